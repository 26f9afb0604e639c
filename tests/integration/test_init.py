"""``medfed init``: each layout of docs/data.md, and real data: the right guess, or a question."""

from __future__ import annotations

import io
import json
import os
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from medfed.commands.init import _answer, init
from medfed.commands.init import main as init_command
from medfed.config.compose import described, load
from medfed.datamodules.generated.luna16 import LunaCohort
from medfed.datamodules.generated.medmnist import BloodCells
from medfed.datamodules.readers.looks import Question
from medfed.standalone.errors import ConfigError, MedfedError
from tests.datamodules import absent_contrasts, organ_layouts
from tests.datamodules.brats_layouts import make_head, write_challenge, write_msd
from tests.datamodules.picture_files import cohort, picture
from tests.datamodules.volume_files import affine, write_volume
from tests.integration.runs import ROOT, UNDRAWN, left_in
from tests.integration.runs import run as trained
from tests.integration.test_findings import NETWORK

REAL = Path(os.environ.get("MEDFED_SHARED", ROOT.parent / "shared")) / "data"


def heads(count=4):
    return {f"BraTS_{n:03d}": make_head(n, (24, 20, 9)) for n in range(count)}


def table(folder, label="outcome", rows=40, cells=lambda n: ["no", "yes"][n % 3 == 0]):
    rng = np.random.default_rng(0)
    lines = [f"age,pressure,admitted,clinic,{label}"]
    for n in range(rows):
        age, pressure = rng.normal([60, 130], 10)
        lines.append(f"{age:.1f},{pressure:.1f},2020-01-{n % 28 + 1},{'AB'[n % 2]},{cells(n)}")
    path = folder / "table.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def photographs(folder, roots=("",), color=False):
    for root in roots:
        for name in ("benign", "malignant"):
            (folder / root / name).mkdir(parents=True)
            for n in range(12):
                rng = np.random.default_rng([len(root), len(name), n])
                pixels = rng.integers(0, 255, (20, 16, 3)[: 2 + color], np.uint8)
                person = n // 2 + 6 * (name == "benign")
                Image.fromarray(pixels).save(folder / root / name / f"p{person}_{n}.png")
    return folder


