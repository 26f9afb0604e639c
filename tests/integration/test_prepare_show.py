"""``scripts/prepare.py show=true``: what it counts, draws and writes, and its use again."""

from __future__ import annotations

import csv
import io
import json
import logging
import re
from collections import Counter

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.image import imread
from matplotlib.patches import Rectangle
from rich.console import Console

from medfed.config.compose import build, described, load
from medfed.config.description import describe
from medfed.datamodules.splits import SPLITS
from medfed.run.cohort import cohort_record, print_cohort
from medfed.run.prepare import (
    augmentation_sheet,
    class_colours,
    contact_sheet,
    prepare,
    train_command,
)
from medfed.standalone.errors import ConfigError, DataError
from tests.integration.runs import left_in

BRATS = (
    "data=brats",
    "data.generated.hospitals=2",
    "data.generated.patients=4",
    "data.generated.shape=[32,32,8]",
    "data.val_fraction=0.25",
    "data.test_fraction=0.25",
    "data.patch_size=[16,16]",
    "data.patches_per_patient=4",
)
LUNA = (
    "data=luna16",
    "data.generated.hospitals=2",
    "data.generated.patients=4",
    "data.generated.shape=[48,48,24]",
    "data.generated.lookalikes=8",
    "data.generated.seed=1",
    "data.patches.size=[16,16]",
)


@pytest.fixture(scope="module")
def show(cohort_root, tmp_path_factory):
    """Prepares small data and shows them; returns the data module and the folder."""

    def run(*overrides, folder=None):
        folder = folder or tmp_path_factory.mktemp("show") / "prepare"
        root = [] if "data=breast_cancer" in overrides else [f"data.root={cohort_root}"]
        config = load([*overrides, *root, "show=true", "workers=1", f"folder={folder}"], "prepare")
        return prepare(describe(config, tuple(overrides))), folder

    return run


def table(folder):
    """The clients of cohort.json, with shares by name."""
    record = json.loads((folder / "cohort.json").read_text())
    names, clients = record["shares"]["names"], record["clients"]
    return {
        c: {**of, "shares": dict(zip(names, of["after"], strict=False))}
        for c, of in clients.items()
    }


def is_drawn(path):
    """Whether a picture has more than its background."""
    pixels = imread(path)[..., :3]
    return (np.abs(pixels - pixels[0, 0]).max(axis=-1) > 0.1).mean() > 0.01


def test_counts_of_scans_are_those_of_the_csv(show):
    data, folder = show(*LUNA, "data.reader.negatives_per_positive=null")
    rows = list(csv.DictReader(io.StringIO((data.scans.path / "candidates.csv").read_text())))
    expected = Counter((row["seriesuid"], int(row["class"])) for row in rows)
    found, splits = table(folder), json.loads((folder / "splits.json").read_text())
    for client, parts in splits["clients"].items():
        line = found[client]
        assert line["splits"] == {split: len(parts[split]) for split in SPLITS}
        mine = {name for series in parts.values() for name in series}
        counts = [sum(expected[name, k] for name in mine) for k in (0, 1)]
        assert line["samples"] == sum(counts)
        shares = [line["shares"][name] for name in ("non-nodule", "nodule")]
        assert shares == pytest.approx([count / sum(counts) for count in counts])
    assert sum(line["samples"] for line in found.values()) == len(rows)
    assert splits == json.loads(json.dumps(data.splits()))
    assert left_in(folder) == [
        "cohort.json",
        "pictures/augmentation.png",
        "pictures/patches.png",
        "splits.json",
    ]
    assert all(is_drawn(path) for path in (folder / "pictures").iterdir())


def test_shares_of_voxels_are_those_of_the_patches(show):
    regions = "data.reader.regions=[whole,enhancing]"
    data, folder = show(*BRATS, regions, "partition=channel_missing")
    found = table(folder)
    for name, client in data.clients.items():
        labels = client.samples(torch.arange(client.num_samples))["label"]
        shares = [found[name]["shares"][region] for region in ("whole", "enhancing")]
        assert shares == pytest.approx(labels.transpose(0, 1).flatten(1).float().mean(1).tolist())
        assert len(found[name]["removed"]) == 1


