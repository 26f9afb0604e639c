"""Sweeps over CER's strength: the bytes of a round are those of the ledger."""

from __future__ import annotations

import csv
import statistics
from pathlib import Path

import pytest

from medfed.reports.findings import report_on
from medfed.reports.report import report_runs
from medfed.reports.runs import find_runs
from medfed.reports.sweeps import paths_of
from medfed.standalone.errors import CheckpointError
from tests.integration.runs import imaging, run

GAMMAS = (0, 1, 100)
ROUNDS = 3  # the first has dense first transfers


@pytest.fixture(scope="module")
def sweep(tmp_path_factory, cohort_root) -> Path:
    root = tmp_path_factory.mktemp("sweep")
    small = [o for o in imaging(cohort_root) if not o.startswith(("experiment=", "rounds="))]
    wires = {
        "stc": ("codec.up.sparsity=0.05", "codec.down.sparsity=0.05"),
        "runs": ("codec@codec.up=runlength", "codec@codec.down=runlength"),
    }
    for name, wire in wires.items():
        for gamma in GAMMAS if name == "stc" else GAMMAS[:2]:
            strength = f"channel.up.cer.gamma={gamma}"
            folder = root / f"{name}_{gamma}"
            given = ["experiment=cer_stc_brats", f"rounds={ROUNDS}", *small, *wire, strength]
            run(folder, *given, "evaluation.every=1", "data.eval_every=1")
    return root


@pytest.fixture(scope="module")
def report(sweep, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    report_runs(str(sweep), folder)
    return folder


def table(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_the_columns_are_those_of_the_median_round(sweep, report):
    rows = table(report / "channel_up_cer_gamma.csv")
    assert {(r["method"].split("=")[-1], float(r["gamma"])) for r in rows} == {
        *(("STC", g) for g in GAMMAS),
        *(("RunLength", g) for g in GAMMAS[:2]),
    }
    for row in rows:
        kind = {"STC": "stc", "RunLength": "runs"}[row["method"].split("=")[-1]]
        ledger = table(sweep / f"{kind}_{float(row['gamma']):g}" / "ledger.csv")
        for way in ("up", "down"):
            sums = [
                sum(
                    int(r["bytes"]) for r in ledger if (r["round"], r["direction"]) == (str(n), way)
                )
                for n in range(ROUNDS)
            ]
            assert float(row[f"kilobytes_{way}"]) == statistics.median(sums) / 1000


def test_the_report_says_what_cer_saves(sweep, report):
    (key, paths), *others = paths_of(report_on(find_runs(str(sweep)))).items()
    assert (key, others) == ("channel.up.cer.gamma", [])
    text = (report / "report.md").read_text()
    assert len(paths) == 2
    assert all(path.describe(key) in text for path in paths)
    stc = next(path for path in paths if len(path.values) == 3)
    none, little, much = stc.over_seeds("kilobytes_up")
    assert much < little < none
    assert f"kilobytes up per round {none:.4g} (0), {little:.4g} (1)" in text


def test_the_picture_is_drawn_and_named(report):
    text = (report / "report.md").read_text()
    for name in ("channel_up_cer_gamma.png", "clients.png"):
        assert (report / "figures" / name).stat().st_size > 10_000
        assert f"(figures/{name})" in text


def test_a_torn_ledger_is_named(sweep, tmp_path):
    ledger = sweep / "stc_0" / "ledger.csv"
    whole = ledger.read_text()
    ledger.write_text(whole.replace("dense", "other"))
    try:
        with pytest.raises(CheckpointError, match=r"stc_0/ledger.csv cannot be read"):
            paths_of(report_on(find_runs(str(sweep))))
    finally:
        ledger.write_text(whole)
