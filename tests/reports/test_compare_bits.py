"""medfed report where runs differ in the bits per weight, and clients in theirs."""

from __future__ import annotations

import csv
import json
import pathlib

import pytest

from medfed.reports.findings import report_on
from medfed.reports.report import report_runs
from medfed.reports.runs import find_runs
from medfed.reports.sweeps import Path, Point, draw, paths_of
from tests.integration.runs import run
from tests.pages import hovers

SMALL = (
    "experiment=qupel_digits",
    "partition.num_clients=4",
    "model.network.channels=[4,4,4]",
    "rounds=2",
    "local.steps=2",
    "logger=none",
    "progress=false",
)
RICH = "+algorithm.client_bits={hospital_0: 32, hospital_2: 32}"
RUNS = {
    "poor_0": ("algorithm=qupel", "algorithm.bits=1", "seed=0"),
    "poor_1": ("algorithm=qupel", "algorithm.bits=1", "seed=1"),
    "mixed_0": ("algorithm=qupel", "algorithm.bits=1.5", "seed=0"),
    "mixed_1": ("algorithm=qupel", "algorithm.bits=1.5", "seed=1"),
    "full_0": ("algorithm=qupel", "algorithm.bits=1", "seed=0", RICH),
    "full_1": ("algorithm=qupel", "algorithm.bits=1", "seed=1", RICH),
    "alone_0": ("algorithm=local", "seed=0"),
    "alone_1": ("algorithm=local", "seed=1"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> pathlib.Path:
    """QuPeL with poor clients, with dealt bits and with named rich ones; two seeds; local."""
    root = tmp_path_factory.mktemp("bits")
    for name, options in RUNS.items():
        run(root / name, *SMALL, *options)
    return root


def summary(runs: pathlib.Path, name: str) -> dict:
    return json.loads((runs / name / "summary.json").read_text())


def test_the_path_has_the_numbers_of_the_summaries(runs, tmp_path):
    comparison = report_runs(str(runs), tmp_path)
    with (tmp_path / "algorithm_bits.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["bits"], int(r["seed"])) for r in rows] == [
        (b, s) for b in ("1", "1.5") for s in (0, 1)
    ]
    for row in rows:
        name = {"1": "poor", "1.5": "mixed"}[row["bits"]]
        scores = summary(runs, f"{name}_{row['seed']}")["federation"][comparison.tasks[0][0].metric]
        assert float(row[f"mean_test_{comparison.tasks[0][0].metric}"]) == scores["mean"]
        assert float(row[f"worst_test_{comparison.tasks[0][0].metric}"]) == scores["worst"]
    names = [*comparison.runs]
    assert "qupel bits=1 client_bits=32" in names  # and not a word per client
    report = (tmp_path / "report.md").read_text()
    assert "(figures/algorithm_bits.png)" in report
    assert "Bits per weight of qupel: mean test" in report
    assert (tmp_path / "figures" / "algorithm_bits.png").stat().st_size > 10000


def test_what_differs_otherwise_is_no_path(runs):
    (path,) = paths_of(report_on(find_runs(str(runs))))["algorithm.bits"]
    assert path.values == [1.0, 1.5]  # without the run in which some clients have 32
    assert not paths_of(report_on([f for f in find_runs(str(runs)) if "poor" not in f.name]))


def test_the_picture_spaces_the_bits_equally():
    scores = [{"mean": 0.8 + s / 10, "worst": 0.7} for s in (0, 1)]
    points = [Point(b, s, scores[s]) for b in (1, 2.5, 32) for s in (0, 1)]
    paths = [Path("qupel", "accuracy", tuple(points))]
    drawn = draw("algorithm.bits", paths, {"fedavg": (0.6, 0.2)})
    axes = drawn.axes[0]
    words = {tick.get_text(): tick.get_position()[0] for tick in axes.get_xticklabels()}
    one, two, many = (words[bits] for bits in ("1", "2.5", "32"))
    assert many - two == pytest.approx(two - one)
    dots = hovers(drawn)
    assert dots[:5] == [
        *(f"qupel: 0.8500 at {bits}" for bits in ("1", "2.5", "32")),
        *(f"fedavg: 0.6000 at {bits}" for bits in ("1", "32")),
    ]
    assert dots[-1] == "fedavg: 0.2000 at 32"
