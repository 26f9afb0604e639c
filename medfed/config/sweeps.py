"""Runs every combination of the values on a command line, each in a folder: a sweep.

The runs go one by one in this process, or several at once in processes of medfed. Results are the
same.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import configure_log, setup_globals
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from medfed.common.processes import finished, worker_pool
from medfed.config import compose
from medfed.config.allowed import CONFIG_DIR
from medfed.config.spelling import literal

RECORD = "multirun.yaml"  # the folder of a sweep has this file
_LENGTH = 100  # of a folder's name, in bytes; file systems allow 255
DIED = "its process ended (killed, or out of memory?)"
_log = logging.getLogger(__name__)

Run = Callable[[DictConfig], str]
"""Runs one combination; returns what went wrong, in one sentence, or nothing."""


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
    workers: int = 0  # how many run at once, each in a process of its own; 0: one by one, here

    def __enter__(self) -> Sweep:
        self._open = ExitStack()
        place = initialize_config_dir(str(CONFIG_DIR), job_name=self.name, version_base="1.3")
        self._open.enter_context(place)
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        self._loader = hydra.config_loader
        overrides = [*self.overrides, "hydra.mode=MULTIRUN"]
        self.config: DictConfig = hydra.compose_config(
            self.name, overrides, RunMode.MULTIRUN, with_log_configuration=True
        )
        with compose.in_folder(self.config, key="hydra.sweep.dir"):
            self.folder = Path(str(self.config.hydra.runtime.output_dir))
        self.jobs = list(self._jobs())
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

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
        ended: set[int] = set()
        while rest := [job for job in self.jobs if job.number not in ended]:
            calls = (
                (job, (run_here, run, job, self.composed(job)[1], str(self.folder))) for job in rest
            )
            with worker_pool(self.workers) as pool:  # another one if a process has died
                for job, future in finished(pool, calls, self.workers):
                    ended.add(job.number)
                    has_died = isinstance(future.exception(), BrokenProcessPool)
                    yield job, DIED if has_died else future.result()

    def record(self) -> None:
        """Writes which sweep the folder holds, once it holds a run."""
        if self.folder.is_dir() and any(self.folder.iterdir()):
            OmegaConf.save(self.config, self.folder / RECORD)


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
