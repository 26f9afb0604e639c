"""Opens a round when the epoch starts and exchanges messages where phases end."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl

from medfed.federation.module import FederatedModule
from medfed.federation.schedule import Task


class FederatedRounds(pl.Callback):
    """Carries out the rounds; the round is closed before Lightning validates."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Opens the round."""
        assert isinstance(pl_module, FederatedModule)
        pl_module.open_round = pl_module.federation.open(pl_module.next_round)
        pl_module.packets = {}

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Task,
        batch_idx: int,
    ) -> None:
        """Exchanges replies at the end of a phase."""
        assert isinstance(pl_module, FederatedModule)
        if batch.closes and not pl_module.exchange():
            pl_module.open_round = None
            pl_module.next_round += 1
