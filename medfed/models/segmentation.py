"""Segmentation of images or volumes into regions that may overlap."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from matplotlib.figure import Figure
from monai.inferers import sliding_window_inference
from torch import Tensor, nn
from torch.optim import Optimizer

from medfed.errors import ConfigError
from medfed.models.losses import dice_bce_loss
from medfed.models.metrics import SegmentationMeter
from medfed.models.networks.canonical import Activation
from medfed.models.pictures import Case, contour_grid
from medfed.models.task import Batch, TaskModule


class SegmentationTask(TaskModule):
    """Soft Dice plus cross-entropy on patches, sliding windows over whole images.

    Batches: ``image (B, C, *spatial)``, ``label (B, R, *spatial)`` with 0 and 1 per region, and for
    evaluation ``case (B,)``, the patient of each image.
    Metrics: ``loss iou dice dice_case``, the last three also per region (``iou/whole``);
    with ``test=True`` and ``hausdorff=True`` also ``hd95``.

    Args:
        network: From ``image`` to logits ``(B, R, *spatial)``.
        optimizer: Partial of an optimizer.
        scheduler: Partial of a schedule, or None.
        regions: Names of the R regions.
        patch_size: Window of the sliding-window inference, that of the training patches; None
            passes whole images through the network.
        overlap: Fraction by which neighbouring windows overlap.
        window_batch: Windows per forward pass.
        threshold: Probability above which a voxel belongs to a region.
        dice_weight: Factor of the Dice term.
        bce_weight: Factor of the cross-entropy term.
        hausdorff: Measure the 95th percentile Hausdorff distance at test (slow).
        personal: Patterns of personal names, None for the network's default.
        selection: Metric and mode that choose a model.

    Raises:
        ConfigError: If there is no region, or the overlap or the threshold is outside [0, 1).
    """

    activation: ClassVar[Activation] = "sigmoid"

    def __init__(
        self,
        network: nn.Module,
        optimizer: Callable[..., Optimizer],
        scheduler: Callable[[Optimizer], Any] | None = None,
        *,
        regions: Sequence[str],
        patch_size: Sequence[int] | None = None,
        overlap: float = 0.25,
        window_batch: int = 16,
        threshold: float = 0.5,
        dice_weight: float = 1.0,
        bce_weight: float = 1.0,
        hausdorff: bool = False,
        personal: Sequence[str] | None = None,
        selection: Sequence[str] = ("iou", "max"),
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
        super().__init__(network, optimizer, scheduler, personal=personal, selection=selection)

    def criterion(self, logits: Tensor, label: Tensor) -> Tensor:
        """Returns Dice plus cross-entropy of logits and labels, both ``(B, R, *spatial)``."""
        return dice_bce_loss(
            logits, label, dice_weight=self.dice_weight, bce_weight=self.bce_weight
        )

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
        """Draws true and predicted contours, see :func:`medfed.models.pictures.contour_grid`.

        Args:
            cases: For each client an image ``(C, H, W)``, its truth ``(R, H, W)`` and, per method,
                the probabilities ``(R, H, W)`` that :meth:`predict` gave.

        Returns:
            A Matplotlib figure, rows for clients and columns for methods.
        """
        return contour_grid(cases, self.regions, threshold=self.threshold)

    def meter(self, *, test: bool = False) -> SegmentationMeter:
        """Returns an empty meter, at test with distances if they were asked for."""
        return SegmentationMeter(
            self.criterion, self.regions, self.threshold, self.hausdorff and test
        )
