"""CT scans as MetaImage files (``.mhd``, ``.mha``): their geometry, and single boxes of voxels.

All indices here are of the *patient grid*: the scan's own voxels, with the axes permuted and
reversed such that x runs from the patient's right to left, y from front to back and z from foot to
head (LPS, as ITK calls it). Arrays are (z, y, x): a slice looks as radiologists look at it. A scan
that was stored with a flipped direction matrix so gives the same arrays as one that was not.
Nothing is resampled: axes oblique to the patient's are taken for the nearest ones.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medfed.common.errors import DataError
from medfed.datamodules.readers.metaimage import Storage, storage_of, unreadable

Voxels = NDArray[np.int16]
Index = Sequence[int]  # (3,), of a voxel
_HOUNSFIELD = 4096  # 12 bits; most of a scan lies within
_PATIENT_AXES = {"R": 0, "L": 0, "A": 1, "P": 1, "I": 2, "S": 2}
_INT16 = np.iinfo(np.int16)


@dataclass(frozen=True)
class Scan:
    """One scan: its geometry, and its voxels box by box. Made by `open_scan`.

    Attributes:
        header: The ``.mhd`` or ``.mha`` file.
        storage: How its voxels are stored.
        file_size: (3,) voxels along the file's axes, the fastest first.
        axes: (3,) the file's axis for each patient axis x, y, z.
        reverse: (3,) whether a patient axis runs against the file's.
        spacing: (3,) mm along the patient axes.
        stencil: A SimpleITK image of one voxel with the file's geometry, which transforms points.
    """

    header: Path
    storage: Storage
    file_size: tuple[int, int, int]
    axes: tuple[int, int, int]
    reverse: tuple[bool, bool, bool]
    spacing: tuple[float, float, float]
    stencil: Any = field(repr=False, compare=False)

    @property
    def size(self) -> NDArray[np.int64]:
        """(3,) voxels along the patient axes x, y, z."""
        return np.array([self.file_size[axis] for axis in self.axes], dtype=np.int64)

    @property
    def slow_axis(self) -> int:
        """The patient axis along which the file's slices lie: 2 for an axial scan."""
        return self.axes.index(2)

    def locate(self, world: NDArray[np.float64]) -> NDArray[np.float64]:
        """Transforms points to the patient grid.

        Args:
            world: (n, 3) mm, x y z, in the physical space of the header.

        Returns:
            (n, 3) continuous index x, y, z; an integer is the middle of a voxel.
        """
        transform = self.stencil.TransformPhysicalPointToContinuousIndex
        index = np.array([transform(point) for point in world.tolist()]).reshape(-1, 3)
        index = index[:, list(self.axes)]
        return np.where(self.reverse, self.size - 1 - index, index)

    def boxes(self, ends: Sequence[tuple[Index, Index]]) -> Iterator[Voxels]:
        """Reads the voxels of boxes that lie inside the scan.

        Of plainly stored scans only the boxes' rows are read, and the kernel is told of all of
        them beforehand, so that the disk works on them at once; others are read whole, once.

        Args:
            ends: Per box (3,) the first voxel x, y, z of the patient grid, and (3,) one past the
                last.

        Yields:
            (z, y, x) int16 of each box.

        Raises:
            DataError: If the voxels cannot be read.
        """
        parts = [self._in_file(low, high) for low, high in ends]
        if not self.storage.plain:
            for (i0, j0, k0), (i1, j1, k1) in parts:
                yield self._turned(self._whole[k0:k1, j0:j1, i0:i1])
            return
        seen = _Seen(self.storage.file)
        try:
            with self.storage.file.open("rb", buffering=0) as file:
                for (_, j0, k0), (_, j1, k1) in parts:
                    self._announce(file.fileno(), k0, k1, j0, j1)
                for (i0, j0, k0), (i1, j1, k1) in parts:
                    rows = self._rows(file, k0, k1, j0, j1)
                    seen.add(rows)
                    yield self._turned(rows[:, :, i0:i1])
        except OSError as error:
            raise unreadable(self.storage.file, error) from error
        if parts:
            seen.check()

    def _in_file(self, low: Index, high: Index) -> tuple[Index, Index]:
        """First and last-plus-one index along the file's axes, the fastest first."""
        first, last = [0, 0, 0], [0, 0, 0]
        for axis, reverse, a, b in zip(self.axes, self.reverse, low, high, strict=True):
            size = self.file_size[axis]
            first[axis], last[axis] = (size - b, size - a) if reverse else (a, b)
        return first, last

    def _turned(self, block: Voxels) -> Voxels:
        """From the file's axes, slowest first, to (z, y, x): file axis a is array axis 2 - a."""
        block = block.transpose([2 - self.axes[p] for p in (2, 1, 0)])
        return block[tuple(slice(None, None, -1 if r else 1) for r in self.reverse[::-1])]

    def _pieces(self, k0: int, k1: int, j0: int, j1: int) -> tuple[list[int], int]:
        """Where rows j0..j1 of the file's slices k0..k1 begin, and how long each piece is."""
        nx, ny, _ = self.file_size
        row = nx * np.dtype(self.storage.dtype).itemsize
        if j1 - j0 == ny:  # whole slices lie one behind the other and are read at once
            return [row * ny * k0], row * ny * (k1 - k0)
        return [row * (ny * k + j0) for k in range(k0, k1)], row * (j1 - j0)

    def _announce(self, handle: int, k0: int, k1: int, j0: int, j1: int) -> None:
        if hasattr(os, "posix_fadvise"):
            starts, length = self._pieces(k0, k1, j0, j1)
            for start in starts:
                os.posix_fadvise(handle, start, length, os.POSIX_FADV_WILLNEED)

    def _rows(self, file: FileIO, k0: int, k1: int, j0: int, j1: int) -> Voxels:
        """Whole rows j0..j1 of the file's slices k0..k1: (k, j, i)."""
        rows = np.empty((k1 - k0, j1 - j0, self.file_size[0]), dtype=self.storage.dtype)
        starts, length = self._pieces(k0, k1, j0, j1)
        flat = rows.reshape(-1).view(np.uint8)
        for n, start in enumerate(starts):
            file.seek(start)
            if file.readinto(flat[n * length : (n + 1) * length].data) != length:
                raise OSError("it ends too early")
        return np.asarray(rows, dtype=np.int16)

    @cached_property
    def _whole(self) -> Voxels:
        """All voxels in the file's order, rounded to int16."""
        voxels = self.storage.voxels()
        if np.issubdtype(voxels.dtype, np.floating) and not np.isfinite(voxels).all():
            raise DataError(
                f"{self.storage.file} has NaN or infinite voxels; repair the file or leave the "
                "scan out."
            )
        seen = _Seen(self.storage.file)
        seen.add(voxels)
        seen.check()
        if voxels.dtype.kind == "i" and voxels.dtype.itemsize <= 2:
            return np.asarray(voxels, dtype=np.int16)
        return np.asarray(np.rint(np.clip(voxels, _INT16.min, _INT16.max)), dtype=np.int16)


