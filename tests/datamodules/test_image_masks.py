"""Pictures with masks: lists and folders, patients, regions, and what must not pass."""

import io
import itertools
import logging
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from medfed.commands.init import guessed
from medfed.common.seeding import numpy_rng
from medfed.config.compose import load
from medfed.datamodules.partitions.base import RoundRobin
from medfed.datamodules.partitions.by_centre import ByCentre
from medfed.datamodules.partitions.by_label import QuantitySkew
from medfed.datamodules.readers.image_folder import read_image_folder
from medfed.datamodules.readers.image_masks import ImageMasksReader
from medfed.datamodules.segmentation import ImageMasksDataModule
from medfed.run.cohort import cohort_record, print_cohort
from medfed.standalone import pictures
from medfed.standalone.errors import ConfigError, DataError
from medfed.standalone.files import visible_files
from tests.datamodules.picture_files import cohort, picture, write_index
from tests.sweeps import sweep

SHARED = Path(os.environ.get("MEDFED_SHARED", Path(__file__).parents[3] / "shared"))
RETINA = SHARED / "data" / "retina"


@pytest.fixture
def rows(tmp_path):
    return cohort(tmp_path)


def module(folder, partition=None, settings=None, **more):
    reader = partial(ImageMasksReader, **(settings or {}))
    size = {"patch_size": (16, 16), "patches_per_patient": 4, "root": str(folder / "root")}
    return ImageMasksDataModule(
        partition or ByCentre(), path=str(folder), reader=reader, **{**size, **more}
    )


def test_a_patient_is_a_stack_of_pictures(tmp_path, rows):
    reader = ImageMasksReader(tmp_path, regions=["vessel"])
    assert (reader.channels, reader.regions) == (("red", "green", "blue"), ("vessel",))
    patients = reader.patients()
    assert [p.id for p in patients] == [f"c{c}p{p}" for c in range(2) for p in range(3)]
    assert [p.centre for p in patients] == ["centre_0"] * 3 + ["centre_1"] * 3
    found = reader.read(patients[0])
    assert found["image"].shape == (3, 40, 32, 2)
    assert reader.shape(patients[0]) == (40, 32, 2)
    assert all(np.isnan(reader.spacing(patients[0])))
    for n, row in enumerate(rows[:2]):
        wide = np.asarray(Image.open(tmp_path / row["image"])).astype(float)
        peer = (wide - wide.mean((0, 1))) / wide.std((0, 1))
        shown = found["image"][..., n].permute(2, 1, 0).flip(0)  # rows from the top, colours last
        assert np.allclose(shown, peer, atol=1e-5)
        mask = np.asarray(Image.open(tmp_path / row["mask"]))
        assert np.array_equal(found["label"][0, ..., n].T.flip(0), mask)


def test_pictures_of_a_patient_may_differ_in_size(tmp_path, rows, caplog):
    small, mask = picture(numpy_rng(1), 24, 20)
    Image.fromarray(small).save(tmp_path / rows[1]["image"])
    Image.fromarray(mask).save(tmp_path / rows[1]["mask"])
    reader = ImageMasksReader(tmp_path)
    found = reader.read(reader.patients()[0])
    assert found["image"].shape == (3, 40, 32, 2)
    assert "Patient c0p0 has pictures of different sizes" in caplog.text
    assert (found["image"][:, 24:, :, 1] == 0).all()
    assert found["label"][0, :24, :20, 1].sum() == found["label"][0, ..., 1].sum() == mask.sum()


def test_a_list_anywhere_with_other_columns_and_absolute_paths(tmp_path, rows):
    names = {"image": "file", "mask": "second", "patient": "person", "centre": "site"}
    listed = [{names[k]: v for k, v in row.items()} for row in rows]
    listed[0]["file"] = str(tmp_path / rows[0]["image"])
    write_index(tmp_path, listed, "other.csv")
    plain, other = ImageMasksReader(tmp_path), ImageMasksReader(tmp_path / "other.csv", **names)
    assert [p.id for p in plain.patients()] == [p.id for p in other.patients()]
    one, two = (r.read(r.patients()[0]) for r in (plain, other))
    assert torch.equal(one["image"], two["image"])


