"""Regression of one continuous outcome."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics.functional.regression import (
    mean_absolute_error,
    mean_squared_error,
    r2_score,
)

from medfed.errors import ConfigError
from medfed.models.losses import l2_penalty
from medfed.models.metrics import Criterion
from medfed.models.networks.canonical import Activation
from medfed.models.task import Batch, TaskModule

REGRESSION_METRICS = ("rmse", "mae", "r2")


class RegressionTask(TaskModule):
    """Mean squared error, in the square of the outcome's unit.

    Batches: ``image (B, F)`` features, ``label (B,)`` float outcomes. Metrics: ``loss rmse mae``
    (of the outcome's unit, the loss of its square) and ``r2``. Canonical models mix their outputs
    as they are, so for a linear model mixing outputs and mixing parameters are the same.

    Args:
        network: From ``image`` to ``(B, 1)``.
        optimizer: Partial of an optimizer.
        scheduler: Partial of a schedule, or None.
        l2: The training loss gains ``l2 / 2`` times the squared norm of all weights except biases;
            the ``loss`` metric does not.
        personal: Patterns of personal names, None for the network's default.
        selection: Metric and mode that choose a model.

    Raises:
        ConfigError: If ``l2`` is negative.
    """

    activation: ClassVar[Activation] = "identity"

    def __init__(
        self,
        network: nn.Module,
        optimizer: Callable[..., Optimizer],
        scheduler: Callable[[Optimizer], Any] | None = None,
        *,
        l2: float = 0.0,
        personal: Sequence[str] | None = None,
        selection: Sequence[str] = ("rmse", "min"),
    ) -> None:
        if l2 < 0:
            raise ConfigError(f"l2 must not be negative, not {l2}.")
        super().__init__(network, optimizer, scheduler, personal=personal, selection=selection)
        self.l2 = l2

    def criterion(self, logits: Tensor, label: Tensor) -> Tensor:
        """Returns the mean squared error of predictions ``(B, 1)`` and outcomes ``(B,)``.

        Raises:
            ValueError: If the labels are classes, or not one per prediction.
        """
        if not label.is_floating_point() or logits.shape != (*label.shape, 1):
            raise ValueError("a regression needs one continuous outcome per sample")
        return F.mse_loss(logits.squeeze(1), label.to(logits))

    def loss(self, batch: Batch) -> Tensor:
        """Returns the penalised training loss."""
        loss = super().loss(batch)
        return loss if self.l2 == 0 else loss + l2_penalty(self.network, self.l2)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Returns the predictions as they are."""
        return logits

    def meter(self, *, test: bool = False) -> RegressionMeter:
        """Returns an empty meter."""
        return RegressionMeter(self.criterion)


class RegressionMeter:
    """Gathers the predictions and outcomes of one split.

    Args:
        criterion: The loss of predictions ``(N, 1)`` and outcomes ``(N,)``.
    """

    def __init__(self, criterion: Criterion) -> None:
        self.criterion = criterion
        self.predictions: list[Tensor] = []
        self.outcomes: list[Tensor] = []

    def update(self, logits: Tensor, batch: Mapping[str, Tensor]) -> None:
        """Adds predictions ``(B, 1)`` and the ``label`` of the batch, outcomes ``(B,)``."""
        self.predictions.append(logits.detach().float())
        self.outcomes.append(batch["label"])

    def compute(self) -> dict[str, float]:
        """Returns ``loss`` and :func:`regression_metrics` of all batches together."""
        if not self.outcomes:
            return dict.fromkeys(("loss", *REGRESSION_METRICS), math.nan)
        predictions, outcomes = torch.cat(self.predictions), torch.cat(self.outcomes)
        loss = self.criterion(predictions, outcomes).item()
        return {"loss": loss} | regression_metrics(predictions.squeeze(1), outcomes)


def regression_metrics(predictions: Tensor, outcomes: Tensor) -> dict[str, float]:
    """Root mean squared error, mean absolute error and coefficient of determination of one split.

    Args:
        predictions: ``(N,)``.
        outcomes: ``(N,)``, in the same unit.

    Returns:
        ``rmse`` and ``mae`` in that unit; ``r2``, 1 for a perfect prediction, 0 for the split's own
        mean, NaN where all outcomes are equal. Computed in double precision.

    Example:
        >>> regression_metrics(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([1.0, 2.0, 3.0]))["mae"]
        1.0
    """
    if len(outcomes) == 0:
        return dict.fromkeys(REGRESSION_METRICS, math.nan)
    found, true = predictions.double(), outcomes.double()
    spread = bool((true != true[0]).any())
    return {
        "rmse": mean_squared_error(found, true, squared=False).item(),
        "mae": mean_absolute_error(found, true).item(),
        "r2": r2_score(found, true).item() if spread else math.nan,
    }
