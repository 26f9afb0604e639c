"""Segmentation of images or volumes: into regions that may overlap, or into exclusive classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Annotated, ClassVar, Unpack

import numpy as np
import torch
import torch.nn.functional as F
from monai.losses import DiceLoss
from torch import Tensor, nn

from medfed.functional.scores import Floats
from medfed.models.custom_losses import CustomLoss, Tried, check_loss, value_of
from medfed.models.meters import Batch, Columns
from medfed.models.segmentation_meter import SegmentationMeter, counts_above, overlap_scores
from medfed.models.task import MakeOptimizer, MakeScheduler, TaskModule, TaskOptions
from medfed.standalone.checks import check_count, check_known, checked, within
from medfed.standalone.errors import ConfigError
from medfed.standalone.inference import RegionInference
from medfed.standalone.mixture import Activation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from medfed.models.contours import Case

__all__ = ["SegmentationMeter", "SegmentationTask", "dice_bce_loss", "dice_ce_loss"]

_DICE = DiceLoss(sigmoid=True, batch=True)
_DICE_OF_CLASSES = DiceLoss(softmax=True, include_background=False, batch=True)
_SMOOTH = 1e-5  # MONAI's, which keeps the Dice of empty regions defined
Terms = tuple[Tensor, Tensor]
_CHOICES = ("auto", "sigmoid", "softmax")


class SegmentationTask(TaskModule):
    """Soft Dice plus cross-entropy, or the user's loss, on patches; windows over whole images.

    Batches: ``image (B, C, *spatial)``, ``label (B, R, *spatial)`` with 0 and 1 per region, and for
    evaluation ``case (B,)``, the patient of each image, and ``spacing (B, 3)``, the mm between
    voxels (of slices: also between those of one case). Where somebody did not outline all regions,
    ``annotated (B, R)`` says which ones; the others have no loss and no metric.

    Regions that may overlap (``sigmoid``) have a logit each, and hold the voxels whose probability
    is above the threshold. Where no voxel is in two regions (``softmax``), the network gives a
    logit to the background, too, first of all, and a voxel belongs to its likeliest class.

    Metrics: ``loss iou dice dice_case``, the last three also per region (``iou/whole``); with
    ``test=True`` also ``hd95`` in mm and ``nsd``, the normalised surface Dice. For a region that is
    nowhere they follow BraTS, see :mod:`medfed.models.segmentation_meter`.

    Args:
        network: As in :class:`medfed.models.task.TaskModule`; it gives logits ``(B, R, *spatial)``,
            or ``(B, 1 + R, *spatial)`` for softmax.
        optimizer: As there.
        scheduler: As there.
        regions: Names of the R regions.
        activation: ``sigmoid``, ``softmax``, or ``auto``: softmax where there are several regions
            and the data say that they are exclusive.
        exclusive: Whether no voxel of the data is in two regions; None where that is not known.
        patch_size: Window of the sliding-window inference, that of the training patches; None
            passes whole images through the network.
        overlap: Fraction by which neighbouring windows overlap.
        window_batch: Windows per forward pass.
        threshold: Probability above which a voxel belongs to a region (of sigmoid).
        loss: A callable that is given logits and labels of the same shape, floats 0 and 1: ``(B, R,
            *spatial)``, or for softmax ``(B, 1 + R, *spatial)``, the background first. None for
            soft Dice plus cross-entropy.
        dice_weight: Factor of the Dice term.
        ce_weight: Factor of the cross-entropy term, binary for sigmoid.
        surface: Measure Hausdorff distance and surface Dice at test.
        tolerance: mm within which surfaces agree: one number, or one per region.
        more: As there: ``personal``, ``selection``, ``metrics``, ``l2``.

    Raises:
        ConfigError: If there is no region, a number is out of its range, softmax is set although
            regions overlap, or factors are given for the user's loss.
    """

    inference: RegionInference
    default_selection: ClassVar[tuple[str, str]] = ("iou", "max")
    by_case: ClassVar[bool] = True

    @checked("model")
    def __init__(
        self,
        network: nn.Module,
        optimizer: MakeOptimizer,
        scheduler: MakeScheduler | None = None,
        *,
        regions: Sequence[str],
        activation: str = "auto",
        exclusive: bool | None = None,
        patch_size: Sequence[int] | None = None,
        overlap: Annotated[float, within("[0, 1)")] = 0.25,
        window_batch: Annotated[int, check_count] = 16,
        threshold: Annotated[float, within("[0, 1)")] = 0.5,
        loss: CustomLoss | None = None,
        dice_weight: float = 1.0,
        ce_weight: float = 1.0,
        surface: bool | None = True,
        tolerance: float | Mapping[str, float] = 2.0,
        **more: Unpack[TaskOptions],
    ) -> None:
        if not regions:
            raise ConfigError("Segmentation needs the names of its regions.")
        if loss is not None and (dice_weight, ce_weight) != (1.0, 1.0):
            raise ConfigError("model.dice_weight and model.ce_weight are for the default loss.")
        self.regions = tuple(regions)
        self.activation = chosen_activation(activation, len(regions), exclusive)
        softmax, window = self.activation == "softmax", tuple(patch_size) if patch_size else None
        self.inference = RegionInference(softmax, threshold, window, overlap, window_batch)
        self.threshold = threshold
        self.dice_weight = dice_weight
        self.ce_weight = ce_weight
        self.tolerances = _tolerances(tolerance, self.regions) if surface else None
        super().__init__(network, optimizer, scheduler, **more)
        self.custom_loss = loss

    def criterion(self, logits: Tensor, label: Tensor, annotated: Tensor | None = None) -> Tensor:
        """Returns Dice plus cross-entropy of logits and labels ``(B, R, *spatial)``."""
        if self.custom_loss is not None:
            return value_of(self.custom_loss, logits, self._classes(label.float()))
        weights = {"dice_weight": self.dice_weight, "ce_weight": self.ce_weight}
        loss = dice_ce_loss if self.activation == "softmax" else dice_bce_loss
        return loss(logits, label, annotated=annotated, **weights)

    def training_criterion(self, logits: Tensor, batch: Batch) -> Tensor:
        """See the base class; of the regions that are annotated."""
        return self.criterion(logits, batch["label"], batch.get("annotated"))

    def output_shape(self, image: Tensor) -> tuple[int, ...]:
        """See the base class."""
        return (len(self.regions) + (self.activation == "softmax"), *image.shape[2:])

    def _classes(self, label: Tensor) -> Tensor:
        """Labels of the network's outputs: for softmax with a background."""
        return _with_background(label) if self.activation == "softmax" else label

    def check_parts(self, batch: Batch) -> None:
        """See the base class."""
        if "annotated" in batch and (self.custom_loss is not None or self.custom_metrics):
            raise ConfigError(
                "Some clients do not annotate all regions, which only the default loss and the "
                "task's metrics leave out; leave model.loss and model.metrics at null."
            )
        if self.custom_loss is not None:
            target = self._classes(self._random_masks(batch))
            right, shape = 8 * target - 4, "(B, R, ...)"
            if self.activation == "softmax":
                shape = "(B, 1 + R, ...), the background first"
            what = f"logits and labels of 0 and 1, both {shape}"
            check_loss(self.custom_loss, Tried(right, (-right,), target, what, self.activation))
        super().check_parts(batch)

    def metric_inputs(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """See the base class: masks and labels of 0 and 1, both ``(B, R, *spatial)``."""
        return self.inference.masks(self.probabilities(logits)).int(), (batch["label"] > 0.5).int()

    def measurable(self, batch: Batch) -> Tried:
        """See the base class."""
        masks = self._random_masks(batch)[:1].int()
        return Tried(masks.clone(), (1 - masks,), masks, "masks")

    def _random_masks(self, batch: Batch) -> Tensor:
        """Example labels of a batch, with all regions present and separate."""
        size, _, *spatial = batch["label"].shape
        random, regions = torch.Generator().manual_seed(0), range(len(self.regions))
        number = torch.randint(len(regions) + 1, (size, *spatial), generator=random)
        return torch.stack([number == r + 1 for r in regions], 1).float()

    def logits(self, batch: Batch) -> Tensor:
        """Returns logits of whole images, blended from overlapping windows if they are larger.

        If the label has other voxels, a ``grid`` of the batch maps them to the image's, and the
        logits are on the label's voxels; voxels outside the image are background.
        """
        grids = batch.get("grid")
        size = () if grids is None else batch["label"].shape[2:]
        return self.inference.logits(self.forward, batch["image"], grids, size)

    def picture(self, cases: Mapping[str, Case]) -> Figure | None:
        """Draws true and predicted contours, see :func:`medfed.models.contours.contour_grid`.

        Args:
            cases: For each client a slice, and the probabilities from :meth:`predict`.

        Returns:
            A Matplotlib figure, rows for clients and columns for methods.
        """
        from medfed.models.contours import contour_grid  # imported here, as training draws nothing

        exclusive = self.activation == "softmax"
        level = 0.5 if exclusive else self.threshold
        return contour_grid(cases, self.regions, threshold=level, exclusive=exclusive)

    def meter(self, *, test: bool = False, levels: Sequence[float] = ()) -> SegmentationMeter:
        """Returns an empty meter, for tests with surfaces if configured.

        Args:
            test: See the base class.
            levels: Thresholds at which it counts overlaps, too.
        """

        def segment(logits: Tensor) -> Tensor:
            return self.inference.masks(self.probabilities(logits))

        def above(logits: Tensor, truth: Tensor) -> Tensor:
            return counts_above(self.probabilities(logits), truth, levels)

        tolerances = self.tolerances if test else None
        of = self.criterion, self.regions, segment, tolerances
        return SegmentationMeter(*of, above if levels else None)

    def scores(self, cases: Columns, weights: Floats) -> dict[str, Floats]:
        """See the base class."""
        return overlap_scores(cases, self.regions, weights)

    def constants(self, cases: Columns, training: Batch) -> dict[str, Columns]:
        """Returns the cases with empty masks as predictions, and with full masks."""
        columns = {n: cases[n] for n in ("case", "region", "labelled", "voxels")}
        empty = np.zeros(len(cases["case"]))
        nothing = {**columns, "true_positive": empty, "predicted": empty}
        everything = {**columns, "true_positive": cases["labelled"], "predicted": cases["voxels"]}
        return {"empty mask": nothing, "all foreground": everything}


def chosen_activation(wanted: str, regions: int, exclusive: bool | None) -> Activation:
    """Chooses between overlapping regions and exclusive classes.

    Example:
        >>> chosen_activation("auto", 3, True), chosen_activation("auto", 1, True)
        ('softmax', 'sigmoid')
    """
    check_known("model.activation", wanted, _CHOICES)
    if wanted == "softmax" and exclusive is False:
        raise ConfigError(
            "model.activation=softmax gives a voxel to one region, but the regions of these data "
            "overlap; choose auto or sigmoid, or regions of label values that differ."
        )
    if wanted == "auto":
        return "softmax" if exclusive and regions > 1 else "sigmoid"
    return "softmax" if wanted == "softmax" else "sigmoid"


def _tolerances(tolerance: float | Mapping[str, float], names: Sequence[str]) -> tuple[float, ...]:
    """Mm by region, checked."""
    tolerances = tolerance if isinstance(tolerance, Mapping) else dict.fromkeys(names, tolerance)
    for name, mm in tolerances.items():
        check_known("model.tolerance", name, names)
        if not 0 <= mm < math.inf:
            raise ConfigError(f"model.tolerance={mm} must be mm, 0 or more.")
    if missing := [name for name in names if name not in tolerances]:
        raise ConfigError(f"model.tolerance lacks the region {missing[0]}; give it in mm.")
    return tuple(float(tolerances[name]) for name in names)


def _with_background(label: Tensor) -> Tensor:
    """Labels ``(B, 1 + R, *spatial)`` of exclusive regions ``(B, R, *spatial)``.

    Example:
        >>> _with_background(torch.tensor([[[1.0, 0.0]]])).tolist()
        [[[0.0, 1.0], [1.0, 0.0]]]
    """
    return torch.cat([1 - label.sum(1, keepdim=True), label], dim=1)


def _weighed(terms: Callable[..., Terms]) -> Callable[..., Tensor]:
    """Makes a loss of two terms, ``1 - Dice`` and a cross-entropy."""

    @wraps(terms)
    def loss(
        logits: Tensor,
        target: Tensor,
        *,
        dice_weight: float = 1.0,
        ce_weight: float = 1.0,
        annotated: Tensor | None = None,
    ) -> Tensor:
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()  # sums over a patch exceed what half precision can count
        dice, entropy = terms(logits, target.to(logits.dtype), annotated)
        return dice_weight * dice + ce_weight * entropy

    return loss


@_weighed
def dice_bce_loss(logits: Tensor, target: Tensor, annotated: Tensor | None) -> Terms:
    """Soft Dice plus binary cross-entropy for regions that may overlap (sigmoid outputs).

    MONAI's ``DiceCELoss`` takes a softmax cross-entropy as soon as there are two channels, which
    contradicts nested regions; so its ``DiceLoss`` is joined with the binary cross-entropy. The
    Dice is pooled over the batch, lest a patch without a region decide its loss alone.

    Source: F. Milletari et al., "V-Net", 3DV 2016. `logits` is ``(B, R, *spatial)``. `target` is
    ``(B, R, *spatial)`` with values 0 and 1. `annotated` is ``(B, R)`` bool, the regions that are
    outlined; the others count in no mean and have no gradient. None for all.

    Example:
        >>> logits, target = torch.full((1, 1, 2, 2), 20.0), torch.ones(1, 1, 2, 2)
        >>> round(dice_bce_loss(logits, target).item(), 6)
        0.0
    """
    if annotated is not None:
        each = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
        of_region = each.flatten(2).mean(2) * annotated
        bce = of_region.sum() / annotated.sum().clamp(min=1)
        return _known_dice(logits.sigmoid(), target, annotated), bce
    return _DICE(logits, target), F.binary_cross_entropy_with_logits(logits, target)


@_weighed
def dice_ce_loss(logits: Tensor, target: Tensor, annotated: Tensor | None) -> Terms:
    """Soft Dice of the regions plus cross-entropy of all classes, where regions are exclusive.

    This is MONAI's ``DiceCELoss(softmax=True, include_background=False, batch=True)``: the Dice is
    pooled over the batch as that of :func:`dice_bce_loss` is, and the background, which is almost
    all of an image, has no Dice of its own.

    Where regions are not annotated, a voxel outside the annotated ones may lie in any of them: its
    cross-entropy is of the sum of their probabilities and the background's.

    Source: G. Shi et al., "Marginal loss and exclusion loss for partially supervised multi-organ
    segmentation", Medical Image Analysis 70, 2021. `logits` is ``(B, 1 + R, *spatial)``, the
    background first. `target` is ``(B, R, *spatial)`` with values 0 and 1, at most one 1 per voxel.
    `annotated` is ``(B, R)`` bool, the regions that are outlined; only these have a Dice. None for
    all.

    Example:
        >>> logits = torch.tensor([0.0, 20.0, 0.0]).view(1, 3, 1, 1)
        >>> target = torch.tensor([1.0, 0.0]).view(1, 2, 1, 1)
        >>> round(dice_ce_loss(logits, target, dice_weight=0.0).item(), 6)
        0.0
    """
    classes = _with_background(target)
    if annotated is not None:
        known = F.pad(annotated, (1, 0)).view(*classes.shape[:2], *[1] * (classes.ndim - 2))
        # The background's voxels may be of any class that is not annotated.
        possible = torch.where(classes[:, :1] > 0, ~known, classes > 0)
        marginal = logits.log_softmax(1).masked_fill(~possible, -math.inf).logsumexp(1)
        return _known_dice(logits.softmax(1)[:, 1:], target, annotated), -marginal.mean()
    return _DICE_OF_CLASSES(logits, classes), F.cross_entropy(logits, classes.argmax(1))


def _known_dice(probabilities: Tensor, target: Tensor, annotated: Tensor) -> Tensor:
    """One minus MONAI's soft Dice of ``(B, R, *spatial)``, over annotated regions."""
    overlap = (probabilities * target).flatten(2).sum(2) * annotated
    total = (probabilities + target).flatten(2).sum(2) * annotated
    of_region = 1 - (2 * overlap.sum(0) + _SMOOTH) / (total.sum(0) + _SMOOTH)
    known = annotated.any(0)
    return (of_region * known).sum() / known.sum().clamp(min=1)
