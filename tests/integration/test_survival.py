"""Survival of patients in a table: trained, compared, exported, and across sites."""

from __future__ import annotations

import csv
import json
import re

import numpy as np
import pytest

from medfed.config.compose import described, load
from medfed.config.description import checked
from medfed.delivery.export.export import export_run
from medfed.delivery.predict.prediction import predict
from medfed.reports.report import report_runs
from medfed.run.assembly import read_data, task_for
from medfed.run.evaluation import measure_subgroups, show_subgroups
from medfed.standalone.errors import ConfigError, MedfedError
from tests.integration.runs import run
from tests.sites.direct import Direct
from tests.sites.hospitals import across, same, site

TRAIN = (
    *("data=csv", "data.outcome=survival", "data.time=days", "data.event=died"),
    *(
        "data.centre=centre",
        "data.patient=patient",
        "partition=centre",
        "model=survival",
        "optimizer=sgd",
    ),
    *("algorithm=fedavg", "rounds=3", "local.steps=20", "optimizer.lr=0.3", "data.intervals=4"),
    *("logger=none", "progress=false"),
)


def write(path, only=None, cells=None, per=170):
    """Two hospitals; survival depends on age and sex, and patients are lost to follow-up."""
    rng, rows = np.random.default_rng(0), []
    for n in range(2 * per):
        age, sex = rng.normal(60, 10), rng.integers(2)
        days = rng.exponential(300 * np.exp(-(age - 60) / 8 - 0.5 * sex)) + 1
        seen = rng.uniform(20, 1500)
        row = {"age": f"{age:.1f}", "sex": "fm"[sex], "centre": "ab"[n // per], "patient": n}
        row |= {"days": f"{min(days, seen):.1f}", "died": int(days <= seen)}
        rows.append(row | (cells or {}).get(n, {}))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(row for row in rows if only in (None, row["centre"]))
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("survival")
    keys = (*TRAIN, f"data.path={write(folder / 'table.csv')}", "pictures.format=png")
    run(folder / "run", *keys)
    return folder


def read(path):
    return json.loads(path.read_text())


def test_survival_is_learned_and_measured_within_hospitals(trained):
    folder = trained / "run"
    summary, cohort = read(folder / "summary.json"), read(folder / "cohort.json")
    clients = summary["clients"]
    assert summary["selection"] == ["loss", "min"]
    assert min(metrics["cindex"] for metrics in clients.values()) > 0.65
    assert summary["pooled"]["pairs"] == sum(metrics["pairs"] for metrics in clients.values())
    low, high = summary["intervals"]["clients"]["a"]["cindex"]
    assert low < clients["a"]["cindex"] < high
    assert cohort["shares"]["names"] == ["no event", "event"]
    assert re.search(r"\d+ events, median follow-up \d+", cohort["clients"]["a"]["notes"][0])
    constant = summary["constant"]["constant"]["clients"]["a"]
    (brier,) = (name for name in constant if name.startswith("brier"))
    assert constant["cindex"] == 0.5
    assert clients["a"][brier] < constant[brier]
    assert (folder / "pictures" / "survival.png").is_file()
    report_runs(str(folder), metric="cindex", out=trained / "comparison")
    assert "[0." in (trained / "comparison" / "report.md").read_text()


def test_cox_takes_whole_hospitals(trained, tmp_path):
    keys = (*TRAIN, f"data.path={trained / 'table.csv'}", "model.loss=cox", "data.batch_size=500")
    run(tmp_path / "cox", *keys, "optimizer.lr=0.5")
    clients = read(tmp_path / "cox" / "summary.json")["clients"]
    assert min(metrics["cindex"] for metrics in clients.values()) > 0.65
    assert not any(name.startswith("brier") for name in clients["a"])
    export = [f"run={tmp_path / 'cox'}", "client=a", f"out={tmp_path / 'out'}"]
    with pytest.raises(ConfigError, match="loss=cox learns no baseline hazard"):
        export_run(checked(load(export, "export")))


def test_a_bundle_predicts_survival_at_the_ends_of_intervals(trained, tmp_path):
    keys = [f"run={trained / 'run'}", "client=all", f"out={tmp_path}"]
    bundle, _ = export_run(checked(load(keys, "export")))
    facts = read(bundle / "configs" / "metadata.json")["medfed"]
    cuts = read(trained / "run" / "preprocessing.json")["a"]["labels"]
    assert (facts["task"], facts["labels"]) == ("survival", cuts)
    out = tmp_path / "out.csv"
    keys = [f"bundle={bundle}", f"input={trained / 'table.csv'}", f"output={out}"]
    predict(checked(load(keys, "predict")))
    with (trained / "run" / "cases.csv").open(newline="") as file:
        cases = {int(row["patient"]): row for row in csv.DictReader(file) if row["client"] == "a"}
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for n, case in cases.items():
        for cut in cuts:
            predicted = float(rows[n][f"survival_{cut}"])
            assert predicted == pytest.approx(float(case[f"survival/{cut}"]), abs=1e-5)


@pytest.mark.parametrize(
    ("keys", "cells", "sentence"),
    [
        ([], {3: {"died": "yes"}}, r"data row 4: the label yes is none of 0, 1"),
        ([], {3: {"days": "-2"}}, r"data row 4, column days: the time -2 is negative"),
        (["data.time=null"], None, r"survival needs data.time=COLUMN and data.event=COLUMN"),
        (["data.cuts=[5,3]"], None, r"data.cuts are the ends of intervals"),
        (["data.features=[age,days]"], None, r"names days, which is data.time"),
        (["model=logistic"], None, r"model=survival and data.outcome=survival need each other"),
        (["model.loss=cox"], None, r"set data.batch_size=\d+ or more, or model.loss=hazard"),
        (["model.horizon=1e6"], None, r"model.horizon=1e\+06 must be above 0 and at most"),
    ],
)
def test_bad_input_is_one_sentence(keys, cells, sentence, tmp_path):
    table = write(tmp_path / "table.csv", cells=cells)
    config = described([*TRAIN, f"data.path={table}", f"folder={tmp_path / 'run'}", *keys])
    with pytest.raises(MedfedError, match=sentence) as caught:
        task_for(config, read_data(config))
    assert "\n" not in str(caught.value)


def test_sites_agree_on_the_intervals(trained, tmp_path):
    sites = {}
    for name in "ab":
        keys = (*TRAIN, f"data.path={write(tmp_path / name / 'table.csv', only=name)}")
        sites[name] = site(tmp_path / "sites", name, *keys, sites=["a", "b"])
    simulated, folder = tmp_path / "simulated", tmp_path / "across"
    table = write(tmp_path / "table.csv")
    across(folder, Direct(sites), ["a", "b"], *TRAIN, f"data.path={tmp_path / 'a' / 'table.csv'}")
    run(simulated, *TRAIN, f"data.path={table}")
    assert same(simulated, folder) == []


def test_subgroups_are_compared_by_concordance_as_their_loss_is_undefined(trained, capsys):
    subgroups = measure_subgroups(trained / "run", "test", "sex")
    show_subgroups(subgroups, trained / "run")
    printed = capsys.readouterr().out
    for name, one in subgroups["groups"].items():
        assert "loss" not in one["metrics"]
        assert f"{one['metrics']['cindex']:.4f}" in printed, name
    assert "Worst by cindex: " in printed


NO_TIME = ("data.time=null", "data.event=null")


@pytest.mark.parametrize(
    "keys",
    [
        (),
        ("model=mlp", "data.outcome=classes", "data.label=died", *NO_TIME),
        ("model=mlp_regression", "data.outcome=continuous", "data.label=days", *NO_TIME),
    ],
    ids=["survival", "mlp", "mlp_regression"],
)
def test_the_default_method_trains_a_model_without_hidden_layers(keys, tmp_path):
    typed = [key for key in TRAIN if not key.startswith("algorithm=")]
    typed += [f"data.path={write(tmp_path / 'table.csv')}", "rounds=1", "local.steps=2"]
    keys = (*typed, *keys, "model.network.hidden_channels=[]")
    run(tmp_path / "run", *keys)
    summary = read(tmp_path / "run" / "summary.json")
    assert summary["algorithm"] == "pfednet"
    assert summary["bytes_by_part"]["up/personal"] > 0