def test_folders_of_equal_names(tmp_path, caplog):
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    for stem in ("p1_L", "p1_R", "p2_L"):
        image, mask = picture(numpy_rng("folder", stem))
        Image.fromarray(image).convert("L").save(tmp_path / "images" / f"{stem}.jpg")
        Image.fromarray(mask).save(tmp_path / "masks" / f"{stem}.png")
    reader = ImageMasksReader(tmp_path)
    assert [p.id for p in reader.patients()] == ["p1", "p2_L"]  # left and right are of one patient
    assert "such as p1_L.jpg and p1_R.jpg of p1" in caplog.text
    reader = ImageMasksReader(tmp_path, patient_pattern=r"(.*)\.")
    assert [p.id for p in reader.patients()] == ["p1_L", "p1_R", "p2_L"]
    assert reader.channels == ("grey",)
    named = ImageMasksReader(tmp_path, patient_pattern="^(p[0-9]+)_")
    assert [p.id for p in named.patients()] == ["p1", "p2"]
    (tmp_path / "centres.csv").write_text("case,hospital\np1_L,a\np1_R,a\np2_L,b\n")
    reader = ImageMasksReader(tmp_path, patient_pattern=r"(.*)\.")
    assert [p.centre for p in reader.patients()] == ["a", "a", "b"]
    (tmp_path / "masks" / "p1_R.png").rename(tmp_path / "masks" / "p1_right.png")
    with pytest.raises(DataError, match=r"p1_R\.jpg has no mask .*masks/p1_R\.\*"):
        ImageMasksReader(tmp_path)


TREES = {  # pictures and masks of a case, with the hospital and the split that the folders name
    "other folders": ("img/{}.jpg", "gt/{}.png", None, None),
    "capitals": ("Images/{}.jpg", "Masks/{}.png", None, None),
    "one word": ("original/{}.png", "GroundTruth/{}.png", None, None),
    "a word after the name": ("images/{}.jpg", "masks/{}_mask.png", None, None),
    "ISIC": ("Task1-2_Training_Input/{}.jpg", "Task1_GroundTruth/{}_segmentation.png", None, None),
    "beside": ("{}.png", "{}_mask.png", None, None),
    "splits": ("{s}/image/{}.png", "{s}/mask/{}.png", None, "s"),
    "hospitals": ("{h}/image/{}.png", "{h}/mask/{}.png", "h", None),
    "hospitals and splits": ("{h}/{s}/images/{}.png", "{h}/{s}/masks/{}.png", "h", "s"),
}


