"""Segmentation of images or volumes into regions that may overlap."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from monai.inferers import sliding_window_inference
from monai.losses import DiceLoss
from torch import Tensor

from medfed.common.errors import ConfigError
from medfed.models.meters import Batch
from medfed.models.networks.canonical import Activation
from medfed.models.regions import hausdorff95, iou_and_dice, overlap_counts
from medfed.models.task import TaskModule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from medfed.models.contours import Case

_DICE = DiceLoss(sigmoid=True, batch=True)


class SegmentationTask(TaskModule):
    """Soft Dice plus cross-entropy on patches, sliding windows over whole images.

    Batches: ``image (B, C, *spatial)``, ``label (B, R, *spatial)`` with 0 and 1 per region, and for
    evaluation ``case (B,)``, the patient of each image, and ``spacing (B, 3)``, the mm between
    voxels (of slices: also between those of one case).
    Metrics: ``loss iou dice dice_case``, the last three also per region (``iou/whole``);
    with ``test=True`` and ``hausdorff=True`` also ``hd95`` in mm. For a region that is nowhere they
    follow BraTS, see :mod:`medfed.models.regions`.

    Args:
        common: As :class:`medfed.models.task.TaskModule` takes them; the network gives logits
            ``(B, R, *spatial)``.
        regions: Names of the R regions.
        patch_size: Window of the sliding-window inference, that of the training patches; None
            passes whole images through the network.
        overlap: Fraction by which neighbouring windows overlap.
        window_batch: Windows per forward pass.
        threshold: Probability above which a voxel belongs to a region.
        dice_weight: Factor of the Dice term.
        bce_weight: Factor of the cross-entropy term.
        hausdorff: Measure the 95th percentile Hausdorff distance at test (slow), in mm.
        more: As ``common``.

    Raises:
        ConfigError: If there is no region, or the overlap or the threshold is outside [0, 1).
    """

    activation: ClassVar[Activation] = "sigmoid"
    default_selection: ClassVar[tuple[str, str]] = ("iou", "max")

    def __init__(
        self,
        *common: Any,
        regions: Sequence[str],
        patch_size: Sequence[int] | None = None,
        overlap: float = 0.25,
        window_batch: int = 16,
        threshold: float = 0.5,
        dice_weight: float = 1.0,
        bce_weight: float = 1.0,
        hausdorff: bool = False,
        **more: Any,
    ) -> None:
        if not regions:
            raise ConfigError("Segmentation needs the names of its regions.")
        if not 0 <= overlap < 1 or not 0 <= threshold < 1:
            raise ConfigError(f"overlap {overlap} and threshold {threshold} must lie in [0, 1).")
        self.regions = tuple(regions)
        self.patch_size = None if patch_size is None else tuple(patch_size)
        self.overlap = overlap
        self.window_batch = window_batch
        self.threshold = threshold
        self.dice_weight = dice_weight
        self.bce_weight = bce_weight
        self.hausdorff = hausdorff
        super().__init__(*common, **more)

    def criterion(self, logits: Tensor, label: Tensor) -> Tensor:
        """Returns Dice plus cross-entropy of logits and labels, both ``(B, R, *spatial)``."""
        weights = {"dice_weight": self.dice_weight, "bce_weight": self.bce_weight}
        return dice_bce_loss(logits, label, **weights)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Returns the probability of each region by itself."""
        return logits.sigmoid()

    def logits(self, batch: Batch) -> Tensor:
        """Returns logits of whole images, blended from overlapping windows if they are larger."""
        image = batch["image"]
        if self.patch_size is None or tuple(image.shape[2:]) == self.patch_size:
            return self.forward(image)
        logits = sliding_window_inference(
            image, self.patch_size, self.window_batch, self.forward, self.overlap, mode="gaussian"
        )
        assert isinstance(logits, Tensor)
        return logits

    def picture(self, cases: Mapping[str, Case]) -> Figure | None:
        """Draws true and predicted contours, see :func:`medfed.models.contours.contour_grid`.

        Args:
            cases: For each client an image ``(C, H, W)``, its truth ``(R, H, W)`` and, per method,
                the probabilities ``(R, H, W)`` that :meth:`predict` gave.

        Returns:
            A Matplotlib figure, rows for clients and columns for methods.
        """
        from medfed.models.contours import contour_grid  # late: training draws nothing

        return contour_grid(cases, self.regions, threshold=self.threshold)

    def meter(self, *, test: bool = False) -> SegmentationMeter:
        """Returns an empty meter, at test with distances if they were asked for."""
        return SegmentationMeter(
            self.criterion, self.regions, self.threshold, self.hausdorff and test
        )


