"""Names, codes and cells of tables: one spelling each, nothing merged, split or dropped unsaid."""

from __future__ import annotations

import csv
import json
import logging
import unicodedata
from io import StringIO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from medfed.config.compose import load
from medfed.datamodules.partitions.by_centre import ByCentre
from medfed.datamodules.plans import by_id
from medfed.datamodules.readers.base import Patient
from medfed.datamodules.readers.centres import named_centres
from medfed.datamodules.readers.image_folder import read_image_table
from medfed.datamodules.readers.image_masks import ImageMasksReader
from medfed.datamodules.readers.table import read_csv
from medfed.datamodules.tables.datamodule import TabularDataModule
from medfed.run.cohort import cohort_record, print_cohort
from medfed.standalone.csv_files import MISSING, as_number, missing_words, read_features
from medfed.standalone.errors import ConfigError, DataError
from medfed.standalone.names import alike, code_among, fold, likeness, same, tidy

ROLES = {"label": "ill", "centre": "place", "patient": "who", "categorical": "auto"}


def table(path, rows, header="who,place,age,ill", encoding="utf-8", end="\n"):
    path.write_bytes((end.join([header, *rows]) + end).encode(encoding))
    return path


def cells(column, *spelled, count=24):
    """Rows whose cells of one column are spelled one way or the other."""
    rows = []
    for n in range(count):
        row = {"who": f"p{n}", "place": "Bern", "age": str(40 + n), "ill": ["no", "yes"][n % 2]}
        row[column] = spelled[n] if n < len(spelled) else row[column]
        rows.append(",".join(row.values()))
    return rows


SPELLINGS = {  # two spellings, and what they differ in
    "number": ("100", "100.0", "the format of a number"),
    "comma zeros": ("7.50", "7.5", "the format of a number"),
    "capitals": ("Basel", "basel", "capitals"),
    "zero width": ("Basel", "Ba\u200bsel", "signs that nobody sees"),
    "soft hyphen": ("Basel", "Ba\u00adsel", "signs that nobody sees"),
    "byte order": ("Basel", "\ufeffBasel", "signs that nobody sees"),
    "direction": ("Basel", "Basel\u200f", "signs that nobody sees"),
    "full width": ("Basel", "\uff22asel", "signs that nobody sees"),
    "two ways": ("Z\u00fcrich", "ZU\u0308RICH\u200b", "capitals or hidden signs"),
}


@pytest.mark.parametrize(
    ("name", "column"),  # of labels that are numbers, see below
    [(n, c) for n in SPELLINGS for c in ("who", "place", "ill") if (n, c) != ("number", "ill")],
)
def test_two_spellings_of_one_name_are_refused_with_a_row_of_each(name, column, tmp_path):
    one, other, what = SPELLINGS[name]
    path = table(tmp_path / "t.csv", cells(column, "x", one, one, other))
    with pytest.raises(DataError) as caught:
        read_csv(path, **ROLES)
    said = str(caught.value)
    assert f"column {column}: {fold(one)!r} (data row 2) and {fold(other)!r} (data row 4)" in said
    assert f"differ only in {what}; write one of them everywhere" in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("one", "other"),
    [("Z\u00fcrich", "Zu\u0308rich"), ("St Anna", "St  Anna"), ("St Anna", "St\u00a0Anna")],
    ids=["NFD", "two spaces", "hard space"],
)
def test_unicode_form_and_spaces_are_folded_and_said(one, other, tmp_path, caplog):
    path = table(tmp_path / "t.csv", cells("place", one, other, one))
    assert {*read_csv(path, **ROLES).centres} == {one, "Bern"}
    assert "are read as one" in caplog.text


def test_labels_that_are_equal_numbers_are_one_class_and_said(tmp_path, caplog):
    rows = cells("ill", *("1", "0", "1.0", "0.00") * 6)
    assert read_csv(table(tmp_path / "t.csv", rows), **ROLES).classes == ("0", "1")
    assert "'1' and '1.0' are read as one" in caplog.text


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0"), max_size=12)


