"""Data of a user's own are used whole; what a partition changed is said before training."""

from __future__ import annotations

import io
import json
import shutil

import numpy as np
import pytest
from omegaconf import OmegaConf
from rich.console import Console
from sklearn.datasets import load_breast_cancer

from medfed.config.compose import CONFIG_DIR, _composed, build, compose_all, described, load
from medfed.datamodules.generated.brats import BratsCohort
from medfed.datamodules.splits import SPLITS
from medfed.run.cohort import cohort_record, print_cohort
from medfed.standalone.errors import ConfigError, DataError
from medfed.standalone.files import write_text
from tests.integration.runs import CLINICAL, IMAGING, data_and_task, imaging, run

EXPERIMENTS = sorted((CONFIG_DIR / "experiment").glob("*.yaml"))
IMAGES = (
    *("experiment=medmnist_pfednet", "data=image_folder", "rounds=1", "local.steps=1"),
    *("logger=none", "progress=false", "data.reader.size=[8,8]", "model.network.channels=[4,4,4]"),
)


@pytest.fixture
def table(tmp_path):
    """Sixty patients of three hospitals, a quarter of them ill; one hospital has few."""
    rng = np.random.default_rng(0)
    rows = ["age,pressure,ill,place"]
    for n in range(60):
        place = "Chur" if n < 8 else ("Basel", "Bern")[n % 2]
        age, pressure = rng.normal([60, 130], 10)
        rows.append(f"{age:.2f},{pressure:.2f},{int(n % 4 == 0)},{place}")
    path = tmp_path / "table.csv"
    path.write_text("\n".join(rows) + "\n")
    return path


