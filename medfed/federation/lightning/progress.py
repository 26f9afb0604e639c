"""Shows the round, the phase, the client, its loss and the time left."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ProgressBar
from rich.console import Console
from rich.progress import Progress, TaskID, TextColumn

from medfed.common.names import cell
from medfed.common.progress import bar
from medfed.federation.lightning.callbacks import PersonalEvaluation
from medfed.federation.lightning.module import FederatedModule
from medfed.federation.lightning.schedule import Task


class RoundProgress(ProgressBar):
    """A rich bar on a terminal; one line per evaluated round elsewhere.

    Args:
        evaluation: Gives the validation score that is shown.
        console: Where to write; standard error by default.
    """

    def __init__(self, evaluation: PersonalEvaluation, console: Console | None = None) -> None:
        super().__init__()
        self.evaluation = evaluation
        self.console = console or Console(file=sys.stderr)
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._losses: dict[str, float] = {}
        self._began, self._first = time.monotonic(), 0

    def disable(self) -> None:
        """Shows nothing: called by Lightning on all ranks but the first."""
        self.console.quiet = True

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Starts the bar at the round at which the run begins or resumes."""
        assert isinstance(pl_module, FederatedModule)
        self._began, self._first = time.monotonic(), pl_module.next_round
        if not self.console.is_terminal or self.console.quiet:
            return
        self._bar = bar(
            self.console,
            "round {task.fields[round]}/{task.fields[rounds]}",
            24,
            TextColumn("{task.fields[phase]:<9} {task.fields[client]:<14} {task.fields[loss]:<13}"),
            TextColumn("{task.fields[score]}"),
        )
        per_round = len(pl_module.tasks(pl_module.next_round))
        rounds = trainer.max_epochs or 0
        self._task = self._bar.add_task(
            "",
            total=per_round * (rounds - self._first),
            round=self._first + 1,
            rounds=rounds,
            phase="",
            client="",
            loss="",
            score="",
        )
        self._bar.start()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Task, batch_idx: int
    ) -> None:
        """Names the client that starts to work."""
        if self._bar:
            self._bar.update(
                self._task,
                round=batch.round + 1,
                phase=batch.phase,
                client=cell(batch.client or "-"),
            )

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Task,
        batch_idx: int,
    ) -> None:
        """Shows the loss of the client that has finished."""
        assert isinstance(pl_module, FederatedModule)
        loss = pl_module.federation.clients[batch.client].loss if batch.client else None
        if loss is not None and batch.client:
            self._losses[batch.client] = loss
        if self._bar:
            text = "" if loss is None else f"loss {loss:.4f}"
            self._bar.update(self._task, advance=1, loss=text)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Shows the validation score, or writes the round's line."""
        assert isinstance(pl_module, FederatedModule)
        value = trainer.callback_metrics.get(f"val/{self.evaluation.metric}")
        score = "" if value is None else f"val {self.evaluation.metric} {float(value):.4f}"
        if self._bar:
            self._bar.update(self._task, score=score)
        elif self.console.quiet is False:
            done, rounds = pl_module.next_round, trainer.max_epochs or 0
            spent = time.monotonic() - self._began
            left = spent / max(1, done - self._first) * (rounds - done)
            loss = sum(self._losses.values()) / max(1, len(self._losses))
            self.console.print(
                f"round {done}/{rounds}  loss {loss:.4f}  {score}  "
                f"{spent:.0f} s, about {left:.0f} s left",
                highlight=False,
            )

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ends the bar."""
        self._stop()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Ends the bar, so that the error is readable."""
        self._stop()

    def _stop(self) -> None:
        if self._bar:
            self._bar.stop()
            self._bar = None
