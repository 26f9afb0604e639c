"""medfed evaluate across=true and by=COLUMN."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from medfed.commands.evaluate import main
from medfed.records.folder import RunFolder
from medfed.run.audit import audit
from medfed.run.evaluation import (
    banded,
    evaluate_run,
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
    splits = json.loads((clinical / "splits.json").read_text())["clients"]
    counts = [str(len(of["test"])) for of in splits.values()]
    assert ["patients", *counts] in [line.split() for line in printed.splitlines()]


@pytest.mark.parametrize("split", ["test", "val"])
def test_a_table_of_models_says_which_hospitals_are_too_small(clinical, tmp_path, capsys, split):
    shutil.copytree(clinical, tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    splits = json.loads(run.splits_json.read_text())
    for client, part in (("hospital_0", "val"), ("hospital_1", "test")):
        of = splits["clients"][client]
        of[part] = of[part][:3]
    run.splits_json.write_text(json.dumps(splits))
    summary = json.loads(run.summary_json.read_text())
    run.summary_json.write_text(json.dumps(summary | {"small": {"hospital_2": "1 of a class"}}))
    values = {m: {n: {"auroc": 0.5} for n in splits["clients"]} for m in splits["clients"]}
    show_across(values, run.folder, split)
    small = "hospital_0 (3 patients)"
    if split == "test":
        small = "hospital_1 (3 patients); hospital_2 (1 of a class)"
    assert f"models may differ by chance: {small}." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("measure", "words"),
    [
        (lambda run: evaluate_run(run, "val"), "The val patients chose the round"),
        (lambda run: measure_across(run, "train"), "The train patients trained the models"),
        (lambda run: measure_subgroups(run, "val", "mean radius"), "The val patients chose"),
        (lambda run: measure_across(run, "test"), ""),
    ],
    ids=["evaluate", "across", "by", "test"],
)
def test_patients_that_shaped_a_model_are_no_test_of_it(clinical, tmp_path, caplog, measure, words):
    shutil.copytree(clinical, tmp_path / "run")
    measure(tmp_path / "run")
    said = "better than on patients that did not" in caplog.text
    assert said == bool(words)
    assert words in caplog.text


@pytest.mark.parametrize(
    ("worst", "chance"), [([0.4, 0.6], False), ([0.4, 0.75], True), ([np.nan, np.nan], True)]
)
def test_a_worst_subgroup_that_chance_may_have_made_is_said_to_be_one(
    clinical, capsys, worst, chance
):
    groups = {"f": (0.5, worst), "m": (0.8, [0.7, 0.9]), "x": (0.6, [0.5, 0.7])}
    each = {
        name: {"patients": 30, "metrics": {"auroc": value}, "intervals": {"auroc": ends}}
        for name, (value, ends) in groups.items()
    }
    show_subgroups({"split": "test", "column": "sex", "groups": each}, clinical)
    words = " ".join(capsys.readouterr().out.split())
    assert "Worst by auroc: f, 0.5000" in words
    assert ("not apart from that of m, the best, so it may be chance." in words) == chance


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
    single = "–: a hospital has a single test patient there, or few resamples define it."
    assert single not in printed
    only["groups"]["f"] = {**only["groups"]["f"], "intervals": {"auroc": [np.nan, np.nan]}}
    show_subgroups(only, clinical)
    assert single in capsys.readouterr().out


def test_numbers_of_the_table_are_divided_into_bands(clinical):
    subgroups = measure_subgroups(clinical, "test", "mean radius", edges=[12, 15], least=1)
    assert [*subgroups["groups"]] == ["below 12", "12 to below 15", "15 and more"]
    total = sum(one["patients"] for one in subgroups["groups"].values())
    splits = json.loads((clinical / "splits.json").read_text())["clients"]
    assert total == sum(len(of["test"]) for of in splits.values())
    assert len(measure_subgroups(clinical, "test", "mean radius", least=1)["groups"]) == 4
    whole = measure_subgroups(clinical, "test", "mean radius", least=0)
    assert all("metrics" in one for one in whole["groups"].values())


def test_several_columns_are_evaluated_one_after_the_other(clinical, tmp_path, capsys):
    shutil.copytree(clinical, tmp_path / "run")
    main([f"run={tmp_path / 'run'}", "by=[mean radius,mean texture]"])
    printed = capsys.readouterr().out
    for column in ("mean radius", "mean texture"):
        (file,) = (tmp_path / "run").glob(f"subgroups_test_{column.replace(' ', '?')}*.json")
        groups = json.loads(file.read_text())["groups"]
        alone = measure_subgroups(clinical, "test", column)["groups"]
        assert [(n, of["patients"]) for n, of in groups.items()] == [
            (n, of["patients"]) for n, of in alone.items()
        ]
        assert f"subgroups_test_{column.replace(' ', '')}" in printed.replace(" ", "")


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
    for of in ("sites.json", "job.json"):  # of a coordinator, and of a hospital
        (clinical / of).write_text("{}")
        for again in (measure_across, lambda run: audit(run, None, 1, 1, 0.01)):
            with pytest.raises(ConfigError, match="was across sites, which keep their patients"):
                again(clinical)
        (clinical / of).unlink()


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