def dice_bce_loss(
    logits: Tensor, target: Tensor, *, dice_weight: float = 1.0, bce_weight: float = 1.0
) -> Tensor:
    """Soft Dice plus binary cross-entropy for regions that may overlap (sigmoid outputs).

    MONAI's ``DiceCELoss`` takes a softmax cross-entropy as soon as there are two channels, which
    contradicts nested regions; so its ``DiceLoss`` is joined with the binary cross-entropy. The
    Dice is pooled over the batch, lest a patch without a region decide its loss alone.

    Source: F. Milletari et al., "V-Net", 3DV 2016.

    Args:
        logits: ``(B, R, *spatial)``.
        target: ``(B, R, *spatial)`` with values 0 and 1.
        dice_weight: Factor of ``1 - Dice``, averaged over regions.
        bce_weight: Factor of the cross-entropy, averaged over voxels and regions.

    Returns:
        A scalar.

    Example:
        >>> logits, target = torch.full((1, 1, 2, 2), 20.0), torch.ones(1, 1, 2, 2)
        >>> round(dice_bce_loss(logits, target).item(), 6)
        0.0
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()  # sums over a patch exceed what half precision can count
    target = target.to(logits.dtype)
    bce = F.binary_cross_entropy_with_logits(logits, target)
    dice: Tensor = _DICE(logits, target)
    return dice_weight * dice + bce_weight * bce


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
        criterion: Callable[[Tensor, Tensor], Tensor],
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
        self._slices: list[tuple[Tensor, Tensor]] = []
        self._stack: tuple[int, tuple[float, ...]] | None = None  # case and spacing of the slices

    def update(self, logits: Tensor, batch: Batch) -> None:
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
            spacing = batch.get("spacing")
            mm = [None] * len(ids) if spacing is None else spacing.tolist()
            for case, one, p, t in zip(ids, mm, pred, truth, strict=True):
                self._add_distance(case, one, p, t)

    def _add_distance(
        self, case: int, spacing: Sequence[float] | None, pred: Tensor, truth: Tensor
    ) -> None:
        """Measures masks ``(R, *spatial)``, the slices of one case as the volume that they make."""
        if spacing is None:  # a distance without a unit would look like one in mm
            self.distances.append(torch.full((1, len(self.regions)), math.nan).double())
        elif pred.ndim - 1 == len(spacing):
            self.distances.append(hausdorff95(pred[None], truth[None], spacing))
        else:
            key = (case, tuple(spacing))
            if self._stack != key:
                self._close_stack()
            self._stack = key
            self._slices.append((pred.cpu(), truth.cpu()))

    def _close_stack(self) -> None:
        """Measures the slices that are waiting for the rest of their case."""
        if self._stack is None:
            return
        pred, truth = (torch.stack(masks, -1)[None] for masks in zip(*self._slices, strict=True))
        spacing = self._stack[1]
        if len(self._slices) == 1:  # no volume: all of it would be surface
            pred, truth, spacing = pred[..., 0], truth[..., 0], spacing[:2]
        self.distances.append(hausdorff95(pred, truth, spacing))
        self._slices, self._stack = [], None

    def compute(self) -> dict[str, float]:
        """Returns the metrics, each as a mean over regions and per region (``iou/whole``).

        ``iou`` and ``dice`` pool the voxels of all cases; ``dice_case`` is the mean over cases;
        ``hd95`` is the mean over cases, in mm, whose slices follow each other from the feet up;
        ``loss`` is the mean over images. All are NaN where there is no case, and ``hd95`` also
        where the data do not say the spacing of their voxels.
        """
        self._close_stack()
        # Without a case every number is NaN.
        nowhere = torch.full((1, len(self.regions), 3), math.nan)
        cases = torch.stack([*self.counts.values()]) if self.counts else nowhere
        iou, dice = iou_and_dice(cases.sum(0))
        values = {"iou": iou, "dice": dice, "dice_case": iou_and_dice(cases)[1].mean(0)}
        if self.hausdorff:
            values["hd95"] = torch.cat(self.distances or [nowhere[..., 0]]).mean(0)
        out = {"loss": self.loss_sum / self.images if self.images else math.nan}
        for name, per_region in values.items():
            scores = per_region.tolist()
            out[name] = math.fsum(scores) / len(scores)
            out |= {f"{name}/{r}": v for r, v in zip(self.regions, scores, strict=True)}
        return out
