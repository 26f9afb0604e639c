"""Evaluates every client's personal model, and keeps the record by which a round is selected."""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

import pytorch_lightning as pl

from medfed.federation.collect import gather_named
from medfed.federation.module import FederatedModule


class Record(NamedTuple):
    """The metrics of one client after one round."""

    round: int
    client: str
    metrics: dict[str, float]


class PersonalEvaluation(pl.Callback):
    """Gathers validation metrics per client and logs mean and worst client.

    Args:
        metric: The metric by which a round is selected, e.g. ``iou``.
        mode: ``max`` or ``min``.
    """

    def __init__(self, metric: str, mode: str = "max") -> None:
        self.metric = metric
        self.mode = mode
        self.history: list[Record] = []
        self.test: dict[str, dict[str, float]] = {}

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Appends the record of this round."""
        assert isinstance(pl_module, FederatedModule)
        metrics, number = _gather(pl_module), pl_module.next_round - 1
        self.history += [Record(number, client, m) for client, m in metrics.items()]
        values: dict[str, float] = {}
        for name in next(iter(metrics.values())):
            finite = [m[name] for m in metrics.values() if math.isfinite(m[name])]
            if finite:
                values[f"val/{name}"] = sum(finite) / len(finite)
                values[f"val/{name}_worst"] = (
                    max(finite) if smaller_is_better(name) else min(finite)
                )
        for name, value in values.items():
            pl_module.log(name, value, logger=False, sync_dist=True, batch_size=1)
        if trainer.logger:
            per_client = {
                f"val/{c}/{self.metric}": m[self.metric]
                for c, m in metrics.items()
                if math.isfinite(m[self.metric])
            }
            trainer.logger.log_metrics({**values, **per_client}, step=number)

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keeps the test metrics."""
        assert isinstance(pl_module, FederatedModule)
        self.test = _gather(pl_module)

    def best_round(self) -> int | None:
        """Returns the round with the best mean over clients; the earliest of equals."""
        rounds = sorted({r.round for r in self.history})
        scores = {n: self.score(n) for n in rounds}
        usable = {n: s for n, s in scores.items() if not math.isnan(s)}
        if not usable:
            return rounds[-1] if rounds else None
        return max(usable, key=lambda n: (usable[n], -n))

    def score(self, number: int) -> float:
        """Returns the selection score of a round, larger is better; NaN where undefined."""
        values = [r.metrics[self.metric] for r in self.history if r.round == number]
        finite = [v for v in values if math.isfinite(v)]
        if not finite:
            return math.nan
        mean = sum(finite) / len(finite)
        return mean if self.mode == "max" else -mean

    def state_dict(self) -> dict[str, Any]:
        """Returns the record, so that a resumed run selects as a straight one."""
        return {"history": [(r.round, r.client, dict(r.metrics)) for r in self.history]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Puts the record back."""
        self.history = [Record(*row) for row in state_dict["history"]]


def smaller_is_better(metric: str) -> bool:
    """Returns whether smaller values of a metric are better.

    Example:
        >>> smaller_is_better("loss"), smaller_is_better("iou/whole")
        (True, False)
    """
    return metric.split("/")[0] in {"loss", "ece", "hd95", "rmse", "mae"}


def _gather(module: FederatedModule) -> dict[str, dict[str, float]]:
    """Returns the metrics of all clients of all ranks, in the order of clients."""
    own = {c: json.dumps(m).encode() for c, m in module.evaluations.items()}
    gathered = gather_named(own, module.device)
    module.evaluations = {}
    return {c: json.loads(gathered[c]) for c in module.federation.ids if c in gathered}
