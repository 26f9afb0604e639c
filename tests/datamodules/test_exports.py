"""Tables as other programs export them: nothing is read as another number without a word."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from scipy import stats

from medfed.datamodules.partitions.by_centre import ByCentre
from medfed.datamodules.readers.table import Table, read_csv
from medfed.datamodules.tables.columns import role_remarks
from medfed.datamodules.tables.datamodule import TabularDataModule
from medfed.run.evaluation import values_of
from medfed.standalone.csv_files import read_features
from medfed.standalone.errors import ConfigError, MedfedError

COUNT = 40
AGES = [50 + n * 7 % 31 for n in range(COUNT)]
DEAD = [n * n % 3 % 2 for n in range(COUNT)]
COLUMNS = {
    "place": ["Bern" if n % 4 < 2 else "Genf" for n in range(COUNT)],
    "age": AGES,
    "dead": DEAD,
}


def write(path, columns, separator=",", before=""):
    lines = [columns, *zip(*columns.values(), strict=True)]
    text = "\n".join(separator.join(map(str, line)) for line in lines)
    path.write_text(before + text + "\n", encoding="utf-8")
    return path


def german(number):
    return f"{number:,}".replace(",", "_").replace(".", ",").replace("_", ".")


PLATELETS = [german(900 + 11 * n) for n in range(COUNT)]  # 900 to 1.329
CRP = [german(n + 0.5) for n in range(COUNT)]


READS = {
    "feature": lambda path: read_csv(path, "dead", features=["x"]),
    "outcome": lambda path: read_csv(path, "x", outcome="continuous", features=["age"]),
    "prediction": lambda path: read_features(path, ["x"]),
}


@pytest.mark.parametrize("role", READS)
@pytest.mark.parametrize(
    "columns",
    [
        {"x": PLATELETS, "crp": CRP},
        {"x": PLATELETS},
        {"x": [german(1000 + n) for n in range(COUNT)], "crp": CRP},
    ],
    ids=["beside commas", "beside hundreds", "all in thousands"],
)
def test_points_of_thousands_are_never_decimals(role, columns, tmp_path):
    path = write(tmp_path / "t.csv", {**COLUMNS, **columns}, ";")
    first = next(text for text in columns["x"] if "." in text)
    meant = first.replace(".", "")
    with pytest.raises(MedfedError, match=rf"t\.csv, data row \d+, column x: .*{meant} or "):
        READS[role](path)


@pytest.mark.parametrize(
    "texts",
    [
        [f"{900 / (n + 3):.3f}" for n in range(COUNT)],
        [f"{n / 8:g}" for n in range(COUNT)],
        [*["2", "1.250", "1.5"] * (COUNT // 3), "7"],
        [*["1500", "1.250"] * (COUNT // 2)],
    ],
    ids=["three decimals each", "as short as can be", "other decimals", "four digits"],
)
def test_decimals_stay_decimals(texts, tmp_path):
    path = write(tmp_path / "t.csv", {**COLUMNS, "x": texts}, ";")
    table = read_csv(path, "dead", features=["x"])
    assert table.features.ravel().tolist() == [float(text) for text in texts]


@pytest.mark.parametrize(
    ("columns", "before", "message"),
    [
        ({"x": ["90 %"] * COUNT}, "", "column x: '90 %' is not a number .*; write 90, leave it"),
        ({"x": ["7.5 mg/l"] * COUNT}, "", "write 7.5, leave it empty"),
        ({"x": ["1a", "1b", "2", "3"] * 10}, "", "write a number, leave it empty, name the column"),
        (
            {"x": ["ND", "n.d.", "-", *range(3, COUNT)]},
            "",
            r"take - and ND and n\.d\. for missing by 'data\.missing=\[-,ND,n\.d\.\]'",
        ),
        ({"x": ["1\u202f041"] * COUNT}, "", "write 1041, leave it empty"),
        ({"x": ['"1,041"'] * COUNT}, "", "write 1041 or 1.041, whichever it means"),
        ({}, "Export of 2019,,\n", "the first line names 1 of 3 columns; if it is a title, remove"),
        ({}, "Export of 2019\n", "the first line names 1 of 3 columns; if it is a title, remove"),
        (
            {"age": ["years", *AGES[1:]], "x": ["mg/l", *AGES[1:]]},
            "",
            "data row 1: 2 cells are not numbers, such as 'years' of age, but all below are; if it",
        ),
        (
            {"dead": ["x" if one else "" for one in DEAD]},
            "",
            rf"column dead: {sum(DEAD)} cells are 'x' and the other {DEAD.count(0)} are missing",
        ),
        (
            {"who": [f"p{min(n, 38)}" for n in range(COUNT)], "place": ["Bern", "Genf"] * 20},
            "",
            "Patient p38 .*; a patient belongs to one client: .* two ids, such as Bern_p38",
        ),
    ],
    ids=[
        *(
            "percent",
            "unit",
            "stages",
            "words of missing",
            "narrow space",
            "comma of thousands",
            "title",
            "bare title",
        ),
        *("units below", "ticks", "one id at two hospitals"),
    ],
)
def test_what_cannot_be_read_is_said_with_what_to_write(columns, before, message, tmp_path):
    path = write(tmp_path / "t.csv", {**COLUMNS, **columns}, before=before)
    keys = {"patient": "who"} if "who" in columns else {}
    with pytest.raises(MedfedError, match=message):
        module(path, **keys)


def module(path, **keys):
    data = TabularDataModule(
        path=str(path), partition=ByCentre(), **{"label": "dead", "centre": "place", **keys}
    )
    data.setup()
    return data


@pytest.mark.parametrize(
    ("columns", "keys", "line"),
    [
        (
            {"x": [-999 if n % 8 == 0 else n for n in range(COUNT)]},
            {},
            "-999 in 5 cells of x; 'data.missing=[-999]' reads them so",
        ),
        (
            {"x": [-9 if n == 3 else n / 3 for n in range(COUNT)]},
            {"label": "x", "outcome": "continuous"},
            "-9 in 1 cells of x; 'data.missing=[-9]' reads them so",
        ),
        (
            {"dead": ["dead", "alive", "lost", "alive"] * (COUNT // 4)},
            {"positive": ["dead"]},
            "all labels count as negative: alive (20), lost (10); see data.negative",
        ),
        ({"x": ["20190131"] * COUNT}, {}, "left out x (dates or times)"),
        ({"x": ["31-Jan-2019"] * COUNT}, {}, "left out x (dates or times)"),
        ({"x": ["1. Mai 2019"] * COUNT}, {}, "left out x (dates or times)"),
    ],
    ids=[
        *("-999", "-9 as outcome", "third label", "digits of a date"),
        *("a month in letters", "a German month"),
    ],
)
def test_what_may_mean_something_else_is_said(columns, keys, line, tmp_path, caplog):
    plain, other = ({**COLUMNS, **of} for of in ({}, columns))
    with caplog.at_level(logging.INFO):
        module(write(tmp_path / "plain.csv", plain))
        assert line not in caplog.text
        module(write(tmp_path / "t.csv", other), **keys)
    assert line in caplog.text


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_every_usual_separator_is_found(separator, tmp_path):
    table = read_csv(write(tmp_path / "t.csv", COLUMNS, separator), "dead", centre="place")
    assert (table.names, table.features.ravel().tolist()) == (("age",), AGES)


def test_ages_below_zero_are_said(tmp_path, caplog):
    born = ["2019-02-01" if n == 3 else "1950-02-01" for n in range(COUNT)]
    path = write(tmp_path / "t.csv", {**COLUMNS, "born": born, "came": ["2019-01-31"] * COUNT})
    read_csv(path, "dead", centre="place", ages={"came": "born"})
    assert "years from born to came are below 0 in 1 of 40 rows" in caplog.text


def test_the_columns_of_a_redcap_export_are_known():
    """Without them, clients would be random and one person's visits in several splits."""
    names = ["record_id", "redcap_event_name", "redcap_data_access_group", "age"]
    remarks = role_remarks(names, None, None)
    assert [r.partition(": ")[0].rpartition(", ")[2].rstrip(".") for r in remarks] == [
        "set data.patient=record_id",
        "set data.centre=redcap_data_access_group",
    ]