@pytest.mark.parametrize("tree", TREES)
def test_folders_of_pictures_and_masks_are_pairs_and_no_classes(tree, tmp_path):
    *names, hospital, split = TREES[tree]
    for case, (h, s) in enumerate(itertools.product(("Basel", "Bern"), ("train", "test"))):
        for n in range(2):
            of = picture(numpy_rng("tree", case, n), 20 + 2 * case, 20 + n)
            for name, pixels in zip(names, of, strict=True):
                file = tmp_path / "data" / name.format(f"p{case}{n}", h=h, s=s)
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(file)
    if tree != "beside":  # where init cannot tell
        assert guessed(tmp_path / "data", {}).data == "image_masks"
    reader = ImageMasksReader(tmp_path / "data")
    patients = reader.patients()
    assert len(patients) == 8
    for patient in patients:
        case = int(patient.files["image_0"].stem[1])
        assert patient.files["mask_0"].stem[:3] == patient.files["image_0"].stem
        assert (patient.files["mask_0"] != patient.files["image_0"]) == (
            reader.shape(patient)[2] == 1
        )
        assert patient.centre == (hospital and ("Basel", "Bern")[case // 2])
        assert patient.split == (split and (None, "test")[case % 2])
    if tree != "beside" and not hospital:
        with pytest.raises(DataError, match="seems to hold masks, not pictures of a class"):
            read_image_folder(tmp_path / "data")


def test_a_hospital_with_empty_masks_alone_is_noted(tmp_path, rows):
    for row in rows:
        if row["centre"] == "centre_1":
            size = pictures.picture_header(tmp_path / row["mask"])[:2]
            Image.new("1", size).save(tmp_path / row["mask"])
    data = module(tmp_path)
    data.setup()
    console = Console(width=200, record=True, file=io.StringIO())
    print_cohort(cohort_record(data), console)
    (line,) = [of for of in console.export_text().splitlines() if "no foreground" in of]
    assert "centre_1" in line


def test_links_to_folders_are_read_and_never_end(tmp_path):
    cohort(tmp_path / "store")
    (tmp_path / "store" / "images.csv").unlink()
    (tmp_path / "store" / "loop").symlink_to(tmp_path / "store")
    (tmp_path / "data").mkdir()
    for name in ("centre_0", "centre_1"):
        (tmp_path / "data" / name).symlink_to(tmp_path / "store" / name)
    assert len(visible_files(tmp_path / "store")) == 24
    assert {p.centre for p in ImageMasksReader(tmp_path / "data").patients()} == {
        "centre_0",
        "centre_1",
    }


def test_masks_of_no_picture_are_no_pairs(tmp_path):
    for name in ("images/{}_training.png", "manual/{}_manual1.png", "mask/{}_training_mask.png"):
        for n in range(3):
            file = tmp_path / name.format(n)
            file.parent.mkdir(exist_ok=True)
            Image.fromarray(picture(numpy_rng("drive", n))["images" not in name]).save(file)
    with pytest.raises(DataError, match=r"manual.*write an images\.csv with the columns"):
        ImageMasksReader(tmp_path)


def test_without_patients_or_centres_that_is_said(tmp_path, rows, caplog):
    write_index(tmp_path, [{k: row[k] for k in ("image", "mask")} for row in rows])
    reader = ImageMasksReader(tmp_path)
    sides = sorted({row["image"].removesuffix(".png").rstrip("LR") for row in rows})
    assert [p.id for p in reader.patients()] == sides
    assert {p.centre for p in reader.patients()} == {None}
    assert "12 names are those of 6 patients" in caplog.text
    assert "every picture counts" not in caplog.text
    ImageMasksReader(tmp_path, patient_pattern="(.*)")
    assert "every picture counts" not in caplog.text
    data = module(tmp_path, RoundRobin(1))
    data.setup()
    assert sum(len(c.patients["train"]) for c in data.clients.values()) > 3


def test_pictures_in_folders_without_patients_are_a_patient_each_and_that_is_said(tmp_path, caplog):
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
        for stem in ("a", "b"):
            pixels = picture(numpy_rng("folder", stem))[name == "masks"]
            Image.fromarray(pixels).save(tmp_path / name / f"{stem}.png")
    assert [p.id for p in ImageMasksReader(tmp_path).patients()] == ["a", "b"]
    assert "every picture counts as a patient" in caplog.text


@sweep("seed", range(4))
@sweep("partition", [ByCentre(), RoundRobin(3), QuantitySkew(2)])
def test_pictures_of_a_patient_never_straddle(tmp_path, seed, partition):
    """Whatever the seed and the partition, those of one person are in one split of one client."""
    rows = cohort(tmp_path, patients=5)
    for row in rows[:20:3]:  # some have one picture, others up to ten
        row["patient"] = "c0p0" if row["centre"] == "centre_0" else "c1p0"
    write_index(tmp_path, rows)
    data = module(tmp_path, partition, seed=seed)
    data.setup()
    place = {}
    for name, plan in data.plans.items():
        for split, ids in plan.patients.items():
            for file in (f for i in ids for f in data.patients[i].files.values()):
                assert place.setdefault(file, (name, split)) == (name, split)
    for person in {row["patient"] for row in rows}:
        own = [row for row in rows if row["patient"] == person]
        files = [tmp_path / row[kind] for row in own for kind in ("image", "mask")]
        assert len({place.pop(file) for file in files}) == 1
    assert not place


def test_regions_of_label_values(tmp_path, rows):
    values = numpy_rng("labels").integers(0, 4, (32, 40)).astype(np.uint8)
    Image.fromarray(values).save(tmp_path / rows[0]["mask"])
    regions = {"vessel": [1], "disc": [2, 3], "cup": [3]}
    reader = ImageMasksReader(tmp_path, regions=regions)
    label = reader._label(tmp_path / rows[0]["mask"])
    for mask, wanted in zip(label, regions.values(), strict=True):
        assert np.array_equal(pictures.rows_from_top(mask), np.isin(values, wanted))
    some = ImageMasksReader(tmp_path, regions={"a": [1], "b": [2]})
    with pytest.raises(DataError, match=r"0L_mask\.png: unknown label value 3; known: 0, 1, 2\."):
        some.read(some.patients()[0])
    rest = ImageMasksReader(tmp_path, regions={"a": [1], "b": [2]}, known_labels=[3])
    assert rest.read(rest.patients()[0])["label"].shape[0] == 2


def test_the_other_readers_masks_of_one_centre(tmp_path, rows):
    for row in rows[6:]:
        mask = np.asarray(Image.open(tmp_path / row["mask"]))
        second = (tmp_path / row["mask"]).with_stem(Path(row["mask"]).stem + "_2")
        Image.fromarray(~mask).save(second)
    plain = ImageMasksReader(tmp_path)
    other = ImageMasksReader(tmp_path, other_masks={"centre_1": "_2"})
    for a, b in zip(plain.patients(), other.patients(), strict=True):
        same = torch.equal(plain.read(a)["label"], other.read(b)["label"])
        assert same == (a.centre == "centre_0")
    assert plain.record() != other.record()
    with pytest.raises(
        DataError, match=r"images\.csv, data row 1: .*0L_mask_2\.png does not exist"
    ):
        ImageMasksReader(tmp_path, other_masks={"centre_0": "_2"})
    with pytest.raises(
        ConfigError, match="other_masks: Unknown centre centre_3; known: centre_0, centre_1"
    ):
        ImageMasksReader(tmp_path, other_masks={"centre_3": "_2"})


def other_size(folder, rows):
    Image.new("1", (8, 8)).save(folder / rows[0]["mask"])


def grey_mixture(folder, rows):
    Image.new("L", (40, 32), 3).save(folder / rows[0]["image"])


def index(folder, rows, **changes):
    write_index(folder, [{**rows[0], **changes}, *rows[1:]])


BAD = [
    (
        lambda f, r: index(f, r, mask="none.png"),
        {},
        r"data row 1: .*none\.png does not exist; add it",
    ),
    (lambda f, r: index(f, r, image="none.png"), {}, r"data row 1: .*none\.png does not exist"),
    (
        lambda f, r: index(f, r, patient=" "),
        {},
        r"data row 1, column patient: the cell is missing; fill it in",
    ),
    (
        lambda f, r: write_index(f, [*r, r[0]]),
        {},
        r"data row 13: .*0L\.png is already in .*data row 1",
    ),
    (
        lambda f, r: index(f, r, centre="x"),
        {},
        r"Patient c0p0 is at x \(.*, data row 1\) and at centre_0 \(.*, data row 2\)",
    ),
    (other_size, {}, r"0L_mask\.png has 8 x 8 pixels, but .*0L\.png has 40 x 32; a mask"),
    (grey_mixture, {}, r"0L\.png is grey and .* has colours; set data\.reader\.color=grey"),
    (lambda f, r: None, {"mask": "masks"}, r"no column masks \(did you mean mask\?\); it has"),
    (lambda f, r: None, {"centre": "site"}, r"no column site; it has .*data\.reader\.centre="),
    (lambda f, r: (f / "images.csv").write_text("image,mask\n"), {}, "has no data rows"),
    (
        lambda f, r: (f / "images.csv").write_text("image,mask\na,b,c\n"),
        {},
        "data row 1: 3 cells, but",
    ),
    (
        lambda f, r: [p.unlink() for p in f.rglob("*.*")],
        {},
        "is no CSV file and has neither images",
    ),
]


@pytest.mark.parametrize(("harm", "settings", "message"), BAD)
def test_bad_lists_are_one_sentence(tmp_path, rows, harm, settings, message):
    harm(tmp_path, rows)
    with pytest.raises(DataError, match=message) as error:
        ImageMasksReader(tmp_path, **settings)
    assert str(error.value).count("\n") == 0


MASKS = [
    (np.full((32, 40), 7, np.uint8), [], r"has the values 7, but a mask of one region has 0"),
    (np.arange(3).repeat(20).astype(np.uint8), [], r"has the values 0, 1, 2, but a mask of one"),
    (np.arange(256).astype(np.uint8), [], "has 256 different values, as masks have after JPEG"),
]


@pytest.mark.parametrize(("values", "settings", "message"), MASKS)
def test_bad_masks_are_one_sentence(tmp_path, rows, values, settings, message):
    Image.fromarray(np.resize(values, (32, 40))).save(tmp_path / rows[0]["mask"])
    with pytest.raises(DataError, match=rf"0L_mask\.png {message}"):
        module(tmp_path).setup()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scale": 2}, r"data\.reader\.scale must be in \(0, 1\], not 2"),
        ({"scale": 0}, r"data\.reader\.scale must be in \(0, 1\], not 0"),
        ({"regions": ["a", "b"]}, r"must give each region its label values"),
        ({"regions": {"a": []}}, r"must give each region its label values"),
        ({"regions": {"a": [0]}}, r"must give each region its label values"),
        ({"color": "gray"}, r"data\.reader\.color='gray' is unknown"),
        ({"normalization": "minmax"}, r"data\.reader\.normalization='minmax' is unknown"),
    ],
)
def test_bad_settings_are_one_sentence(tmp_path, rows, settings, message):
    with pytest.raises(ConfigError, match=message):
        ImageMasksReader(tmp_path, **settings)


