"""``medfed init`` on files as hospitals have them: right, a question, or one clear sentence."""

from __future__ import annotations

import itertools
import json
import re
import shutil

import numpy as np
import pytest
from PIL import Image

from medfed.commands.init import init
from medfed.config.compose import CONFIG_DIR, build, load
from medfed.config.spelling import hydra_spelling
from medfed.datamodules.readers.looks import Guess
from medfed.standalone.errors import ConfigError, DataError, MedfedError
from tests.datamodules import organ_layouts
from tests.datamodules.test_dicom import frames, series
from tests.datamodules.test_oddities import a_list
from tests.datamodules.volume_files import affine, write_volume
from tests.integration.test_init import guess, luna, refused, table, with_column


def rows_of(folder, head, row, count=60):
    path = folder / "t.csv"
    path.write_text("\n".join([head, *(",".join(row(n)) for n in range(count))]) + "\n", "utf-8")
    return path


def ages(n):
    return f"{np.random.default_rng(n).normal(60, 9):.1f}"


def ids(folder):
    return rows_of(
        folder,
        "patient,age,outcome",
        lambda n: (f"{100 + n // 2}{'.0' * (n % 2)}", ages(n), f"{n % 3 > 1:d}"),
    )


def capitals(folder, label="outcome"):
    return rows_of(folder, f"age,{label}", lambda n: (ages(n), ("No", "Yes", "no", "yes")[n % 4]))


def no_hospital(folder):
    return rows_of(
        folder,
        "age,hospital,outcome",
        lambda n: (ages(n), ("#N/A", "A", "B", "<NA>")[n % 4], f"{n % 3 > 1:d}"),
    )


def no_label(folder):
    return rows_of(folder, "age,outcome", lambda n: (ages(n), ("1", "0", "#N/A")[n % 3]))


def codes(folder):
    return rows_of(
        folder,
        "age,icd,outcome",
        lambda n: (ages(n), ("0744", "744", "V30")[n % 3], f"{n % 5 > 1:d}"),
    )


def pictures(folder, ending="png", top=256, masks=False):
    for kind in ("benign", "malignant"):
        (folder / kind).mkdir(parents=True)
        for n in range(10):
            values = np.random.default_rng(n).integers(0, top, (12, 10))
            image = Image.fromarray(values.astype(np.uint8 if top == 256 else np.uint16))
            image.save(folder / kind / f"{kind} ({n}).{ending}")
            if masks:
                image.save(folder / kind / f"{kind} ({n})_mask.png")
    return folder


def as_nnunet(folder):
    for n in range(6):
        values = np.random.default_rng(n).integers(0, 255, (24, 20, 3), np.uint8)
        for part, name, pixels in (
            ("imagesTr", f"c{n}_0000", values),
            ("labelsTr", f"c{n}", values[..., 0] % 2),
        ):
            (folder / part).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(folder / part / f"{name}.png")
    (folder / "dataset.json").write_text(
        '{"channel_names": {"0": "R"}, "labels": {"background": 0, "t": 1}, "file_ending": ".png"}'
    )
    return folder


def more_volumes(folder):
    folder.mkdir()
    a_list(folder, (6, 5, 4, 3))
    return folder


def from_windows(folder):
    folder.mkdir()
    a_list(folder, path=".\\{}", mark="\ufeff")
    return folder