def open_scan(header: Path) -> Scan:
    """Reads a header; no voxel is read.

    Args:
        header: A ``.mhd`` or ``.mha`` file of a 3-D scan.

    Returns:
        The scan.

    Raises:
        DataError: If the header cannot be read, or its voxels are missing or of another number.
    """
    import SimpleITK as sitk

    storage = storage_of(header)
    stencil = sitk.Image(1, 1, 1, sitk.sitkInt16)
    stencil.SetOrigin(storage.origin)
    stencil.SetSpacing(storage.spacing)
    stencil.SetDirection(storage.direction)
    letters = sitk.DICOMOrientImageFilter.GetOrientationFromDirectionCosines(storage.direction)
    x, y, z = ([_PATIENT_AXES[letter] for letter in letters].index(p) for p in range(3))
    a, b, c = (storage.spacing[axis] for axis in (x, y, z))
    return Scan(
        header=header,
        storage=storage,
        file_size=storage.size,
        axes=(x, y, z),
        reverse=(letters[x] == "R", letters[y] == "A", letters[z] == "I"),
        spacing=(a, b, c),
        stencil=stencil,
    )


@dataclass
class _Seen:
    """What the voxels that were read of a scan have in common."""

    file: Path
    least: float = math.inf
    most: float = -math.inf
    count: int = 0
    strange: int = 0

    def add(self, voxels: NDArray[Any]) -> None:
        least, most = float(voxels.min()), float(voxels.max())
        self.least, self.most = min(self.least, least), max(self.most, most)
        self.count += voxels.size
        if least < -_HOUNSFIELD or most > _HOUNSFIELD:
            self.strange += int(((voxels < -_HOUNSFIELD) | (voxels > _HOUNSFIELD)).sum())

    def check(self) -> None:
        """Refuses what is no picture in Hounsfield units.

        Metal, and what lies around the circle of a scanner, may be anything; most voxels may not.
        """
        if self.count > 1 and self.least == self.most:
            raise DataError(
                f"{self.file} has the value {self.least:g} in every voxel that was read; copy the "
                "scan again or leave it out."
            )
        if 2 * self.strange > self.count:
            raise DataError(
                f"{self.file} has {self.strange / self.count:.0%} of its voxels outside of "
                f"{-_HOUNSFIELD} to {_HOUNSFIELD} HU, so that ElementType or the byte order is "
                "wrong or the file is damaged; mend it or leave the scan out."
            )
