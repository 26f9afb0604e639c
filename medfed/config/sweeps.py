"""Runs every combination of the values on a command line, each in a folder: a sweep.

The runs go one by one in this process, several at once in processes of medfed, or as jobs of SLURM by
Hydra's launcher ``submitit_slurm``. Results are the same.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import NamedTuple

from hydra import initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, configure_log, setup_globals
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from medfed.common.processes import worker_pool
from medfed.config import compose
from medfed.config.allowed import CONFIG_DIR
from medfed.config.spelling import literal
from medfed.standalone.errors import ConfigError, did_you_mean, first_line

RECORD = "multirun.yaml"  # the folder of a sweep has this file
WORKERS = "sweep.workers"
MOST_WORKERS = 64
# What each launcher is called by pip, and the module in which Hydra finds it.
LAUNCHERS = {
    "submitit_slurm": ("hydra-submitit-launcher", "hydra_plugins.hydra_submitit_launcher"),
}
_SETTING = re.compile(r"hydra\.launcher\.[a-z]\w*(\.\w+)*=.*", re.DOTALL)
_KEY_OF_LAUNCHER = "hydra/launcher="
_LENGTH = 100  # of a folder's name, in bytes; file systems allow 255
DIED = "its process ended (killed, or out of memory?)"
_log = logging.getLogger(__name__)

Run = Callable[[DictConfig], str]
"""Runs one combination; returns what went wrong, in one sentence, or nothing."""


@dataclass(frozen=True)
class Engine:
    """What runs the combinations of a sweep."""

    workers: int = 0  # how many run at once, each in a process of its own; 0: one by one, here
    launcher: str = ""  # one of :data:`LAUNCHERS`; empty: none
    settings: tuple[str, ...] = ()  # overrides of the launcher's keys

    @property
    def named(self) -> str:
        """The argument that chose it; empty for the usual one."""
        if self.launcher:
            return _KEY_OF_LAUNCHER + self.launcher
        return f"{WORKERS}={self.workers}" if self.workers else ""

    @classmethod
    def of(cls, arguments: Sequence[str]) -> tuple[Engine, list[str]]:
        """Takes the arguments that choose an engine from a command line.

        Example:
            >>> Engine.of(["-m", "seed=0,1", "sweep.workers=2"])
            (Engine(workers=2, launcher='', settings=()), ['-m', 'seed=0,1'])
            >>> Engine.of(["sweep.worker=2"])
            Traceback (most recent call last):
            ...
            medfed.standalone.errors.ConfigError: Unknown key 'sweep.worker' (did you mean \
sweep.workers?); sweep has workers.
        """
        workers, launcher, settings, others = 0, "", [], []
        for argument in arguments:
            key, _, value = argument.partition("=")
            if key.startswith("sweep."):
                workers = _workers(key, value)
            elif argument.startswith(_KEY_OF_LAUNCHER):
                launcher = _launcher(value)
            elif _SETTING.fullmatch(argument):
                settings.append(argument)
            else:
                others.append(argument)
        if launcher and workers:
            raise ConfigError(
                f"{WORKERS} and hydra/launcher are two ways to run a sweep; leave one out."
            )
        if settings and not launcher:
            raise ConfigError(f"{settings[0]} needs a launcher; add {_KEY_OF_LAUNCHER}submitit_slurm.")
        return cls(workers, launcher, tuple(settings)), others


def _workers(key: str, value: str) -> int:
    if key != WORKERS:
        raise ConfigError(f"Unknown key {key!r}{did_you_mean(key, [WORKERS])}; sweep has workers.")
    if not (value.isdecimal() and 1 <= int(value) <= MOST_WORKERS):
        raise ConfigError(f"{key} must be a whole number from 1 to {MOST_WORKERS}, not {value}.")
    return int(value)


def _launcher(name: str) -> str:
    if name == "basic":
        return ""
    if name not in LAUNCHERS:
        raise ConfigError(
            f"{_KEY_OF_LAUNCHER}{name} is unknown{did_you_mean(name, LAUNCHERS)}; choose one of "
            f"{', '.join(LAUNCHERS)}, or {WORKERS}=N."
        )
    package, module = LAUNCHERS[name]
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        raise ConfigError(
            f"{_KEY_OF_LAUNCHER}{name} needs the package {package}: pip install {package}. "
            f"Without it, {WORKERS}=N runs N at once on this machine."
        )
    if shutil.which("sbatch") is None:
        raise ConfigError(
            f"{_KEY_OF_LAUNCHER}{name} needs SLURM, but this machine has no sbatch; start the "
            f"sweep on the cluster, or use {WORKERS}=N."
        )
    return name


class Job(NamedTuple):
    """One run of a sweep: a combination of the values."""

    number: int  # from 0, in the order of the combinations
    values: tuple[str, ...]  # the overrides in which it differs from others
    overrides: tuple[str, ...]  # all its overrides


@dataclass
class Sweep:
    """The combinations of a command line, ready to run; a context manager, as Hydra is open."""

    overrides: Sequence[str]
    name: str
    engine: Engine = field(default_factory=Engine)

    def __enter__(self) -> Sweep:
        self._open = ExitStack()
        place = initialize_config_dir(str(CONFIG_DIR), job_name=self.name, version_base="1.3")
        self._open.enter_context(place)
        overrides = [*self.overrides, "hydra.mode=MULTIRUN"]
        config = self._compose(overrides)
        with compose.in_folder(config, key="hydra.sweep.dir"):
            self.folder = Path(str(config.hydra.runtime.output_dir))
        if self.engine.launcher:
            config = self._with_launcher(overrides)
        self.config = config
        self.jobs = list(self._jobs())
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _compose(self, overrides: Sequence[str]) -> DictConfig:
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        self._loader = hydra.config_loader
        config: DictConfig = hydra.compose_config(
            self.name, list(overrides), RunMode.MULTIRUN, with_log_configuration=True
        )
        return config

    def _with_launcher(self, overrides: Sequence[str]) -> DictConfig:
        # Else each process would give the folder the time of its own start.
        fixed = f"hydra.sweep.dir={literal(str(self.folder))}"
        chosen = [*overrides, fixed, _KEY_OF_LAUNCHER + self.engine.launcher]
        known = [f"hydra.launcher.{key}" for key in self._compose(chosen).hydra.launcher]
        for key in (setting.partition("=")[0] for setting in self.engine.settings):
            if not key.startswith(tuple(known)):
                raise ConfigError(
                    f"Unknown key {key!r}{did_you_mean(key, known)}; {self.engine.launcher} has "
                    f"{', '.join(name.rpartition('.')[2] for name in known if '._' not in name)}."
                )
        mark = hashlib.sha256(os.fsencode(self.folder)).hexdigest()[:8]
        chosen.append(f"hydra.launcher.name=medfed-{mark}")  # by which its jobs can be ended
        try:
            return self._compose([*chosen, *self.engine.settings])
        except (HydraException, OmegaConfBaseException) as error:
            settings = " ".join(self.engine.settings)
            raise ConfigError(f"{settings} cannot be used: {first_line(error)}.") from error

    def _jobs(self) -> Iterator[Job]:
        config = self.config
        lines = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
        typed = compose.parse(
            [*lines, *compose.as_typed(config.hydra.overrides.task)], "The command line"
        )
        values = {override.get_key_element(): compose.values_of(override) for override in typed}
        swept = {key for key, each in values.items() if len(each) > 1}
        named = any(o.startswith("hydra.job.name=") for o in self.overrides)
        for number, each in enumerate(itertools.product(*values.values())):
            differing = tuple(one for key, one in zip(values, each, strict=True) if key in swept)
            name = () if named else (f"hydra.job.name={literal(folder_name(differing))}",)
            yield Job(number, differing, (*each, *name))

    def composed(self, job: Job) -> tuple[list[str], DictConfig]:
        """Returns the overrides of one run, with those of its data and method, and its config."""
        composing = partial(self._loader.load_sweep_config, self.config)
        overrides = compose.for_other_data(job.overrides, composing)
        config = composing(overrides)
        if more := compose.of_the_method(config, overrides):
            overrides += more
            config = composing(overrides)
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = job.number
        return overrides, config

    def outcomes(self, run: Run) -> Iterator[tuple[Job, str]]:
        """Runs all combinations, and yields each with what went wrong, as soon as it ends."""
        if self.engine.launcher:
            yield from self._launched(run)
            return
        waiting = self.jobs[::-1]
        running: dict[Future[str], Job] = {}
        while waiting or running:  # once more if a process has died
            with worker_pool(self.engine.workers) as pool:
                try:
                    while waiting or running:
                        while waiting and len(running) < max(1, self.engine.workers):
                            _, config = self.composed(waiting[-1])
                            future = pool.submit(
                                run_here, run, waiting[-1], config, str(self.folder)
                            )
                            running[future] = waiting.pop()
                        # Ctrl-C may reach another thread, and a wait without end would not see it.
                        for future in wait(running, 1.0, FIRST_COMPLETED).done:
                            why = future.result()
                            yield running.pop(future), why
                except BrokenProcessPool:  # which of them has died, the pool does not say
                    for future, job in running.items():
                        whole = future.done() and future.exception() is None
                        yield job, future.result() if whole else DIED
                    running.clear()

    def _launched(self, run: Run) -> Iterator[tuple[Job, str]]:
        callbacks = Callbacks(self.config)
        context = HydraContext(config_loader=self._loader, callbacks=callbacks)
        launcher = Plugins.instance().instantiate_launcher(
            hydra_context=context, task_function=run, config=self.config
        )
        lines = [self.composed(job)[0] for job in self.jobs]
        logging.getLogger("hydra_plugins").setLevel(logging.WARNING)
        # One submission each: that of all would end with the first job that SLURM ends.
        results: SimpleQueue[tuple[Job, str]] = SimpleQueue()
        free = Semaphore(self.config.hydra.launcher.get("array_parallelism") or len(lines))

        def submit(job: Job, overrides: list[str]) -> None:
            with free:
                try:
                    (done,) = launcher.launch([overrides], initial_job_idx=job.number)
                    results.put((job, _result(done)))
                except Exception as error:
                    results.put((job, first_line(error)))

        for each in zip(self.jobs, lines, strict=True):
            Thread(target=submit, args=each, daemon=True).start()
        try:
            for _ in lines:
                yield results.get()
        except BaseException:
            with suppress(OSError):
                name = self.config.hydra.launcher.name
                subprocess.run(["scancel", f"--name={name}"], check=False)
            raise

    def record(self) -> None:
        """Writes which sweep the folder holds, once it holds a run."""
        if self.folder.is_dir() and any(self.folder.iterdir()):
            OmegaConf.save(self.config, self.folder / RECORD)


def _result(done: JobReturn) -> str:
    if done.status is JobStatus.COMPLETED:
        return str(done.return_value)
    return first_line(done._return_value)


def run_here(run: Run, job: Job, config: DictConfig, folder: str) -> str:
    """Runs one combination in this process, with Hydra's values and log."""
    setup_globals()
    with compose.in_folder(config, folder, "hydra.sweep.subdir"):
        configure_log(config.hydra.job_logging, config.hydra.verbose)
        _log.info("Run %d of the sweep: %s", job.number, " ".join(job.values))
        return run(config)


def folder_name(values: Sequence[str]) -> str:
    """Returns the name of a run's folder, which every shell and command takes as it is.

    Example:
        >>> folder_name(["algorithm=fedavg", "codec@codec.up=stc", "optimizer.lr=0.1"])
        'algorithm-fedavg_codec.up-stc_optimizer.lr-0.1'
        >>> folder_name(["data.features=[Größe, Alter]"]), folder_name([])
        ('data.features-Größe-Alter', 'run')
    """
    pairs = (value.partition("=")[::2] for value in values)
    words = (f"{key.lstrip('+~').rpartition('@')[2]}={value}" for key, value in pairs)
    name = "_".join(re.sub(r"[^\w.+-]+", "-", word).strip("-.") for word in words) or "run"
    return os.fsencode(name)[:_LENGTH].decode(errors="ignore").strip("-._")