def photographs(folder, counts=(14, 7), size=8):
    """Class folders of noise."""
    from PIL import Image

    rng = np.random.default_rng(1)
    for name, count in zip(("benign", "malignant"), counts, strict=True):
        (folder / name).mkdir(parents=True)
        for n in range(count):
            pixels = rng.integers(0, 255, (size, size), np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{name}_{n}.png")
    return folder


def used(folder):
    """The patients of splits.json."""
    clients = json.loads((folder / "splits.json").read_text())["clients"]
    return sorted(i for parts in clients.values() for ids in parts.values() for i in ids)


def printed(data):
    """The table of a data module as a terminal shows it."""
    console = Console(record=True, width=160, file=io.StringIO())
    print_cohort(cohort_record(data), console)
    return console.export_text()


@pytest.mark.parametrize("centre", [True, False], ids=["hospitals", "no hospitals"])
def test_every_row_of_a_table_is_used(table, centre, tmp_path, capsys):
    own = ["data=csv", f"data.path={table}", "data.label=ill", "rounds=1"]
    own += ["data.centre=place"] if centre else ["data.features=[age,pressure]"]
    run(tmp_path / "run", *CLINICAL, *own)
    assert used(tmp_path / "run") == sorted(f"row_{n}" for n in range(60))
    kept = json.loads((tmp_path / "run" / "cohort.json").read_text())
    assert list(kept["clients"]) == (
        ["Basel", "Bern", "Chur"] if centre else [f"hospital_{n}" for n in range(5)]
    )
    assert kept["patients"] == {"used": 60, "of": 60}
    remark, refused = kept["remarks"]
    assert refused.startswith("Hospitals would refuse this run: at ")
    assert remark.endswith("set partition=label_imbalance.")
    out = capsys.readouterr().out
    assert remark in out
    if centre:
        assert "│ Chur   │   8 of 8 │ " in out
        assert kept["clients"]["Basel"]["before"] == kept["clients"]["Basel"]["after"]
    else:
        assert remark.startswith("All 60 patients are divided among 5 clients at random, as the")


def test_columns_that_look_like_hospitals_or_patients_are_named(table):
    lines = table.read_text().replace("place", "Hospital", 1).splitlines()
    rows = [f"{lines[0]},patient_id", *(f"{a},p{n % 2}_{n // 4}" for n, a in enumerate(lines[1:]))]
    table.write_text("\n".join(rows) + "\n")
    own = ["data=csv", f"data.path={table}", "data.label=ill"]
    data, _ = data_and_task(described([*CLINICAL, *own]))
    hospital, patient, dealt = data.remarks
    assert hospital == ("If the column Hospital names the hospitals, set data.centre=Hospital.")
    assert patient.startswith("If the column patient_id identifies patients, set data.patient=pat")
    assert dealt.startswith("All 60 patients are divided")
    named = ["data.centre=Hospital", "data.patient=patient_id"]
    data, _ = data_and_task(described([*CLINICAL, *own, *named]))
    assert len(data.remarks) == 1
    assert sorted(data.patients) == sorted(f"p{a}_{b}" for a in range(2) for b in range(15))


def test_every_image_is_used(tmp_path):
    folder = photographs(tmp_path / "photographs")
    run(tmp_path / "run", *IMAGES, f"data.path={folder}")
    assert used(tmp_path / "run") == sorted(
        str(p.relative_to(folder)) for p in folder.rglob("*.png")
    )


@pytest.mark.parametrize("named", [True, False], ids=["hospitals", "no hospitals"])
def test_every_scan_and_channel_is_used(named, cohort_root, tmp_path):
    made = BratsCohort(hospitals=2, patients=4, shape=(32, 32, 8)).ensure(cohort_root)[0]
    own = tmp_path / "Task01_BrainTumour"
    shutil.copytree(made, own)
    if not named:
        (own / "centres.json").unlink()
    small = [*IMAGING, "rounds=1", "data.test_fraction=0.25", "data.patches=fixed"]
    _, experiment = run(tmp_path / "run", *small, f"data.path={own}")
    cases = sorted(p.name.removesuffix(".nii.gz") for p in (own / "imagesTr").iterdir())
    assert used(tmp_path / "run") == cases
    assert len(experiment.data.clients) == 2
    assert all(c.channels.all() for c in experiment.data.clients.values())
    kept = json.loads((tmp_path / "run" / "cohort.json").read_text())
    assert all(client["removed"] == [] for client in kept["clients"].values())
    for name, client in experiment.data.clients.items():
        label = client.train["label"]
        assert kept["clients"][name]["after"] == pytest.approx([float(label.float().mean())])


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda p: p.stem)
def test_no_setting_of_an_experiments_cohort_reaches_other_data(path):
    """Also of an experiment that stands upon another one."""
    own = _composed([f"experiment={path.stem}"], "train").config
    protocol = own.hydra.runtime.choices.partition
    shipped = OmegaConf.load(CONFIG_DIR / "partition" / f"{protocol}.yaml")
    assert own.partition._target_ == shipped._target_
    # No experiment has these data; of its own ones, only a generated cohort has no path.
    generated = not OmegaConf.is_missing(own.data, "path") and "path" in own.data
    folder = [f"experiment={path.stem}", *["data=image_folder"] * (not generated), "data.path=x"]
    other = load(folder)
    assert other.partition._target_.endswith(".Auto")
    assert other.partition.protocol == protocol
    build(other.partition)
    assert "affine_chance" in other.augment
    assert other.data.get("patches") != "fixed"
    assert other.data.get("spacing") != [4.0, 4.0]
    assert "on_other_data" not in [*other]
    named = ["data=image_folder", "partition=shards", "augment=none", "++data.patches=fixed"]
    typed = load([folder[0], "data.path=x", *named])
    assert typed.partition._target_.endswith(".Shards")
    assert "affine_chance" not in typed.augment
    assert typed.data.patches == "fixed"


