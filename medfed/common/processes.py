"""Signals, launchers and worker processes.

Ctrl-C and SIGTERM become an exception in the main thread, so that open files are cleaned up.

Environment variables say whether torchrun or SLURM started this process, and as which of how many.
They do so before PyTorch is imported and before the ranks connect.

A pool of worker processes notices the death of a worker even in the middle of a message.
"""

from __future__ import annotations

import gc
import getpass
import itertools
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn, TypeVar

from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

# The environment variable that gives a further rank the process that it must not outlive.
PARENT = "MEDFED_PARENT"
_BOTH = (signal.SIGINT, signal.SIGTERM)
# The signal that ends the command: a library that is being imported may turn its exception into
# one of its own, as NumPy's import does.
interruptions: list[KeyboardInterrupt] = []
Task = TypeVar("Task")


class Terminated(KeyboardInterrupt):
    """Another process has asked this one to end (SIGTERM), as a queue does after its time limit."""


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Ends the process with status 130 on Ctrl-C and 143 on SIGTERM, and one line on stderr."""
    # The line is the exception's message if it has one, which says how to continue. Only the
    # first signal counts, so that a second one does not interrupt the clean-up. A process
    # that ignores a signal, like those of ``nohup`` and background jobs, still ignores it.
    before = {number: signal.getsignal(number) for number in _BOTH}
    main = threading.current_thread() is threading.main_thread()
    ours = [n for n, old in before.items() if main and old is not signal.SIG_IGN]

    def interrupt(number: int, _: FrameType | None) -> NoReturn:
        for each in ours:
            signal.signal(each, signal.SIG_IGN)
        interruptions.append(Terminated() if number == signal.SIGTERM else KeyboardInterrupt())
        raise interruptions[0]

    for number in ours:
        signal.signal(number, interrupt)
    try:
        yield
    except KeyboardInterrupt as error:
        is_terminated = isinstance(error, Terminated)
        how = str(error) or "finished work is kept; run the command again to continue."
        print(f"{'Terminated' if is_terminated else 'Interrupted'}; {how}", file=sys.stderr)
        sys.exit(128 + (signal.SIGTERM if is_terminated else signal.SIGINT))
    finally:
        interruptions.clear()
        for number in ours:
            if signal.getsignal(number) is interrupt:
                signal.signal(number, before[number])


@contextmanager
def signals_blocked(*numbers: signal.Signals) -> Iterator[None]:
    """Blocks signals; processes that are started meanwhile never get them."""
    # This is for processes that another process ends: on Ctrl-C a terminal signals all of
    # them.
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """Ends a further rank as soon as the process that started it has ended in any way."""
    if (parent := os.environ.get(PARENT)) is None:
        return

    def wait() -> None:
        while os.getppid() == int(parent):
            time.sleep(0.2)

    _end_after(wait)


def _end_after(wait: Callable[[], None]) -> None:
    """Ends this process as soon as a call returns, which a thread waits for."""

    def watch() -> None:
        wait()
        os._exit(1)

    threading.Thread(target=watch, name="medfed-parent", daemon=True).start()


class Launched(NamedTuple):
    """What a launcher outside of medfed says about the processes that it has started."""

    by: str  # ``torchrun`` or ``srun``
    rank: int  # the index of this process
    ranks: int  # the number of processes
    machines: int  # the number of machines

    @property
    def devices(self) -> int:
        """Processes per machine."""
        return self.ranks // self.machines


def launched(environ: Mapping[str, str] = os.environ) -> Launched | None:
    """Returns the launcher that has started this process as one of several, if there is one."""
    # The script of a SLURM job is not one of several, although SLURM sets its variables
    # there, too.

    def variable(name: str, otherwise: int) -> int:
        return int(environ.get(name, otherwise))

    if "TORCHELASTIC_RUN_ID" in environ:
        ranks = variable("WORLD_SIZE", 1)
        machines = ranks // variable("LOCAL_WORLD_SIZE", 1)
        return Launched("torchrun", variable("RANK", 0), ranks, machines)
    ranks = variable("SLURM_STEP_NUM_TASKS", 1)  # the step that srun has started
    if ranks > 1 and "SLURM_PROCID" in environ:
        machines = variable("SLURM_STEP_NUM_NODES", variable("SLURM_NNODES", 1))
        return Launched("srun", variable("SLURM_PROCID", 0), ranks, machines)
    return None


def go_by_rank() -> None:
    """Makes a process of srun use its process number as its rank from here on."""
    # Not all processes of srun are ranks: srun may also start unrelated runs. So only callers
    # that know that this run takes several devices call this function.
    if (place := launched()) is not None:
        os.environ["RANK"] = str(place.rank)


def number(environ: Mapping[str, str] = os.environ) -> int:
    """Returns this process's rank, as far as it is known; only the first process of a run has 0."""
    ranks = [int(environ.get(name, "0")) for name in ("RANK", "NODE_RANK", "LOCAL_RANK")]
    return next(filter(None, ranks), 0)


def is_first_process() -> bool:
    """Returns whether this process writes for all ranks: the first one does."""
    return number() == 0


EVERY = 1.0  # seconds between two checks


