"""Worker processes whose death is noticed, also in the midst of a message."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

EVERY = 1.0  # seconds between two looks


class WatchedPool(ProcessPoolExecutor):
    """A pool that breaks, and does not wait for ever, where a process is killed while it sends.

    The pool of the standard library reads a result to its end before it looks whether its processes
    live. Of half a result there is no end: all processes, and the pool itself, hold the other end
    of the pipe open. Here a thread looks; where one process is dead and the pool has not noticed a
    look later, it ends the others and closes the pipe, so that the pool finds its end.
    """

    _watch: threading.Thread | None = None

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Submits a task; raises `BrokenProcessPool` as the standard library's does."""
        future = super().submit(fn, *args, **kwargs)
        if self._watch is None:  # only now: a thread that runs while processes are forked may harm
            self._watch = threading.Thread(target=_watch, args=(self,), daemon=True)
            self._watch.start()
        return future


def start_worker() -> None:
    """Prepares a worker process: one thread, no say in Ctrl-C, and an end when its parent ends."""
    os.environ.update(OMP_NUM_THREADS="1", ITK_GLOBAL_DEFAULT_NUMBER_OF_THREADS="1")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where signals cannot be held back
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)  # a killed parent would otherwise leave its workers waiting for ever

    threading.Thread(target=watch, daemon=True).start()


def _watch(pool: WatchedPool) -> None:
    manager: Any = pool._executor_manager_thread
    processes = pool._processes or {}  # it grows as processes are started
    writer = getattr(pool._result_queue, "_writer", None)  # type: ignore[attr-defined]
    del pool  # whose end must not wait for this thread
    seen = False
    while manager is not None and manager.is_alive():
        manager.join(EVERY)
        dead = [p for p in [*processes.values()] if not p.is_alive()]
        if dead and seen and manager.is_alive() and writer is not None:
            for process in [*processes.values()]:
                process.kill()
                process.join()
            writer.close()
            return
        seen = bool(dead)
