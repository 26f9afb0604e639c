"""What becomes of a volume between its file and a network: the same in training and prediction.

In this order: cropped to the foreground, normalised channel by channel, resampled to a spacing.
Masks keep the grid of their file, so that results are measured where the truth was drawn; where a
network sees another grid, a matrix leads from the one to the other
(:func:`medfed.functional.grids.on_grid`). Cropping and resampling are MONAI's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from medfed.common.errors import ConfigError
from medfed.datamodules.normalization import Rule, record_of, rules_from

if TYPE_CHECKING:
    from medfed.datamodules.readers.base import Patient, VolumeReader

_LEAST = 0.01  # mm between voxels; below it memory ends before the network begins


class Prepared(NamedTuple):
    """A volume as a network sees it.

    Attributes:
        image: (C, h, w, d) float32.
        grid: (4, 4) float64 from voxels of the scan to voxels of `image`.
    """

    image: Tensor
    grid: Tensor


@dataclass(frozen=True)
class Preparation:
    """What is done to every volume of a data set.

    Attributes:
        rules: How each channel is normalised.
        spacing: mm between voxels that all volumes are resampled to; None leaves them as they are.
            Two numbers are those within axial slices, whose distance then stays.
        crop: Whether to cut off what lies around the foreground: voxels that are not 0 in some
            channel; of CT in a window, those above its lower end.

    Raises:
        ConfigError: If the spacing is no two or three positive numbers.
    """

    rules: tuple[Rule, ...]
    spacing: tuple[float, ...] | None = None
    crop: bool = False

    def __post_init__(self) -> None:
        mm = self.spacing
        if mm is None:
            return
        numbers = all(isinstance(x, int | float) and math.isfinite(x) for x in mm)
        if len(mm) not in (2, 3) or not numbers or min(mm) < _LEAST:
            raise ConfigError(
                f"data.spacing={list(mm)} must be null, or millimetres along three axes, such as "
                "[1.5, 1.5, 2.0] (of slices two: [1.5, 1.5])."
            )

    @property
    def keeps_grid(self) -> bool:
        """Whether image and mask have the same voxels."""
        return self.spacing is None and not self.crop

    def apply(self, voxels: Tensor, spacing: Sequence[float]) -> Prepared:
        """Prepares one volume.

        Args:
            voxels: (C, H, W, D) float32 in RAS, as `readers.volumes.read_volume` gives them; may be
                changed in place.
            spacing: (3,) mm between them.

        Returns:
            The image for the network, and where it lies.

        Example:
            >>> halved = Preparation((Rule("none"),), spacing=(2.0, 2.0, 2.0))
            >>> image, grid = halved.apply(torch.ones(1, 5, 5, 3), (1.0, 1.0, 2.0))
            >>> tuple(image.shape), grid.diagonal().tolist()
            ((1, 3, 3, 3), [0.5, 0.5, 1.0, 1.0])
        """
        affine = np.diag([*spacing, 1.0])
        start = np.eye(4)
        if self.crop:
            low, high = self._box(voxels)
            voxels = voxels[:, low[0] : high[0], low[1] : high[1], low[2] : high[2]].clone()
            start[:3, 3] = low
        channels = [rule.apply(voxels[n : n + 1]) for n, rule in enumerate(self.rules)]
        image = torch.cat(channels) if len(channels) > 1 else channels[0]
        grid = np.linalg.inv(start)
        if self.spacing is not None:
            from monai.data import MetaTensor  # takes seconds to import
            from monai.transforms import Spacing

            wanted = (*self.spacing, spacing[2])[:3]
            resample = Spacing(wanted, mode="bilinear", padding_mode="border")
            found = resample(MetaTensor(image, affine=torch.from_numpy(affine)))
            grid = np.linalg.inv(found.affine.numpy()) @ affine @ grid
            image = found.as_tensor().float().contiguous()
        return Prepared(image, torch.from_numpy(grid))

    def _box(self, voxels: Tensor) -> tuple[list[int], list[int]]:
        from monai.transforms.utils import generate_spatial_bounding_box

        lower = [rule.low if rule.name == "window" else 0.0 for rule in self.rules]
        window = [rule.name == "window" for rule in self.rules]
        ends = torch.tensor(lower).reshape(-1, 1, 1, 1)
        above = torch.tensor(window).reshape(-1, 1, 1, 1)
        inside = torch.where(above, voxels > ends, voxels != 0)
        if not inside.any():
            return [0, 0, 0], list(voxels.shape[1:])
        low, high = generate_spatial_bounding_box(inside, select_fn=lambda x: x > 0)
        return [int(x) for x in low], [int(x) for x in high]

    def record(self) -> dict[str, Any]:
        """Returns it as JSON, from which :meth:`from_record` makes it again.

        Example:
            >>> kept = Preparation((Rule("window", -175.0, 250.0),), (1.5, 1.5), crop=True)
            >>> Preparation.from_record(kept.record(), channels=1) == kept
            True
        """
        return {
            "normalization": record_of(self.rules),
            "resampled_to": None if self.spacing is None else list(self.spacing),
            "crop_foreground": self.crop,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any], channels: int) -> Preparation:
        """Returns the preparation that a record tells of; older ones tell the normalisation alone.

        Args:
            record: From :meth:`record`, or a bundle's facts.
            channels: How many there are.
        """
        mm = record.get("resampled_to")
        rules = rules_from(record["normalization"], channels)
        crop = bool(record.get("crop_foreground", False))
        return cls(rules, None if mm is None else tuple(map(float, mm)), crop)


def prepared_case(
    reader: VolumeReader, case: Patient, preparation: Preparation | None
) -> dict[str, Tensor]:
    """Reads one case as training and evaluation want it.

    Args:
        reader: Reads it.
        case: What to read.
        preparation: What to do to it; None where the reader's own normalisation is all.

    Returns:
        ``image`` (C, h, w, d) float32, ``label`` (R, H, W, D) uint8 on the grid of its file, and
        where these differ ``grid`` (4, 4), from the label's voxels to the image's.
    """
    if preparation is None:
        return reader.read(case)
    raw = reader.raw(case)
    image, grid = preparation.apply(raw["image"], reader.spacing(case))
    found = {"image": image, "label": raw["label"]}
    return found if preparation.keeps_grid else {**found, "grid": grid}