def listed_photographs(folder):
    photographs(folder)
    rows = ["image,label,patient,centre,split"]
    for n, file in enumerate(sorted(folder.rglob("*.png"))):
        split = ("train", "train", "val", "test")[n // 2 % 4]
        person, kind = file.name.partition("_")[0], file.parent.name
        rows.append(f"{file.relative_to(folder)},{kind},{person},{'ab'[n // 2 % 2]},{split}")
    (folder / "list.csv").write_text("\n".join(rows) + "\n")
    return folder / "list.csv"


def with_masks(folder):
    for n in range(6):
        image, mask = picture(np.random.default_rng(n))
        for name, pixels in (("images", image), ("masks", np.where(mask, 3, n % 2))):
            (folder / name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"eye_{n}.png")
    return folder


def series(folder):
    """A DICOM series, another contrast as NIfTI, and a mask, in a folder per case."""
    for n in range(6):
        image, label = organ_layouts.organs(n, (36, 36, 6))
        case = folder / f"case_{n}"
        write_volume(case / "CT", image, affine())
        write_volume(case / f"case_{n}_pet.nii.gz", image, affine())
        write_volume(case / "roi.nrrd", label, affine())
    lines = ["case,hospital", *(f"case_{n},{['Basel', 'Bern'][n % 2]}" for n in range(6))]
    (folder / "centres.csv").write_text("\n".join(lines) + "\n")
    return folder


def challenge(folder, convention):
    below = folder / "HGG" if convention == "2018" else folder
    write_challenge(below, heads(), convention)
    return folder


def fets(folder, write=write_challenge):
    """FeTS' partitionings of its cases: by hospital, and by hospital and size of the tumour."""
    names = [f"FeTS2022_{n:05d}" for n in range(8)]
    write(folder, dict(zip(names, heads(8).values(), strict=True)))
    for file, most in (("partitioning_1.csv", 5), ("partitioning_2.csv", 3)):
        rows = (f"{1 + n // most},{name}" for n, name in enumerate(names))
        (folder / file).write_text("\n".join(["Partition_ID,Subject_ID", *rows]) + "\n")
    return folder


def fets_in_two_folders(folder):
    def write(folder, heads):
        write_msd(folder, heads)
        (folder / "dataset.json").unlink()
        (folder / "imagesTr").rename(folder / "images")
        (folder / "labelsTr").rename(folder / "labels")

    return fets(folder, write)


def msd(folder):
    write_msd(folder, heads())
    return folder


def hearts(folder):
    cells = "63,1,1,145,233,1,2,150,0,2.3,3,0,6"
    folder.mkdir()
    rows = [f"{cells},{int(n >= 51)}" for n in range(200)]
    (folder / "processed.va.data").write_text("\n".join(rows) + "\n")
    return folder


def list_file(folder):
    organ_layouts.write_datalist(folder, entry=lambda n: {"centre": "ab"[n % 2]})
    (folder / "dataset.json").rename(folder / "mine.json")
    return folder


def continuous(folder):
    return table(folder, "outcome", cells=lambda n: f"{n * 1.5}")


def chest(folder):
    """Pictures of several findings each, as in ChestMNIST."""
    random, arrays = np.random.default_rng(0), {}
    for split, n in (("train", 30), ("val", 12), ("test", 12)):
        arrays[f"{split}_images"] = random.integers(0, 255, (n, 12, 12), dtype=np.uint8)
        arrays[f"{split}_labels"] = random.integers(0, 2, (n, 3))
    folder.mkdir()
    np.savez(folder / "chest.npz", **arrays)
    return folder


def listed_findings(folder):
    """As CheXpert: a column per finding, of which one cell is uncertain."""
    photographs(folder)
    rows = ["image,patient_id,hospital,effusion,nodule"]
    for n, file in enumerate(sorted(folder.rglob("*.png"))):
        cells = f"p{n // 2},{'ab'[n // 2 % 2]},{n % 2},{-1 if n == 3 else n // 3 % 2}"
        rows.append(f"{file.relative_to(folder)},{cells}")
    (folder / "list.csv").write_text("\n".join(rows) + "\n")
    return folder


def luna(folder, scans=False, nested=False):
    path, _ = LunaCohort(1, 4, (32, 32, 16), lookalikes=4, seed=2).ensure(folder)
    (table,) = path.glob("candidates*.csv")
    if nested:  # as its archives unpack, with the candidates of both years
        subset = next(path.glob("subset*"))
        (subset / subset.name).mkdir()
        for file in [f for f in subset.iterdir() if f.is_file()]:
            file.rename(subset / subset.name / file.name)
        for name in ("candidates.csv", "candidates_V2.csv"):
            if not (path / name).exists():
                (path / name).write_bytes(table.read_bytes())
    if scans:
        table.unlink()
    return path


def old_nnunet(folder):
    """nnU-Net's first version lists cases whose files have a number at the end."""
    organ_layouts.write_nnunet(folder)
    content = json.loads((folder / "dataset.json").read_text())
    labels = {str(v): name for name, v in content["labels"].items()}
    names = sorted(f.name for f in (folder / "labelsTr").iterdir())
    pairs = [{"image": f"./imagesTr/{n}", "label": f"./labelsTr/{n}"} for n in names]
    listed = {"modality": content["channel_names"], "labels": labels, "training": pairs}
    (folder / "dataset.json").write_text(json.dumps(listed))
    return folder


def time_points(folder):
    for n, (name, head) in enumerate(heads(8).items()):
        write_challenge(folder, {f"BraTS-GLI-{n // 2:05d}-{n % 2:03d}": head}, "2023")
        assert name
    return folder


def excel(folder):
    path = table(folder)
    text = path.read_text().replace(",", ";").replace(".", ",")
    path.write_bytes(("sep=;\n" + text).encode("utf-8-sig"))
    return path


def no_header(folder):
    """Cases and hospitals without a header line, as in half of all such files."""
    series(folder)
    lines = (folder / "centres.csv").read_text().splitlines()
    (folder / "centres.csv").write_text("\n".join(lines[1:]) + "\n")
    return folder


def visits(folder):
    """Two visits of each patient, masks with the values of BraTS, and a file of one case alone."""
    for n in range(8):
        image, label = organ_layouts.organs(n, (36, 36, 6))
        case = folder / f"anna{n // 2}_v{n % 2}"
        write_volume(case / "t1.nii.gz", image, affine())
        label = np.where(label == 2, 4, label)
        label[:2, :2, :2] = 2
        write_volume(case / "seg.nii.gz", label, affine())
    write_volume(folder / "anna0_v0" / "extra.nii.gz", image, affine())
    return folder


PATTERN = r"^(.*?\d+)[_-]"
BRATS = {"whole": [1, 2, 4], "core": [1, 4], "enhancing": [4]}
LAYOUTS = {  # the maker, the option of data=, and keys that are read off the files
    "table": (table, "csv", {"label": "outcome", "centre": "clinic"}),
    "measurements": (continuous, "csv", {"outcome": "continuous"}),
    "class folders": (photographs, "image_folder", {"reader.patient_pattern": PATTERN}),
    "colours in split folders": (
        lambda folder: photographs(folder, ("Training", "Testing"), True),
        "image_folder",
        {"reader.color": "rgb"},
    ),
    "a CSV of images": (listed_photographs, "image_table", {"reader.label": "label"}),
    "a CSV of masks": (lambda f: cohort(f, 2, 3) and f, "image_masks", {"reader.regions": None}),
    "images and masks": (
        with_masks,
        "image_masks",
        {"reader.regions": {"label_1": [1], "label_3": [3]}},
    ),
    "MSD brain": (msd, "brats", {"reader.regions": ["whole", "core", "enhancing"]}),
    "BraTS 2018": (lambda f: challenge(f, "2018"), "brats_challenge", {"reader.enhancing": 4}),
    "FeTS": (
        fets,
        "brats_challenge",
        {"reader.sites.case": "Subject_ID", "reader.sites.centre": "Partition_ID"},
    ),
    "FeTS in two folders": (fets_in_two_folders, "datalist", {"reader.sites.split": None}),
    "BraTS 2023": (lambda f: challenge(f, "2023"), "brats_challenge", {"reader.enhancing": 3}),
    "absent contrasts": (
        lambda f: absent_contrasts.write_folders(f, {0, 1}),
        "brats_challenge",
        {"reader.missing": "zero", "reader.channels": ["FLAIR", "T1w"]},
    ),
    "DICOM": (
        series,
        "brats_folder",
        {
            "reader.modalities": {"CT": "CT", "pet": "*_pet.nii.gz"},
            "reader.label": "roi.nrrd",
            "reader.regions": {"label_1": [1], "label_2": [2]},
            "normalize": {"window": [-175, 250]},
        },
    ),
    "a list": (list_file, "datalist", {"reader.regions": None}),
    "MSD": (organ_layouts.write_datalist, "datalist", {"patch_size": [16, 16]}),
    "nnU-Net": (organ_layouts.write_nnunet, "nnunet", {"patch_size": [16, 16]}),
    "MedMNIST": (
        lambda f: BloodCells(images=(40, 20, 20), size=16).ensure(f)[0],
        "medmnist",
        {"official_splits": True},
    ),
    "LUNA16": (
        lambda f: LunaCohort(1, 4, (32, 32, 16), lookalikes=4, seed=2).ensure(f)[0],
        "luna16",
        {},
    ),
    "heart": (hearts, "heart", {"reader.centres": ["va"]}),
    "Excel": (excel, "csv", {"label": "outcome", "centre": "clinic"}),
    "findings": (chest, "medmnist", {"reader.classes": None}),
    "a CSV of findings": (
        listed_findings,
        "image_table",
        {
            "reader.findings": ["effusion", "nodule"],
            "reader.uncertain": "missing",
            "reader.patient": "patient_id",
            "reader.centre": "hospital",
        },
    ),
    "LUNA16's annotations": (lambda f: luna(f, scans=True), "luna16_scans", {}),
    "LUNA16 unpacked": (lambda f: luna(f, nested=True), "luna16", {"reader.candidates": None}),
    "nnU-Net 1": (old_nnunet, "nnunet", {"patch_size": [16, 16]}),
    "time points": (time_points, "brats_challenge", {"eval_every": 1}),
    "no header": (no_header, "brats_folder", {"eval_every": 1}),
    "visits": (
        visits,
        "brats_folder",
        {
            "reader.patient_pattern": PATTERN,
            "reader.regions": BRATS,
            "reader.modalities": {"t1": "t1.nii.gz"},
        },
    ),
}
TABLES = ("table", "measurements", "Excel")
HOSPITALS = {
    "FeTS": "1 5, 2 3",
    "FeTS in two folders": "1 5, 2 3",
    "no header": "Basel 3, Bern 3",
    "time points": "none named",
    "Excel": "A 20, B 20",
}
PATIENTS = {"time points": 4, "visits": 4, "no header": 6, "a CSV of findings": 12}


def guess(path, into, *given):
    """What ``medfed train`` gets from the experiment."""
    file = init([str(path), f"into={into}", "name=mine", *given])
    assert file == into / "configs" / "experiment" / "mine.yaml"
    return load([f"plugins={into}", "experiment=mine"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_guessed(layout, tmp_path, capsys):
    make, kind, keys = LAYOUTS[layout]
    path = make(tmp_path / "own" if layout not in TABLES else tmp_path)
    before = left_in(path if path.is_dir() else path.parent)
    config = guess(path, tmp_path / "into", "yes=true")
    shipped = load([f"data={kind}", "data.path=x"])
    reader = (shipped.data.get("reader") or {}).get("_target_")
    assert (config.data._target_, (config.data.get("reader") or {}).get("_target_")) == (
        shipped.data._target_,
        reader,
    )
    for key, value in keys.items():
        node = config.data
        for part in key.split("."):
            node = node[part]
        assert node == value, key
    out = capsys.readouterr().out
    assert f"Train:   medfed train plugins={tmp_path / 'into'} experiment=mine" in out
    assert f"\npatients        {PATIENTS.get(layout, '')}" in out
    assert f"\nhospitals       {HOSPITALS.get(layout, '')}" in out
    lines = [line for line in out.splitlines() if line]
    assert len({*lines}) == len(lines)  # each once
    made = [f for f in left_in(path if path.is_dir() else path.parent) if not f.startswith("into")]
    assert made == before
    described([f"plugins={tmp_path / 'into'}", "experiment=mine"])


SMALL = ("rounds=1", "local.steps=1", "logger=none", "progress=false", *UNDRAWN)
UNET = ("model.network.channels=[4,8]", "model.network.strides=[2]", "data.patches_per_patient=2")
STARTS = {
    "table": (),
    "measurements": (),
    "class folders": ("data.reader.size=[8,8]", "model.network.channels=[4,4,4]"),
    "images and masks": UNET,
    "DICOM": UNET,
    "absent contrasts": UNET,
    "a list": UNET,
    "visits": UNET,
    "findings": (
        "~model.network",
        "+model.network=" + NETWORK.replace("out_channels: 2", "out_channels: 3"),
        "model.personal=[head.*]",
    ),
}


@pytest.mark.parametrize("layout", STARTS)
def test_training_starts_from_it(layout, tmp_path):
    make, _, _ = LAYOUTS[layout]
    path = make(tmp_path / "own" if layout not in TABLES else tmp_path)
    guess(path, tmp_path / "into", "yes=true")
    line = [f"plugins={tmp_path / 'into'}", "experiment=mine", *SMALL, *STARTS[layout]]
    summary, _ = trained(tmp_path / "run", *line)
    assert summary["clients"]


def refused(tmp_path, path, *given):
    """The questions and the one sentence, after which nothing is there."""
    into, printed = tmp_path / "into", io.StringIO()
    with redirect_stdout(printed), pytest.raises(MedfedError) as caught:
        init([str(path), f"into={into}", *given])
    assert not into.exists()
    assert "\n" not in str(caught.value)
    lines = [" ".join(line.split()) for line in printed.getvalue().splitlines()]
    assert len({*lines}) == len(lines)  # each once
    return "\n".join([*lines, str(caught.value)])


def test_what_cannot_be_known_is_asked(tmp_path, monkeypatch, capsys):
    path = table(tmp_path, "seen")
    said = refused(tmp_path, path, "yes=true")
    assert "\nWhich column is the label? (clinic, seen) Answer by data.label=VALUE.\n" in said
    assert said.endswith("1 question is open; nothing is written. Answer by data.label=VALUE.")
    config = guess(path, tmp_path / "a", "data.label=seen", "rounds=2", "partition=round_robin")
    assert (config.data.label, config.rounds) == ("seen", 2)
    assert config.partition._target_.endswith("RoundRobin")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda question: "seen")
    assert guess(path, tmp_path / "b").data.label == "seen"
    monkeypatch.setattr("builtins.input", lambda question: "null")
    images = photographs(tmp_path / "images")
    assert guess(images, tmp_path / "c").data.reader.patient_pattern is None
    with pytest.raises(ConfigError, match=r"mine\.yaml exists; choose another name by name=NAME"):
        init([str(path), f"into={tmp_path / 'b'}", "name=mine"])
    yes = table(tmp_path, "outcome", cells=lambda n: ["nein", "ja"][n % 2])
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    said = refused(tmp_path, yes, "data.label=outcome")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    assert "\nWhich label of outcome is the positive class? (ja, nein) Answer by " in said
    assert guess(yes, tmp_path / "d", "yes=true").data.positive == ["ja"]
    assert "labels positive: ja " in " ".join(capsys.readouterr().out.split())
    monkeypatch.setattr("builtins.input", lambda question: "nein" if "positive" in question else "")
    assert guess(yes, tmp_path / "e", "data.label=outcome").data.positive == ["nein"]
    assert "The command cannot be read" in refused(tmp_path, path, "data.drop=[a")
    with pytest.raises(SystemExit):
        init_command([str(path), str(path)])
    assert "takes one folder or file, not 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("BMI, kg/m2, age", ["BMI, kg/m2", "age"]),
        ('"BMI, kg/m2",sex', ["BMI, kg/m2", "sex"]),
        ('["BMI, kg/m2", sex]', ["BMI, kg/m2", "sex"]),
        ("age,sex", ["age", "sex"]),
        ("[age, sex]", ["age", "sex"]),
        ("BMI, kg/m2", ["BMI, kg/m2"]),
    ],
)
def test_a_comma_in_a_name_does_not_divide_an_answer(typed, read, monkeypatch):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda question: typed)
    asked = Question("Which columns?", ["age"], ["BMI, kg/m2", "age", "sex"])
    assert _answer("data.features", asked) == read