def test_scores_below_zero_are_no_missing_cells(tmp_path, caplog):
    path = write(tmp_path / "t.csv", {**COLUMNS, "excess": [n % 20 - 9 for n in range(COUNT)]})
    table = read_csv(path, "dead", features=["excess"])
    assert table.features.min() == -9
    assert "may mean missing" not in caplog.text


def test_a_column_that_one_hospital_never_fills_is_said(tmp_path):
    filled = ["" if place == "Bern" else n for n, place in enumerate(COLUMNS["place"])]
    remarks = module(write(tmp_path / "t.csv", {**COLUMNS, "x": filled})).remarks
    assert "No training row of a hospital has a value of a column: x at Bern." in remarks
    some = ["" if n == 3 else n for n in range(COUNT)]
    remarks = module(write(tmp_path / "t.csv", {**COLUMNS, "x": some})).remarks
    assert not [r for r in remarks if r.startswith("No training row")]


@pytest.mark.parametrize("outcome", ["continuous", "survival"])
def test_copies_of_an_outcome_are_said_by_their_rank_correlation(outcome, tmp_path):
    rng = np.random.default_rng(0)
    days = rng.exponential(300, COUNT)
    noisy = days + rng.normal(0, 60, COUNT)
    assert abs(stats.spearmanr(days, noisy).statistic) < 0.99
    columns = {**COLUMNS, "days": days, "months": -days / 30, "noisy": noisy}
    keys = {"outcome": outcome, "label": "days"}
    if outcome == "survival":
        keys = {"outcome": outcome, "time": "days", "event": "dead"}
    remarks = module(write(tmp_path / "t.csv", columns), **keys).remarks
    (leak,) = [r for r in remarks if "alone predict the label" in r]
    assert leak.endswith("'data.drop=[months]'.")
    assert "rank correlation" in leak
    assert "months (1.000)" in leak


