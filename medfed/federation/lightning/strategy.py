"""Several ranks, each with its own clients: Lightning's DDP without DDP's model wrapping.

Ranks are processes on one or several machines; each has a device, or several share one. This module
starts the ranks of one machine; torchrun and SLURM start theirs. It assigns clients to ranks, and
says which settings of a Trainer have no meaning for rounds; docs/api/trainer.md has all.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from statistics import median
from subprocess import TimeoutExpired
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning import callbacks as of_lightning
from pytorch_lightning.plugins.environments import (  # type: ignore[attr-defined]
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
)
from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy
from pytorch_lightning.strategies.launchers import _SubprocessScriptLauncher
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.exceptions import SIGTERMException
from torch import nn

from medfed.common.processes import PARENT, Terminated, launched, signals_blocked
from medfed.federation.lightning.collect import rank
from medfed.standalone.checks import check_count
from medfed.standalone.errors import ConfigError, MedfedError, RankError, first_line

_GRACE = 5.0  # seconds that a rank has to report why it ends
# How much longer than its best assignment a round must take before clients change ranks.
WORTH_MOVING, SECONDS = 1.1, 0.2


class ClientSharding(DDPStrategy):
    """Launches ranks like DDP, which would mix the gradients of the clients of several ranks.

    Here ranks exchange only encoded replies, when a phase closes.
    """

    strategy_name = "client_sharding"

    def __init__(self, ranks_per_device: int = 1, **settings: Any) -> None:
        check_count("trainer.strategy.ranks_per_device", ranks_per_device)
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
            with signals_blocked(signal.SIGINT, signal.SIGTERM):
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

        Lightning would then wait for the other ranks, which may be waiting for something else.
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


TYPES = {"16-true": torch.float16, "bf16-true": torch.bfloat16, "64-true": torch.float64}
PRECISIONS = ("32-true", "16-mixed", "bf16-mixed", *TYPES)
# They change the weights of the one network, which holds those of the last client.
_OF_ONE_MODEL = (
    *(of_lightning.StochasticWeightAveraging, of_lightning.WeightAveraging),
    *(of_lightning.ModelPruning, of_lightning.BaseFinetuning, of_lightning.BatchSizeFinder),
    *(of_lightning.GradientAccumulationScheduler, of_lightning.LearningRateFinder),
)
_STEPS = "would not make clients train less; set budget=LocalBudget(steps=N) of assemble"
# Settings of batches and steps, the values that change nothing, and what to do instead.
_OF_BATCHES = {
    "fast_dev_run": (
        ("False", "0"),
        "tries one batch, and here a batch is a round; set max_epochs=1 and LocalBudget(steps=1)",
    ),
    "overfit_batches": (("0", "0.0"), _STEPS),
    "limit_train_batches": (("1.0",), _STEPS),
    "accumulate_grad_batches": (
        ("1",),
        "does not reach clients; set budget=LocalBudget(accumulate=N) of assemble",
    ),
    "gradient_clip_val": (
        ("None", "0", "0.0"),
        "does not reach clients; set budget=LocalBudget(clip=NORM) of assemble",
    ),
}


def check_trainer(trainer: Any, network: nn.Module) -> None:
    """Refuses a Trainer whose settings would cut rounds short, or mean something else."""
    for reason in _reasons(trainer, network):
        raise ConfigError(f"{reason}.")


def _reasons(trainer: Any, network: nn.Module) -> Iterator[str]:
    strategy, precision = trainer.strategy, str(trainer.precision)
    if not isinstance(strategy, SingleDeviceStrategy | ClientSharding):
        yield (
            f"{type(strategy).__name__} would mix the gradients of clients; give the Trainer "
            "strategy=ClientSharding() of medfed.federation.lightning.strategy for several devices"
        )
    if precision not in PRECISIONS:
        yield f"Trainer(precision={precision!r}) is not possible; choose {', '.join(PRECISIONS)}"
    others = {p.dtype for p in network.parameters()} - {TYPES.get(precision)}
    if precision in TYPES and others:
        yield (
            f"Trainer(precision={precision!r}) would change the network's type and not that of the "
            f"clients' states, {str(others.pop())[6:]}; give assemble a network and data of that "
            "type, or choose 32-true, bf16-mixed or 16-mixed"
        )
    loops = (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop)
    sources = (loop._data_source for loop in (*loops, trainer.validate_loop, trainer.test_loop))
    if any(source.instance not in (None, trainer.lightning_module) for source in sources):
        yield (
            "The Trainer gets a DataLoader, and every client brings its own data; call fit, "
            "validate and test with the module alone"
        )
    if trainer.state.fn != TrainerFn.FITTING:
        return
    for name, (usual, reason) in _OF_BATCHES.items():
        if repr(value := getattr(trainer, name)) not in usual:
            yield f"Trainer({name}={value}) {reason}"
    if trainer.val_check_interval != 1 and trainer.check_val_every_n_epoch is not None:
        yield (
            f"Trainer(val_check_interval={trainer.val_check_interval}) counts batches, and here an "
            "epoch has one, the round; set check_val_every_n_epoch=N"
        )
    if isinstance(strategy, ClientSharding) and strategy._layer_sync is not None:
        yield (
            "Trainer(sync_batchnorm=True) would mix the statistics of clients; leave it out, and "
            "choose buffers of assemble"
        )
    for callback in trainer.callbacks:
        if isinstance(callback, _OF_ONE_MODEL):
            yield (
                f"The callback {type(callback).__name__} changes one model or its optimizer, and "
                "here every client has its own; leave it out"
            )


def environment(several: bool) -> ClusterEnvironment | None:
    """Returns the environment that starts a run's ranks; ``None``: Lightning decides.

    Within a SLURM job Lightning takes even the job's script for one of several processes that srun
    has started, and would wait for the others for ever.
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
def ranks_end_together(trainer: pl.Trainer) -> Iterator[None]:
    """Ends all ranks together, and passes on the real reason for stopping a run.

    What makes this process a rank (variables, a process group) ends with the run; otherwise its
    next run would take it for one of several. Lightning ends the process with status 1 on Ctrl-C,
    ignoring further ones, and with 0 on SIGTERM.
    """
    launcher, on_interrupt = trainer.strategy.launcher, signal.getsignal(signal.SIGINT)
    absent = [name for name in _OF_RANKS if name not in os.environ]
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
        for name in absent:
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


