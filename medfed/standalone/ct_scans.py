"""Whole CT scans at one spacing, and places in them.

A volume has the axes of the patches of :mod:`medfed.standalone.ct_patches`: h runs from front to
back, w from the patient's right to left, d from foot to head. Voxel i reaches from i to i + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from . import itk
from .ct_patches import check_hounsfield, hounsfield, locate
from .errors import ConfigError, DataError
from .volumes import Geometry, read_geometry

Floats = NDArray[np.float64]
_AIR = -200  # HU; other tissues, and other kinds of images, are above


@dataclass(frozen=True)
class ScanSpec:
    """How a scan is prepared."""

    spacing: tuple[float, ...] = (1.5, 1.5, 1.5)  # mm between voxels along h, w and d
    # The HU that become 0 and 1; values outside are clipped.
    window: tuple[int, int] = (-1000, 400)

    def __post_init__(self) -> None:
        object.__setattr__(self, "spacing", tuple(map(float, self.spacing)))
        object.__setattr__(self, "window", tuple(self.window))
        if len(self.spacing) != 3 or not all(0.1 <= mm <= 20 for mm in self.spacing):
            wanted = "three numbers from 0.1 to 20 mm"
            raise ConfigError(f"data.scan.spacing={list(self.spacing)} must be {wanted}.")
        low, high = self.window
        if not (-(1 << 15) < low < high < 1 << 15 and (low, high) == (int(low), int(high))):
            wanted = "two whole numbers of HU, the lower first"
            raise ConfigError(f"data.scan.window={list(self.window)} must be {wanted}.")

    @property
    def values(self) -> NDArray[np.float32]:
        """What the codes of :func:`read_scan` mean: (high - low + 1,) from 0 to 1."""
        return np.linspace(0, 1, self.window[1] - self.window[0] + 1, dtype=np.float32)


def read_scan(header: Path, spec: ScanSpec) -> NDArray[np.uint16]:
    """Reads a scan, clipped and resampled linearly: (h, w, d) HU above the window's lower end."""
    from scipy.ndimage import affine_transform

    grid = read_geometry(header, "LPS")
    if min(grid.shape) == 1:
        raise DataError(f"{header} is a single slice; give the whole scan.")
    voxels = hounsfield(header, grid)
    check_hounsfield(header, [voxels])
    if (least := int(voxels.min())) > _AIR:
        raise DataError(
            f"{header} has no value below {least}, but air and lungs are below {_AIR} HU: it is no "
            "CT scan in Hounsfield units; convert it, or leave it out."
        )
    volume = np.clip(voxels, *spec.window).transpose(1, 2, 0).astype(np.float32)
    step = np.array(spec.spacing) / _old_spacing(grid)
    size = np.maximum(np.rint(np.array(volume.shape) / step), 1).astype(int)
    # Between the middles of voxels, so that the first voxels of both grids begin together.
    place = step, 0.5 * step - 0.5, tuple(size.tolist())
    values = affine_transform(volume, *place, order=1, mode="nearest")
    return np.asarray(np.rint(values - spec.window[0]), dtype=np.uint16)


def places(grid: Geometry, world: Floats, spacing: Sequence[float]) -> Floats:
    """Transforms points (n, 3) of a CSV, mm x y z, to places h, w, d in the prepared volume."""
    old = _old_spacing(grid)
    return np.asarray((locate(grid, world)[:, [1, 0, 2]] + 0.5) * old / np.array(spacing))


def world_of(grid: Geometry, found: Floats, spacing: Sequence[float]) -> Floats:
    """Undoes :func:`places`."""
    voxels = (found * np.array(spacing) / _old_spacing(grid) - 0.5)[:, [1, 0, 2]]
    affine = itk.LPS @ grid.affine
    return np.asarray(voxels @ affine[:3, :3].T + affine[:3, 3])


def _old_spacing(grid: Geometry) -> Floats:
    """(3,) mm along h, w, d."""
    return np.array(grid.spacing)[[1, 0, 2]]
