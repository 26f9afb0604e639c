"""Several ranks, each with its own clients: Lightning's DDP without DDP's model wrapping.

Ranks are processes on one or several machines; each has a device, or several share one. This module
starts the ranks of one machine; torchrun and SLURM start theirs.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from subprocess import TimeoutExpired
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.plugins.environments import (  # type: ignore[attr-defined]
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
)
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.strategies.launchers import _SubprocessScriptLauncher
from pytorch_lightning.utilities.exceptions import SIGTERMException

from medfed.common.processes import PARENT, Terminated, held, launched
from medfed.federation.lightning.collect import rank
from medfed.standalone.errors import ConfigError, MedfedError, RankError, first_line

_GRACE = 5.0  # seconds that a rank has to report why it ends


class ClientSharding(DDPStrategy):
    """Launches ranks like DDP but does not synchronise gradients.

    DDP would mix the gradients of the clients that ranks train at the same time; here ranks
    exchange only encoded replies, when a phase closes.
    """

    strategy_name = "client_sharding"

    def __init__(self, ranks_per_device: int = 1, **settings: Any) -> None:
        if ranks_per_device < 1:
            raise ConfigError(
                f"trainer.strategy.ranks_per_device must be at least 1, not {ranks_per_device}."
            )
        self.ranks_per_device = ranks_per_device
        if ranks_per_device > 1:
            settings.setdefault("process_group_backend", "gloo")
        super().__init__(**settings)

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The device of each rank of this machine."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        repeated = [d for d in devices or [] for _ in range(self.ranks_per_device)]
        self._parallel_devices = repeated or None

    def configure_ddp(self) -> None:
        """Does not wrap the model."""

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = Launcher(self.cluster_environment, self.num_processes, self.num_nodes)


class Launcher(_SubprocessScriptLauncher):
    """Starts the other ranks, which end with the first one; the first ends if another fails.

    Lightning's launcher would also change the number of threads, which affects results.
    """

    _watching: threading.Thread | None = None

    def __init__(self, environment: ClusterEnvironment, processes: int, nodes: int) -> None:
        super().__init__(environment, processes, nodes)
        self._ended = threading.Event()

    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: pl.Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        """Starts the ranks, unless they run already, and calls the function on each."""
        environment = self.cluster_environment
        try:
            environment.validate_settings(self.num_processes, self.num_nodes)
        except ValueError as error:
            raise ConfigError(f"The ranks do not fit: {first_line(error)}.") from error
        if not environment.creates_processes_externally:
            os.environ[PARENT] = str(os.getpid())
            # A user stops the first rank, which stops the others.
            with held(signal.SIGINT, signal.SIGTERM):
                self._call_children_scripts()
            del os.environ[PARENT]
            if self.procs:
                self._watching = threading.Thread(
                    target=self._watch, args=(trainer,), name="medfed-ranks", daemon=True
                )
                self._watching.start()
        return function(*args, **kwargs)

    def kill(self, signum: int) -> None:
        """Ends the other ranks at once, for every signal; SIGTERM also ends this one.

        Lightning passes SIGTERM on by this function and would then wait for the other ranks, which
        may be waiting for something else.
        """
        self._ended.set()
        for process in self.procs:
            process.kill()
        for process in self.procs:
            process.wait()
        if signum == signal.SIGTERM:
            raise Terminated

    def join(self) -> None:
        """Waits for the other ranks to end."""
        for process in self.procs:
            with suppress(TimeoutExpired):
                process.wait(_GRACE)
        self._ended.set()
        if self._watching is not None:
            self._watching.join()

    def failed(self) -> str | None:
        """Names the other rank that has failed, if any."""
        for number, process in enumerate(self.procs, 1):
            if status := process.poll():
                how = f"with status {status}" if status > 0 else f"by signal {-status}"
                return f"Rank {number} ended {how}, so that the other ranks were stopped"
        return None

    def _watch(self, trainer: pl.Trainer | None) -> None:
        """Ends this process if another rank has failed, for which it would wait for ever."""
        while (failure := self.failed()) is None:
            if self._ended.wait(0.5) or all(process.poll() == 0 for process in self.procs):
                return
        if self._ended.wait(_GRACE):  # it may report the same failure, with more detail
            return
        self.kill(signal.SIGKILL)
        folder = "FOLDER" if trainer is None else trainer.default_root_dir
        print(f"error: {failure}; {go_on(folder)}", file=sys.stderr, flush=True)
        os._exit(1)


def environment(several: bool) -> ClusterEnvironment | None:
    """Returns the environment that starts a run's ranks; ``None``: Lightning decides.

    Within a SLURM job Lightning takes every process, even the job's script, for one of several
    started by srun, and would wait for the others for ever.
    """
    launcher = launched()
    if several and launcher is not None and launcher.by == "srun":
        try:
            return SLURMEnvironment(auto_requeue=False)
        except RuntimeError as error:
            raise ConfigError(f"SLURM starts no ranks so: {first_line(error)}.") from error
    if launcher is None or not several:
        return LightningEnvironment() if "SLURM_JOB_ID" in os.environ else None
    return None


def go_on(folder: object) -> str:
    """Says how to continue a stopped run."""
    return f"continue with the same command and resume={folder}."


_OF_RANKS = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", "RANK")


@contextmanager
def together(trainer: pl.Trainer) -> Iterator[None]:
    """Ends all ranks together, and passes on the real reason for stopping a run.

    What makes this process a rank (variables, a process group) ends with the run; otherwise the
    next run of this process would take itself for one of several. Lightning ends the process with
    status 1 on Ctrl-C, ignoring further ones, and with 0 on SIGTERM.
    """
    launcher, on_interrupt = trainer.strategy.launcher, signal.getsignal(signal.SIGINT)
    before = {name: os.environ.get(name) for name in _OF_RANKS}
    joined = dist.is_available() and dist.is_initialized()
    try:
        yield
        if isinstance(launcher, Launcher):
            launcher.join()
    except BaseException as error:
        reason: BaseException = error
        if isinstance(launcher, Launcher):
            if isinstance(error, RuntimeError) and not isinstance(error, MedfedError):
                reason = _of_another_rank(launcher, trainer, error) or error
            launcher.kill(signal.SIGKILL)
        if isinstance(error, SIGTERMException):
            signal.raise_signal(signal.SIGTERM)  # its handler is the previous one
        if isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt):
            signal.signal(signal.SIGINT, on_interrupt)
            reason = error.__context__
        if reason is error:
            raise
        raise reason from None
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
        if not joined and dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


def _of_another_rank(
    launcher: Launcher, trainer: pl.Trainer, error: RuntimeError
) -> RankError | None:
    """The error of a lost connection; the first rank ends the others."""
    elsewhere = launcher.cluster_environment.creates_processes_externally or launcher.num_nodes > 1
    if elsewhere and PARENT not in os.environ:
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            lost = f"Rank {rank()} has lost another rank; the other rank's message says why"
            return RankError(f"{lost}; {go_on(trainer.default_root_dir)}")
        return None
    deadline = time.monotonic() + _GRACE
    while time.monotonic() < deadline:
        if (failure := launcher.failed()) is not None:
            return RankError(f"{failure}; {go_on(trainer.default_root_dir)}")
        if rank() == 0 and not launcher.procs:
            break
        time.sleep(0.1)
    return None
