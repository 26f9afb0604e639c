"""medfed evaluate across=true and by=COLUMN."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from medfed.commands.evaluate import main
from medfed.run.evaluation import (
    banded,
    measure_across,
    measure_subgroups,
    show_across,
    show_subgroups,
)
from medfed.standalone.errors import ConfigError, MedfedError
from tests.integration.runs import CLINICAL, run


@pytest.fixture(scope="module")
def clinical(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("across") / "run"
    run(folder, *CLINICAL, "rounds=1", "partition.num_clients=3")
    return folder


def test_models_on_their_own_patients_are_the_summary(clinical, capsys):
    summary = json.loads((clinical / "summary.json").read_text())
    values = measure_across(clinical)
    assert list(values) == list(summary["clients"])
    for model, row in values.items():
        assert list(row) == list(values)
        own = summary["clients"][model]
        assert row[model] == {n: v for n, v in own.items() if "/" not in n}
    assert len({row["hospital_0"]["loss"] for row in values.values()}) == 3
    show_across(values, clinical, "test")
    assert json.loads((clinical / "across_test.json").read_text()) == values
    assert (clinical / "pictures" / "across_test.png").is_file()
    printed = capsys.readouterr().out
    assert f"{values['hospital_1']['hospital_2']['auroc']:.4f}" in printed
    patients = json.loads((clinical / "splits.json").read_text())["clients"]
    assert all(f"{name} ({len(of['test'])})" in printed for name, of in patients.items())


def test_a_subgroup_is_all_hospitals_cases_of_it(clinical, tmp_path, capsys):
    with (clinical / "cases.csv").open(newline="") as file:
        cases = list(csv.DictReader(file))
    sex = {row["patient"]: "fm"[n % 5 < 2] for n, row in enumerate(cases)}
    rare = [row["patient"] for row in cases[:5]]
    few = {rare[0]: "d", rare[1]: "d", rare[2]: "d"}
    with (tmp_path / "patients.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows(
            [["patient", "sex"], *((p, few.get(p, s)) for p, s in sex.items() if p not in rare[3:])]
        )
    subgroups = measure_subgroups(clinical, "test", "sex", tmp_path / "patients.csv")
    for name in ("d", "unknown"):
        assert subgroups["groups"][name] == {"patients": None}
    for name in "fm":
        some = [r for r in cases if sex[r["patient"]] == name and r["patient"] not in rare]
        one = subgroups["groups"][name]
        assert one["patients"] == len(some)
        right = [(float(r["probability/1"]) > 0.5) == (r["label"] == "1") for r in some]
        assert one["metrics"]["accuracy"] == pytest.approx(np.mean(right))
        low, high = one["intervals"]["accuracy"]
        assert low <= one["metrics"]["accuracy"] <= high
    show_subgroups(subgroups, clinical)
    printed = capsys.readouterr().out
    worst = min("fm", key=lambda n: subgroups["groups"][n]["metrics"]["auroc"])
    assert f"Worst by auroc: {worst}, " in printed
    hidden = "Not shown, of too few patients or as these would follow: d, unknown; a lower least="
    assert hidden in printed
    assert json.loads((clinical / "subgroups_test_sex.json").read_text()) == subgroups
    with (tmp_path / "patients.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["patient", "sex"], *((p, few.get(p, s)) for p, s in sex.items())])
    groups = measure_subgroups(clinical, "test", "sex", tmp_path / "patients.csv")["groups"]
    # With the total and the larger group, d's patients follow.
    fewer = min("fm", key=lambda n: subgroups["groups"][n]["patients"])
    assert groups["d"] == groups[fewer] == {"patients": None}
    assert "metrics" in groups["fm".replace(fewer, "")]
    only = {**subgroups, "groups": {"f": subgroups["groups"]["f"], "m": {"patients": None}}}
    show_subgroups(only, clinical)
    printed = capsys.readouterr().out
    assert "Worst by" not in printed  # of one group none is the worst
    single = "A subgroup with a hospital of a single test patient has no interval."
    assert single not in printed
    only["groups"]["f"] = {**only["groups"]["f"], "intervals": {"auroc": [np.nan, np.nan]}}
    show_subgroups(only, clinical)
    assert single in capsys.readouterr().out


def test_numbers_of_the_table_are_divided_into_bands(clinical):
    subgroups = measure_subgroups(clinical, "test", "mean radius", edges=[12, 15], least=1)
    assert {*subgroups["groups"]} == {"below 12", "12 to below 15", "15 and more"}
    total = sum(one["patients"] for one in subgroups["groups"].values())
    splits = json.loads((clinical / "splits.json").read_text())["clients"]
    assert total == sum(len(of["test"]) for of in splits.values())
    assert len(measure_subgroups(clinical, "test", "mean radius", least=1)["groups"]) == 4


def test_what_cannot_be_evaluated_so_is_one_sentence(clinical, tmp_path, capsys):
    with pytest.raises(ConfigError, match=r"by=mean_radius is no column of the data .did you mean"):
        measure_subgroups(clinical, "test", "mean_radius")
    with pytest.raises(SystemExit):
        main([f"run={clinical}", "across=true", "by=sex"])
    assert "across and by are separate evaluations" in capsys.readouterr().err
    file = tmp_path / "patients.csv"
    wrong = {
        "": "patients.csv is no file; name a CSV with the column patient.",
        "patient,sex\na,f\n": "has no column age; it needs the columns patient and age.",
        "patient,age\na,40\n": "names no patient of the run; its column patient has a,",
    }
    for text, sentence in wrong.items():
        if text:
            file.write_text(text)
        with pytest.raises(SystemExit):
            main([f"run={clinical}", "by=age", f"patients={file}"])
        assert sentence in capsys.readouterr().err
    (clinical / "sites.json").write_text("{}")
    with pytest.raises(ConfigError, match="was across sites, which keep their patients"):
        measure_across(clinical)
    (clinical / "sites.json").unlink()


def test_one_odd_cell_changes_no_column(caplog):
    ages = {f"p{n}": str(20 + n % 60) for n in range(300)}
    cells = {"p0": "unknown", "p7": "> 89", "p8": "034", "p9": "#N/A", "p11": "nan", "p12": "inf"}
    odd = banded({**ages, **cells}, [40, 60])
    clean = banded(ages, [40, 60])
    assert "p9" not in odd
    assert "p11" not in odd
    assert (odd["p0"], odd["p7"]) == ("unknown", "> 89")
    assert {*odd.values()} - {*clean.values()} == {"unknown", "> 89", "034", "inf"}
    sentence = "4 values are no plain numbers, and stay beside the bands: unknown, > 89, 034, inf."
    assert sentence in caplog.text
    bands = {*banded(ages).values()}
    for cell in ("unknown", "034", "0x10", "1e999", "-inf", "12 years", "½", "１２x", "3,5,7"):
        assert {*banded({**ages, "odd": cell}).values()} == {*bands, cell}


@pytest.mark.parametrize(
    "values",
    [["f", "m"], ["0744", *map(str, range(20))], ["1", "2", "3"], [*"abcdefg", "1", "2"]],
    ids=["texts", "codes", "grades", "mostly texts"],
)
def test_what_is_no_measurement_is_not_divided_into_bands(values):
    named = {f"p{n}": value for n, value in enumerate(values)}
    assert banded(named) == named


def test_a_patient_with_several_values_is_said(clinical, tmp_path, caplog):
    ids = [
        n
        for of in json.loads((clinical / "splits.json").read_text())["clients"].values()
        for n in of["test"]
    ]
    rows = ["patient,ward", *(f"{one},{'AB'[n % 2]}" for n, one in enumerate(ids)), f"{ids[0]},C"]
    (tmp_path / "patients.csv").write_text("\n".join(rows))
    groups = measure_subgroups(clinical, "test", "ward", tmp_path / "patients.csv", least=1)
    assert groups["groups"]["C"]["patients"] == 1
    said = f"1 patients have several values of ward, of which the last counts: {ids[0]} (A, C)."
    assert said in caplog.text
    (tmp_path / "patients.csv").write_text("\n".join([*rows, f"{ids[1].upper()},A"]))
    with pytest.raises(MedfedError, match=r"differ only in capitals"):
        measure_subgroups(clinical, "test", "ward", tmp_path / "patients.csv")