@settings(max_examples=200, deadline=None)
@given(NAMES)
def test_folding_is_stable_and_spellings_of_a_name_are_alike(name):
    folded = fold(name)
    assert fold(folded) == folded == fold(unicodedata.normalize("NFD", name))
    for spelled in (name.casefold(), f" {name}\t", f"{name}\u200b"):
        assert likeness(spelled) == likeness(name)
    assert not alike([name, name])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.from_regex(r"[0-9]{1,4}(\.[0-9]{1,2})?|[0-9]E[0-9]{1,2}", fullmatch=True)))
def test_codes_keep_their_digits_and_equal_numbers_are_alike(texts):
    for text in texts:
        zero_first = len(text) > 1 and text[0] == "0" and text[1].isdigit()
        if zero_first or "E" in text:
            assert tidy(text) == text
        else:
            assert as_number(tidy(text)) == float(text)
            assert likeness(f"{text}.0" if "." not in text else f"{text}0") == likeness(text)
        assert bool(code_among([text])) == (zero_first or "E" in text)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["a", "A", "1", "1.0", "01", "b", "é", "É"]), max_size=6))
def test_what_is_not_refused_has_one_spelling_per_likeness(texts):
    try:
        read = same(texts, "here", str)
    except DataError:
        assert len({*texts}) > len({*map(likeness, texts)})
    else:
        assert read == texts
        assert len({*texts}) == len({*map(likeness, texts)})


