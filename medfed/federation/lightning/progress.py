"""Shows the round, the phase, the client, its loss and the time left."""

from __future__ import annotations

import sys
import time

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ProgressBar
from rich.console import Console
from rich.progress import Progress, TaskID, TextColumn

from medfed.common.names import cell
from medfed.common.progress import bar
from medfed.federation.lightning.callbacks import PersonalEvaluation
from medfed.federation.lightning.collect import world_size
from medfed.federation.lightning.module import FederatedModule


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
        pl_module.told.append(lambda *found: self._told(pl_module, *found))
        rounds = trainer.max_epochs or 0
        self._task = self._bar.add_task(
            "",
            total=_visits(pl_module, self._first) * (rounds - self._first),
            round=self._first + 1,
            rounds=rounds,
            phase="",
            client="",
            loss="",
            score="",
        )
        self._bar.start()

    def _told(self, module: FederatedModule, phase: str, client: str, done: bool) -> None:
        """Names the client that starts to work, and shows the loss of one that has finished."""
        if not self._bar:
            return
        if not done:
            number = module.next_round + 1
            self._bar.update(self._task, round=number, phase=phase, client=cell(client))
            return
        loss = module.federation.clients[client].loss
        # The other ranks have probably come as far.
        text = "" if loss is None else f"loss {loss:.4f}"
        self._bar.update(self._task, advance=world_size(), loss=text)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Says how much is done on all ranks."""
        assert isinstance(pl_module, FederatedModule)
        if self._bar:
            done = pl_module.next_round - self._first
            self._bar.update(self._task, completed=_visits(pl_module, self._first) * done)

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
            found = [pl_module.federation.clients[c].loss for c in pl_module.owned]
            losses = [loss for loss in found if loss is not None]
            # Across sites the losses stay there.
            loss = f"loss {sum(losses) / len(losses):.4f}  " if losses else ""
            self.console.print(
                f"round {done}/{rounds}  {loss}{score}  {spent:.0f} s, about {left:.0f} s left",
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


def _visits(module: FederatedModule, round: int) -> int:
    """How often a client works in a round."""
    federation = module.federation
    return len(federation.algorithm.phases(round)) * len(federation.members(round))
