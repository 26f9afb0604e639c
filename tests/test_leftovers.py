"""What a test leaves behind is named: tests/conftest.py fails such a test."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from tests import leftovers


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(leftovers, "PATIENCE", 0.0)


@pytest.mark.parametrize(
    ("name", "daemon", "counts"),
    [("medfed-site", True, True), ("another", False, True), ("another", True, False)],
    ids=["ours", "not a daemon", "a library's"],
)
def test_threads(name, daemon, counts):
    before, end = leftovers.running(), threading.Event()
    thread = threading.Thread(target=end.wait, name=name, daemon=daemon)
    thread.start()
    try:
        assert leftovers.left(before) == [name] * counts
    finally:
        end.set()
        thread.join()
    assert leftovers.left(before) == []


@pytest.mark.skipif(not leftovers.TASKS.is_dir(), reason="needs Linux")
def test_child_processes():
    before = leftovers.running()
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        (named,) = leftovers.left(before)
        assert named.startswith(f"process {child.pid}: {sys.executable} -c import sys")
    assert leftovers.left(before) == []


def test_settings(monkeypatch, tmp_path):
    before = leftovers.settings()
    with monkeypatch.context() as patch:
        patch.setenv("MEDFED_TEST", "1")
        patch.chdir(tmp_path)
        torch.set_default_dtype(torch.float64)
        try:
            assert leftovers.changed(before) == [
                "the folder of work",
                "PyTorch's type of numbers",
                "MEDFED_TEST",
            ]
        finally:
            torch.set_default_dtype(torch.float32)
    assert "MEDFED_TEST" not in os.environ
    assert leftovers.changed(before) == []


def test_each_test_draws_from_the_beginning_of_the_global_streams():
    drawn = random.random(), np.random.rand(), torch.rand(())
    leftovers.seed()
    assert drawn == (random.random(), np.random.rand(), torch.rand(()))
