"""Classification of images (or feature vectors) into exclusive classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from medfed.errors import ConfigError, did_you_mean
from medfed.models.losses import focal_loss
from medfed.models.metrics import ClassificationMeter
from medfed.models.networks.canonical import Activation
from medfed.models.task import TaskModule

_LOSSES = ("cross_entropy", "focal")


class ClassificationTask(TaskModule):
    """Cross-entropy or focal loss, both optionally class-weighted.

    Batches: ``image (B, C, *spatial)`` or ``(B, F)``, ``label (B,)`` class indices.
    Metrics: ``loss accuracy balanced_accuracy auroc ece``.

    Args:
        network: From ``image`` to logits ``(B, K)``.
        optimizer: Partial of an optimizer.
        scheduler: Partial of a schedule, or None.
        num_classes: K.
        loss: ``"cross_entropy"`` or ``"focal"``.
        class_weights: K weights, or None for equal ones.
        focal_gamma: Exponent of the focal loss.
        label_smoothing: Smoothing of the cross-entropy.
        ece_bins: Bins of the calibration error.
        personal: Patterns of personal names, None for the network's default.
        selection: Metric and mode that choose a model.

    Raises:
        ConfigError: If the loss is unknown or the number of weights is not K.
    """

    activation: ClassVar[Activation] = "softmax"

    def __init__(
        self,
        network: nn.Module,
        optimizer: Callable[..., Optimizer],
        scheduler: Callable[[Optimizer], Any] | None = None,
        *,
        num_classes: int = 2,
        loss: str = "cross_entropy",
        class_weights: Sequence[float] | None = None,
        focal_gamma: float = 2.0,
        label_smoothing: float = 0.0,
        ece_bins: int = 15,
        personal: Sequence[str] | None = None,
        selection: Sequence[str] = ("balanced_accuracy", "max"),
    ) -> None:
        if loss not in _LOSSES:
            raise ConfigError(
                f"Unknown loss {loss!r}: use one of {', '.join(_LOSSES)}"
                f"{did_you_mean(loss, _LOSSES)}."
            )
        if class_weights is not None and len(class_weights) != num_classes:
            raise ConfigError(
                f"{len(class_weights)} class_weights were given for {num_classes} classes."
            )
        self.loss_name = loss
        self.focal_gamma = focal_gamma
        self.label_smoothing = label_smoothing
        self.ece_bins = ece_bins
        super().__init__(network, optimizer, scheduler, personal=personal, selection=selection)
        self._weights = None if class_weights is None else torch.tensor(list(class_weights))

    def criterion(self, logits: Tensor, label: Tensor) -> Tensor:
        """Returns the loss of logits ``(B, K)`` and class indices ``(B,)``."""
        weight = self._class_weights(logits)
        if self.loss_name == "focal":
            return focal_loss(logits, label, gamma=self.focal_gamma, weight=weight)
        return F.cross_entropy(logits, label, weight=weight, label_smoothing=self.label_smoothing)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Returns the softmax over classes."""
        return logits.softmax(1)

    def meter(self, *, test: bool = False) -> ClassificationMeter:
        """Returns an empty meter."""
        return ClassificationMeter(self.criterion, self.ece_bins)

    def _class_weights(self, like: Tensor) -> Tensor | None:
        # A plain tensor, moved once: a buffer would travel with the weights of the network, and a
        # copy from the host in every step would break CUDA graphs.
        if self._weights is None:
            return None
        if (self._weights.device, self._weights.dtype) != (like.device, like.dtype):
            self._weights = self._weights.to(like)
        return self._weights