def with_column(folder, name, values):
    """A table whose hospitals, if any, are in that column."""
    head, *rows = table(folder).read_text().replace("clinic", "room").splitlines()
    rows = [f"{row},{values[n % len(values)]}" for n, row in enumerate(rows)]
    rows = [row.replace(",A,", ",1,").replace(",B,", ",2,") for row in rows]
    (folder / "table.csv").write_text("\n".join([f"{head},{name}", *rows]) + "\n", "utf-8")
    return folder / "table.csv"


@pytest.mark.parametrize(
    "name",
    ["Klinik", "Krankenhaus", "Spital-Nr", "Hôpital", "centro", "ospedale_id", "szpital", "病院"],
)
def test_a_hospital_column_is_known_in_many_languages(name, tmp_path, capsys):
    path = with_column(tmp_path, name, ["Nord", "Süd"])
    assert guess(path, tmp_path / "into", "yes=true").data.centre == name
    out = " ".join(capsys.readouterr().out.split())
    assert f"centre {name} (probably: its name)" in out
    assert "all 40 rows are taken" in out


def test_a_column_that_may_be_the_hospital_is_asked_about(tmp_path, monkeypatch):
    path = with_column(tmp_path, "Kostenstelle", ["Nord", "Süd", "West"])
    said = refused(tmp_path, path, "data.label=outcome")
    assert "\nDoes one of these columns name the hospital? Without it, clients are " in said
    assert "(Kostenstelle, null: no) Answer by data.centre=VALUE, or take null" in said
    assert guess(path, tmp_path / "a", "yes=true").data.centre is None
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda q: "Kostenstelle" if "hospital" in q else "")
    assert guess(path, tmp_path / "b").data.centre == "Kostenstelle"


