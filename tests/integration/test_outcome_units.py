"""A continuous outcome far from 0, such as days in hospital: learnt in standard units."""

from __future__ import annotations

import csv
import json
import logging
from pathlib import Path

import numpy as np
import pytest

from medfed.config.compose import load
from medfed.config.description import checked
from medfed.delivery.export.export import export_run
from medfed.delivery.predict.prediction import predict
from medfed.records.folder import Run
from tests.integration.runs import run
from tests.sites.hospitals import across, direct, same

CLINICS = {"Basel": 60, "Bern": 45, "Chur": 30}
QUIET = ("logger=none", "progress=false", "threads=1", "pictures.format=none")


def table(path: Path, mean: float = 450, unit: float = 1) -> tuple[str, ...]:
    """Writes a table, and returns the keys by which it is trained on."""
    rng = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["patient", "clinic", "age", "score", "days"])
        for clinic, count in CLINICS.items():
            for n in range(count):
                age, score = rng.uniform(20, 90), rng.normal(10, 3)
                days = mean + unit * (1.5 * (age - 55) + 8 * (score - 10) + rng.normal(0, 20))
                out.writerow([f"{clinic}{n}", clinic, age, score, days])
    keys = ("data=csv", f"data.path={path}", "data.label=days", "data.centre=clinic")
    return (*keys, "data.patient=patient", "data.outcome=continuous", "model=linear", *QUIET)


@pytest.mark.parametrize("method", ["fedavg", "fedadam", "pfednet"])
def test_defaults_reach_what_is_to_be_learnt(method, tmp_path, caplog):
    keys = (*table(tmp_path / "t.csv"), f"algorithm={method}", "rounds=20")
    with caplog.at_level(logging.INFO):
        summary, experiment = run(tmp_path / "run", *keys)
    assert "The model learns the outcome days in standard units" in caplog.text
    rmse = summary["federation"]["rmse"]["mean"]
    constant = summary["constant"]["constant"]["federation"]["rmse"]["mean"]
    assert rmse < 0.85 * constant
    # As they are, in days, the first steps of the same run do not reach the mean.
    as_is, _ = run(tmp_path / "as_is", *keys, "data.outcome_scale=[0,1]")
    assert as_is["federation"]["rmse"]["mean"] > 3 * rmse
    told = [size for _, way, size in experiment.data.exchanged if way == "up"]
    assert len(told) == 3
    assert max(told) < 150


def test_a_network_learns_what_no_line_can(tmp_path):
    keys = list(table(tmp_path / "t.csv"))
    with (tmp_path / "t.csv").open() as file:
        rows = list(csv.reader(file))
    with (tmp_path / "t.csv").open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(rows[0])
        out.writerows([*r[:4], 450 + 3 * abs(float(r[2]) - 55)] for r in rows[1:])  # a valley
    options = ("algorithm=pfednet", "rounds=20", "local.steps=10", "optimizer=adam")
    found = {}
    for model in ("linear", "mlp_regression"):
        folder = tmp_path / model
        summary, _ = run(folder, *keys, *options, f"model={model}", "optimizer.lr=0.03")
        found[model] = summary["federation"]["rmse"]["mean"]
    assert found["mlp_regression"] < 0.5 * found["linear"]
    (bundle,) = export_run(
        checked(load([f"run={tmp_path / 'mlp_regression'}", "client=Bern"], "export"))
    )
    output = tmp_path / "out.csv"
    predict(
        checked(
            load([f"bundle={bundle}", f"input={tmp_path / 't.csv'}", f"output={output}"], "predict")
        )
    )
    with output.open() as file:
        told = [(float(r["prediction"]), float(r["days"])) for r in csv.DictReader(file)]
    error = np.sqrt(np.mean([(a - b) ** 2 for a, b in told]))
    assert error < 2 * found["mlp_regression"]


def test_sites_agree_as_in_a_simulation(tmp_path):
    keys = (*table(tmp_path / "t.csv"), "algorithm=fedavg", "rounds=3", "data.scaling=pooled")
    keys = (*keys, "partition=centre")
    run(tmp_path / "simulation", *keys)
    transport = direct(tmp_path / "sites", [*CLINICS], *keys)
    across(tmp_path / "server", transport, [*CLINICS], *keys)
    assert not same(tmp_path / "simulation", tmp_path / "server")
    scales = [Run(tmp_path / name).config.outcome_scale for name in ("simulation", "server")]
    assert scales[0] == scales[1]
    assert scales[0][0] == pytest.approx(450, abs=20)


def test_weights_of_a_run_come_with_its_units(tmp_path):
    keys = (*table(tmp_path / "t.csv"), "algorithm=fedavg")
    run(tmp_path / "first", *keys, "rounds=20")
    first = Run(tmp_path / "first").config.outcome_scale
    other = table(tmp_path / "other.csv", mean=460)
    start = (f"init.weights={tmp_path / 'first'}", "algorithm=fedavg", "rounds=1")
    begun, _ = run(tmp_path / "second", *other, *start, "init.adopt=[network,data]")
    assert Run(tmp_path / "second").config.outcome_scale == first
    adopted = json.loads((tmp_path / "second" / "start.json").read_text())["adopted"]
    assert adopted["data.outcome_scale"] == list(first)
    constant = begun["constant"]["constant"]["federation"]["rmse"]["mean"]
    assert begun["federation"]["rmse"]["mean"] < 0.85 * constant
