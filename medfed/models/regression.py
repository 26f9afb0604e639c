"""Regression of one continuous outcome.

The network predicts in standard units: its output times a deviation, plus a mean, is the prediction
in the outcome's unit. So the same learning rate works for days and millilitres, and a method with
steps of fixed length reaches the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, Unpack

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medfed.functional.scores import OUTCOME_SCORES, Floats, outcome_scores
from medfed.models.custom_losses import CustomLoss, Tried, check_loss, value_of
from medfed.models.meters import Batch, Columns, WholeSplit, plain
from medfed.models.task import MakeOptimizer, MakeScheduler, TaskModule, TaskOptions
from medfed.standalone.checks import checked_scale
from medfed.standalone.errors import ConfigError
from medfed.standalone.inference import OutcomeInference
from medfed.standalone.mixture import Activation


class RegressionTask(TaskModule):
    """Mean squared error, in squared deviations of the outcome, or the user's loss.

    Batches: ``image (B, F)`` features, ``label (B,)`` float outcomes in their unit. Metrics: ``rmse
    mae`` in that unit, ``r2``, and ``loss``. Canonical models mix their outputs as they are, so for
    a linear model mixing outputs and mixing parameters are the same.

    The network gives ``(B, 1)``, in standard units.

    Args:
        network: As in :class:`medfed.models.task.TaskModule`.
        optimizer: As there.
        scheduler: As there.
        loss: A callable that is given predictions and outcomes, both ``(B,)`` floats in the
            outcome's unit; ``poisson`` for the likelihood of counts, whose predictions must be
            positive; None for the squared error.
        scale: Mean and deviation of the outcome; None: the network answers in its unit.
        more: As there: ``personal``, ``selection``, ``metrics``, ``l2``.

    Raises:
        ConfigError: If the scale is not a finite mean and a deviation above 0, or the loss is
            unknown.

    Example:
        >>> import torch
        >>> task = RegressionTask(torch.nn.Linear(1, 1), torch.optim.SGD, scale=(450, 60))
        >>> days = task.probabilities(torch.tensor([[0.0], [1.0]]))
        >>> days.tolist(), task.criterion(torch.ones(1, 1), torch.tensor([450.0])).item()
        ([[450.0], [510.0]], 1.0)
    """

    activation: Activation = "identity"
    default_selection: ClassVar[tuple[str, str]] = ("rmse", "min")

    def __init__(
        self,
        network: nn.Module,
        optimizer: MakeOptimizer,
        scheduler: MakeScheduler | None = None,
        *,
        loss: CustomLoss | Literal["poisson"] | None = None,
        scale: Sequence[float] | None = None,
        **more: Unpack[TaskOptions],
    ) -> None:
        self.mean, self.deviation = checked_scale(scale or (0.0, 1.0), "model.scale")
        self.inference = OutcomeInference(self.mean, self.deviation)
        super().__init__(network, optimizer, scheduler, **more)
        self.poisson = loss == "poisson"
        self.custom_loss = None if isinstance(loss, str) else loss
        if isinstance(loss, str) and not self.poisson:
            raise ConfigError(f"model.loss={loss} is unknown; choose poisson, or null.")

    def criterion(self, logits: Tensor, label: Tensor) -> Tensor:
        """Returns the loss of outputs ``(B, 1)`` and outcomes ``(B,)``.

        Raises:
            ValueError: If the labels are classes, or not one per prediction.
        """
        if not label.is_floating_point() or logits.shape != (*label.shape, 1):
            raise ValueError("a regression needs one continuous outcome per sample")
        predictions = logits.squeeze(1)
        if self.poisson:
            if bool((label < 0).any()):
                raise ValueError("model.loss=poisson is for counts, and an outcome is negative")
            means = self.probabilities(predictions)
            return F.poisson_nll_loss(means, label.to(logits), log_input=False)
        if self.custom_loss is not None:
            return value_of(self.custom_loss, self.probabilities(predictions), label.to(logits))
        # In the label's precision: its mean may be far larger than its deviation.
        return F.mse_loss(predictions, ((label - self.mean) / self.deviation).to(logits))

    def check_parts(self, batch: Batch) -> None:
        """See the base class."""
        outcome = torch.linspace(-1, 1, 8)
        worse = (outcome + 3, outcome + 0.5, outcome - 0.5)
        what = "predictions (B,) and outcomes (B,) in its unit"
        if self.custom_loss is not None:
            check_loss(self.custom_loss, Tried(outcome.clone(), worse, outcome, what))
        super().check_parts(batch)

    def metric_inputs(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """See the base class: predictions and outcomes, both ``(N,)``."""
        return self.probabilities(logits.squeeze(1)), batch["label"].to(logits)

    def measurable(self, batch: Batch) -> Tried:
        """See the base class."""
        outcome = torch.linspace(-1, 1, 8)
        return Tried(outcome.clone(), (outcome.flip(0) + 1,), outcome, "predictions")

    def meter(self, *, test: bool = False) -> WholeSplit:
        """Returns an empty meter."""
        return WholeSplit(
            self.criterion,
            OUTCOME_SCORES,
            lambda z, y: regression_metrics(self.probabilities(z.squeeze(1)), y),
            lambda z: {"prediction": self.probabilities(z.squeeze(1))},
        )

    def scores(self, cases: Columns, weights: Floats) -> dict[str, Floats]:
        """See the base class."""
        return outcome_scores(cases["prediction"], cases["label"], weights)

    def constants(self, cases: Columns, training: Batch) -> dict[str, Columns]:
        """Returns the cases with the mean training outcome as prediction."""
        mean = training["label"].double().mean().item()
        return {"constant": {**cases, "prediction": np.full(len(cases["label"]), mean)}}


def regression_metrics(predictions: Tensor, outcomes: Tensor) -> dict[str, float]:
    """Root mean squared error, mean absolute error and coefficient of determination of one split.

    `predictions` is ``(N,)``. `outcomes` is ``(N,)``, in the same unit.

    Example:
        >>> import torch
        >>> regression_metrics(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([1.0, 2.0, 3.0]))["mae"]
        1.0
    """
    predicted, true = (t.double().cpu().numpy() for t in (predictions, outcomes))
    return plain(outcome_scores(predicted, true, np.ones((1, len(true)))))