@pytest.mark.parametrize(
    ("codes", "first"),
    [
        (["0744", "744", "01882", "1882"], "0744"),
        (["0100", "100"], "0100"),
        (["038.9", "38.9"], "038.9"),
        (["1E50", "1E51", "2E65"], "1E50"),
    ],
    ids=["ICD-9", "digits", "decimals", "ICD-11"],
)
def test_codes_are_categories_and_said(codes, first, tmp_path, caplog):
    path = table(tmp_path / "t.csv", cells("age", *codes * (24 // len(codes))))
    read = read_csv(path, **ROLES)
    assert {*codes} <= {*read.categories["age"]}
    assert f"age ({first})" in caplog.text
    with pytest.raises(
        DataError, match=r"means codes: age .*name the columns in data\.categorical"
    ):
        read_csv(path, **{**ROLES, "categorical": ()})


def test_one_exponent_among_numbers_changes_no_column(tmp_path):
    read = read_csv(table(tmp_path / "t.csv", cells("age", "1E2", "5e1")), **ROLES)
    assert not read.categories
    assert read.features[:2, 0].tolist() == [100, 50]


def remarks_of(column, names, folder):
    path = table(folder / "t.csv", cells(column, *names, count=len(names)))
    data = TabularDataModule(
        path=str(path), partition=ByCentre(), label="ill", centre="place", patient="who"
    )
    data.plan()
    return " ".join(remark for remark in data.remarks if "count as two" in remark)


@pytest.mark.parametrize(
    ("one", "other"), [("7", "007"), ("P7", "P07"), ("p7", "P07"), ("case_1_2", "case_1_02")]
)
def test_ids_that_differ_in_leading_zeros_are_two_patients_and_said(one, other, tmp_path):
    names = [one, other, *(f"q{n}" for n in range(20))]
    assert f"leading zeros count as two: {one} and {other}. If" in remarks_of(
        "who", names, tmp_path
    )


SLIPS = {  # the rarer name last
    "a letter more": ("Basel", "Bassel"),
    "a letter less": ("Zürich", "Zrich"),
    "another letter": ("Zürich", "Zurich"),
    "two that swapped": ("Lausanne", "Luasanne"),
    "a sign": ("St. Gallen", "St Gallen"),
    "a leading zero": ("clinic 1", "clinic 01"),
}


@pytest.mark.parametrize("kind", SLIPS)
def test_names_of_hospitals_that_may_be_slips_are_said_with_their_patients(kind, tmp_path):
    one, other = SLIPS[kind]
    said = remarks_of("place", [one] * 60 + [other, "Bern"] * 3, tmp_path)
    assert f"count as two: {one} (60 patients) and {other} (3). If they are one" in said
    of_the_same_size = remarks_of("place", [one] * 30 + [other] * 30, tmp_path)
    assert bool(of_the_same_size) == (kind in ("a sign", "a leading zero"))


@pytest.mark.parametrize(
    "names",
    [
        ("clinic 1", "clinic 2"),
        ("site A", "site B"),
        ("hospitalA", "hospitalB"),
        ("clinic II", "clinic III"),
        ("1-2", "12"),
        ("10", "100"),
        ("Ulm", "Elm"),
        ("北京大学第一医院", "北京大学第二医院"),
    ],
    ids=lambda names: names[0],
)
def test_hospitals_and_patients_that_are_numbered_are_not_said(names, tmp_path):
    assert not remarks_of("place", [*names] * 10, tmp_path)
    assert not remarks_of("who", [*names, *(f"p{n}" for n in range(20))], tmp_path)


USUAL = ["", "?", ".", "NaN", "-nan", "NA", "<NA>", "N/A", "n.a.", "#N/A", "#NA", "None", "NULL"]
USUAL += ["NaT", "#NULL!", "#DIV/0!", "#VALUE!", "#REF!", "#NUM!", "#NAME?", "1.#QNAN", "#N/A N/A"]


@pytest.mark.parametrize("word", USUAL)
def test_usual_words_of_missing_cells(word, tmp_path):
    for column in ("place", "who", "ill"):
        with pytest.raises(DataError, match=f"data row 1, column {column}: the cell is missing"):
            read_csv(table(tmp_path / "t.csv", cells(column, word)), **ROLES)
    read = read_csv(table(tmp_path / "t.csv", cells("age", word)), **ROLES)
    assert np.isnan(read.features[:, 0]).tolist() == [True] + [False] * 23


def test_further_words_are_missing_but_no_number_is_a_patient_less(tmp_path):
    rows = cells("age", "k.A.", "-9", "-9.0", "9")
    rows = [f"{-9 if n == 5 else n},{row.partition(',')[2]}" for n, row in enumerate(rows)]
    path = table(tmp_path / "t.csv", rows)
    read = read_csv(path, **ROLES, missing=["K.A.", -9])
    assert np.isnan(read.features[:, 0]).sum() == 3
    assert read.patients[5] == "-9"
    with pytest.raises(ConfigError, match=r"'data\.missing=\[k\.A\.\]'"):
        read_csv(path, **ROLES, missing="k.A.")


@pytest.mark.parametrize(
    ("limits", "values"), [("half", [0.25, 100, 2, 3.5]), ("value", [0.5, 100, 4, 3.5])]
)
@pytest.mark.parametrize("comma", [False, True], ids=["point", "comma"])
def test_half_limits_are_what_the_key_says(limits, values, comma, tmp_path, caplog):
    spelled = ["<0.5", "> 100", "≤4", "3.5"]
    rows = cells("age", *spelled)
    header, text = "who,place,age,ill", rows
    if comma:
        header, text = (t.replace(",", ";") for t in (header, "\n".join(rows)))
        text = text.replace(".", ",").split("\n")
    path = table(tmp_path / "t.csv", text, header)
    with pytest.raises(DataError, match=r"take limits by data\.limits=half or data\.limits=value"):
        read_csv(path, **ROLES)
    assert read_csv(path, **ROLES, limits=limits).features[:4, 0].tolist() == values
    assert f"3 cells are limits, and count as {'half of ' * (limits == 'half')}the" in caplog.text
    with pytest.raises(ConfigError, match=r"data\.limits"):
        read_csv(path, **ROLES, limits="third")


def test_a_table_to_predict_is_read_like_the_one_in_training(tmp_path):
    path = table(tmp_path / "t.csv", cells("age", "k.A.", "<5", "50"))
    read, others, _ = read_features(path, ["age"], None, ["k.A."], "half")
    assert np.isnan(read[0, 0])
    assert read[1:3, 0].tolist() == [2.5, 50]
    assert {*others} == {"who", "place", "ill"}


def test_a_usual_word_of_a_missing_cell_is_said_and_may_be_a_category(tmp_path, caplog):
    """In columns of words alone: among numbers none is missing still."""
    lines = [f"{('none', '41', '52')[n % 3]},{('none', 'low', 'n/a')[n % 3]}" for n in range(30)]
    lines = [f"{line},{('none', 'mild', 'severe')[n // 10]}" for n, line in enumerate(lines)]
    path = table(tmp_path / "t.csv", lines, "crp,grade,ill")
    with pytest.raises(DataError, match=r"column ill: the cell is missing \(none counts so\)"):
        read_csv(path, "ill", categorical="auto")
    read = read_csv(path, "ill", categorical="auto", unlabelled="drop")
    assert read.classes == ("mild", "severe")
    assert '10 of 30 rows have no ill ("none" in 10 cells) and are left out' in caplog.text
    said = '"none" in 10 cells of ill, "none" in 10 cells of grade, "n/a" in 10 cells of grade; '
    assert f"{said}'data.missing=[not none,not n/a]' keeps" in caplog.text
    caplog.clear()
    keys = load(["data=csv", "data.missing=[not none,not n/a,not done]"]).data.missing
    read = read_csv(path, "ill", categorical="auto", missing=keys)
    assert read.classes == ("mild", "none", "severe")
    assert read.categories == {"grade": ("low", "n/a", "none")}
    assert np.isnan(read.features).sum(axis=0).tolist() == [10, 0]
    assert "read as missing" not in caplog.text
    predicted, _, _ = read_features(path, read.names, read.categories, list(map(str, keys)))
    assert np.array_equal(predicted, read.features, equal_nan=True)
    assert "not done" in missing_words(["not done"])


KINDS = ["40", "", "NA", "#N/A", "k.A.", "7.5", "<NA>"]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("mark", ["utf-8", "utf-8-sig", "latin-1"])
def test_rows_and_cells_seen_are_those_taken_and_left_out(seed, mark, tmp_path, caplog):
    """Compared with the csv module alone."""
    rng, delimiter = np.random.default_rng(seed), ",;\t"[seed % 3]
    lines = [delimiter.join(["who", "Größe", "crp", "ill"])]
    for n in range(60):
        if rng.random() < 0.1:
            lines.append(delimiter * 3)
        ill = rng.choice(["yes", "no", "", "NA", "maybe"])
        lines.append(delimiter.join([f"p{n}", str(rng.choice(KINDS)), str(rng.choice(KINDS)), ill]))
    path = tmp_path / "t.csv"
    path.write_bytes("\r\n".join(lines).encode(mark))
    how = {"positive": ["yes"], "negative": ["no"], "unlabelled": "drop", "missing": ["k.A."]}
    read = read_csv(path, "ill", patient="who", categorical="auto", **how)
    with path.open(encoding=mark, newline="") as file:
        seen = list(csv.reader(file, delimiter=delimiter))[1:]
    kept = [row for row in seen if row[3] in ("yes", "no")]
    rows, cells_ = read.accounts
    assert (rows.total, rows.taken) == (len(seen), len(kept)) == (rows.record()["seen"], rows.taken)
    words = sum(any(r) and r[3] == "NA" for r in seen)
    named = f' ("NA" in {words} cells)' if words else ""
    assert {why: n for why, (n, _) in rows.left_out.items()} == {
        why: n
        for why, n in {
            "empty": sum(not any(row) for row in seen),
            f"no ill of those named{named}": sum(
                any(r) and r[3] not in ("yes", "no") for r in seen
            ),
        }.items()
        if n
    }
    values = [cell for row in kept for cell in row[1:3]]
    known = [cell for cell in values if cell in ("40", "7.5")]
    assert (cells_.total, cells_.taken) == (len(values), len(known))
    assert cells_.taken == np.isfinite(read.features).sum()
    assert caplog.text.count("is read as Latin-1") == (mark == "latin-1")


def test_excel_s_first_line_names_the_separator(tmp_path):
    path = tmp_path / "t.csv"
    rows = [
        "sep=;",
        "who;place;age;ill",
        *(row.replace(",", ";").replace(".", ",") for row in cells("age", "7.5")),
    ]
    path.write_text("\n".join(rows))
    read = read_csv(path, **ROLES)
    assert read.names == ("age",)
    assert read.features[0, 0] == 7.5


def test_the_account_stands_in_the_start_table_and_its_record(tmp_path, caplog):
    caplog.set_level(logging.ERROR)
    path = table(tmp_path / "t.csv", [",,,", *cells("age", "", "NA")])
    data = TabularDataModule(ByCentre(), path=path, label="ill", centre="place", patient="who")
    data.setup()
    cohort = cohort_record(data)
    console = Console(width=1000, record=True, file=StringIO())
    print_cohort(cohort, console=console)
    printed = console.export_text()
    assert "t.csv: 24 of 25 rows are taken; left out: 1 empty." in printed
    assert (
        "t.csv: 22 of 24 cells of 1 features are taken; left out: 1 empty (age in data row 1), 1 "
        "missing (NA) (age in data row 2)."
    ) in printed
    rows, features = cohort.record()["read"]
    assert (rows["what"], rows["seen"], rows["taken"]) == ("rows", 25, 24)
    assert features["left_out"]["missing (NA)"] == {"count": 1, "first": "age in data row 2"}


def test_every_word_of_missing_cells_is_lower_case():
    assert all(word == fold(word).lower() for word in MISSING)


@pytest.mark.parametrize("ending", ["csv", "json"])
def test_a_list_of_hospitals_names_cases_in_any_unicode_form(ending, tmp_path):
    """As folders of macOS have them."""
    listed = {"Mu\u0308ller 1": "Bern", "M\u00fcller  2": "Bern"}
    write_centres(tmp_path / f"centres.{ending}", listed)
    cases = ["M\u00fcller 1", "Mu\u0308ller 2"]
    assert named_centres(tmp_path, cases) == dict.fromkeys(cases, "Bern")
    for other, what in (("bern", "capitals"), ("Be\u200brn", "signs that nobody sees")):
        write_centres(tmp_path / f"centres.{ending}", {**listed, "x": other})
        with pytest.raises(DataError, match=f"hospitals: 'Bern' .case .*differ only in {what}"):
            named_centres(tmp_path, cases)
    write_centres(tmp_path / f"centres.{ending}", {"a1": "Bern", "A1": "Bern"})
    with pytest.raises(DataError, match=r"cases: 'a1' .entry 0. and 'A1' .entry 1. differ only"):
        named_centres(tmp_path, ["a1"])


def write_centres(path, listed):
    lines = ["case,hospital", *map(",".join, listed.items())]
    path.write_text(json.dumps(listed) if path.suffix == ".json" else "\n".join(lines), "utf-8")


@pytest.mark.parametrize("centre", [False, True], ids=["patient", "hospital"])
@pytest.mark.parametrize(("one", "other", "what"), SPELLINGS.values(), ids=SPELLINGS)
def test_no_reader_s_patients_or_hospitals_are_two_by_spelling(one, other, what, centre):
    patients = [Patient(f"p{n}", centre=name) for n, name in enumerate(("x", one, other))]
    if not centre:
        patients = [Patient(name) for name in ("x", one, other)]
    kind = "hospitals" if centre else "patients"
    with pytest.raises(DataError, match=f"The {kind}' names: .* differ only in {what}"):
        by_id(patients)
    assert [*by_id(patients[:2])] == [p.id for p in patients[:2]]


def test_rows_that_join_a_federation_have_its_classes(tmp_path):
    path = table(tmp_path / "t.csv", cells("ill", *["b"] * 24))
    read = read_csv(path, **ROLES, classes=("a", "b", "c"))
    assert (read.classes, read.labels.tolist()) == (("a", "b", "c"), [1] * 24)
    with pytest.raises(DataError, match=r"data row 1: the label b is none of a, c; mend the row"):
        read_csv(path, **ROLES, classes=("a", "c"))
    read = read_csv(path, **ROLES, positive=["a"], classes=("negative", "positive"))
    assert read.labels.tolist() == [0] * 24


@pytest.mark.parametrize("read", [read_image_table, ImageMasksReader], ids=["classes", "masks"])
@pytest.mark.parametrize("column", ["patient", "centre", "label"])
@pytest.mark.parametrize(("one", "other", "what"), SPELLINGS.values(), ids=SPELLINGS)
def test_tables_of_pictures_have_one_spelling_too(one, other, what, column, read, tmp_path):
    if (read, column) == (ImageMasksReader, "label"):
        column = "patient"  # masks have no label
    lines = ["image,mask,patient,centre,label"]
    for n, name in enumerate(("x", one, other)):
        cells_ = {"image": f"{n}.png", "mask": f"m{n}.png", "patient": f"p{n}", "centre": "Bern"}
        lines.append(",".join({**cells_, "label": "ill", column: name}.values()))
    path = tmp_path / "images.csv"
    path.write_text("\n".join(lines), "utf-8")
    with pytest.raises(
        DataError, match=rf"column {column}: .*row 2. .*row 3. differ only in {what}"
    ):
        read(path)