@pytest.mark.parametrize("dims", [2, 3])
def test_the_sheet_leaves_out_missing_channels_and_marks_regions(show, dims):
    volumes = ("data.spatial_dims=3", "data.patch_size=[16,16,8]") if dims == 3 else ()
    data, _ = show(*BRATS, *volumes, "partition=channel_missing")
    figure = contact_sheet(data)
    (axes,) = figure.axes
    empty = [p for p in axes.patches if isinstance(p, Rectangle) and p.get_linestyle() == ":"]
    assert len(empty) == 2 * 3  # clients, samples of each
    assert len(axes.images) == 2 * 3 * 3  # and channels that they have
    assert axes.collections  # contours
    assert [t.get_text() for t in axes.get_yticklabels()] == ["hospital_0", "hospital_1"]


@pytest.mark.parametrize("dims", [2, 3])
def test_what_augmentation_makes_of_a_sample_is_drawn(show, dims):
    volumes = ("data.spatial_dims=3", "data.patch_size=[16,16,8]") if dims == 3 else ()
    data, folder = show(*BRATS, *volumes, "augment=nnunet", "augment.channel_dropout=0.5")
    assert is_drawn(folder / "pictures" / "augmentation.png")
    (axes,) = augmentation_sheet(data).axes
    pixels = [np.asarray(image.get_array()) for image in axes.images]
    assert len(pixels) == 2 * 12
    for row in (pixels[:12], pixels[12:]):
        assert sum(not np.array_equal(row[0], other) for other in row[1:]) >= 3
    plain, other = show(*BRATS, "augment=none")
    assert augmentation_sheet(plain) is None
    assert not (other / "pictures" / "augmentation.png").exists()


def test_the_sheet_frames_samples_in_the_colour_of_their_class(show):
    data, _ = show(*LUNA)
    (axes,) = contact_sheet(data).axes
    frames = [to_hex(p.get_edgecolor()).upper() for p in axes.patches]
    assert len(frames) == len(axes.images) == 2 * 12
    assert set(frames) == set(class_colours(2))
    again = [i.get_array() for i in contact_sheet(data).axes[0].images]
    for image, other in zip(axes.images, again, strict=True):
        assert np.array_equal(image.get_array(), other)
    pool = data.clients["hospital_0"].samples(torch.arange(data.clients["hospital_0"].num_samples))
    shown = torch.from_numpy(np.asarray(axes.images[0].get_array(), dtype=np.float32))
    (place,) = (pool["image"][:, 0] == shown).flatten(1).all(dim=1).nonzero()[0].tolist()
    assert frames[0] == class_colours(2)[int(pool["label"][place])]


@pytest.mark.parametrize("slices", ["data.patches.slices=3", "data.patches.size=[12,12,6]"])
def test_slabs_and_cubes_are_drawn(show, slices):
    _, folder = show(*LUNA, slices)
    assert all(is_drawn(path) for path in (folder / "pictures").iterdir())


def test_a_saved_partition_brings_back_the_same_samples(show, caplog):
    grouped = (
        "partition=site_groups",
        "partition.num_clients=2",
        "partition.scanners=[{},{gamma:1.3}]",
    )
    with caplog.at_level(logging.INFO):
        data, folder = show(*LUNA, *grouped, "seed=3")
    line = next(r for r in caplog.messages if r.startswith("To train on these clients: "))
    assert line.endswith(f"seed=3 partition=saved partition.file={folder / 'splits.json'}")
    saved = ("partition=saved", f"partition.file={folder / 'splits.json'}")
    again, other = show(*LUNA, *saved, "seed=3")
    assert (folder / "cohort.json").read_text() == (other / "cohort.json").read_text()
    assert "gamma" in (folder / "cohort.json").read_text()
    for client, held in data.clients.items():
        for split in SPLITS:
            batches = held.eval_batches(split), again.clients[client].eval_batches(split)
            for one, two in zip(*batches, strict=True):
                assert all(torch.equal(one[key], two[key]) for key in one)


def test_tables_have_no_contact_sheet(show):
    data, folder = show("data=breast_cancer", "partition=label_imbalance")
    assert contact_sheet(data) is None
    assert not list((folder / "pictures").glob("*"))


def test_twenty_clients_with_ten_classes():
    data = prepare(described(["data=digits", "partition=label_groups"], "prepare"))
    data.setup()
    cohort = cohort_record(data)
    console = Console(record=True, width=140, file=io.StringIO())
    print_cohort(cohort, console, lines=20)
    text = console.export_text()
    assert "group_3_hospital_4" in text
    assert "1,097 / 350 / 350" in text
    assert {text.get_text() for text in contact_sheet(data).axes[0].texts} == set("0123456789")


