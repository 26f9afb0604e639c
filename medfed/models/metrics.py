"""Metrics as pure functions, and meters that gather a split batch by batch.

The meters are plain objects rather than ``torchmetrics.Metric`` modules, so that a task module's
state dict holds its network and nothing else. Where a metric is undefined (the AUROC of one class,
the Dice of a region that is nowhere), its value is NaN and no warning is raised.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from monai.metrics import compute_hausdorff_distance
from torch import Tensor
from torchmetrics.functional.classification import (
    binary_auroc,
    multiclass_accuracy,
    multiclass_calibration_error,
)

Criterion = Callable[[Tensor, Tensor], Tensor]
CLASSIFICATION_METRICS = ("accuracy", "balanced_accuracy", "auroc", "ece")


def classification_metrics(probs: Tensor, label: Tensor, n_bins: int = 15) -> dict[str, float]:
    """Accuracy, balanced accuracy, AUROC and calibration error of one split.

    Args:
        probs: ``(N, K)`` class probabilities.
        label: ``(N,)`` class indices.
        n_bins: Bins of equal width for the expected calibration error.

    Returns:
        ``accuracy``; ``balanced_accuracy``, the mean recall over the classes that occur; ``auroc``,
        one class against the rest, averaged over the classes for which it is defined; ``ece``.

    Example:
        >>> probs = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8]])
        >>> scores = classification_metrics(probs, torch.tensor([0, 1, 1]))
        >>> round(scores["accuracy"], 4), scores["balanced_accuracy"], scores["auroc"]
        (0.6667, 0.75, 1.0)
    """
    if len(label) == 0:
        return dict.fromkeys(CLASSIFICATION_METRICS, math.nan)
    k = probs.shape[1]
    present = torch.bincount(label, minlength=k) > 0
    recall = multiclass_accuracy(probs, label, num_classes=k, average="none")
    ece = multiclass_calibration_error(probs, label, num_classes=k, n_bins=n_bins)
    return {
        "accuracy": (probs.argmax(1) == label).double().mean().item(),
        "balanced_accuracy": recall[present].double().mean().item(),
        "auroc": _mean(_one_vs_rest_auroc(probs, label)),
        "ece": ece.item(),
    }


def overlap_counts(pred: Tensor, truth: Tensor) -> Tensor:
    """Counts true positives, predicted and labelled voxels.

    Args:
        pred: ``(B, R, *spatial)`` boolean.
        truth: The same shape, boolean.

    Returns:
        ``(B, R, 3)`` integers: TP, P, L.

    Example:
        >>> pred, truth = torch.tensor([[[1, 1, 0]]]).bool(), torch.tensor([[[0, 1, 1]]]).bool()
        >>> overlap_counts(pred, truth).tolist()
        [[[1, 2, 2]]]
    """
    return torch.stack([(m.flatten(2)).sum(2) for m in (pred & truth, pred, truth)], dim=-1)


def iou_and_dice(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Intersection over union ``TP / (P + L - TP)`` and Dice ``2 TP / (P + L)``.

    Args:
        counts: ``(..., 3)`` with TP, P, L, as from :func:`overlap_counts`.

    Returns:
        Two tensors of shape ``(...)``, float64, NaN where nothing is predicted or labelled.

    Example:
        >>> iou, dice = iou_and_dice(torch.tensor([[1, 2, 2], [0, 0, 0]]))
        >>> [round(v, 4) for v in iou.tolist()], dice.tolist()
        ([0.3333, nan], [0.5, nan])
    """
    tp, p, t = counts.double().unbind(-1)
    return tp / (p + t - tp), 2 * tp / (p + t)


def hausdorff95(pred: Tensor, truth: Tensor) -> Tensor:
    """95th percentile Hausdorff distance of each image and region, in voxels.

    Args:
        pred: ``(B, R, *spatial)`` boolean.
        truth: The same shape, boolean.

    Returns:
        ``(B, R)``: NaN where both are empty, the diagonal of the image where one of them is.

    Example:
        >>> pred, truth = torch.zeros(1, 1, 8, 8).bool(), torch.zeros(1, 1, 8, 8).bool()
        >>> pred[..., 2, 2], truth[..., 2, 5] = True, True
        >>> hausdorff95(pred, truth).item()
        3.0
    """
    pred, truth = pred.cpu(), truth.cpu()  # distance transforms come from SciPy
    some_pred, some_truth = pred.flatten(2).any(2), truth.flatten(2).any(2)
    diagonal = math.sqrt(sum((n - 1) ** 2 for n in pred.shape[2:]))
    distance = torch.full(pred.shape[:2], math.nan, dtype=torch.float64)
    distance[some_pred ^ some_truth] = diagonal
    with warnings.catch_warnings():
        # MONAI 1.6 calls its own function with an argument that it has deprecated.
        warnings.filterwarnings(
            "ignore", message=".*always_return_as_numpy", category=FutureWarning
        )
        for b, r in (some_pred & some_truth).nonzero().tolist():
            p, t = (m[b, r][None, None].float() for m in (pred, truth))
            distance[b, r] = compute_hausdorff_distance(
                p, t, include_background=True, percentile=95
            ).item()
    return distance