@pytest.mark.parametrize(
    ("experiment", "data", "keys"),
    [
        ("brats_pfednet", "csv", "data.patches"),
        ("heart_complete", "csv", "data.reader.features"),
        ("isic2019_flamby", "image_folder", "data.reader.image"),
        ("luna16_ppfl", "image_masks", "data.reader.negatives_per_positive"),
        ("retina_pfednet", "datalist", "data.reader.scale"),
        ("stroke", "image_folder", "data.label"),
    ],
)
def test_settings_for_data_of_another_kind_are_named(experiment, data, keys):
    with pytest.raises(ConfigError) as error:
        compose_all([f"experiment={experiment}", f"data={data}", "data.path=x"])
    words = f"experiment={experiment} sets ", keys, f", which data={data} does not have: it is for "
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("experiment", "data"),
    [
        ("clinical_pfednet", "csv"),
        ("brats_pfednet", "datalist"),
        ("medmnist_pfednet", "image_table"),
    ],
)
def test_data_of_the_same_kind_are_taken(experiment, data):
    (one,) = compose_all([f"experiment={experiment}", f"data={data}", "data.path=x"])
    assert one.config.hydra.runtime.choices.data == data


def test_centres_of_other_names_are_told_the_key(tmp_path):
    for folder in ("images", "masks"):
        photographs(tmp_path / folder, (6, 0))
    rows = [
        f"images/benign/benign_{n}.png,masks/benign/benign_{n}.png,p{n},{'ab'[n % 2]}"
        for n in range(6)
    ]
    (tmp_path / "images.csv").write_text("\n".join(["image,mask,patient,centre", *rows]) + "\n")
    data = build(described(["experiment=retina_pfednet", f"data.path={tmp_path}"]).data)
    with pytest.raises(
        ConfigError, match=r"set 'partition.parts=\{a: 1, b: 1\}', or partition=auto"
    ):
        data.plan()


def test_an_experiment_of_ones_own_says_what_holds_for_other_data(tmp_path):
    content = "# @package _global_\ndefaults: [override /data: digits]\non_other_data: [seed=7]\n"
    write_text(tmp_path / "configs" / "experiment" / "mine.yaml", content)
    mine = [f"plugins={tmp_path}", "experiment=mine"]
    assert load(mine).seed == 0
    assert load([*mine, "data=csv", "data.path=x"]).seed == 7
    assert load([*mine, "data=csv", "data.path=x", "seed=1"]).seed == 1


UPON = """# @package _global_
defaults:
  - clinical_pfednet
  - override /data: csv
  - _self_
data: {path: x, label: ill}
"""
SHARDS = UPON.replace("  - _self_", "  - override /partition: shards\n  - _self_")


@pytest.mark.parametrize(
    ("content", "typed", "expected"),
    [
        (UPON, "seed=1", "Auto"),
        (UPON, "partition=shards", "Shards"),
        (UPON.replace("path: x, ", ""), "data.path=y", "Auto"),
        (UPON + "partition: {delta: 7}\n", "seed=1", "LabelImbalance"),
        (SHARDS, "seed=1", "Shards"),
        (SHARDS, "data.path=y", "Shards"),
        (UPON.replace("  - override /data: csv\n", "").replace("path: x, ", ""), "seed=1", "Label"),
    ],
    ids=["path", "typed", "typed path", "a key", "a choice", "a choice and a path", "its data"],
)
def test_an_experiment_upon_a_shipped_one_has_its_own_data(content, typed, expected, tmp_path):
    write_text(tmp_path / "configs" / "experiment" / "mine.yaml", content)
    config = load([f"plugins={tmp_path}", "experiment=mine", typed])
    assert config.partition._target_.rpartition(".")[2].startswith(expected)


MISTAKES = {
    "an unknown key": (UPON + "round: 5\n", r"Unknown key 'round' \(did you mean rounds"),
    "a key inside": (UPON + "pictures: {formt: none}\n", r"Unknown key 'pictures.formt' \(did"),
    "no first line": ("defaults: [digits_pfednet]\nrounds: 5\n", "begins with the line # @package"),
    "choices, too": (UPON.partition("\n")[2], "first line must be # @package _global_"),
    "a tab": (UPON + "\trounds: 5\n", r"mine.yaml, line 7: found character .* mend the file"),
    "a key twice": (UPON + "seed: 1\nseed: 2\n", r"mine.yaml, line 8: found duplicate key seed"),
}


