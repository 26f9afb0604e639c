"""How a volume is prepared for a network: the same in training and prediction.

A volume is cropped to the foreground, normalised channel by channel, and resampled to a spacing, in
this order. Masks keep the grid of their file, so metrics are computed on the original annotation;
if the network uses another grid, a matrix maps one to the other (:func:`on_grid`, by MONAI's
``SpatialResample``, which interpolates linearly or takes the nearest voxel).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .errors import ConfigError
from .itk import say_once
from .normalization import Rule, record_of, rules_from

BLANK = (
    "is 0 in every voxel for the network: its grey values are all alike, or outside the window of "
    "the training (data.normalize); check that it is a scan, no mask, in the units of the others"
)
_UNITS = (
    "has no value below 0, so these may be no Hounsfield units, in which air is -1000: subtract "
    "what was added, or train with data.normalize=zscore"
)
_LEAST = 0.01  # mm between voxels; below it a volume does not fit in memory


@dataclass(frozen=True)
class Preparation:
    """The preparation of every volume of a data set."""

    rules: tuple[Rule, ...]  # how each channel is normalised
    # mm between voxels to which all volumes are resampled; None does not resample. Two numbers
    # apply within axial slices, whose distance then does not change.
    spacing: tuple[float, ...] | None = None
    # Whether to crop to the foreground: voxels that are not 0 in some channel; for CT in a window,
    # those above its lower end.
    crop: bool = False

    def __post_init__(self) -> None:
        mm = self.spacing
        if mm is None:
            return
        numbers = all(isinstance(x, int | float) and math.isfinite(x) for x in mm)
        if len(mm) not in (2, 3) or not numbers or min(mm) < _LEAST:
            what = f"data.spacing={list(mm)} must be null, or millimetres along three axes"
            raise ConfigError(f"{what}, such as [1.5, 1.5, 2.0] (of slices two: [1.5, 1.5]).")

    def of(self, there: Sequence[bool]) -> Preparation:
        """Returns the preparation of some of the channels: each keeps its rule."""
        pairs = zip(self.rules, there, strict=True)
        return replace(self, rules=tuple(rule for rule, has in pairs if has))

    @property
    def keeps_grid(self) -> bool:
        """Whether image and mask have the same voxels."""
        return self.spacing is None and not self.crop

    def doubt(self, voxels: Tensor, path: Path) -> None:
        """Says where voxels (C, H, W, D) seem to be in other units than a window of CT."""
        below = [n for n, rule in enumerate(self.rules) if rule.name == "window" and rule.low < 0]
        if below and voxels[below].min() >= 0:
            say_once(path, _UNITS)

    def apply(self, voxels: Tensor, spacing: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Prepares one volume (C, H, W, D) in RAS, perhaps in place.

        Returns (C, h, w, d) float32, and (4, 4) float64 from the voxels of the scan to these.
        """
        affine = np.diag([*spacing, 1.0])
        start = np.eye(4)
        if self.crop:
            box = self._box(voxels)
            voxels = voxels[:, *box].clone()
            start[:3, 3] = [side.start or 0 for side in box]
        # Before resampling: interpolation would blur the zeros that the z-score excludes.
        channels = [rule.apply(voxels[n : n + 1]) for n, rule in enumerate(self.rules)]
        image = torch.cat(channels) if len(channels) > 1 else channels[0]
        grid = np.linalg.inv(start)
        if self.spacing is not None:
            from monai.data import MetaTensor  # takes seconds to import
            from monai.transforms import Spacing

            wanted = (*self.spacing, spacing[2])[:3]
            # "border": zeros beyond the volume would darken its outermost slices.
            resample = Spacing(wanted, mode="bilinear", padding_mode="border")
            resampled = resample(MetaTensor(image, affine=torch.from_numpy(affine)))
            grid = np.linalg.inv(resampled.affine.numpy()) @ affine @ grid
            image = resampled.as_tensor().float().contiguous()
        return image, torch.from_numpy(grid)

    def _box(self, voxels: Tensor) -> tuple[slice, ...]:
        lower = [rule.low if rule.name == "window" else 0.0 for rule in self.rules]
        window = [rule.name == "window" for rule in self.rules]
        ends = torch.tensor(lower).reshape(-1, 1, 1, 1)
        above = torch.tensor(window).reshape(-1, 1, 1, 1)
        inside = torch.where(above, voxels > ends, voxels != 0)
        return bounding_box(inside.any(0).numpy()) if inside.any() else (slice(None),) * 3

    def record(self) -> dict[str, Any]:
        """Returns the preparation as JSON; :meth:`from_record` reads it.

        Example:
            >>> kept = Preparation((Rule("window", -175.0, 250.0),), (1.5, 1.5), crop=True)
            >>> Preparation.from_record(kept.record(), channels=1) == kept
            True
        """
        mm, rules = self.spacing and list(self.spacing), record_of(self.rules)
        return {"normalization": rules, "resampled_to": mm, "crop_foreground": self.crop}

    @classmethod
    def from_record(cls, record: Mapping[str, Any], channels: int) -> Preparation:
        """Returns the preparation in a record; older records hold only the normalisation."""
        mm = record.get("resampled_to")
        rules = rules_from(record["normalization"], channels)
        crop = bool(record.get("crop_foreground", False))
        return cls(rules, None if mm is None else tuple(map(float, mm)), crop)