@pytest.mark.parametrize(
    ("name", "values"), [("sex", "fm"), ("smoker", ["ja", "nein"]), ("remark", "abcdefghijklmnop")]
)
def test_other_columns_of_texts_are_not_asked_about(name, values, tmp_path):
    path = with_column(tmp_path, name, values)
    assert guess(path, tmp_path / "into", "data.label=outcome").data.centre is None


def test_all_open_questions_are_printed_at_once(tmp_path):
    path = with_column(tmp_path, "Ort", ["Nord", "Süd"])
    head, *rows = path.read_text("utf-8").splitlines()
    more = [("k.A.", "3"), ("<0.5", "7"), ("4/5", "2"), ("-9", "12")]
    rows = [",".join([row, *(pair[n % 2] for pair in more)]) for n, row in enumerate(rows)]
    rows = [f"{row},{['dead', 'alive'][n // 2 % 2]}" for n, row in enumerate(rows)]
    rows = [row.replace("no", "lives").replace("yes", "dies") for row in rows]
    path.write_text("\n".join([f"{head},wbc,crp,ratio,iron,state", *rows]) + "\n", "utf-8")
    said = refused(tmp_path, path, "data.label=state")
    keys = ("data.positive", "data.centre", "data.missing", "data.limits", "data.drop")
    for key in keys:
        assert said.count(f" Answer by {key}=VALUE, or take ") == 1
    assert "Do -9, k.A. among numbers stand for missing cells?" in said
    assert "What are limits among numbers, such as <0.5? (half, value, refuse)" in said
    last = said.splitlines()[-1]
    assert last.startswith("5 questions are open; nothing is written. Answer by ")
    assert all(f"{key}=VALUE" in last for key in keys)
    config = guess(path, tmp_path / "a", "data.label=state", "yes=true").data
    assert (config.missing, config.limits) == (["-9", "k.A."], "half")
    assert {"ratio"} <= {*config.drop}
    assert config.positive == ["dead"]


