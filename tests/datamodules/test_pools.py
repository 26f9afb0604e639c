"""A worker that is killed in the midst of its answer."""

from __future__ import annotations

import multiprocessing
import os
import signal
import struct
import sys
import time
from concurrent.futures.process import BrokenProcessPool

import pytest

from medfed.common import processes as pools
from medfed.common.processes import WatchedPool

# The first process of a server waits until the server has imported PyTorch, MONAI and more
# (tests/processes.py): on a busy machine longer than any wait that could tell a hang.
PATIENCE = 280


def _half_an_answer():
    """Sends the length of an answer and its first byte, then dies as by the system's hand."""
    frame = sys._getframe()
    while "result_queue" not in frame.f_locals:  # the standard library's own, of this process
        frame = frame.f_back
    os.write(frame.f_locals["result_queue"]._writer.fileno(), struct.pack("!i", 1000) + b"\x80")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("way", ["fork", "forkserver"])
def test_half_an_answer_breaks_the_pool(way, monkeypatch):
    monkeypatch.setattr(pools, "EVERY", 0.1)
    with WatchedPool(2, multiprocessing.get_context(way)) as pool:
        assert pool.submit(abs, -3).result(PATIENCE) == 3
        other = pool.submit(time.sleep, 2 * PATIENCE)
        with pytest.raises(BrokenProcessPool):
            pool.submit(_half_an_answer).result(PATIENCE)
        with pytest.raises(BrokenProcessPool):
            other.result(PATIENCE)
        with pytest.raises(BrokenProcessPool):
            pool.submit(abs, -3)


def test_processes_that_end_with_their_pool_are_no_deaths(monkeypatch):
    monkeypatch.setattr(pools, "EVERY", 0.01)
    with WatchedPool(2, multiprocessing.get_context("fork")) as pool:
        assert list(pool.map(abs, range(-20, 0))) == list(range(20, 0, -1))
    assert not pool._watch.is_alive()
