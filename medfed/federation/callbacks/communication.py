"""Logs what has travelled, and what the server says of its own work."""

from __future__ import annotations

import pytorch_lightning as pl

from medfed.federation.module import FederatedModule


class CommunicationLogger(pl.Callback):
    """Logs, by direction, the bytes of each round and of the run so far, and what is saved.

    ``bytes/up_savings`` is how many times fewer bytes the run has sent than fp32 would have.
    """

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Logs the round that has closed."""
        assert isinstance(pl_module, FederatedModule)
        if not trainer.logger:
            return
        ledger, number = pl_module.federation.ledger, pl_module.next_round - 1
        so_far = ledger.totals("direction")
        latest = [e for e in ledger.entries if e.round == number]
        metrics: dict[str, float] = {}
        for direction in ("up", "down"):
            metrics[f"bytes/{direction}_total"] = so_far.get((direction,), 0)
            metrics[f"bytes/{direction}_savings"] = ledger.savings(direction=direction)
            metrics[f"bytes/{direction}"] = sum(e.bytes for e in latest if e.direction == direction)
        for name, value in pl_module.federation.server.get("diagnostics", {}).items():
            metrics[f"server/{name}"] = float(value)
        trainer.logger.log_metrics(metrics, step=number)