def test_mixed_columns_are_named(tmp_path):
    path = table(tmp_path)
    lines = path.read_text().splitlines()
    rows = [f"{line},{'5/6' if n % 4 else n}" for n, line in enumerate(lines[1:])]
    path.write_text("\n".join([f"{lines[0]},crp", *rows]) + "\n")
    said = refused(tmp_path, path, "data.label=outcome")
    assert "\nNumbers and texts are mixed in crp (5/6). Leave these columns out?" in said
    said = refused(tmp_path, path, "yes=true", "data.drop=[age]")
    assert "leave it out by 'data.drop=[crp]'" in said
    config = guess(path, tmp_path / "into", "yes=true")
    assert (config.data.drop, config.data.label) == (["crp"], "outcome")


def test_columns_that_tell_the_label_are_left_out(tmp_path):
    path = table(tmp_path)
    lines = path.read_text().splitlines()
    rows = [f"{line},{n % 3 == 0:d}" for n, line in enumerate(lines[1:])]
    path.write_text("\n".join([f"{lines[0]},autopsy", *rows]) + "\n")
    said = refused(tmp_path, path, "data.label=outcome")
    assert "\nColumns that alone predict the label: autopsy (1.000). Leave" in said
    rows = [f"{row},{'5/6' if n % 4 else n}" for n, row in enumerate(rows)]
    path.write_text("\n".join([f"{lines[0]},autopsy,crp", *rows]) + "\n")
    config = guess(path, tmp_path / "into", "yes=true")
    assert config.data.drop == ["crp", "autopsy"]
    kept = guess(path, tmp_path / "kept", "yes=true", "data.drop=[crp]")
    assert kept.data.drop == ["crp"]


