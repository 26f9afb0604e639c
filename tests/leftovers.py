"""What a test leaves behind and another would find: threads, processes, variables, settings."""

from __future__ import annotations

import gc
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import random
import signal
import threading
import time
from pathlib import Path

import numpy as np
import torch

from tests.processes import SERVERS

PATIENCE = 60.0  # seconds that something which is ending has to end
TASKS = Path("/proc/self/task")
# Variables that change what a run does; libraries add others of their own as they are imported.
READ = ("MEDFED", "HYDRA", "SLURM", "TORCHELASTIC", "MASTER_", "WANDB", "OMP_", "ITK_")
RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def seed() -> None:
    """Lets the global streams begin anew, whatever was drawn before."""
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)


def settings() -> dict[str, object]:
    """Returns what holds for the whole process and is not for a test to change."""
    environ = {n: v for n, v in os.environ.items() if n.startswith(READ) or n in RANKS}
    return {
        **environ,
        "the folder of work": os.getcwd(),
        "PyTorch's threads": torch.get_num_threads(),
        "PyTorch's type of numbers": torch.get_default_dtype(),
        "PyTorch's deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "PyTorch's gradients": torch.is_grad_enabled(),
        "PyTorch's process group": torch.distributed.is_initialized(),
        "the handler of SIGINT": signal.getsignal(signal.SIGINT),
        "the handler of SIGTERM": signal.getsignal(signal.SIGTERM),
    }


def changed(before: dict[str, object]) -> list[str]:
    """Names the settings that are not what they were."""
    now = settings()
    return [name for name in {**before, **now} if before.get(name) != now.get(name)]


def running() -> set[threading.Thread | int]:
    """Returns threads for which the interpreter waits, threads of ours, and child processes."""
    threads = {t for t in threading.enumerate() if not t.daemon or t.name.startswith("medfed")}
    return {*threads, *_children()}


def left(before: set[threading.Thread | int]) -> list[str]:
    """Names what runs and did not run before; what is ending already may end."""
    if not (more := running() - before):
        return []
    gc.collect()  # a pool ends with who held it
    end = time.monotonic() + PATIENCE
    while (more := {one for one in more if _lives(one)}) and time.monotonic() < end:
        time.sleep(0.01)
    return [one.name if isinstance(one, threading.Thread) else _command(one) for one in more]


def _children() -> set[int]:
    found: list[str] = []
    for task in TASKS.iterdir() if TASKS.is_dir() else ():  # of Linux
        try:
            found += (task / "children").read_text().split()
        except OSError:  # the thread has ended
            continue
    servers = (
        multiprocessing.forkserver._forkserver,
        multiprocessing.resource_tracker._resource_tracker,
    )
    known = {
        getattr(server, name, None) for server in servers for name in ("_pid", "_forkserver_pid")
    }
    return {*map(int, found)} - known - SERVERS


def _lives(one: threading.Thread | int) -> bool:
    if isinstance(one, threading.Thread):
        return one.is_alive()
    try:  # a process that has ended waits for its parent as a zombie
        return Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _command(process: int) -> str:
    try:
        command = Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")
    except OSError:
        command = "ended"
    return f"process {process}: {command:.100}"
