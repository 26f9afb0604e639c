"""medfed report where runs differ in the number of canonical models alone."""

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
    "experiment=clinical_pfednet",
    "rounds=1",
    "local.steps=2",
    "logger=none",
    "progress=false",
    "model.network.spread=0.1",
)

RUNS = [("ppfl", 2, 0), ("ppfl", 2, 1), ("ppfl", 1, 0), ("ppfl", 1, 1), ("ifca", 3, 0)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> pathlib.Path:
    """PPFL with two numbers of models and two seeds, and IFCA with another number."""
    root = tmp_path_factory.mktemp("counts")
    for method, count, seed in RUNS:
        folder = root / f"{method}_{count}_{seed}"
        options = (f"algorithm={method}", f"canonical.count={count}", f"seed={seed}")
        run(folder, *SMALL, *options)
    return root


def test_the_path_has_the_numbers_of_the_summaries(runs, tmp_path):
    comparison = report_runs([str(f) for f in find_runs(str(runs)) if "ppfl" in f.name], tmp_path)
    with (tmp_path / "canonical_count.csv").open() as file:
        rows = list(csv.DictReader(file))
    keys = [(r["method"], int(r["count"]), int(r["seed"])) for r in rows]
    assert keys == [("ppfl", k, s) for k in (1, 2) for s in (0, 1)]
    for (method, count, seed), row in zip(keys, rows, strict=True):
        summary = json.loads((runs / f"{method}_{count}_{seed}" / "summary.json").read_text())
        scores = summary["federation"][comparison.tasks[0][0].metric]
        assert float(row[f"mean_test_{comparison.tasks[0][0].metric}"]) == scores["mean"]
        assert float(row[f"worst_test_{comparison.tasks[0][0].metric}"]) == scores["worst"]
        assert "adjusted_rand" not in row  # nothing was planted
    report = (tmp_path / "report.md").read_text()
    assert "(figures/canonical_count.png)" in report
    assert "Canonical models of ppfl: mean test auroc" in report
    assert (tmp_path / "figures" / "canonical_count.png").stat().st_size > 10000


def test_what_differs_otherwise_is_no_path(runs):
    folders = find_runs(str(runs))
    assert [p.values for p in paths_of(report_on(folders))["canonical.count"]] == [[1, 2]]
    two = [f for f in folders if f.name in ("ppfl_2_0", "ifca_3_0")]
    assert not paths_of(report_on(two))


def test_the_picture_shows_recovery_where_it_is_known():
    scores = {
        k: {
            "mean": 0.8 + k / 50,
            "worst": 0.7,
            "adjusted_rand": k / 4,
            "half_l1": None,
        }
        for k in (2, 4)
    }
    points = [Point(k, s, scores[k]) for k in (2, 4) for s in (0, 1)]
    path = Path("ppfl", "accuracy", tuple(points), planted=4)
    known = draw("canonical.count", [path], {"fedavg": (0.6, 0.2)})
    panels = [
        "test accuracy, mean over clients",
        "test accuracy, worst client",
        "adjusted Rand index to the planted groups",
    ]
    assert [axes.get_title("left") for axes in known.axes] == panels
    assert {axes.get_xlabel() for axes in known.axes} == {
        "Canonical models (equal steps), 4 planted"
    }
    dots = hovers(known)
    assert dots[:4] == [
        "ppfl: 0.8400 at 2", "ppfl: 0.8800 at 4", "fedavg: 0.6000 at 2", "fedavg: 0.6000 at 4",
    ]  # fmt: skip
    unknown = [p._replace(scores={**p.scores, "adjusted_rand": None}) for p in points]
    again = draw("canonical.count", [Path("ppfl", "accuracy", tuple(unknown))])
    assert panels[2] not in [axes.get_title("left") for axes in again.axes]