def test_a_contrast_that_copies_another_is_noticed(tmp_path, capsys):
    for n in range(6):
        image, mask = picture(np.random.default_rng(n))
        image = image[..., 0]
        pixels = np.stack([image, image if n < 4 else image[:, ::-1], image[::-1]], -1)
        for name, of in (("images", pixels), ("masks", np.where(mask, 255, 0))):
            (tmp_path / "own" / name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(of.astype(np.uint8)).save(tmp_path / "own" / name / f"head_{n}.png")
    guess(tmp_path / "own", tmp_path / "into", "yes=true")
    assert "red = green in 4 of 6 pictures" in capsys.readouterr().out


def test_a_label_is_no_list_of_pictures_called_by_its_values(tmp_path):
    path = with_column(tmp_path, "grade", "01")
    (path.parent / "figures").mkdir()
    for n in "01":
        Image.new("L", (8, 8)).save(path.parent / "figures" / f"{n}.png")
    config = guess(path, tmp_path / "into", "data.label=grade", "yes=true")
    assert (config.data.path, config.data.label) == (str(path), "grade")


def test_no_data_get_one_sentence(tmp_path):
    (tmp_path / "empty").mkdir()
    assert "has no table and no layout" in refused(tmp_path, tmp_path / "empty")
    assert "does not exist; name a folder" in refused(tmp_path, tmp_path / "none")
    two = tmp_path / "two"
    two.mkdir()
    for name in ("a.csv", "b.csv"):
        (two / name).write_text("x,y\n1,2\n")
    said = refused(tmp_path, two)
    assert "Which of the 2 files? (a.csv, b.csv) Answer by data.path=VALUE." in said
    assert "a.csv" in refused(tmp_path, two, "data.path=a.csv", "data.label=y", "yes=true")
    scans = tmp_path / "scans"
    for n in range(2):
        for name in ("one", "other"):
            write_volume(scans / f"case_{n}" / f"{name}.nii.gz", *organ_files(n))
    assert "Which file of a case is the mask? (" in refused(tmp_path, scans, "yes=true")
    assert "is no mask of a few label values" in refused(
        tmp_path, scans, "data.reader.label=one.nii.gz"
    )
    broken = tmp_path / "broken"
    organ_layouts.write_nnunet(broken)
    (broken / "labelsTr" / "organ_00.nii.gz").write_bytes(b"torn")
    assert "organ_00.nii.gz" in refused(tmp_path, broken, "yes=true")
    (broken / "dataset.json").write_text(json.dumps([1]))
    assert "must hold a JSON object" in refused(tmp_path, broken)


def organ_files(n):
    return organ_layouts.organs(n)[0], affine()


ASKED = {  # of data that have no label, or several tables
    "flamby": "has no table and no layout",
    "flamby/published": "Which of the 12 files?",
    "flamby/tcga_brca": "Which of the 3 files? (brca.csv, centers.csv, train_test_split.csv)",
    "flamby/tcga_brca/brca.csv": "Which column is the label?",
}
FOUND = {
    "brats2018": ("brats_folder", {"reader.label": "GT_W.nii.gz"}),
    "heart": ("heart", {}),
    "lgg": ("image_masks", {}),
    "retina": ("image_masks", {}),
    "retina_centres": ("image_masks", {}),
}


@pytest.mark.skipif(not REAL.is_dir(), reason="has no real data")
@pytest.mark.parametrize("name", [*ASKED, *FOUND])
def test_real_data_are_guessed_or_asked_about(name, tmp_path):
    if name in ASKED:
        assert ASKED[name] in refused(tmp_path, REAL / name, "yes=true")
        return
    kind, keys = FOUND[name]
    data = guess(REAL / name, tmp_path / "into", "yes=true").data
    assert data._target_ == load([f"data={kind}", "data.path=x"]).data._target_
    assert all(data.reader[key.partition(".")[2]] == value for key, value in keys.items())