def test_pictures_are_no_volumes(tmp_path, rows):
    with pytest.raises(ConfigError, match=r"data\.eval_every=2 are for volumes"):
        module(tmp_path, eval_every=2)


def test_evaluation_sees_every_picture_whole_and_no_millimetres(tmp_path, rows):
    data = module(tmp_path, settings={"scale": 0.5})
    data.setup()
    for name, client in data.clients.items():
        batches = list(client.eval_batches("test"))
        assert sum(len(b["image"]) for b in batches) == 2 * len(client.patients["test"])
        assert all("spacing" not in b for b in batches)
        assert batches[0]["image"].shape[1:] == (3, 20 + 4 * int(name[-1]), 16)
        facts = data.preprocessing(name)
        assert facts["spacing"] is None
        assert facts["input"]["kind"] == "pictures"
        assert facts["input"]["scale"] == 0.5
    assert len(data.splits()["files"]) == 24


def test_a_cache_changes_nothing(tmp_path, rows):
    plain, cached = module(tmp_path), module(tmp_path, memory_gb=0.0)
    plain.setup()
    cached.setup()
    assert cached.store is not None
    assert plain.splits() == cached.splits()
    for name, client in plain.clients.items():
        other = cached.clients[name]
        assert torch.equal(client.train["image"], other.train["image"])
        pairs = itertools.zip_longest(client.eval_batches("test"), other.eval_batches("test"))
        assert all(torch.equal(a[k], b[k]) for a, b in pairs for k in ("image", "label"))