def costs(expected: Mapping[str, float], seconds: Mapping[str, float]) -> dict[str, float]:
    """Returns the cost of each client's round: its last time, or an estimate in proportion.

    Example:
        >>> costs({"a": 10, "b": 20, "c": 40}, {"a": 1.0, "b": 2.0})
        {'a': 1.0, 'b': 2.0, 'c': 4.0}
    """
    if not seconds:
        return dict(expected)
    each = median(taken / expected[client] for client, taken in seconds.items())
    return {client: seconds.get(client, size * each) for client, size in expected.items()}


def assign(
    work: Mapping[str, float], ranks: int, owners: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Assigns clients to ranks so that all ranks finish at about the same time.

    The longest work is assigned first, to the rank with the least work so far. The longest rank
    then takes at most 4/3 of what the best assignment would (Graham: Bounds on multiprocessing
    timing anomalies, SIAM J. Appl. Math. 17(2), 1969). With `owners`, the current ranks, work is in
    seconds, and clients stay unless the longest rank saves a tenth of its time, and
    :data:`SECONDS`.

    Example:
        >>> assign({"a": 1, "b": 1, "c": 1}, ranks=2)
        {'a': 0, 'b': 1, 'c': 0}
        >>> assign({"a": 1, "b": 2, "c": 3}, ranks=2, owners={"a": 0, "b": 1, "c": 0})
        {'a': 1, 'b': 1, 'c': 0}
    """
    order = sorted(work, key=lambda c: -work[c])
    loads, assigned = [0.0] * ranks, {}
    for client in order:
        assigned[client] = loads.index(min(loads))
        loads[assigned[client]] += work[client]
    if owners is not None:
        steps = [sum(w for c, w in work.items() if owners[c] == rank) for rank in range(ranks)]
        if max(steps) <= max(WORTH_MOVING * max(loads), max(loads) + SECONDS):
            return {c: owners[c] for c in work}
    return {c: assigned[c] for c in work}