class WatchedPool(ProcessPoolExecutor):
    """A pool that breaks instead of waiting for ever if a process is killed while it sends."""

    # The pool of the standard library reads a result to its end before it checks whether its
    # processes live. Half a result never ends, because all processes and the pool itself hold
    # the other end of the pipe open. Here a thread checks: if a process is dead and the pool
    # has not noticed by the next check, the thread ends the others and closes the pipe, which
    # wakes the pool.

    _watch: threading.Thread | None = None

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Submits a task; raises `BrokenProcessPool` like the pool of the standard library."""
        with signals_blocked(signal.SIGINT):  # also while a worker is still starting
            future = super().submit(fn, *args, **kwargs)
        if self._watch is None:  # not before: forking with a thread may deadlock
            self._watch = threading.Thread(
                target=_watch, args=(self,), name="medfed-pool", daemon=True
            )
            self._watch.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the processes, and with them the thread that checks them."""
        super().shutdown(wait, cancel_futures=cancel_futures)
        if wait and self._watch is not None:
            self._watch.join()


@contextmanager
def loading() -> Iterator[None]:
    """Pauses the garbage collector: imported modules stay, so scanning them again wastes time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def start_worker(environ: Mapping[str, str] | None = None) -> None:
    """Prepares a worker process: one thread, no reaction to Ctrl-C, and an end with its parent."""
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "ITK_GLOBAL_DEFAULT_NUMBER_OF_THREADS"), "1")
    os.environ.update({**(environ or {}), **one_thread})
    tempfile.tempdir = None  # what TMPDIR of these variables names counts
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for systems that cannot block signals
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None
    _end_after(parent.join)  # otherwise the workers of a killed parent would wait for ever
    set_threads(1)


def set_threads(count: int) -> None:
    """Sets the threads of PyTorch and of NumPy's BLAS, on whose number last bits depend."""
    import torch

    torch.set_num_threads(count)
    threadpool_limits(count, "blas")


@contextmanager
def threads_as_before() -> Iterator[None]:
    """Gives the numbers of threads back, of which a run takes its own."""
    import torch

    count = torch.get_num_threads()
    with threadpool_limits(user_api="blas"):
        try:
            yield
        finally:
            torch.set_num_threads(count)


class Here(Executor):
    """Computes each task at once, in this process."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Computes a task; see the base class."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


@contextmanager
def worker_pool(workers: int, **environ: str) -> Iterator[Executor]:
    """Gives processes that stay alive and have loaded what runs need; they end with the block.

    Without workers, this process computes each task at once.
    """
    if not workers:
        yield Here()
        return
    # On macOS, forked processes crash in the system's libraries.
    context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    context.set_forkserver_preload(["medfed.run.ready"])
    pool = WatchedPool(workers, context, start_worker, ({**os.environ, **environ},))
    try:
        yield pool
    except BaseException:
        for process in list((pool._processes or {}).values()):
            process.terminate()  # what they compute would be lost either way
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def finished(
    pool: Executor, calls: Iterable[tuple[Task, tuple[Any, ...]]], at_once: int
) -> Iterator[tuple[Task, Future[Any]]]:
    """Yields each task with its future as soon as it ends; its call is a function and arguments.

    So many run at once, and a call is made when there is room for it. If a process dies, the tasks
    that were running have its error, and no further task begins.
    """
    waiting, running = iter(calls), dict[Future[Any], Task]()
    try:
        while True:
            for task, call in itertools.islice(waiting, max(1, at_once) - len(running)):
                running[pool.submit(*call)] = task
            if not running:
                return
            # Ctrl-C may reach another thread, and a wait without end would not see it.
            for future in wait(running, 1.0, FIRST_COMPLETED).done:
                yield running.pop(future), future
    except BrokenProcessPool:
        yield from ((task, future) for future, task in running.items())


_gpu: list[Any] = []  # the lock that this process holds to its end


def take_gpu() -> None:
    """Shows this process one of the visible GPUs, if possible one that no other has taken."""
    # It must come before the process first uses a GPU.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        import torch

        visible = ",".join(map(str, range(torch.cuda.device_count())))
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if len(names) < 2 or _gpu:
        return
    from filelock import FileLock, Timeout

    folder = Path(tempfile.gettempdir(), f"medfed-gpus-{getpass.getuser()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    for turn, name in itertools.product(range(len(os.sched_getaffinity(0)) + 1), names):
        lock = FileLock(folder / f"{name}-{turn}".replace("/", "_"))
        with suppress(Timeout):
            lock.acquire(timeout=0)
            _gpu.append(lock)
            os.environ["CUDA_VISIBLE_DEVICES"] = name
            return


def _watch(pool: WatchedPool) -> None:
    manager: Any = pool._executor_manager_thread
    processes = pool._processes or {}  # a copy: the pool adds processes
    writer = getattr(pool._result_queue, "_writer", None)  # type: ignore[attr-defined]
    del pool  # the interpreter's end must not wait for this thread
    was_dead = False
    while manager is not None and manager.is_alive():
        manager.join(EVERY)
        dead = [p for p in [*processes.values()] if not p.is_alive()]
        if dead and was_dead and manager.is_alive() and writer is not None:
            for process in [*processes.values()]:
                process.kill()
                process.join()
            _end_of(writer)
            return
        was_dead = bool(dead)


def _end_of(writer: Any) -> None:
    """Ends a pipe from the writing side, and lets the pool close the connection."""
    # The pool wakes up at once and closes the connection in its thread. A second close of the
    # same file descriptor would fail there, or close what another thread has just opened.
    if os.name != "posix":
        writer.close()
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, writer.fileno())  # the descriptor stays open, the pipe does not
    except OSError:
        pass  # the pool has already closed the connection
    finally:
        os.close(nowhere)
