"""A small one-stage detector of lesions in volumes, after RetinaNet, and boxes from its map.

A box is six numbers in voxels: its least and its greatest corner. Voxel i reaches from i to i + 1,
so a flip of n voxels turns x into n - x. MONAI's parts make anchors, turn numbers into boxes and
drop boxes that overlap better ones; none of them needs torchvision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from monai.apps.detection.utils.anchor_utils import AnchorGeneratorWithAnchorShape
from monai.apps.detection.utils.box_coder import BoxCoder
from monai.apps.detection.utils.box_selector import BoxSelector
from torch import Tensor, nn

from .inference import Inference, Network, blended

Ints = Sequence[int]
STRIDE = 2
"""Voxels per cell of the map of anchors, along each axis."""


class FeaturePyramid(nn.Module):
    """Levels of ever coarser features, which are added up to the finest one from the top down."""

    def __init__(self, in_channels: int, channels: Sequence[int]) -> None:
        super().__init__()
        steps = pairwise([in_channels, *channels])
        self.levels = nn.ModuleList(nn.Sequential(_block(a, b, 2), _block(b, b)) for a, b in steps)
        self.lateral = nn.ModuleList(nn.Conv3d(c, channels[0], 1) for c in channels)
        self.smooth = _block(channels[0], channels[0])

    def forward(self, image: Tensor) -> Tensor:
        """Returns features ``(B, channels[0], h / 2, w / 2, d / 2)``."""
        features = []
        for level in self.levels:
            image = level(image)
            features.append(image)
        *finer, total = [conv(x) for conv, x in zip(self.lateral, features, strict=True)]
        for x in reversed(finer):
            total = x + F.interpolate(total, size=x.shape[2:], mode="nearest")
        smooth: Tensor = self.smooth(total)
        return smooth


class Detector(nn.Module):
    """Scores and moves the anchors of every cell: one extractor of features, two heads.

    Source: T.-Y. Lin et al., "Focal loss for dense object detection" (RetinaNet), ICCV 2017, and
    "Feature pyramid networks for object detection", CVPR 2017. Here the heads see the finest level
    of the pyramid alone, with all anchors: nodules differ in size by less than levels do.

    Shapes:
        ``(B, C, h, w, d)``, of sides that :data:`STRIDE` divides, to ``(B, 7 A, h / 2, w / 2, d /
        2)``: a logit of each anchor, then the six numbers of each anchor's box.
    """

    personal: ClassVar[tuple[str, ...]] = ("classification_head.*", "regression_head.*")

    def __init__(
        self, in_channels: int, anchors: Sequence[Ints], channels: Ints = (16, 16, 24)
    ) -> None:
        super().__init__()
        width, count = channels[0], len(anchors)
        self.feature_extractor = FeaturePyramid(in_channels, channels)
        self.classification_head = _head(width, count, -2.2)
        self.regression_head = _head(width, 6 * count, 0.0)

    def forward(self, image: Tensor) -> Tensor:
        """Returns the map of anchors, see the class."""
        features = self.feature_extractor(image)
        return torch.cat([self.classification_head(features), self.regression_head(features)], 1)


def _block(before: int, after: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv3d(before, after, 3, stride, padding=1, bias=False)
    return nn.Sequential(conv, nn.GroupNorm(4, after), nn.ReLU())


def _head(width: int, outputs: int, start: float) -> nn.Sequential:
    last = nn.Conv3d(width, outputs, 1)
    nn.init.normal_(last.weight, std=0.01)
    last.bias = nn.Parameter(torch.full((outputs,), start))
    return nn.Sequential(_block(width, width), last)


CODER = BoxCoder(weights=(1.0,) * 6)
_BEST = 500  # anchors of a scan from which boxes are made
_MULTIPLE = 8  # of which the sides of a window and of a scan are


@dataclass(frozen=True)
class BoxInference(Inference):
    """From scans, window by window, to the map of anchors and to boxes."""

    # Sides of each anchor, in voxels: even numbers.
    anchors: Sequence[Sequence[int]] = ((4, 4, 4), (6, 6, 6), (10, 10, 10))
    patch_size: tuple[int, ...] = (48, 48, 24)  # the window
    overlap: float = 0.25  # share of a window that neighbouring windows have in common
    window_batch: int = 4  # windows per forward pass
    threshold: float = 0.01  # boxes of a lower score are dropped
    boxes: int = 50  # the most boxes of a scan
    # Of two boxes that overlap by more, intersection over union, the better one is kept.
    iou: float = 0.1

    def logits(
        self, network: Network, image: Tensor, grids: Tensor | None = None, size: Sequence[int] = ()
    ) -> Tensor:
        """Returns the map of anchors, blended from windows if the scan is larger than one."""
        more = [(-side) % _MULTIPLE for side in image.shape[2:]]
        if any(more):
            ends = [end for side in reversed(more) for end in (0, side)]
            image = F.pad(image, ends, value=float(image.min()))
        if all(n <= m for n, m in zip(image.shape[2:], self.patch_size, strict=True)):
            return network(image)
        lowest = {"cval": float(image.min()), "mode": "gaussian"}
        window = self.patch_size, self.window_batch, network, self.overlap
        return blended(image, *window, **lowest)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Returns the map with scores from 0 to 1 in place of their logits."""
        count = len(self.anchors)
        return torch.cat([logits[:, :count].sigmoid(), logits[:, count:]], 1)

    def grid(self, logits: Tensor) -> Tensor:
        """Returns the anchors ``(N, 6)`` of a map ``(..., h, w, d)``, cell by cell."""
        maker = AnchorGeneratorWithAnchorShape((1.0,), self.anchors)
        steps = [[torch.tensor(STRIDE)] * 3]
        anchors: Tensor = maker.grid_anchors([list(logits.shape[-3:])], steps)[0]
        return anchors.to(logits)

    def by_anchor(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Sorts a map ``(B, 7 A, h, w, d)`` like :meth:`grid`: ``(B, N)`` and ``(B, N, 6)``."""
        count = len(self.anchors)
        scores, boxes = logits[:, :count], logits[:, count:].unflatten(1, (count, 6))
        return scores.movedim(1, -1).flatten(1), boxes.movedim((1, 2), (-2, -1)).flatten(1, 4)

    def boxes_of(self, logits: Tensor, size: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Returns every scan's boxes ``(n, 6)``, within it, and scores, the best first."""
        choose = BoxSelector(
            apply_sigmoid=True,
            score_thresh=self.threshold,
            topk_candidates_per_level=_BEST,
            nms_thresh=self.iou,
            detections_per_img=self.boxes,
        )
        anchors = self.grid(logits)
        boxes_of_images = []
        for scores, codes in zip(*self.by_anchor(logits.float()), strict=True):
            boxes = CODER.decode_single(codes, anchors)
            chosen, score, _ = choose.select_boxes_per_image([boxes], [scores[:, None]], list(size))
            boxes_of_images.append((chosen, score))
        return boxes_of_images