@pytest.mark.parametrize(("content", "sentence"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_in_a_yaml_of_ones_own_are_named(content, sentence, tmp_path):
    write_text(tmp_path / "configs" / "experiment" / "mine.yaml", content)
    with pytest.raises(ConfigError, match=sentence):
        load([f"plugins={tmp_path}", "experiment=mine"])
    used = UPON + "half: 3\nrounds: ${half}\n"  # a name for other values is no mistake
    write_text(tmp_path / "configs" / "experiment" / "mine.yaml", used)
    assert load([f"plugins={tmp_path}", "experiment=mine"]).rounds == 3


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("data=csv data.path=x partition=shards", "Shards"),
        ("data=csv data.path=x partition.delta=7", "LabelImbalance"),
        ("data=csv data.path=x partition.num_clients=8", "Auto"),
        ("data=heart data.path=x", "Auto"),
        ("data=breast_cancer", "LabelImbalance"),
        ("data.path=null", "LabelImbalance"),
        ("experiment=retina_pfednet data.path=x", "CentreSplit"),
        ("experiment=retina_pfednet data=image_masks data.path=x", "CentreSplit"),
        ("experiment=retina_pfednet data=image_folder data.path=x", "Auto"),
        ("partition.num_clients=8", "LabelImbalance"),
    ],
)
def test_what_is_named_wins(typed, expected):
    experiment = [] if "experiment=" in typed else ["experiment=clinical_pfednet"]
    config = load([*experiment, *typed.split()])
    assert config.partition._target_.endswith(f".{expected}")
    assert config.partition.get("num_clients") in (None, 5, 8)


@pytest.mark.parametrize(
    ("typed", "altered", "patches"),
    [
        ("data.path=x", True, "fresh"),
        ("data=brats_folder data.path=x", True, "fresh"),
        ("data.path=x augment=none", False, "fresh"),
        ("data.path=x data.patches=fixed", True, "fixed"),
        ("data.path=x partition=centre", True, "fresh"),
        ("seed=1", False, "fixed"),
    ],
)
def test_images_of_ones_own_are_augmented_though_the_experiments_were_not(typed, altered, patches):
    config = load(["experiment=brats_pfednet", *typed.split()])
    assert ("affine_chance" in config.augment) == altered
    assert config.data.patches == patches


def test_scans_of_ones_own_are_not_made_coarse():
    assert load(["experiment=organs_pfednet"]).data.spacing == [4.0, 4.0]
    assert load(["experiment=organs_pfednet", "data.path=x"]).data.spacing is None
    named = ["experiment=organs_pfednet", "data.path=x", "data.spacing=[1.5,1.5]"]
    assert load(named).data.spacing == [1.5, 1.5]


def test_an_experiment_takes_another_partition_whatever_it_sets_of_its_own():
    for path in (p for p in EXPERIMENTS if "\ntuned:" in p.read_text()):
        build(load([f"experiment={path.stem}", "partition=dirichlet"]).partition)


@pytest.mark.parametrize("optimizer", ["adamw", "flamby/sgd"])
def test_another_optimizer_does_not_get_the_rate_of_an_experiments_own(optimizer):
    """A rate of 0.3 suits SGD, and ruins Adam."""
    for path in EXPERIMENTS:
        text = path.read_text()
        assert "\noptimizer:" not in text, f"{path.stem}: tuned.OPTIMIZER has its rate"
        if "lr: 0.3" in text and f"/optimizer: {optimizer}" not in text:
            rate = build(load([f"experiment={path.stem}", f"optimizer={optimizer}"]).optimizer)
            assert rate.keywords["lr"] == {"adamw": 0.001, "flamby/sgd": 0.01}[optimizer]


