"""Stops a run whose validation score no longer improves."""

from __future__ import annotations

import pytorch_lightning as pl
from pytorch_lightning.callbacks import EarlyStopping

from medfed.federation.callbacks.evaluation import PersonalEvaluation


class Patience(EarlyStopping):
    """Lightning's early stopping, which a resumed run remembers.

    Args:
        evaluation: Gives metric and mode.
        patience: Evaluations without improvement after which the run stops.
    """

    def __init__(self, evaluation: PersonalEvaluation, patience: int) -> None:
        super().__init__(
            f"val/{evaluation.metric}",
            patience=patience,
            mode=evaluation.mode,
            strict=False,  # the metric may be undefined at all clients
            check_on_train_epoch_end=False,
        )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Trains no further where the run to be continued had stopped."""
        if self.wait_count >= self.patience:
            trainer.should_stop = True
