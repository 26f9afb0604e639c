"""Looks at where Hydra will make folders, before it makes any."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from medfed.commands.door import as_the_user_asked, one_sentence
from medfed.common.errors import MedfedError
from medfed.common.folders import SWEEP, Before, refuse_full
from medfed.common.launched import is_first_process


class Watch(Callback):
    """Refuses a folder that is not empty, and keeps what was there before.

    Hydra itself only makes the run folder and writes the record of a sweep; whatever else a run
    folder holds is written once the run has claimed it.
    """

    seen: ClassVar[Before | None] = None

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Looks at the folder of a single run."""
        with _answered(), _resolving(config):
            folder = Path(str(OmegaConf.select(config, "hydra.run.dir")))
            if config.resume is None and is_first_process():
                refuse_full(folder)
            Watch.seen = Before.of(folder)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Looks at the folder of a sweep, which an earlier sweep may have left."""
        with _answered(), _resolving(config):
            folder = Path(str(OmegaConf.select(config, "hydra.sweep.dir")))
            refuse_full(folder, known_by=SWEEP)
            Watch.seen = Before.of(folder)


@contextmanager
def _answered() -> Iterator[None]:
    """Ends the program at a mistake, which Hydra would only warn of."""
    try:
        with as_the_user_asked(), one_sentence():
            yield
    except MedfedError:  # HYDRA_FULL_ERROR=1
        traceback.print_exc()
        sys.exit(1)


@contextmanager
def _resolving(config: DictConfig) -> Iterator[None]:
    """Lets ``${hydra:…}`` find its values already now."""
    hydra = HydraConfig.instance()
    before = hydra.cfg
    hydra.set_config(config)
    try:
        yield
    finally:
        hydra.cfg = before