def test_canonical_models_of_a_table_start_apart(tmp_path):
    """Nobody needs to know of model.network.spread; other methods start from zeros, as before."""
    found = {n: load([*CLINICAL, f"algorithm={n}"]).model.network.spread for n in ("ppfl", "local")}
    assert found == {"ppfl": 0.1, "local": 0.0}
    given = (*CLINICAL, "algorithm=ppfl", "+tuned.logistic.spread=0.3")
    assert load(given).model.network.spread == 0.3
    short = ("rounds=1", "local.steps=1", "logger=none")
    assert run(tmp_path / "run", *CLINICAL, "algorithm=ppfl", *short)[0]["rounds"] == 1


def test_a_hospital_with_too_few_patients_is_warned_of_and_trains(table, tmp_path):
    with table.open("a") as file:
        file.write("50,120,1,Tiny\n" + "".join(f"{n}.5,{n},0,Healthy\n" for n in range(100, 107)))
    own = ["data=csv", f"data.path={table}", "data.label=ill", "data.centre=place", "rounds=1"]
    summary, _ = run(tmp_path / "run", *CLINICAL, *own)
    clients = json.loads((tmp_path / "run" / "cohort.json").read_text())["clients"]
    assert clients["Tiny"]["splits"] == {"train": 1, "val": 0, "test": 0}
    assert clients["Tiny"]["missing"] == {"train": ["0"]}
    assert clients["Healthy"]["missing"] == {s: ["1"] for s in SPLITS}
    assert summary["steps"]["Tiny"] == summary["steps"]["Bern"]


def test_a_number_of_clients_does_not_overrule_hospitals(table, tmp_path):
    own = ["data=csv", f"data.path={table}", "data.label=ill", "data.centre=place"]
    with pytest.raises(ConfigError, match=r"num_clients=4 contradicts the data of 3 known hosp"):
        run(tmp_path / "run", *CLINICAL, *own, "partition.num_clients=4")


def test_invented_hospitals_are_said_to_be(cohort_root, tmp_path):
    made = BratsCohort(hospitals=2, patients=4, shape=(32, 32, 8)).ensure(cohort_root)[0]
    shutil.copytree(made, tmp_path / "own")
    (tmp_path / "own" / "centres.json").unlink()
    own = [*imaging(cohort_root), f"data.path={tmp_path / 'own'}", "data.reader.hospitals=2"]
    data, _ = data_and_task(described(own))
    assert data.remarks[1].startswith("The hospitals of 8 of 8 patients are invented: the data")
    assert list(data.clients) == ["hospital_0", "hospital_1"]


def test_the_table_counts_what_a_protocol_left(tmp_path):
    run(tmp_path / "run", *CLINICAL, "rounds=1")
    kept = json.loads((tmp_path / "run" / "cohort.json").read_text())
    malignant = 1 - load_breast_cancer().target  # scikit-learn calls benign 1
    ill = {f"row_{n}": int(v) for n, v in enumerate(malignant)}
    clients = json.loads((tmp_path / "run" / "splits.json").read_text())["clients"]
    for name, parts in clients.items():
        had, ids = kept["clients"][name], [i for split in parts.values() for i in split]
        assert (had["patients"], had["of"]) == (len(ids), 569)
        assert had["splits"] == {split: len(part) for split, part in parts.items()}
        assert had["before"][1] == pytest.approx(malignant.mean())
        assert had["after"][1] == pytest.approx(np.mean([ill[i] for i in ids]))
    assert kept["patients"] == {"used": len(used(tmp_path / "run")), "of": 569}


def test_removed_channels_and_missing_classes_are_named(cohort_root, table):
    text = printed(data_and_task(described([*imaging(cohort_root)]))[0])
    assert "│ hospital_1 │   4 of 4 │ " in text
    assert "│ T1w " in text
    own = ["data=csv", f"data.path={table}", "data.label=ill", "data.centre=place"]
    text = printed(data_and_task(described([*CLINICAL, *own, "data.test_fraction=0.1"]))[0])
    (chur,) = (line for line in text.splitlines() if "Chur" in line)
    assert "test: no 1" in chur