@contextmanager
def one_thread() -> Iterator[None]:
    """Runs PyTorch on one thread, on whose number sums depend, and restores it afterwards.

    Example:
        >>> import torch
        >>> with one_thread():
        ...     torch.get_num_threads()
        1
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def millimetres(spacing: Sequence[float]) -> str:
    """Returns a size as a person writes it.

    Example:
        >>> millimetres([1.0, 1.0, 2.5])
        '1 × 1 × 2.5'
    """
    return " × ".join(f"{mm:.3g}" for mm in spacing)


def on_grid(
    values: Tensor,
    grid: Tensor,
    size: Sequence[int],
    *,
    nearest: bool = False,
    outside: Tensor | None = None,
) -> Tensor:
    """Looks (K, *spatial) values up on another grid; beyond, `outside` (K,) or the border."""
    from monai.data import MetaTensor  # takes seconds to import
    from monai.transforms import SpatialResample

    dims = len(size)
    resample = SpatialResample(
        mode="nearest" if nearest else "bilinear", padding_mode="border", dtype=torch.float32
    )
    image = MetaTensor(values.float(), affine=torch.eye(dims + 1, dtype=torch.float64))
    resampled = resample(image, dst_affine=grid.double().cpu(), spatial_size=list(size)).as_tensor()
    if outside is not None:
        outer = torch.zeros(tuple(size), dtype=torch.bool, device=values.device)
        scale, shift = grid.double().diagonal()[:dims].tolist(), grid.double()[:dims, dims].tolist()
        for axis, (n, have) in enumerate(zip(size, values.shape[1:], strict=True)):
            place = scale[axis] * torch.arange(n, device=values.device) + shift[axis]
            beyond = (place < -0.5) | (place > have - 0.5)
            outer |= beyond.reshape([-1 if a == axis else 1 for a in range(dims)])
        resampled[:, outer] = outside.to(resampled)[:, None]
    moved: Tensor = resampled.to(values.dtype)
    return moved


def bounding_box(mask: NDArray[np.bool_]) -> tuple[slice, ...]:
    """Finds the smallest box around a mask's voxels; one voxel at the origin if it is empty."""
    axes = range(mask.ndim)
    occupied = [np.flatnonzero(mask.any(axis=tuple({*axes} - {axis}))).tolist() for axis in axes]
    return tuple(slice(at[0], at[-1] + 1) if at else slice(0, 1) for at in occupied)
