"""Communication sweeps: the CSV adds up to the ledger, the savings are those of the bytes."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from medfed.common.errors import CheckpointError
from medfed.reports.communication import communication, pareto_front
from medfed.reports.comparison import compare_runs
from medfed.reports.methods import compare
from medfed.reports.runs import find_runs
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
    compare_runs(str(sweep), folder)
    return folder


def table(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_the_columns_add_up_to_the_ledger(sweep, report):
    rows = table(report / "communication.csv")
    for name, family in (("stc", "STC 5 %"), ("runs", "run-length")):
        for gamma in GAMMAS[:2]:
            mine = [r for r in rows if (r["family"], float(r["gamma"])) == (family, gamma)]
            ledger = table(sweep / f"{name}_{gamma}" / "ledger.csv")
            for column in ("bytes", "dense"):
                assert sum(int(r[column]) for r in mine) == sum(int(r[column]) for r in ledger)
            for part in ("shared", "personal"):
                ours = sum(int(r["bytes"]) for r in mine if r["part"] == part)
                assert ours == sum(int(r["bytes"]) for r in ledger if r["part"] == part)


def test_the_front_has_the_numbers_of_the_summaries(sweep, report):
    rows = table(report / "communication_front.csv")
    assert len(rows) == 5
    for row in rows:
        folder = {"STC 5 %": "stc", "run-length": "runs"}[row["family"]]
        folder = sweep / f"{folder}_{float(row['gamma']):g}"
        summary = json.loads((folder / "summary.json").read_text())
        assert float(row["bytes_up"]) == summary["bytes"]["up"]
        assert float(row["bytes"]) == sum(summary["bytes"].values())
        assert float(row["mean_iou"]) == summary["federation"]["iou"]["mean"]
        assert float(row["worst_iou"]) == summary["federation"]["iou"]["worst"]
    assert any(row["on_front"] == "1" for row in rows)


def test_the_report_says_what_cer_saves(sweep, report):
    found = communication(compare(find_runs(str(sweep))))
    text = (report / "comparison.md").read_text()
    lines = found.describe()
    assert len(lines) == 3  # two gammas for STC, one for the run-length code
    assert all(line in text for line in lines)
    by_gamma = {s.gamma: s for s in found.families()["STC 5 %"]}
    up = {g: s.per_round("up").value for g, s in by_gamma.items()}
    assert up[100] < up[1] < up[0]
    assert f"saves {100 * (1 - up[1] / up[0]):.1f} % up" in text
    rounds = table(sweep / "stc_1" / "ledger.csv")
    sums = sorted(
        sum(int(r["bytes"]) for r in rounds if (r["round"], r["direction"]) == (str(n), "up"))
        for n in range(ROUNDS)
    )
    assert up[1] == sums[ROUNDS // 2]


def test_the_picture_is_drawn_and_named(report):
    text = (report / "comparison.md").read_text()
    for name in ("communication.png", "bytes.png"):
        assert (report / name).stat().st_size > 10_000
        assert f"({name})" in text


def test_a_torn_ledger_is_named(sweep, tmp_path):
    ledger = sweep / "stc_0" / "ledger.csv"
    whole = ledger.read_text()
    ledger.write_text(whole.replace("dense", "other"))
    try:
        with pytest.raises(CheckpointError, match=r"stc_0/ledger.csv cannot be read"):
            communication(compare(find_runs(str(sweep))))
    finally:
        ledger.write_text(whole)


def test_one_codec_is_no_sweep(sweep):
    assert communication(compare([sweep / "stc_0", sweep / "stc_1"])) is None


def test_the_front_is_what_brute_force_finds():
    cost, value = [3.0, 1.0, 2.0, 2.0, 3.0], [0.9, 0.2, 0.5, 0.6, 0.9]
    front = set()
    for i in range(5):
        beaten = False
        for j in range(5):
            cheaper = cost[j] <= cost[i] and value[j] >= value[i]
            beaten |= cheaper and (cost[j] < cost[i] or value[j] > value[i])
        front |= set() if beaten else {i}
    assert pareto_front(cost, value) == front == {0, 1, 3, 4}
