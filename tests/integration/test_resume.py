"""A run killed at any moment resumes to the same result, on one rank and on two."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.processes import ROOT, Started, ranks

TRAIN = ROOT / "scripts" / "train.py"
ROUNDS = 5
OVERRIDES = [
    "experiment=clinical_pfednet",
    f"rounds={ROUNDS}",
    "logger=none",
    "local.optimizer_state=kept",
    "optimizer.momentum=0.9",
    "algorithm.strength=0.05",
]


# A run that is to be killed: before it writes its results it waits for that, however long.
ENDLESS = """
import time
from medfed.commands.train import main
from medfed.run import results

results.write = lambda *_: time.sleep(10_000)
main()
"""


def start(folder: Path, *more: str, script: Path = TRAIN) -> list[Started]:
    """Starts a run's only process, or both."""
    words = (script, *OVERRIDES, *more, f"hydra.run.dir={folder}")
    return (
        ranks(*words, together=True) if "trainer=ddp" in more else [Started(*words, together=True)]
    )


def finish(processes: list[Started]) -> str:
    """Returns what the first has printed."""
    texts = [process.communicate(timeout=200)[0] for process in processes]
    assert not any(process.returncode for process in processes), texts
    return texts[0]


def outcome(folder: Path) -> dict:
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "hashes": json.loads((folder / "hashes.json").read_text()),
        "metrics": (folder / "metrics.csv").read_text(),
        "ledger": (folder / "ledger.csv").read_text(),
        "summary": summary,
    }


def kill_after(processes: list[Started], folder: Path, rounds: int, delay: float) -> None:
    """Sends SIGKILL to all processes of a run, a moment after it has written some checkpoints."""
    while len(list((folder / "checkpoints").glob("round_*.sha256"))) < rounds:
        assert processes[0].poll() is None, processes[0].told()
        time.sleep(0.01)
    time.sleep(delay)
    for process in processes:
        os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.communicate()


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("straight") / "run"
    finish(start(folder))
    return outcome(folder)


@pytest.mark.promise("resume after a kill")
@pytest.mark.parametrize("trainer", ["cpu", "ddp"])
def test_killed_and_resumed_equals_straight(trainer, straight, tmp_path):
    folder, script = tmp_path / "run", tmp_path / "endless.py"
    script.write_text(ENDLESS)
    started = start(folder, f"trainer={trainer}", script=script)
    kill_after(started, folder, rounds=2, delay=random.Random(trainer).uniform(0, 0.2))
    assert not (folder / "summary.json").exists()
    # A torn file: the newest checkpoint loses its tail, as after a power cut.
    newest = sorted((folder / "checkpoints").glob("round_*.ckpt"))[-1]
    newest.write_bytes(newest.read_bytes()[:-100])
    text = finish(start(folder, f"trainer={trainer}", f"resume={folder}"))
    assert "is damaged or unfinished" in text
    assert outcome(folder) == straight


def test_a_changed_configuration_is_refused(tmp_path):
    folder = tmp_path / "run"
    finish(start(folder, "rounds=1"))
    (process,) = start(folder, "rounds=1", f"resume={folder}", "algorithm.strength=0.7")
    text = process.communicate()[0]
    assert process.returncode == 1
    assert "algorithm.strength: 0.05 -> 0.7" in text.splitlines()[-1]
    assert "Traceback" not in text
