"""W&B without a network: a record for every run, that ends however the run ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
import wandb

from medfed.federation.algorithm import Cohort
from medfed.run import results
from medfed.standalone.errors import ConfigError, NonFiniteError
from tests.integration.runs import CLINICAL, resume, run
from tests.integration.wandb_records import read, records

SHORT = (*CLINICAL, "logger=wandb", "local.steps=1", "pictures.format=none")


@pytest.fixture(autouse=True)
def nobody_has_logged_in(monkeypatch, tmp_path):
    for name in [n for n in os.environ if n.startswith("WANDB")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    yield
    wandb.teardown()


@pytest.fixture
def stop(monkeypatch):
    """Stops runs at a round, as if the user did."""
    draw = Cohort.of

    def at(number):
        def of(self, clients, seed, round):
            if round >= number:
                raise KeyboardInterrupt
            return draw(self, clients, seed, round)

        monkeypatch.setattr(Cohort, "of", of)

    yield at
    monkeypatch.undo()


def only(folder):
    """The content of the only record of a run."""
    wandb.teardown()  # waits for the process that writes it
    (path,) = records(folder)
    return read(path)


def curves(experiment, name):
    """What the run itself knows: a metric of its clients by round."""
    known = {}
    for record in experiment.evaluation.history:
        known.setdefault(record.client, {})[record.round] = record.metrics[name]
    return known


def test_every_hospital_has_curves_over_rounds_and_a_row_in_the_table_of_the_test(tmp_path, capsys):
    summary, experiment = run(tmp_path / "run", *SHORT, "rounds=3")
    written = only(tmp_path / "run")
    assert written.axes == {"round": "", "*": "round"}
    for metric in ("auroc", "loss", "brier"):
        for client, values in curves(experiment, metric).items():
            assert written.curve(f"val/{client}/{metric}") == pytest.approx(values)
    losses = {
        r.round: r.metrics["loss"] for r in experiment.evaluation.losses if r.client == "hospital_0"
    }
    assert written.curve("train/hospital_0/loss") == pytest.approx(losses)
    (table,) = (tmp_path / "run").rglob("*.table.json")
    rows = json.loads(table.read_text())
    assert rows["columns"][0] == "client"
    assert {
        row[0]: dict(zip(rows["columns"][1:], row[1:], strict=True)) for row in rows["data"]
    } == {
        client: {n: pytest.approx(values[n], nan_ok=True) for n in rows["columns"][1:]}
        for client, values in summary["clients"].items()
    }
    assert written.exit_code == 0
    (folder,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    assert f"To send the W&B record: wandb sync {folder}" in capsys.readouterr().out.replace(
        "\n", ""
    )
    assert "WANDB_MODE" not in os.environ


def test_a_start_that_wandb_refuses_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(ConfigError, match=r"W&B does not start: .*; set WANDB_MODE=offline"):
        run(tmp_path / "run", *SHORT, "rounds=1")


def test_a_failed_run_ends_and_the_next_one_has_a_record_of_its_own(tmp_path):
    with pytest.raises(NonFiniteError):
        run(tmp_path / "failed", *SHORT, "rounds=1", "optimizer.lr=1e29", "local.steps=5")
    _, good = run(tmp_path / "good", *SHORT, "rounds=2")
    failed, written = only(tmp_path / "failed"), only(tmp_path / "good")
    assert (failed.exit_code, written.exit_code) == (1, 0)
    assert failed.config["optimizer"]["lr"] == 1e29
    assert "selected_round" not in failed.summary
    assert written.config["optimizer"]["lr"] == good.config.optimizer["lr"]
    assert set(written.curve("val/auroc")) == {0, 1}


def test_a_run_ends_when_its_results_cannot_be_written(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(results, "write_tables", full)
    with pytest.raises(Exception, match="space"):
        run(tmp_path / "run", *SHORT, "rounds=1")
    assert only(tmp_path / "run").exit_code == 1


def test_an_open_run_of_the_user_is_left_alone(tmp_path):
    mine = wandb.init(mode="offline", dir=str(tmp_path / "mine"), project="mine")
    run(tmp_path / "run", *SHORT, "rounds=1")
    assert wandb.run is mine
    mine.log({"thesis": 1.0})
    mine.finish()
    theirs, ours = only(tmp_path / "mine"), only(tmp_path / "run")
    assert [{k for k in row if not k.startswith("_")} for row in theirs.rows] == [{"thesis"}]
    assert "algorithm" not in theirs.config
    assert set(ours.curve("val/auroc")) == {0}


def straight(folder):
    run(folder, *SHORT, "rounds=4")
    return only(folder)


def same(one, other):
    """Whether all curves and the configuration are those of the other record."""
    names = {
        n for row in other.rows for n in row if n.partition("/")[0] in ("val", "train", "bytes")
    }
    assert len(names) > 20
    for name in names:
        assert one.curve(name) == pytest.approx(other.curve(name), abs=1e-12), name
    assert one.config["algorithm"] == other.config["algorithm"]
    assert {n: v for n, v in one.summary.items() if n.startswith("test/")} == {
        n: v for n, v in other.summary.items() if n.startswith("test/")
    }


def test_an_interrupted_run_goes_on_in_one_record(tmp_path, stop):
    stop(2)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", *SHORT, "rounds=4")
    stop(3)
    assert set(only(tmp_path / "run").curve("val/auroc")) == {0, 1}
    with pytest.raises(KeyboardInterrupt):
        resume(tmp_path / "run", *SHORT, "rounds=4")
    assert set(only(tmp_path / "run").curve("val/auroc")) == {0, 1, 2}
    stop(99)
    resume(tmp_path / "run", *SHORT, "rounds=4")
    same(only(tmp_path / "run"), straight(tmp_path / "straight"))


def test_a_killed_run_goes_on_in_one_record(tmp_path):
    script = "\n".join(
        [
            "import os, signal, sys",
            "import medfed",
            "from medfed.federation.lightning.callbacks import CommunicationLogger",
            "log = CommunicationLogger.on_train_epoch_end",
            "def kill(self, trainer, module):",
            "    if module.next_round == 3:",
            "        os.kill(os.getpid(), signal.SIGKILL)  # once metrics of this round are logged",
            "    log(self, trainer, module)",
            "CommunicationLogger.on_train_epoch_end = kill",
            "medfed.train(*sys.argv[2:], folder=sys.argv[1])",
        ]
    )
    keys = [sys.executable, "-c", script, str(tmp_path / "run"), *SHORT, "rounds=4"]
    killed = subprocess.run(keys, check=False, capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    resume(tmp_path / "run", *SHORT, "rounds=4")
    same(only(tmp_path / "run"), straight(tmp_path / "straight"))