def listed_hospitals(folder):
    """A list whose entries name patient and hospital by other words."""
    return organ_layouts.write_datalist(
        folder, entry=lambda n: {"subject": f"p{n // 2}", "Klinik": "ab"[n // 2 % 2]}
    )


def hospitals_in_names(folder):
    for n in range(4):
        image, label = organ_layouts.organs(n)
        case = folder / f"{('basel', 'bern')[n % 2]}{n}"
        write_volume(case / "t1.nii.gz", image, affine())
        write_volume(case / "seg.nii.gz", label, affine())
    return folder


def no_masks(folder):
    organ_layouts.write_nnunet(folder)
    (folder / "labelsTr" / "organ_00.nii.gz").unlink()
    return folder


def no_labels(folder):
    organ_layouts.write_datalist(folder)
    file = folder / "dataset.json"
    file.write_text(file.read_text().replace('"labels"', '"classes"'))
    return folder


def dicom_cases(folder, two=False, several=False):
    for n in range(4):
        case = folder / f"case_{n}"
        for name in ("arterial", "venous") if several else ("CT",):
            (case / name).mkdir(parents=True)
            if two:
                series(case / name)
                series(case / name, ending="_2.dcm", series="9")
            else:
                frames(case / name / "scan.dcm")
        (case / "seg.nrrd").parent.mkdir(exist_ok=True)
        mask = np.zeros((7, 6, 5), np.uint8)
        mask[2:4, 2:4, 2:4] = 1
        write_volume(case / "seg.nrrd", mask, affine())
    return folder


def other_names(folder):
    for n in range(2):
        for name in ("mask", "label"):
            write_volume(folder / f"c{n}" / f"{name}.nii.gz", organ_layouts.organs(n)[1], affine())
        write_volume(folder / f"c{n}" / "t1.nii.gz", organ_layouts.organs(n)[0], affine())
    return folder


def inside_hospitals(folder):
    for place in ("basel", "bern"):
        pictures(folder / place)
    return folder


def folders_of_masks(folder):
    for kind, files in (("images", pictures(folder / "a")), ("masks", pictures(folder / "b"))):
        for file in files.glob("*/*.png"):
            (folder / file.parent.name / kind).mkdir(parents=True, exist_ok=True)
            file.rename(folder / file.parent.name / kind / file.name)
    shutil.rmtree(folder / "a")
    shutil.rmtree(folder / "b")
    return folder


def listed_without(folder, path):
    """A table that names pictures without folder or ending, or by paths of Windows."""
    pictures(folder / "all")
    (folder / "img").mkdir()
    for file in folder.glob("all/*/*.png"):
        file.rename(folder / "img" / file.name)
    names = sorted(file.stem for file in folder.glob("img/*.png"))
    rows = rows_of(folder, "picture,target", lambda n: (path.format(names[n]), f"{n % 2}"), 20)
    return rows.parent


def survival(folder):
    return rows_of(
        folder,
        "age,months_to_death,death",
        lambda n: (ages(n), f"{np.random.default_rng(n).exponential(9) + 1:.1f}", f"{n % 2}"),
    )


def two_folders(folder):
    for n in range(4):
        for part, volume in zip(("images", "labels"), organ_layouts.organs(n), strict=True):
            write_volume(folder / part / f"scan_{n}.nii.gz", volume, affine())
    return folder


def old_list(folder):
    """The list of nnU-Net v1, whose cases have no file of their name."""
    organ_layouts.write_nnunet(folder)
    file = folder / "dataset.json"
    content = json.loads(file.read_text())
    masks = sorted(f"labelsTr/{path.name}" for path in (folder / "labelsTr").iterdir())
    content["training"] = [{"image": m.replace("labels", "images"), "label": m} for m in masks]
    file.write_text(json.dumps(content))
    return file


def wide_text(folder):
    path = table(folder)
    path.write_bytes(path.read_text().replace(",", "\t").encode("utf-16"))
    return path.rename(folder / "export.txt")


CASES = {  # the maker, and what is said
    "ids 100 and 100.0": (ids, "differ only in the format of a number"),
    "yes and Yes": (capitals, "'No'", "'no'", "differ only in capitals"),
    "no hospital": (no_hospital, "data.unplaced drop (a guess", "30 of 60 rows are taken"),
    "no label": (no_label, "data.unlabelled drop (a guess", "40 of 60 rows are taken"),
    "codes": (codes, "a leading zero", "icd (0744)", "patients 60"),
    "masks beside pictures": (
        lambda f: pictures(f, masks=True),
        "20 .png: masks of pictures beside them",
        "patients 20 ",
    ),
    "webp": (lambda f: pictures(f, "webp"), "patients 20 ", "all 20 files are taken"),
    "12 bits": (lambda f: pictures(f, top=4096), "16 bits use 12 bits", "patients 20 "),
    "pictures as nnU-Net's": (as_nnunet, "image_masks at ", "patients 6 ", "mask values [1]"),
    "more volumes": (more_volumes, "holds 3 volumes", "but 1 is named"),
    "a list of Windows": (from_windows, "datalist at ", "patients 3 "),
    "words of a list": (
        listed_hospitals,
        "centre Klinik (probably",
        "patient subject (probably",
        "hospitals a 2, b 1",
        "patients 3 ",
    ),
    "hospitals in names": (
        hospitals_in_names,
        "data.reader.centre_pattern None (a guess",
        "hospitals none named",
    ),
    "no masks": (no_masks, "no mask in labelsTr and are left out: organ_00", "patients 5 "),
    "a list without labels": (no_labels, "mask values [1, 2]", "labels label_1, label_2"),
    "two masks": (other_names, "Which file of a case is the mask? (label.nii.gz, mask.nii.gz)"),
    "two series": (lambda f: dicom_cases(f, two=True), "holds 2 DICOM series"),
    "hospitals of classes": (
        inside_hospitals,
        "The folders basel, bern each hold benign, malignant. What are the outer ones? (hospitals,",
        "data.reader.outer=VALUE",
    ),
    "folders of masks": (
        folders_of_masks,
        "20 .png: masks of pictures beside them",
        "patients 20 ",
        "labels benign, malignant",
    ),
    "names of pictures": (
        lambda f: listed_without(f, "{}"),
        "image_table at ",
        "patients 20 ",
        "all 21 files are taken",
    ),
    "paths of Windows": (
        lambda f: listed_without(f, r".\img\{}.png"),
        "image_table at ",
        "patients 20 ",
    ),
    "survival": (survival, "data.time months_to_death (a guess", "labels no event, event"),
    "images and labels": (two_folders, "datalist at ", "mask values [1, 2]", "patients 4 "),
    "nnU-Net's old list": (old_list, "nnunet at ", "all 13 files are taken"),
    "UTF-16": (wide_text, "csv at ", "patients 40 ", "all 40 rows are taken"),
    "phases": (
        lambda f: dicom_cases(f, several=True),
        "data.reader.channels ['arterial', 'venous'] (a guess",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_files_as_hospitals_have_them(case, tmp_path, capsys):
    make, *words = CASES[case]
    path = make(tmp_path if make in TABLES else tmp_path / "own")
    try:
        guess(path, tmp_path / "into", "yes=true")
        said = capsys.readouterr().out
    except MedfedError:
        said = refused(tmp_path, path, "yes=true")
    said = " ".join(said.split())
    assert all(word in said for word in words), said
    assert "unexpected" not in said


@pytest.mark.parametrize("names", ["age,days,event", "Alter,Tage,Ereignis"])
@pytest.mark.parametrize("typed", [True, False])
def test_survival_needs_no_label_beside_its_event(names, typed, tmp_path, capsys):
    _, time, event = names.split(",")
    path = survival(tmp_path)
    path.write_text(path.read_text().replace("age,months_to_death,death", names))
    keys = [f"data.label={event}"]
    if typed:
        keys = ["data.outcome=survival", f"data.time={time}", f"data.event={event}"]
    data = guess(path, tmp_path / "into", "yes=true", *keys).data
    assert (data.outcome, data.time, data.event) == ("survival", time, event)
    assert "Which column is the label?" not in capsys.readouterr().out


def test_hospitals_with_images_and_masks_are_no_classes(tmp_path):
    folder = folders_of_masks(tmp_path / "own")
    for file in folder.glob("*/masks/*.png"):
        Image.fromarray(255 * np.eye(24, 20, dtype=np.uint8)).save(file)
    said = refused(tmp_path, folder)
    assert "What is it? (image_masks, image_folder)" in said
    assert "Are these hospitals (" in said


TABLES = {ids, capitals, no_hospital, no_label, codes, survival, wide_text}


@pytest.mark.parametrize(
    ("words", "positive"),
    [
        (("no", "yes"), None),
        (("0", "1"), None),
        (("negative", "positive"), None),
        (("False", "True"), None),
        (("nein", "ja"), ["ja"]),
        (("no", "sí"), ["sí"]),
        (("非", "是"), ["非"]),
        (("alive", "dead"), ["dead"]),
        (("control", "case"), ["control"]),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, tuple) else "",
)
def test_which_of_two_labels_is_positive_is_said_or_asked(words, positive, tmp_path, capsys):
    path = table(tmp_path, cells=lambda n: words[n % 3 == 0])
    assert guess(path, tmp_path / "into", "yes=true").data.positive == positive
    out = " ".join(capsys.readouterr().out.split())
    if positive is None:
        assert f"positive class {words[1]} (probably" in out
    else:
        asked = refused(tmp_path / "other", path, "data.label=outcome")
        assert "Which label of outcome is the positive class? (" in asked


def answering(monkeypatch, **answers):
    """A terminal whose user answers the questions that hold a word; all that were asked."""
    asked = []

    def answer(question):
        asked.append(question)
        return next((a for word, a in answers.items() if word in question), "")

    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", answer)
    return asked


def test_an_error_that_names_a_key_is_a_question(tmp_path, monkeypatch, capsys):
    path = luna(tmp_path / "own")
    next(path.glob("subset*/*.mhd")).unlink()
    said = refused(tmp_path, path, "yes=true")
    assert "set data.reader.missing=skip. (skip) Answer by data.reader.missing=VALUE." in said
    asked = answering(monkeypatch, missing="skip")
    assert guess(path, tmp_path / "into").data.reader.missing == "skip"
    assert len(asked) == 1
    assert "data.reader.missing skip (answered)" in " ".join(capsys.readouterr().out.split())


def test_answers_are_kept_where_it_stops(tmp_path, monkeypatch):
    path = capitals(tmp_path, "result")
    asked = answering(monkeypatch, label="result")
    said = refused(tmp_path, path)
    assert "\nYou have answered: data.label=result\n" in said
    assert said.splitlines()[-1].count("differ only in capitals") == 1
    assert len(asked) == 1


ALIKE = {  # two spellings of one name in a role, of which nobody knows whether they are one
    "patients": ("patient_id", ("7", "7.0", "8", "9")),
    "hospitals": ("hospital", ("Bern", "BERN", "Basel", "Genf")),
    "labels": ("outcome", ("No", "Yes", "no", "yes")),
}


@pytest.mark.parametrize("role", ALIKE)
def test_names_that_no_run_takes_are_refused_before_any_question(role, tmp_path, monkeypatch):
    column, texts = ALIKE[role]
    path = rows_of(
        tmp_path, f"age,crp,result,{column}", lambda n: (ages(n), "-", "xy"[n % 2], texts[n % 4])
    )
    asked = answering(monkeypatch)
    said = refused(tmp_path, path)
    assert f"column {column}: '{texts[0]}' (data row 1) and " in said.splitlines()[-1]
    assert not asked


@pytest.mark.parametrize("word", ["-", "n.b.", "unbekannt"])
def test_a_word_among_decimal_commas_is_missing(word, tmp_path):
    """Not the columns are left out; and without init, the sentence names the word."""

    cells = [word if n % 9 == 4 else ages(n).replace(".", ",") for n in range(60)]
    rows = [f"{cell};{n % 3 > 1:d}" for n, cell in enumerate(cells)]
    path = tmp_path / "t.csv"
    path.write_text("\n".join(["age;outcome", *rows]) + "\n", "utf-8")
    data = guess(path, tmp_path / "into", "yes=true").data
    assert (data.missing, data.get("drop") or []) == ([word], [])
    wanted = [np.nan if n % 9 == 4 else float(ages(n)) for n in range(60)]
    assert build(data).table.features[:, 0] == pytest.approx(wanted, nan_ok=True)
    data.missing = []
    with pytest.raises(DataError, match=re.escape(f"take {word} for missing by 'data.missing=[")):
        print(build(data).table)


def test_a_class_called_none_is_asked_for_and_stays_a_class(tmp_path, capsys):
    """Among numbers the same word is missing; a row without a class is asked for afterwards."""

    def line(n):
        return ages(n) if n % 7 else "none", ("none", "mild", "severe", "")[n % 4]

    path = rows_of(tmp_path, "age,outcome", line)
    assert "Is none in 15 cells of outcome a category" in refused(tmp_path, path)
    data = guess(path, tmp_path / "into", "yes=true").data
    assert (data.missing, data.unlabelled, data.get("positive")) == (["not none"], "drop", None)
    table = build(data).table
    assert table.classes == ("mild", "none", "severe")
    assert np.isnan(table.features[:, 0]).sum() == sum(n % 7 == 0 for n in range(60) if n % 4 < 3)
    assert "15 of 60 rows have no outcome and are left out" in capsys.readouterr().out


def test_columns_without_names_are_asked_for(tmp_path, monkeypatch):
    path = rows_of(tmp_path, "61.5,1,0", lambda n: (ages(n), f"{n % 4}", f"{n % 3 > 1:d}"))
    said = refused(tmp_path, path, "yes=true")
    assert "The first line holds numbers. What are the names of the columns?" in said
    answering(monkeypatch, columns="age,stage,ill", label="ill")
    data = guess(path, tmp_path / "into").data
    assert (data.header, data.label) == (["age", "stage", "ill"], "ill")


@pytest.mark.parametrize(
    "content",
    [b"", b"a,b\n", b"PK\x03\x04", b"\x89PNG", b"{", b"[1]", b"\x1f\x8b", b"\xff\xfe\0"],
    ids=repr,
)
@pytest.mark.parametrize("ending", ["csv", "json", "npz", "png", "nii.gz", "dcm", "xlsx", "data"])
def test_no_file_is_more_than_one_sentence(content, ending, tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / f"a.{ending}").write_bytes(content)
    for path in (tmp_path / "own", tmp_path / "own" / f"a.{ending}"):
        assert "unexpected" not in refused(tmp_path, path, "yes=true")


def test_answers_have_the_spelling_of_the_command_line(tmp_path, monkeypatch):
    path = with_column(tmp_path, "Ort", ["Nord", "Süd"])
    lines = path.read_text("utf-8").splitlines()
    more = [
        f"{line},{['3/4', '7'][n % 2]},{['1/2', '5'][n % 2]}" for n, line in enumerate(lines[1:])
    ]
    path.write_text("\n".join([f"{lines[0]},a,b", *more]) + "\n", "utf-8")
    asked = answering(monkeypatch, mixed="a, b", label="outcome", hospital="Ort")
    data = guess(path, tmp_path / "into").data
    assert (data.drop, data.label, data.centre) == (["a", "b"], "outcome", "Ort")
    assert sum("mixed in a (3/4), b (1/2)." in question for question in asked) == 1


def test_an_experiment_of_medfeds_name_is_not_hidden(tmp_path):
    path = table(tmp_path).rename(tmp_path / "stroke.csv")
    file = init([str(path), f"into={tmp_path / 'into'}", "yes=true"])
    assert file.stem == "stroke_data"
    assert load([f"plugins={tmp_path / 'into'}", "experiment=stroke_data"]).data.path == str(path)
    with pytest.raises(ConfigError, match="name=nnunet is an experiment of medfed's"):
        init([str(path), f"into={tmp_path / 'into'}", "yes=true", "name=nnunet"])


PLUGIN = """
from medfed.datamodules.readers.looks import Guess
from medfed.datamodules.readers.table import read_csv

def read_sheets(path, label):
    return read_csv(next(path.glob("*.sheet")), label, categorical="auto")

def looks_like(path, answers):
    if not any(path.glob("*.sheet")):
        return None
    guess = Guess("", path)
    guess.ask("data.reader.label", "Which column of the sheet?", None, ["outcome"])
    return guess
"""


def test_a_plug_in_reader_takes_part(tmp_path, capsys):
    plugin, own = tmp_path / "mine", tmp_path / "own"
    (plugin / "configs" / "data").mkdir(parents=True)
    (plugin / "sheets_of_ours.py").write_text(PLUGIN)
    shipped = (CONFIG_DIR / "data" / "csv.yaml").read_text().replace("reader: null", "")
    shipped += "reader: {_target_: sheets_of_ours.read_sheets, _partial_: true, label: ill}\n"
    (plugin / "configs" / "data" / "sheets.yaml").write_text(shipped)
    own.mkdir()
    table(own).rename(own / "clinic.sheet")
    keys = (f"plugins={plugin}", "yes=true")
    said = refused(tmp_path, own, *keys)
    assert "Which column of the sheet? (outcome) Answer by data.reader.label=VALUE." in said
    file = init([str(own), f"into={tmp_path / 'into'}", *keys, "data.reader.label=outcome"])
    out = capsys.readouterr().out
    assert f"'plugins=[{plugin},{tmp_path / 'into'}]' experiment=own" in out
    config = load([f"plugins=[{plugin},{tmp_path / 'into'}]", f"experiment={file.stem}"])
    assert config.data.reader["_target_"] == "sheets_of_ours.read_sheets"
    assert "patients        40" in out


def test_hospitals_in_the_names_of_cases_are_asked_about(tmp_path, monkeypatch):
    path = hospitals_in_names(tmp_path / "own")
    said = refused(tmp_path, path)
    assert "Do the names of cases begin with the hospital (basel, bern)?" in said
    answering(monkeypatch, hospital="^([a-z]+)[0-9]")
    data = guess(path, tmp_path / "into").data
    assert data.reader.centre_pattern == "^([a-z]+)[0-9]"


def test_what_two_readers_take_is_asked(tmp_path):
    path = pictures(tmp_path / "own")
    for n, case in enumerate(("benign", "malignant")):
        for name, kind in (("t1", 0), ("seg", 1)):
            volume = organ_layouts.organs(n)[kind]
            write_volume(path / case / f"{name}.nii.gz", volume, affine())
    said = refused(tmp_path, path)
    assert "What is it? (image_folder, brats_folder) Answer by data=VALUE" in said
    data = guess(path, tmp_path / "into", "data=brats_folder").data
    assert data.reader["_target_"].endswith("FolderReader")


def named(pattern, *ranges):
    return [pattern.format(*at) for at in itertools.product(*map(range, ranges))]


HOSPITALS = [f"{place}_{n:03d}" for place in ("AAC", "BON", "KOL", "MUE") for n in range(10)]
CENTRE, PATIENT = "data.reader.centre_pattern", "data.reader.patient_pattern"
BEGINNINGS = {  # names, the hospital of each, and the best answer of each question
    "hospitals": (HOSPITALS, [""] * 40, {CENTRE: "null"}),
    "hospitals of a file": (HOSPITALS, [name[:3] for name in HOSPITALS], {}),
    "hospitals in names of pictures": (HOSPITALS, None, {PATIENT: "null"}),
    "numbered hospitals": (named("site{}_{:03d}", 4, 10), [""] * 40, {CENTRE: "null"}),
    "visits": (named("p{}_{}", 20, 2), [""] * 40, {PATIENT: r"^(.*?\d+)[_-]"}),
    "many pictures of a patient": (
        named("p{:02d}_{}", 12, 9),
        None,
        {PATIENT: r"^(.*?\d+)[_-]"},
    ),
    "two patients a hospital": (
        named("p{}_{}", 8, 5),
        [f"h{n // 10}" for n in range(40)],
        {PATIENT: "null"},
    ),
    "visits in hospitals": (
        [f"{place}{n}_v{v}" for place in ("basel", "bern") for n in range(4) for v in (1, 2)],
        [""] * 16,
        {CENTRE: "null", PATIENT: r"^(.*?\d+)[_-]"},
    ),
    "a case each": (named("case_{:03d}", 12), [""] * 12, {}),
}


@pytest.mark.parametrize("case", BEGINNINGS)
def test_a_hospital_is_no_patient_by_guess(case, tmp_path):
    names, places, best = BEGINNINGS[case]
    guess = Guess("x", tmp_path)
    guess.ask_names(names, {}, places)
    assert {key: question.best for key, question in guess.asks.items()} == best


def test_a_number_that_is_no_hospital_may_be_the_patient(tmp_path):
    guess = Guess("x", tmp_path)
    guess.ask_names(named("site{}_{:03d}", 4, 10), {CENTRE: None}, [""] * 40)
    assert guess.asks[PATIENT].best == "null"
    guess = Guess("x", tmp_path)
    guess.ask_names(named("site{}_{:03d}", 4, 10), {CENTRE: "^(site.)"}, [""] * 40)
    assert not guess.asks


@pytest.mark.parametrize("seed", range(20))
def test_no_patient_by_guess_leaves_a_hospital_without_splits(seed, tmp_path):
    """A hospital of three cases or more keeps three patients: train, val and test."""
    rng = np.random.default_rng(seed)
    people = rng.integers(1, 5, rng.integers(3, 12))
    names = [f"p{n}_{v}" for n, visits in enumerate(people) for v in range(visits)]
    at = rng.integers(0, 3, len(people))
    places = [f"h{at[int(name[1:].partition('_')[0])]}" for name in names]
    guess = Guess("x", tmp_path)
    guess.ask_names(names, {}, places)
    if (question := guess.asks.get(PATIENT)) is not None and question.best != "null":
        persons = [re.match(question.best, name)[1] for name in names]
        for place in {*places}:
            of = [p for p, at in zip(persons, places, strict=True) if at == place]
            assert len({*of}) >= min(3, len(of))


def in_two_hospitals(path, nnunet=True, second=None):
    """Six cases each of AAC and BON, whose voxels have other sizes if a second one is given."""
    for n in range(12):
        place, mm = ("AAC", {}) if n % 2 == 0 else ("BON", {"spacing": second} if second else {})
        image, label = organ_layouts.organs(n)
        name = f"{place}_{n:03d}"
        write_volume(path / "imagesTr" / f"{name}{'_0000' * nnunet}.nii.gz", image, affine(**mm))
        write_volume(path / "labelsTr" / f"{name}.nii.gz", label, affine(**mm))
    if nnunet:
        content = {"channel_names": {"0": "CT"}, "labels": {"background": 0, "a": 1, "b": 2}}
        (path / "dataset.json").write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("nnunet", [True, False], ids=["nnunet", "folders"])
def test_the_beginning_of_a_case_is_its_hospital(nnunet, tmp_path, monkeypatch, capsys):
    path = in_two_hospitals(tmp_path / "own", nnunet)
    said = refused(tmp_path, path)
    question = "Do the names of cases begin with the hospital (AAC, BON)?"
    assert f"{question} (" in said
    assert f"Answer by {CENTRE}=VALUE" in said
    asked = answering(monkeypatch, hospital=(pattern := "^([A-Z]+)_"))
    assert guess(path, tmp_path / "into").data.reader.centre_pattern == pattern
    assert [question in each for each in asked] == [True]
    assert "hospitals AAC 6, BON 6" in " ".join(capsys.readouterr().out.split())
    both = (f'{key}="{pattern}"' for key in (PATIENT, CENTRE))
    last = refused(tmp_path / "other", path, *both).splitlines()[-1]
    assert "; check what says whose a sample is, or give the clients more" in last


UNEVEN = "Clients differ in the size of voxels: 0.7 × 0.8 × 2.5 mm at AAC, 1 × 0.8 × 2.5 mm at BON."


@pytest.mark.parametrize(
    ("answer", "spacing"),
    [("yes=true", [0.85, 0.8]), ("", [0.85, 0.8]), ("[1,0.9]", [1.0, 0.9]), ("null", None)],
)
def test_voxels_of_other_sizes_are_said_and_asked_about(
    answer, spacing, tmp_path, monkeypatch, capsys
):
    path = in_two_hospitals(tmp_path / "own", second=(1.0, 0.8, 2.5))
    keys = [f'{CENTRE}="^([A-Z]+)_"', *[answer] * (answer == "yes=true")]
    asked = answering(monkeypatch, Resample=answer)
    data = guess(path, tmp_path / "into", *keys).data
    assert asked == ["Resample images to one size? (null: no) [[0.85,0.8]] "] * (len(keys) == 1)
    assert data.spacing == spacing
    out = " ".join(capsys.readouterr().out.split())
    assert UNEVEN in out
    read = build(data)
    read.plan()
    remark = f"{UNEVEN} data.spacing=[0.85,0.8] resamples images to one size."
    assert ([remark] if spacing is None else []) == [r for r in read.remarks if "voxels" in r]


@pytest.mark.parametrize(
    ("second", "dims", "differ"),
    [
        ((0.7, 0.8, 2.5), 3, False),
        ((0.74, 0.8, 2.5), 3, False),
        ((0.7, 0.8, 5.0), 2, False),
        ((0.7, 0.8, 5.0), 3, True),
        ((0.7, 1.0, 2.5), 2, True),
    ],
    ids=["equal", "nearly", "slices", "volumes", "plane"],
)
def test_voxels_count_along_the_axes_of_the_network(second, dims, differ, tmp_path):
    path = in_two_hospitals(tmp_path / "own", second=second)
    size = "[16,16,8]" if dims == 3 else "[16,16]"
    keys = (f"data.spatial_dims={dims}", f"data.patch_size={size}", f'{CENTRE}="^([A-Z]+)_"')
    config = load(["data=nnunet", f"data.path={path}", "partition=centre", *hydra_spelling(keys)])
    read = build(config.data)
    read.plan()
    assert any("differ in the size of voxels" in r for r in read.remarks) == differ