class ClassificationMeter:
    """Gathers the logits and labels of one split.

    Args:
        criterion: The loss of logits ``(N, K)`` and class indices ``(N,)``.
        n_bins: Bins of the calibration error.
    """

    def __init__(self, criterion: Criterion, n_bins: int = 15) -> None:
        self.criterion = criterion
        self.n_bins = n_bins
        self.logits: list[Tensor] = []
        self.labels: list[Tensor] = []

    def update(self, logits: Tensor, batch: Mapping[str, Tensor]) -> None:
        """Adds logits ``(B, K)`` and the ``label`` of the batch, class indices ``(B,)``."""
        self.logits.append(logits.detach().float())
        self.labels.append(batch["label"])

    def compute(self) -> dict[str, float]:
        """Returns ``loss`` and :func:`classification_metrics` of all batches together."""
        if not self.labels:
            return dict.fromkeys(("loss", *CLASSIFICATION_METRICS), math.nan)
        logits, label = torch.cat(self.logits), torch.cat(self.labels)
        loss = self.criterion(logits, label).item()
        return {"loss": loss} | classification_metrics(logits.softmax(1), label, self.n_bins)


class SegmentationMeter:
    """Counts overlaps per case and region, so that they can be pooled or averaged over cases.

    Args:
        criterion: The loss of logits and labels, both ``(B, R, *spatial)``.
        regions: Names of the R regions.
        threshold: Probability above which a voxel belongs to a region.
        hausdorff: Whether to measure distances too (slow).
    """

    def __init__(
        self,
        criterion: Criterion,
        regions: Sequence[str],
        threshold: float = 0.5,
        hausdorff: bool = False,
    ) -> None:
        self.criterion = criterion
        self.regions = tuple(regions)
        self.threshold = threshold
        self.hausdorff = hausdorff
        self.loss_sum, self.images = 0.0, 0
        self.counts: dict[int, Tensor] = {}
        self.distances: list[Tensor] = []

    def update(self, logits: Tensor, batch: Mapping[str, Tensor]) -> None:
        """Adds logits ``(B, R, *spatial)`` and the ``label`` of the batch, of the same shape.

        The ``case`` of the batch ``(B,)`` says which patient an image belongs to; without it each
        image is a case of its own.
        """
        pred, truth = logits.sigmoid() > self.threshold, batch["label"] > 0.5
        counts = overlap_counts(pred, truth).cpu()
        first = len(self.counts)
        ids = batch["case"].tolist() if "case" in batch else range(first, first + len(counts))
        for i, c in zip(ids, counts, strict=True):
            self.counts[i] = self.counts[i] + c if i in self.counts else c
        self.loss_sum += self.criterion(logits, batch["label"]).item() * len(counts)
        self.images += len(counts)
        if self.hausdorff:
            self.distances.append(hausdorff95(pred, truth))

    def compute(self) -> dict[str, float]:
        """Returns the metrics, each as a mean over regions and per region (``iou/whole``).

        ``iou`` and ``dice`` pool the voxels of all cases; ``dice_case`` is the mean over cases;
        ``hd95`` is the mean over images, in voxels; ``loss`` is the mean over images.
        """
        empty = torch.zeros(len(self.regions), 3)
        cases = torch.stack([*self.counts.values()] or [empty])
        iou, dice = iou_and_dice(cases.sum(0))
        values = {"iou": iou, "dice": dice, "dice_case": iou_and_dice(cases)[1].nanmean(0)}
        if self.hausdorff:
            values["hd95"] = torch.cat(self.distances or [empty[None, :, 0] * math.nan]).nanmean(0)
        out = {"loss": self.loss_sum / self.images if self.images else math.nan}
        for name, per_region in values.items():
            scores = per_region.tolist()
            out[name] = _mean(scores)
            out |= {f"{name}/{r}": v for r, v in zip(self.regions, scores, strict=True)}
        return out


def _one_vs_rest_auroc(probs: Tensor, label: Tensor) -> list[float]:
    """AUROC of each class against the rest, NaN where only one of the two occurs."""
    positives = [label == k for k in range(probs.shape[1])]
    return [
        binary_auroc(probs[:, k], p.long()).item() if p.any() and not p.all() else math.nan
        for k, p in enumerate(positives)
    ]


def _mean(values: Iterable[float]) -> float:
    """Mean of the values that are defined, NaN if none is."""
    defined = [v for v in values if not math.isnan(v)]
    return math.fsum(defined) / len(defined) if defined else math.nan
