"""Run folders that are torn, foreign or made to hurt: each command names the file in a sentence."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import struct
import sys
from pathlib import Path

import pytest
import torch

from medfed.commands.evaluate import main as evaluate
from medfed.commands.export import main as export
from medfed.commands.report import main as report
from medfed.commands.sentences import one_sentence
from medfed.commands.train import main as train
from medfed.delivery.export.run_record import RunRecord
from medfed.federation.lightning.checkpoint import digest_file, last_whole, seal
from medfed.records.folder import Run
from medfed.reports.report import report_runs
from medfed.run.evaluation import evaluate_run
from medfed.standalone.errors import CheckpointError
from tests.integration.runs import CLINICAL, left_in, resume

DEEP = 100_000


@pytest.fixture(scope="module")
def finished(finished_run):
    return finished_run(*CLINICAL, "rounds=2")


@pytest.fixture(autouse=True)
def no_handlers_left():
    """Takes away what Hydra logs to: the output that a test captures ends with it."""
    yield
    root = logging.getLogger()
    for handler in [h for h in root.handlers if type(h) is logging.StreamHandler]:
        root.removeHandler(handler)


@pytest.fixture
def copy(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["medfed"])
    return Path(shutil.copytree(finished, tmp_path / "run"))


def said(capsys, command, *arguments: str) -> str:
    """The one line that a command prints on stderr before it ends with status 1."""
    with pytest.raises(SystemExit) as ended:
        command(arguments)
    assert ended.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "unexpected" not in error
    assert error.count("\n") == 1
    assert len(error) < 500
    return error


# What each command opens a run by, without the command line.
OPEN = (evaluate_run, RunRecord.read, lambda folder: report_runs(str(folder)))


def refused(folder: Path) -> list[str]:
    """The sentences with which the commands refuse a run folder, in which nothing changes."""
    before, sentences = left_in(folder.parent), []
    for opened in OPEN:
        with pytest.raises(CheckpointError) as caught:
            opened(folder)
        sentences.append(str(caught.value))
    assert left_in(folder.parent) == before
    assert all("\n" not in s and "\x1b" not in s and len(s) < 400 for s in sentences)
    return sentences


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{n}: &{n} [{','.join([f'*{p}'] * 9)}]\n"
    for p, n in zip("abcdefghij", "bcdefghijk", strict=True)
)
# What becomes of a text, by kind of damage.
ANY_TEXT = {
    "empty": lambda text: b"",
    "binary": lambda text: bytes(range(256)) * 4,
    "a scalar": lambda text: b"3\n",
    "a list": lambda text: b"[1, 2]\n",
    "deep": lambda text: b"[" * DEEP,
    "null": lambda text: b"null\n",
}
CONFIG = {
    **ANY_TEXT,
    "torn": lambda text: text[: len(text) // 2].encode(),
    "bomb": lambda text: BOMB.encode(),
    "deep and whole": lambda text: b"a: " + b"[" * DEEP + b"]" * DEEP,
    "a tag": lambda text: b"a: !!python/object/apply:os.system [id]\n",
    "a section is a list": lambda text: text.replace("cohort:", "cohort: []\nx:").encode(),
    "a number is text": lambda text: text.replace("seed: 0\nrounds", "seed: x\nrounds", 1).encode(),
    "twice": lambda text: (text + "seed: 3\n").encode(),
}


@pytest.mark.parametrize("damage", CONFIG.values(), ids=CONFIG)
def test_config(damage, copy):
    path = copy / "config.yaml"
    path.write_bytes(damage(path.read_text()))
    assert all(f"{path} " in sentence for sentence in refused(copy))


def test_the_commands_say_so(copy, capsys):
    path = copy / "config.yaml"
    path.write_text(BOMB)
    for command, key in ((evaluate, "run"), (export, "run"), (report, "runs")):
        assert f"{path} " in said(capsys, command, f"{key}={copy}")
    with pytest.raises(CheckpointError, match=r"config.yaml "):
        resume(copy, *CLINICAL, "rounds=2")


def changed(**keys):
    def damage(text):
        return json.dumps({**json.loads(text), **keys}).encode()

    return damage


SUMMARY = {
    **ANY_TEXT,
    "torn": lambda text: text[: len(text) // 2].encode(),
    "no clients": changed(clients={}),
    "clients are a list": changed(clients=[1]),
    "a metric is text": changed(clients={"hospital_0": {"loss": "low"}}),
    "no metric": changed(federation={}),
    "no steps": changed(steps={}),
    "another selection": changed(selection=["beauty", "max"]),
    "no selection": changed(selection=[]),
    "half a selection": changed(selection=["auroc"]),
    "bytes of 400 digits": changed(bytes={"up": 10**400, "down": 1}),
    "negative bytes": changed(bytes={"up": -1, "down": 1}),
    "no constant": changed(constant={"constant": {"clients": 1}}),
    "no interval": changed(intervals={"clients": {"hospital_0": {"auroc": 0.5}}}),
    "memberships are a number": changed(memberships=5),
    "a membership is text": changed(memberships={"leading": "many"}),
}


@pytest.mark.parametrize("damage", SUMMARY.values(), ids=SUMMARY)
def test_summary(damage, copy):
    path = copy / "summary.json"
    path.write_bytes(damage(path.read_text()))
    assert all(f"{path} " in sentence for sentence in refused(copy))


SPLITS = {
    **ANY_TEXT,
    "torn": lambda text: text[: len(text) // 2].encode(),
    "no files": lambda text: changed(files=[])(text),
    "no clients": changed(clients={}),
    "patients are numbers": changed(clients={"hospital_0": {"train": 3}}),
}


@pytest.mark.parametrize("damage", SPLITS.values(), ids=SPLITS)
def test_splits(damage, copy):
    path = copy / "splits.json"
    path.write_bytes(damage(path.read_text()))
    assert all(f"{path} " in sentence for sentence in refused(copy))


def test_a_run_of_another_version_names_that_version(copy):
    versions = json.loads((copy / "versions.json").read_text())
    (copy / "versions.json").write_text(json.dumps({**versions, "medfed": "0.1.3"}))
    for sentence in refused(copy):
        assert sentence.startswith(f"medfed 0.1.3 made the run in {copy}")


def test_a_run_of_another_commit_names_that_commit(copy, capsys, monkeypatch):
    """Its keys may be named else; without its commit, the error would blame the user's."""
    monkeypatch.setattr("medfed.records.folder.commit_here", lambda: "a" * 40)
    versions = json.loads((copy / "versions.json").read_text())
    (copy / "versions.json").write_text(json.dumps({**versions, "commit": "b" * 40}))
    config = (copy / "config.yaml").read_text().replace("medfed.models.", "medfed.formerly.", 1)
    (copy / "config.yaml").write_text(config)
    named = f"Commit {'b' * 10} of medfed made the run, and this is commit {'a' * 10}"
    assert f"error: {named}" in said(capsys, evaluate, f"run={copy}")
    assert f"error: {named}" in said(capsys, train, *CLINICAL, "rounds=2", f"resume={copy}")
    (copy / "versions.json").write_text(json.dumps(versions | {"commit": f"{'a' * 40}-dirty"}))
    assert "Commit" not in said(capsys, evaluate, f"run={copy}")