@pytest.mark.skipif(not RETINA.is_dir(), reason=f"{RETINA} is absent (DRIVE and CHASE_DB1)")
def test_the_real_photographs(caplog):
    caplog.set_level(logging.WARNING)
    reader = ImageMasksReader(RETINA, regions=["vessel"], scale=0.5)
    patients = reader.patients()
    assert [p.centre for p in patients] == ["chase"] * 11 + ["drive"] * 35
    assert [len(p.files) for p in patients] == [4] * 11 + [2] * 35
    assert not caplog.records
    second = ImageMasksReader(
        RETINA, regions=["vessel"], scale=0.5, other_masks={"chase": "_second_reader"}
    )
    one, two = (r.read(r.patients()[0])["label"].bool() for r in (reader, second))
    agreement = 2 * (one & two).sum() / (one.sum() + two.sum())
    assert 0.7 < agreement < 0.9


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("other_masks={chase: _second_reader}", {"chase": "_second_reader"}),
        ("regions={vessel: [1], disc: [2, 3]}", {"vessel": [1], "disc": [2, 3]}),
        ("regions=[vessel]", ["vessel"]),
    ],
)
def test_settings_can_be_given_on_the_command_line(setting, value):
    config = load(["data=image_masks", "data.path=.", f"data.reader.{setting}"])
    assert config.data.reader[setting.partition("=")[0]] == value
