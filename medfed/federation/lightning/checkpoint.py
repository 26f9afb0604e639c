"""Writes a checkpoint per round, whole or not at all, and finds the last whole one."""

# Callbacks of rounds go with a FederatedModule alone.
# mypy: disable-error-code="override"

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Checkpoint
from pytorch_lightning.plugins import TorchCheckpointIO

from medfed.common.schemas import Count, fit
from medfed.common.untrusted import read_checkpoint
from medfed.standalone.errors import CheckpointError
from medfed.standalone.files import sha256, whole_or_none, write_text

if TYPE_CHECKING:
    from medfed.federation.lightning.callbacks import PersonalEvaluation
    from medfed.federation.lightning.module import FederatedModule

_log = logging.getLogger(__name__)
BEST = "best.ckpt"


class _Federation(TypedDict):
    """The content that `FederatedModule.on_save_checkpoint` writes."""

    algorithm: str
    next_round: Count
    steps: dict[str, Count]
    passes: dict[str, tuple[Count, Count]]
    server: dict[str, Any]
    memory: dict[str, Any]
    clients: dict[str, dict[str, Any]]
    ledger: bytes


class _Checkpoint(TypedDict):
    federation: _Federation


class RoundCheckpoint(Checkpoint):
    """Saves by round, not by optimizer step: some algorithms take no such steps.

    No dataclass: Hydra, which passes callbacks on to the trainer, would take it for configuration.
    It keeps at least two rounds, so that a damaged file has a predecessor.
    """

    def __init__(
        self,
        folder: str | Path,
        keep: int = 2,
        every: int = 1,
        evaluation: PersonalEvaluation | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.keep = max(2, keep)
        self.every = max(1, every)
        self.evaluation = evaluation

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: FederatedModule) -> None:
        """Saves the round that has closed; a collective call."""
        number = pl_module.next_round - 1
        best = self.evaluation is not None and self.evaluation.best_round() == number
        due = pl_module.next_round % self.every == 0 or pl_module.next_round == trainer.max_epochs
        if not (due or best or trainer.should_stop):
            return
        path = self.folder / f"round_{number:05d}.ckpt"
        partial = path.with_suffix(".partial")
        if trainer.is_global_zero:
            # After a kill it may be one file with the best checkpoint.
            partial.unlink(missing_ok=True)
        with whole_or_none(path, partial):
            trainer.save_checkpoint(partial)
            if trainer.is_global_zero:
                self._seal(partial, path, best)
        trainer.strategy.barrier("round_checkpoint")

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Removes files of earlier rounds that a kill after the last checkpoint has left."""
        if trainer.is_global_zero:
            self._forget()

    def _seal(self, partial: Path, path: Path, best: bool) -> None:
        if not partial.is_file():  # Lightning does not report a folder without write permission
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        sha = sha256(partial)
        if best:
            # Before the round's file: a kill in between repeats the round and seals it again.
            link = self.folder / f"{BEST}.partial"
            link.unlink(missing_ok=True)
            os.link(partial, link)
            seal(link, self.folder / BEST, sha)
        seal(partial, path, sha)
        self._forget()

    def _forget(self) -> None:
        for old in rounds_in(self.folder)[: -self.keep]:
            digest_file(old).unlink(missing_ok=True)
            old.unlink()


class InPlace(TorchCheckpointIO):
    """Writes a checkpoint to its folder, under a partial name that :func:`seal` completes.

    Lightning writes to the system's temporary folder first, where a kill leaves the file for ever.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Writes a checkpoint."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with Path(path).open("wb") as file:
            torch.save(checkpoint, file)

    def load_checkpoint(self, path: str | Path, *args: Any, **more: Any) -> dict[str, Any]:
        """Memory-maps a checkpoint, so that only the used parts take memory."""
        mapped: dict[str, Any] = read_checkpoint(Path(path), mmap=os.name == "posix")
        return mapped


def digest_file(path: Path) -> Path:
    """Returns the path of a checkpoint's hash, which is written after the checkpoint."""
    return path.with_name(path.name + ".sha256")


def seal(partial: Path, path: Path, sha: str | None = None) -> None:
    """Renames a finished file, then writes its hash; a kill in between leaves it unsealed."""
    sha = sha or sha256(partial)
    digest_file(path).unlink(missing_ok=True)
    os.replace(partial, path)
    write_text(digest_file(path), sha)


def save_sealed(content: object, path: Path) -> None:
    """Writes content that ``weights_only=True`` can read, whole or not at all."""
    partial = path.with_suffix(".partial")
    try:
        torch.save(content, partial)
        seal(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def is_whole(path: Path) -> bool:
    """Returns whether a checkpoint exists and is unchanged."""
    sealed = digest_file(path)
    return path.is_file() and sealed.is_file() and sealed.read_bytes() == sha256(path).encode()


def check_federation(path: Path) -> None:
    """Checks a checkpoint's content, without reading its tensors' values."""
    content = read_checkpoint(path, map_location="meta")
    try:
        fit(content, _Checkpoint)
    except ValueError as error:
        raise CheckpointError(
            f"{path} is no checkpoint of a medfed run ({error}); resume or repeat the run."
        ) from error


def rounds_in(folder: Path) -> list[Path]:
    """Returns the checkpoints of rounds, oldest first."""
    return sorted(folder.glob("round_*.ckpt"))


def last_whole(folder: Path) -> Path | None:
    """Returns the latest whole checkpoint; logs and skips damaged ones."""
    rounds = rounds_in(folder)
    for path in reversed(rounds):
        if is_whole(path):
            check_federation(path)
            return path
        _log.warning("%s is damaged or unfinished; the run uses the checkpoint before it.", path)
    if rounds:
        raise CheckpointError(
            f"Every checkpoint in {folder} is damaged; start the run again without resume."
        )
    return None