@pytest.mark.parametrize("name", ["preprocessing.json", "versions.json"])
def test_what_export_needs_beside(name, copy):
    for damage in (b"", b"[]", b"[" * DEEP, b"\xff"):
        (copy / name).write_bytes(damage)
        with pytest.raises(CheckpointError, match=f"{name} "):
            RunRecord.read(copy)
    (copy / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        RunRecord.read(copy)


TABLES = {
    "empty": lambda text: "",
    "no rows": lambda text: text.splitlines()[0] + "\n",
    "torn": lambda text: text[: len(text) - len(text.splitlines()[-1]) - 5],
    "torn between rows": lambda text: "\n".join(text.splitlines()[:-1]) + "\n",
    "other columns": lambda text: text.replace("client", "hospital", 1),
    "no number": lambda text: text.replace("\n1,", "\nx,"),
    "an endless quote": lambda text: text + '"' + "a" * 200_000,
}


@pytest.mark.parametrize("damage", TABLES.values(), ids=TABLES)
def test_tables_are_whole_or_refused(damage, copy):
    for name, read in (("metrics.csv", Run.history), ("ledger.csv", lambda run: run.ledger)):
        path = copy / name
        path.write_text(damage(path.read_text()))
        with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
            read(Run(copy))
    with pytest.raises(CheckpointError, match=r"metrics\.csv cannot be read"):
        _ = Run(copy).metrics


def test_models(copy, capsys):
    path = copy / "models" / "hospital_0.safetensors"
    whole = path.read_bytes()
    other = (copy / "models" / "hospital_1.safetensors").read_bytes()
    for damage in (
        b"",
        whole[:-3],
        whole[:20],
        b"\xff" * 100,
        other.replace(b"linear.", b"lineal."),
        whole[:-8] + struct.pack("<ff", math.nan, math.inf),
    ):
        path.write_bytes(damage)
        with pytest.raises(CheckpointError, match="hospital_0"):
            Run(copy).model("hospital_0")
        with pytest.raises(CheckpointError, match="hospital_0"):
            RunRecord.read(copy).client_model("hospital_0")
    assert "hospital_0" in said(capsys, export, f"run={copy}", "client=hospital_0")
    assert not (copy / "bundles").exists()


class Payload:
    """Leaves a folder where it is unpickled."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


def test_checkpoints(copy, capsys, tmp_path):
    best = copy / "checkpoints" / "best.ckpt"
    last = copy / "checkpoints" / "round_00001.ckpt"
    bad = {
        "nothing": {},
        "a list": [1],
        "no federation": {"federation": [1]},
        "half": {"federation": {"algorithm": "PFedNet", "clients": {}}},
        "code": {"federation": Payload(tmp_path / "mark")},
    }
    for content in bad.values():
        for path in (best, last):  # sealed, as by whoever made them
            torch.save(content, path.with_suffix(".partial"))
            seal(path.with_suffix(".partial"), path)
        with pytest.raises(CheckpointError, match=r"best.ckpt "):
            evaluate_run(copy)
        with pytest.raises(CheckpointError, match=r"round_00001.ckpt "):
            last_whole(last.parent)
    with pytest.raises(CheckpointError, match=r"round_00001.ckpt "):
        resume(copy, *CLINICAL, "rounds=2")
    assert not (tmp_path / "mark").exists()
    best.write_bytes(best.read_bytes()[:100])
    digest_file(last).write_bytes(b"\xff")
    assert f"{best} is missing or torn" in said(capsys, evaluate, f"run={copy}")
    assert last_whole(last.parent).name == "round_00000.ckpt"


COMPARE = {
    "runs=[]": "runs names no folder",
    "runs=null": "runs names no folder",
    "runs={file}": "is no folder",
    "runs=3": "runs=3 is no folder",
    "runs=[[{run}]]": "is no folder",
    "runs={run} out=/proc/x": "Cannot write /proc/x",
    "runs={run} out={file}": "Cannot write",
    "runs={run} out={file}/x": "Cannot write",
}


@pytest.mark.parametrize(("arguments", "sentence"), COMPARE.items())
def test_what_is_compared_and_where_to(arguments, sentence, copy, capsys, tmp_path):
    (tmp_path / "file").write_text("mine")
    before = left_in(tmp_path)
    line = arguments.format(run=copy, file=tmp_path / "file")
    assert sentence in said(capsys, report, *line.split())
    assert left_in(tmp_path) == before
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_cannot_be_made(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["medfed"])
    assert "Cannot write /proc/x" in said(capsys, train, *CLINICAL, "hydra.run.dir=/proc/x")


# What nobody expected.


@pytest.fixture
def broken(monkeypatch):
    def fails(*_):
        raise KeyError("no\nsuch \x1b[2J thing")

    monkeypatch.setattr(sys, "argv", ["medfed"])
    monkeypatch.setattr("medfed.run.evaluation.evaluate_run", fails)


def log_in(error: str) -> Path:
    return Path(error.split("the traceback is in ")[1].split("; please report it.\n")[0])


def test_the_unexpected_is_one_sentence_and_a_log_in_the_run(broken, copy, capsys):
    with pytest.raises(SystemExit) as ended:
        evaluate([f"run={copy}"])
    error = capsys.readouterr().err
    assert ended.value.code == 1
    assert error.startswith("error: unexpected KeyError: ")
    assert error.count("\n") == 1
    assert "\x1b" not in error
    assert log_in(error).parent == copy
    assert "Traceback" in log_in(error).read_text()
    assert "in fails" in log_in(error).read_text()


def test_a_run_that_has_not_begun_logs_elsewhere(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["medfed"])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def fails(config):
        raise RuntimeError("1\n2")

    monkeypatch.setattr("medfed.run.train.build_experiment", fails)
    with pytest.raises(SystemExit):
        train([*CLINICAL, f"hydra.run.dir={tmp_path / 'run'}"])
    error = capsys.readouterr().err
    assert error.startswith("error: unexpected RuntimeError: 1; the traceback is in ")
    assert error.count("\n") == 1
    assert left_in(tmp_path) == [log_in(error).name]
    assert "HYDRA_FULL_ERROR" not in os.environ


def test_the_traceback_on_request(broken, copy, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(KeyError):
        evaluate([f"run={copy}"])
    assert os.environ["HYDRA_FULL_ERROR"] == "1"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_an_end_that_is_asked_for_passes(error, capsys):
    with pytest.raises(type(error)) as passed, one_sentence():
        raise error
    assert passed.value is error
    assert capsys.readouterr().err == ""
