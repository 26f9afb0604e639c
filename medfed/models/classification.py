"""Classification of images (or feature vectors) into exclusive classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, Unpack

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medfed.functional.scores import (
    CLASS_SCORES,
    PROBABILITY,
    Floats,
    case_class_scores,
    class_scores,
)
from medfed.models.custom_losses import CustomLoss, Tried, check_loss, value_of
from medfed.models.meters import Batch, Columns, WholeSplit, plain
from medfed.models.task import MakeOptimizer, MakeScheduler, TaskModule, TaskOptions
from medfed.standalone.checks import check_known
from medfed.standalone.errors import ConfigError
from medfed.standalone.inference import ClassInference
from medfed.standalone.mixture import Activation


class ClassificationTask(TaskModule):
    """Cross-entropy, focal loss or the user's loss, all optionally class-weighted.

    Batches: ``image (B, C, *spatial)`` or ``(B, F)``, ``label (B,)`` class indices.
    Metrics: ``loss`` and those of :func:`medfed.functional.scores.class_scores`.

    Args:
        network: As in :class:`medfed.models.task.TaskModule`; it gives logits ``(B, K)``.
        optimizer: As there.
        scheduler: As there.
        num_classes: K.
        loss: ``"cross_entropy"``, ``"focal"``, or a callable that is given the logits ``(B, K)``
            and the class indices ``(B,)``; with class weights it gives a value per sample.
        class_weights: K weights, ``"balanced"``, or None for equal ones. Balanced weights come from
            each client's training labels, with its training batches as ``class_weights (B, K)``;
            the ``loss`` metric then has no weights, so that it is comparable between clients.
        focal_gamma: Exponent of the focal loss.
        label_smoothing: Smoothing of the cross-entropy.
        more: As there: ``personal``, ``selection``, ``metrics``, ``l2``.

    Raises:
        ConfigError: If there are fewer than 2 classes, the loss is unknown, the number of weights
            is not K, or the smoothing is given with another loss.
    """

    activation: Activation = "softmax"
    inference = ClassInference()
    default_selection: ClassVar[tuple[str, str]] = ("auroc", "max")

    def __init__(
        self,
        network: nn.Module,
        optimizer: MakeOptimizer,
        scheduler: MakeScheduler | None = None,
        *,
        num_classes: int = 2,
        loss: str | CustomLoss = "cross_entropy",
        class_weights: Sequence[float] | Literal["balanced"] | None = None,
        focal_gamma: float = 2.0,
        label_smoothing: float = 0.0,
        **more: Unpack[TaskOptions],
    ) -> None:
        if isinstance(loss, str):
            check_known("loss", loss, ("cross_entropy", "focal"))
        if label_smoothing and loss != "cross_entropy":
            raise ConfigError("model.label_smoothing is for cross_entropy; set it in your loss.")
        if num_classes < 2:
            raise ConfigError(
                f"A classification needs at least 2 classes, not {num_classes} (a continuous "
                "outcome needs model=linear or model=mlp_regression)."
            )
        self.balanced = class_weights == "balanced"
        if isinstance(class_weights, str):
            check_known("model.class_weights", class_weights, ["balanced"])
            class_weights = None
        if class_weights is not None and len(class_weights) != num_classes:
            raise ConfigError(f"{len(class_weights)} class_weights are not one of each class.")
        self.num_classes = num_classes
        self.focal_gamma = focal_gamma
        self.label_smoothing = label_smoothing
        super().__init__(network, optimizer, scheduler, **more)
        self.custom_loss = loss
        self._weights = None if class_weights is None else torch.tensor(list(class_weights))

    def criterion(self, logits: Tensor, label: Tensor) -> Tensor:
        """Returns the loss of logits ``(B, K)`` and class indices ``(B,)``."""
        return self._loss(logits, label, self._class_weights(logits))

    def training_criterion(self, logits: Tensor, batch: Batch) -> Tensor:
        """Returns the loss of a training batch, with the weights of its client if configured.

        Raises:
            ConfigError: If the data do not give the configured weights.
        """
        label = batch["label"]
        if not self.balanced:
            return self.criterion(logits, label)
        if "class_weights" not in batch:
            raise ConfigError(
                "model.class_weights=balanced needs batches with class_weights; give the weights "
                "as a list, or set balanced=True of the data module before its setup."
            )
        return self._loss(logits, label, batch["class_weights"].to(logits))

    def _loss(self, logits: Tensor, label: Tensor, weight: Tensor | None) -> Tensor:
        """The loss with the weight of each class, ``(K,)`` or by sample ``(B, K)``."""
        if callable(self.custom_loss):
            each = None
            if weight is not None:
                each = weight.expand(len(label), -1).gather(1, label[:, None]).squeeze(1)
            return value_of(self.custom_loss, logits, label, each)
        if self.custom_loss == "focal":
            return focal_loss(logits, label, gamma=self.focal_gamma, weight=weight)
        if weight is not None and weight.ndim > 1:
            return _weighted_cross_entropy(logits, label, weight, self.label_smoothing)
        return F.cross_entropy(logits, label, weight=weight, label_smoothing=self.label_smoothing)

    def output_shape(self, image: Tensor) -> tuple[int, ...]:
        """See the base class."""
        return (self.num_classes,)

    def check_parts(self, batch: Batch) -> None:
        """See the base class."""
        label = torch.arange(self.num_classes).repeat(2)
        right = 8.0 * F.one_hot(label, self.num_classes) - 4
        what = "logits (B, K) and class indices (B,)"
        if callable(self.custom_loss):
            weighted = self.balanced or self._weights is not None
            tried = Tried(right, (-right,), label, what, "softmax")
            check_loss(self.custom_loss, tried, weighted=weighted)
        super().check_parts(batch)

    def measurable(self, batch: Batch) -> Tried:
        """See the base class: probabilities ``(N, K)`` and class indices ``(N,)``."""
        label = torch.arange(self.num_classes).repeat(2)
        right = (8.0 * F.one_hot(label, self.num_classes) - 4).softmax(1)
        return Tried(right, (right.roll(1, 1),), label, "probabilities")

    def meter(self, *, test: bool = False) -> WholeSplit:
        """Returns an empty meter."""
        return WholeSplit(
            self.criterion,
            CLASS_SCORES,
            lambda z, y: classification_metrics(z.double().softmax(1), y),
            lambda z: {PROBABILITY.format(k): p for k, p in enumerate(z.softmax(1).T)},
        )

    def scores(self, cases: Columns, weights: Floats) -> dict[str, Floats]:
        """See the base class."""
        return case_class_scores(cases, weights)

    def constants(self, cases: Columns, training: Batch) -> dict[str, Columns]:
        """Returns the cases with the class shares of the training data as predictions."""
        counts = training["label_counts"].double()
        shares = (counts / counts.sum()).tolist()
        size = len(cases["label"])
        predicted = {PROBABILITY.format(k): np.full(size, share) for k, share in enumerate(shares)}
        chosen = ("decision", "calibrated/")
        columns = {name: v for name, v in cases.items() if not name.startswith(chosen)}
        return {"constant": {**columns, **predicted}}

    def _class_weights(self, like: Tensor) -> Tensor | None:
        # A plain tensor, moved once: a buffer would travel with the weights of the network, and a
        # copy from main memory in every step would make a GPU wait.
        if self._weights is None:
            return None
        if (self._weights.device, self._weights.dtype) != (like.device, like.dtype):
            self._weights = self._weights.to(like)
        return self._weights


class RiskTask(ClassificationTask):
    """The risk of an outcome by logistic regression: a classification of feature vectors.

    Batches: ``image (B, F)`` features, ``label (B,)`` class indices. Metrics and arguments are
    those of :class:`ClassificationTask`.
    """


def focal_loss(
    logits: Tensor, target: Tensor, *, gamma: float = 2.0, weight: Tensor | None = None
) -> Tensor:
    """Focal loss on class indices: the mean over samples of ``-w_y (1 - p_y)^gamma log p_y``.

    MONAI's ``FocalLoss(use_softmax=True)`` also divides by the number of classes, which ties the
    learning rate to it; otherwise the two are equal.

    Source: T.-Y. Lin et al., "Focal Loss for Dense Object Detection", ICCV 2017, equation 5.
    `logits` is ``(B, K)``. `target` is ``(B,)`` class indices. `gamma`: how strongly
    well-classified samples are discounted; 0 gives cross-entropy. `weight` is ``(K,)`` weight of
    each class, ``(B, K)`` by sample, or None.

    Example:
        >>> logits, target = torch.tensor([[0.0, 0.0]]), torch.tensor([1])
        >>> round(focal_loss(logits, target, gamma=2.0).item(), 4)  # 0.5 ** 2 * log(2)
        0.1733
    """
    log_p = -F.cross_entropy(logits, target, reduction="none")
    per_sample = -((1 - log_p.exp()) ** gamma) * log_p
    if weight is not None:
        rows = weight.expand(len(target), -1)
        per_sample = per_sample * rows.gather(1, target[:, None]).squeeze(1)
    return per_sample.mean()


def _weighted_cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor, label_smoothing: float = 0.0
) -> Tensor:
    """PyTorch's ``CrossEntropyLoss(weight)``, for samples of clients with different weights.

    `logits` is ``(B, K)``. `target` is ``(B,)`` class indices. `weight` is ``(B, K)`` weight of
    each class, by sample.

    Example:
        >>> logits, target = torch.tensor([[0.0, 0.0], [2.0, 0.0]]), torch.tensor([1, 0])
        >>> weight = torch.tensor([1.0, 3.0])
        >>> ours = _weighted_cross_entropy(logits, target, weight.expand(2, 2))
        >>> bool(torch.isclose(ours, F.cross_entropy(logits, target, weight)))
        True
    """
    weighted = -weight * logits.log_softmax(1)
    of_class = target[:, None]
    loss = (1 - label_smoothing) * weighted.gather(1, of_class).sum()
    loss = loss + label_smoothing / logits.shape[1] * weighted.sum()
    return loss / weight.gather(1, of_class).sum()


def classification_metrics(probs: Tensor, label: Tensor) -> dict[str, float]:
    """Returns :func:`medfed.functional.scores.class_scores` of one split.

    `probs` is ``(N, K)`` class probabilities. `label` is ``(N,)`` class indices.

    Example:
        >>> probs = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8]])
        >>> scores = classification_metrics(probs, torch.tensor([0, 1, 1]))
        >>> round(scores["accuracy"], 4), scores["balanced_accuracy"], scores["auroc"]
        (0.6667, 0.75, 1.0)
    """
    rows, truth = probs.double().cpu().numpy(), label.cpu().numpy()
    return plain(class_scores(rows, truth, np.ones((1, len(truth)))))
