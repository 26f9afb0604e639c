"""Gives a run folder to one training: new or its own, locked while it trains."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from pathlib import Path

import pytorch_lightning as pl

from medfed.common.console import logged_by, output_refused
from medfed.common.processes import is_first_process
from medfed.config.description import RunDescription
from medfed.datamodules.base import FederatedDataModule
from medfed.federation.lightning.collect import gathered, rank
from medfed.records.places import BEGUN, Places, check_made, refuse_full
from medfed.standalone.errors import ConfigError, DataError, MedfedError
from medfed.standalone.files import FULL, PARTIAL, cannot_write, locked, refuse_links, writing

_MINE = (str(Places.lock), str(Places.lock_pid))
_ELSEWHERE = "choose another run folder"


@contextmanager
def locked_run_folder(config: RunDescription, logs: bool = False) -> Iterator[None]:
    """Locks a run folder for one training; the other ranks rely on the first rank's lock.

    If the run ends before it is opened, its files are removed again, and nothing else.
    """
    if rank() or not is_first_process():
        yield
        return
    folder = Path(config.folder)
    absent = [place for place in (folder, *folder.parents) if not place.exists()]
    new = config.resume is None
    made: list[str] = []
    try:
        if new:
            refuse_full(folder)
        elif Path(str(config.resume)).resolve() != folder.resolve():
            raise ConfigError(
                f"resume={config.resume} continues in that folder; leave out the other, {folder}."
            )
        else:
            check_made(config.values)
            refuse_links(*sorted(folder.iterdir()))
        with ExitStack() as lock:
            with writing(folder, _ELSEWHERE):
                folder.mkdir(parents=True, exist_ok=True)
                lock.enter_context(locked(folder, _MINE[0], wait=False))
            if new:  # checked again: another training may have held the folder in between
                refuse_full(folder)
                for path in folder.iterdir():  # of a run that was killed before it was opened
                    if path.name not in _MINE:
                        path.unlink()
                made += BEGUN
            if logs:
                log = logging.FileHandler(folder / Places.log, delay=True, encoding="utf-8")
                # A full disk stops the run where it writes its results, not here.
                log.handleError = lambda record: None  # type: ignore[method-assign]
                lock.enter_context(logged_by(log))
            yield
    except BaseException as error:
        if not (folder / Places.config_yaml).exists():
            partial = [p.name for p in folder.glob(f"{PARTIAL}*")] if made else []
            for name in [*made, *partial]:
                with suppress(OSError):
                    (folder / name).unlink()
            for place in absent:
                with suppress(OSError):  # another run may have begun there
                    place.rmdir()
        # torch.save ends a file that a full disk cut off with an error of its own.
        cause = error.__context__ if isinstance(error, RuntimeError) else error
        # medfed's loggers already report it; this error is another library's, or of what it prints.
        if (
            isinstance(cause, OSError)
            and cause.errno in FULL
            and not isinstance(error, MedfedError)
            and not output_refused(cause)
        ):
            raise cannot_write(folder, cause, _ELSEWHERE) from error
        raise


class SameEverywhere(pl.Callback):
    """Checks before training on several machines that they share the run folder and the data."""

    def __init__(self, folder: Path, data: FederatedDataModule) -> None:
        self._folder, self._data = folder, data

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compares with the first rank."""
        if trainer.num_nodes == 1:
            return
        splits = json.dumps(self._data.splits(), sort_keys=True).encode()
        sees_folder = (self._folder / Places.config_yaml).is_file()
        everywhere = gathered((sees_folder, sha256(splits).digest()))
        for number, (sees_folder, data) in enumerate(everywhere):
            if not sees_folder:
                raise DataError(
                    f"The machine of rank {number} does not see the run folder {self._folder}; "
                    "name one on a disk that all machines share, by hydra.run.dir=FOLDER."
                )
            if data != everywhere[0][1]:
                raise DataError(
                    f"The data on the machine of rank {number} differ from those of rank 0; give "
                    "all machines the same files under the same path."
                )
