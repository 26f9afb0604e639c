"""A small one-stage detector of lesions in volumes, after RetinaNet."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