def test_one_class_and_tiny_clients_are_noted(tmp_path, caplog, capsys):
    lines = ["age,outcome,place"]
    lines += [f"{n},{int(n % 2)},Basel" for n in range(9)]
    lines += [f"{n},1,Bern" for n in range(5)] + ["3,0,Chur", "4,1,Chur"]
    path = tmp_path / "table.csv"
    path.write_text("\n".join(lines) + "\n")
    settings = ("data=csv", f"data.path={path}", "data.label=outcome", "data.centre=place")
    folder = tmp_path / "shown"
    prepare(described([*settings, "show=true", f"folder={folder}"], "prepare"))
    notes = dict(re.findall(r"│ (\w+) +│.*│ ([^│]*?) +│\n", capsys.readouterr().out))
    assert notes["Basel"] == ""
    assert notes["Bern"] == "no 0"
    assert notes["Chur"].startswith("no patient in val")
    assert notes["Chur"].endswith("trains on one patient")
    assert "2 clients train on a single class: Bern, Chur." in caplog.messages


@pytest.mark.parametrize("data", ["brats", "luna16", "medmnist"])
def test_generating_is_said_in_one_line(data, tmp_path, caplog):
    small = {
        "brats": BRATS[1:4],
        "luna16": LUNA[1:6],
        "medmnist": ["data.generated.images=[8,4,4]"],
    }
    with caplog.at_level(logging.INFO):
        prepare(
            described(
                [f"data={data}", f"data.root={tmp_path}", *small[data], "workers=1"], "prepare"
            )
        )
    assert sum(message.startswith("Generated ") for message in caplog.messages) == 1


def test_a_folder_that_cannot_be_written(show, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"Cannot write .*file/x \(Not a directory\); make room"):
        show("data=digits", "partition=round_robin", folder=tmp_path / "file" / "x")


def test_a_folder_with_something_in_it_is_refused_before_anything_is_read(tmp_path):
    (tmp_path / "cohort.json").write_text("mine")
    config = load(["data=digits", "show=true", f"folder={tmp_path}"], "prepare")
    with pytest.raises(ConfigError, match=r"is not empty; name an empty one by folder=FOLDER\."):
        prepare(describe(config))
    assert [p.name for p in tmp_path.iterdir()] == ["cohort.json"]


def test_a_model_that_is_named_is_shown_as_a_tree(show, capsys):
    chosen = ("experiment=brats_pfednet", "model=unet", "model.network.channels=[4,8]")
    rest = [o for o in BRATS if o != "data=brats"]
    show(*chosen, "model.network.strides=[2]", *rest)
    text = capsys.readouterr().out
    task = load([*chosen, "model.network.strides=[2]", "in_channels=4", "out_channels=1",
                 "spatial_dims=2", "regions=[whole]"])  # fmt: skip
    network = build(task.model.network, _convert_="all")
    sizes = {n: sum(p.numel() for p in m.parameters()) for n, m in network.model.named_children()}
    whole, own = sum(sizes.values()), sizes["2"]
    assert f"{whole:,} parameters, {whole - own:,} shared, {own:,} personal" in text
    assert f"0: {sizes['0']:,}" in text
    assert re.search(rf"model\.2: {own:,} \([\d.]+ %\), personal", text)
    assert re.search(r"model\.1: .*, shared", text)
    assert text.count("personal") == 3  # all, model, model.2


def test_without_a_model_there_is_no_tree(show, capsys):
    show(*BRATS)
    assert "personal" not in capsys.readouterr().out


@pytest.mark.parametrize("experiment", ["cer_stc", "digits_ppfl", "organs_pfednet"])
def test_an_experiment_is_prepared_as_it_is_trained(experiment):
    trained, prepared = (load([f"experiment={experiment}"], name) for name in ("train", "prepare"))
    for section in ("data", "partition", "model", "algorithm"):
        assert trained[section] == prepared[section]


def test_the_command_to_train_keeps_the_experiment():
    typed = ["experiment=digits_pfednet", "model=resnet", "show=true"]
    assert train_command(typed) == "medfed train experiment=digits_pfednet model=resnet"
