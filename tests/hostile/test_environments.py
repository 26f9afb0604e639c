"""Odd places to run in: other encodings, folders that nobody can write, a folder that is gone."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.trust.hostile_lines import outcome
from medfed.common import compiling
from medfed.federation.wire.codecs import kernels as of_codecs
from medfed.functional import kernels
from tests.integration.runs import CLINICAL, ROOT

MEDFED = "import sys; from medfed.commands.main import main; main(sys.argv[1:])"


def medfed(
    *line: str, folder: Path, code: str = MEDFED, **variables: str
) -> subprocess.CompletedProcess[bytes]:
    """Runs a command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *line],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        timeout=300,
    )


def table(folder: Path) -> tuple[str, ...]:
    """A table with names of many scripts, and the keys that name it."""
    lines = ["patient,centre,größe,label"]
    lines += [f"p数{n},{('Köln', '東京')[n % 2]},{n * 37 % 100},{n // 2 % 2}" for n in range(80)]
    (folder / "table.csv").write_text("\n".join(lines), encoding="utf-8")
    keys = ("centre=centre", "patient=patient", "label=label", "path=table.csv")
    return ("data=csv", "partition=centre", *(f"data.{key}" for key in keys))


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_output_in_another_encoding(encoding, tmp_path):
    few = ("rounds=1", "algorithm=fedavg", "pictures.format=none", "hydra.run.dir=run")
    line = ("train", *CLINICAL, *table(tmp_path), *few, "progress=true")
    done = medfed(*line, folder=tmp_path, PYTHONIOENCODING=encoding)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.decode(encoding)
    assert r"\u6771\u4eac" in printed
    assert ("Köln" if encoding == "cp1252" else r"K\xf6ln") in printed
    assert "東京" in (tmp_path / "run" / "metrics.csv").read_text(encoding="utf-8")


def test_names_of_files_in_another_encoding(tmp_path):
    variables = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = medfed("doctor", folder=tmp_path, **variables)
    assert done.returncode == 1
    assert done.stderr == (
        b"error: Python writes the names of files in ascii here; set PYTHONUTF8=1.\n"
    )


def test_a_folder_that_is_gone(tmp_path):
    gone = tmp_path / "gone"
    code = f"import os; os.rmdir({str(gone)!r}); {MEDFED}"
    for command in ("doctor", "train"):
        gone.mkdir(exist_ok=True)
        done = medfed(command, folder=gone, code=code)
        assert done.returncode == 1
        assert done.stderr.startswith(b"error: The folder from which you call medfed is gone")
        assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize("key", ["hydra.run.dir", "data.path", "init.weights"])
def test_a_path_that_is_not_utf_8(key, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir(b"\xff")
    end, text = outcome(["train", *CLINICAL, f"{key}=\udcff"], 0)
    assert end == "sentence"
    assert rf"{key}=" in text
    assert r"\udcff is not in UTF-8" in text
    assert os.listdir(b".") == [b"\xff"]


@pytest.mark.parametrize("module", [kernels, of_codecs], ids=["maths", "codecs"])
def test_loops_compile_where_nothing_can_be_written(module, monkeypatch, caplog):
    """Numba keeps compiled loops beside their file or at home; /proc takes files of nobody."""
    for name in ("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR"):
        monkeypatch.setenv(name, "/proc/nobody")
    compiling._say_once.cache_clear()
    source = Path(module.__file__).read_text(encoding="utf-8")
    with caplog.at_level(logging.WARNING, "medfed"):
        there = {"__name__": "elsewhere"}
        exec(compile(source, "/proc/kernels.py", "exec"), there)
    assert caplog.messages == [compiling.NOT_KEPT]
    if module is kernels:
        rows = np.array([[0.3, 2.4, -2.5, 2.6]])
        made, known = np.zeros(1), np.zeros(1)
        there["clip_levels"](rows, np.ones(1), made)
        kernels.clip_levels(rows, np.ones(1), known)
        assert np.array_equal(made, known)
    scope: dict = {}
    exec(compile("def one(x):\n    return x + 1", "/proc/one.py", "exec"), scope)
    assert not compiling.can_cache(scope["one"])
    assert compiling.compiled()(scope["one"])(1) == 2


def test_what_the_system_refuses_is_no_mistake_of_medfed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logger = ("logger=tensorboard", "logger.save_dir=/proc/nobody")
    line = ["train", *CLINICAL, *logger, "rounds=1", "pictures.format=none"]
    end, text = outcome([x for x in line if x != "logger=none"], 0)
    assert end == "sentence"
    assert text.startswith("error: The system refuses /proc/nobody")
    assert "please report" not in text


FULL = {
    "help": (),
    "site": (),
    "train -h": (),
    "train": (*CLINICAL, "rounds=1", "hydra.run.dir=run"),
    "train --cfg job": CLINICAL,
}


@pytest.mark.parametrize("command", FULL)
def test_output_to_a_full_device(command, tmp_path):
    """One sentence, also where Python itself would complain when it ends."""
    line = (*command.split(), *FULL[command])
    code = f"import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1); {MEDFED}"
    done = medfed(*line, folder=tmp_path, code=code)
    assert done.returncode == 1
    why = "Standard output takes no more (No space left on device); send it elsewhere, or make room"
    assert done.stderr.decode() == f"error: {why}.\n"
    assert not (tmp_path / "run").exists()
