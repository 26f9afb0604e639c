"""medfed evaluate measures what training measured, and leaves the run as it was."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from medfed.api import train
from medfed.run.evaluation import evaluate_run
from medfed.standalone.errors import CheckpointError
from tests.integration.runs import CLINICAL, imaging

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def whole_run(finished_run) -> Path:
    return finished_run(*CLINICAL, "rounds=2")


def contents(folder: Path) -> dict[str, bytes]:
    files = (p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


@pytest.fixture
def copy(whole_run, tmp_path) -> Path:
    shutil.copytree(whole_run, tmp_path / "copy")
    return tmp_path / "copy"


def test_the_test_split_gives_the_summary_again_and_nothing_else_changes(copy):
    before = contents(copy)
    summary = json.loads((copy / "summary.json").read_text())
    evaluate_run(copy)
    after = contents(copy)
    written = json.loads(after.pop("evaluation_test.json"))
    assert after == before
    assert written["clients"] == summary["clients"]
    assert written["federation"] == summary["federation"]
    assert written["selected_round"] == summary["selected_round"]


def test_validation_metrics_are_those_that_selected_the_round(copy):
    measured = evaluate_run(copy, "val")
    lines = [line.split(",") for line in (copy / "metrics.csv").read_text().splitlines()]
    column = lines[0].index("balanced_accuracy")
    best = str(measured["selected_round"])
    recorded = {row[1]: float(row[column]) for row in lines if row[0] == best and row[2] == "val"}
    assert {c: m["balanced_accuracy"] for c, m in measured["clients"].items()} == recorded


def test_statistics_estimated_again_are_measured_and_delivered_and_cost_no_byte(
    finished_run, cohort_root
):
    words = (*imaging(cohort_root), "algorithm=fedavg", "evaluation.normalization=")
    kept, again = (finished_run(*words[:-1], f"{words[-1]}{n}") for n in ("kept", "reestimated"))
    assert (again / "ledger.csv").read_bytes() == (kept / "ledger.csv").read_bytes()
    assert (again / "hashes.json").read_bytes() == (kept / "hashes.json").read_bytes()
    models = {}
    for folder in (kept, again):
        summary = json.loads((folder / "summary.json").read_text())
        assert evaluate_run(folder)["clients"] == summary["clients"]
        models[folder] = {p.name: load_file(p) for p in folder.glob("models/*.safetensors")}
    assert json.loads((kept / "summary.json").read_text())["clients"] != summary["clients"]
    statistics = {"running_mean", "running_var"}
    for name, own in models[again].items():
        moved = {n for n, t in own.items() if not torch.equal(t, models[kept][name][n])}
        assert moved == {n for n in own if n.rpartition(".")[2] in statistics}
        assert moved


def test_all_rounds_stay_in_the_record(whole_run):
    rows = [line.split(",") for line in (whole_run / "metrics.csv").read_text().splitlines()]
    assert {row[0] for row in rows if row[2] == "val"} == {"0", "1"}


def test_a_folder_without_a_run(tmp_path):
    with pytest.raises(CheckpointError, match="is no run folder"):
        evaluate_run(tmp_path)


def test_an_unwhole_run(copy):
    (copy / "summary.json").unlink()
    with pytest.raises(CheckpointError, match="has not finished"):
        evaluate_run(copy)


def test_a_torn_checkpoint(copy):
    best = copy / "checkpoints" / "best.ckpt"
    best.write_bytes(best.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="missing or torn"):
        evaluate_run(copy)


def test_a_torn_record(copy):
    (copy / "splits.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        evaluate_run(copy)


def test_changed_patients(copy):
    splits = json.loads((copy / "splits.json").read_text())
    splits["clients"]["hospital_0"]["test"].pop()
    (copy / "splits.json").write_text(json.dumps(splits))
    with pytest.raises(CheckpointError, match="do not give the splits"):
        evaluate_run(copy)


def test_changed_files(copy):
    splits = json.loads((copy / "splits.json").read_text())
    splits["files"] = {"table.csv": "0" * 64}
    (copy / "splits.json").write_text(json.dumps(splits))
    with pytest.raises(CheckpointError, match="data files are not those"):
        evaluate_run(copy)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("y,", "").replace(",2,", ","),
        lambda text: text.replace("ill", "b"),
    ],
    ids=["a column less", "another label"],
)
def test_a_table_that_fits_the_run_no_more_is_named(change, tmp_path):
    """The keys are those of the run, so nobody is told to change them."""
    table, run = tmp_path / "t.csv", tmp_path / "run"
    rows = [f"{n * 7 % 31},2,{'ill' if n * n % 3 else 'well'}" for n in range(40)]
    table.write_text("\n".join(["x,y,label", *rows]))
    keys = [f"data.path={table}", "data=csv", "partition=round_robin", "partition.num_clients=2"]
    keys += ["experiment=clinical_pfednet", "rounds=1", "local.steps=1", "logger=none"]
    train(*keys, "pictures.format=none", "evaluation.every=1", folder=run)
    table.write_text(change(table.read_text()))
    with pytest.raises(CheckpointError, match=r"data files are not those .*: t\.csv changed"):
        evaluate_run(run)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "run has no value yet; set it by run=VALUE"), (["rum=x"], "did you mean run")],
)
def test_the_script_answers_in_one_sentence(arguments, message, tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "evaluate.py"), *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())