def test_many_clients_are_told_in_ranges():
    data, _ = data_and_task(described([*CLINICAL, "partition.num_clients=20"]))
    text = printed(data)
    assert "20 clients have 420 of 569 patients, 21 each, 13 in train, 4 in val, 4 in test." in text
    assert "from 19.0 % to 81.0 %; in the whole data: 37.3 %." in text
    assert "149 of the 569 patients belong to no client and are not used." in text


def test_copies_are_found_by_content(tmp_path, caplog):
    folder = photographs(tmp_path / "photographs")
    for old, new in (("benign/benign_0", "benign/x"), ("benign/benign_1", "malignant/y")):
        shutil.copy(folder / f"{old}.png", folder / f"{new}.png")
    own = [*IMAGES, f"data.path={folder}"]
    data, _ = data_and_task(described([*own, "partition.num_clients=3", "seed=2"]))
    place = {i: (c, s) for c, p in data.plans.items() for s, ids in p.patients.items() for i in ids}
    pairs = [("benign/benign_0.png", "benign/x.png"), ("benign/benign_1.png", "malignant/y.png")]
    apart = [set(pair) for pair in pairs if len({place[i] for i in pair}) == 2]
    found = cohort_record(data).duplicates
    assert [{p.sample.name for p in group} for group in found.groups] == apart != []
    assert found.counts()["labelled_differently"] == sum("malignant/y.png" in g for g in apart)
    printed(data)
    assert "of equal ones" in caplog.text
    with pytest.raises(DataError, match=r"of equal ones .* data\.duplicates=error"):
        run(tmp_path / "run", *own, "partition.num_clients=3", "seed=2", "data.duplicates=error")
    assert not (tmp_path / "run").exists()
    data, _ = data_and_task(described([*own, "data.duplicates=together"]))
    place = {i: c for c, p in data.plans.items() for ids in p.patients.values() for i in ids}
    assert not {"benign/x.png", "malignant/y.png"} & set(place)
    assert sum(c.num_samples for c in data.clients.values()) + sum(
        len(b["label"]) for c in data.clients.values() for e in c.evaluation.values() for b in e
    ) == len(list(folder.rglob("*.png")))
    left = cohort_record(data).duplicates  # what is together, and of two classes all the same
    assert left.counts()["labelled_differently"] == len(left.groups) == 1


def test_scans_and_rows_that_are_there_twice(cohort_root, table, tmp_path):
    made = BratsCohort(hospitals=2, patients=4, shape=(32, 32, 8)).ensure(cohort_root)[0]
    own = tmp_path / "own"
    shutil.copytree(made, own)
    first, *_, last = sorted((own / "imagesTr").iterdir())
    shutil.copy(first, last)
    data, _ = data_and_task(described([*imaging(cohort_root), f"data.path={own}"]))
    (group,) = cohort_record(data).duplicates.groups
    names = [f"{p.name.removesuffix('.nii.gz')} image" for p in (first, last)]
    assert [p.sample.name for p in group] == names
    lines = table.read_text().splitlines()
    table.write_text("\n".join([*lines, lines[1].replace("Chur", "Bern")]) + "\n")
    rows = ["data=csv", f"data.path={table}", "data.label=ill", "data.centre=place"]
    data, _ = data_and_task(described([*CLINICAL, *rows]))
    (group,) = cohort_record(data).duplicates.groups
    assert [p.client for p in group] == ["Bern", "Chur"]
    # Of two columns with two values each, equal rows are no wonder.
    table.write_text("a,b,ill\n" + "".join(f"{n % 2},{n % 3 % 2},{n % 2}\n" for n in range(40)))
    data, _ = data_and_task(described([*CLINICAL, *rows[:3]]))
    assert not cohort_record(data).duplicates.groups