@pytest.mark.parametrize(
    ("died", "best"), [(("alive", "dead"), "dead"), ((1, 2), "2")], ids=["words", "1 and 2"]
)
def test_other_words_for_an_event_are_asked_for_by_their_key(died, best, tmp_path):
    columns = {**COLUMNS, "days": AGES, "dead": [died[one] for one in DEAD]}
    path = write(tmp_path / "t.csv", columns)
    keys = {"time": "days", "outcome": "survival", "features": ["age"]}
    with pytest.raises(MedfedError, match=rf"column dead: .*data\.positive=\[{best}\]"):
        read_csv(path, "dead", **keys)
    table: Table = read_csv(path, "dead", positive=[best], **keys)
    assert table.labels[:, 1].tolist() == DEAD


def test_cuts_in_another_unit_than_the_times_are_said(tmp_path, caplog):
    path = write(tmp_path / "t.csv", {**COLUMNS, "years": [age / 30 for age in AGES]})
    survival = {"outcome": "survival", "time": "years", "event": "dead"}
    module(path, **survival, cuts=[1.0, 2.0])
    assert "data.cuts" not in caplog.text
    module(path, **survival, cuts=[365.0, 730.0])
    assert "data.cuts begins with 365, but the longest time is 2.66667" in caplog.text


@pytest.mark.parametrize("patient", [None, "who"], ids=["rows", "patients"])
def test_subgroups_may_be_of_any_column_of_the_table(patient, tmp_path):
    """Also of columns that the model must not see, such as an ethnicity, and of the hospital."""
    groups = ["ab"[n % 3 % 2] for n in range(COUNT)]
    columns = {"who": [f"p{n}" for n in range(COUNT)], **COLUMNS, "group": groups}
    path = write(tmp_path / "t.csv", columns)
    data = module(path, patient=patient, drop=["group", "who"] if patient is None else ["group"])
    assert "group" not in data.table.names
    ids = columns["who"] if patient else [f"row_{n}" for n in range(COUNT)]
    assert values_of(data, "group", None) == dict(zip(ids, groups, strict=True))
    assert values_of(data, "place", None) == dict(zip(ids, columns["place"], strict=True))
    with pytest.raises(ConfigError, match=r"by=grup is no column of the data \(did you mean group"):
        values_of(data, "grup", None)
