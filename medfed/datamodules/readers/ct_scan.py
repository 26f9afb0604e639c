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
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medfed.common.errors import DataError

Voxels = NDArray[np.int16]
Index = Sequence[int]  # (3,), of a voxel
_HEADER_BYTES = 1 << 16  # longer than any header; in a .mha the voxels follow
_PATIENT_AXES = {"R": 0, "L": 0, "A": 1, "P": 1, "I": 2, "S": 2}
_INT16 = np.iinfo(np.int16)


@dataclass(frozen=True)
class Storage:
    """How a header says that its voxels are stored.

    Attributes:
        file: The file with the voxels; the header itself where they follow it.
        plain: Whether they are nothing but int16 numbers in one file, so that parts can be read.
        dtype: NumPy's name of these numbers.
    """

    file: Path
    plain: bool
    dtype: str = "<i2"


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
    _kept: list[Any] = field(default_factory=list, repr=False, compare=False)

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
        try:
            with self.storage.file.open("rb", buffering=0) as file:
                for (_, j0, k0), (_, j1, k1) in parts:
                    self._announce(file.fileno(), k0, k1, j0, j1)
                for (i0, j0, k0), (i1, j1, k1) in parts:
                    yield self._turned(self._rows(file, k0, k1, j0, j1)[:, :, i0:i1])
        except OSError as error:
            raise _unreadable(self.storage.file, error) from error

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
        import SimpleITK as sitk

        try:
            image = sitk.ReadImage(str(self.header), imageIO="MetaImageIO")
        except RuntimeError as error:
            raise _unreadable(self.storage.file, error) from error
        voxels = sitk.GetArrayViewFromImage(image)  # no second copy of a scan
        if np.issubdtype(voxels.dtype, np.floating) and not np.isfinite(voxels).all():
            raise DataError(
                f"{self.storage.file} has NaN or infinite voxels; repair the file or leave the "
                "scan out."
            )
        if voxels.dtype == np.int16:
            self._kept.append(image)  # the view does not keep it
            return np.asarray(voxels)
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

    storage, reader = storage_of(header), sitk.ImageFileReader()
    reader.SetFileName(str(header))
    reader.SetImageIO("MetaImageIO")
    try:
        reader.ReadImageInformation()
        if reader.GetDimension() != 3 or reader.GetNumberOfComponents() != 1:
            raise DataError(
                f"{header} has {reader.GetDimension()} dimensions and "
                f"{reader.GetNumberOfComponents()} values per voxel; a CT scan has 3 and 1: leave "
                "the file out."
            )
        stencil = sitk.Image(1, 1, 1, sitk.sitkInt16)
        stencil.SetOrigin(reader.GetOrigin())
        stencil.SetSpacing(reader.GetSpacing())
        stencil.SetDirection(reader.GetDirection())
        oriented = sitk.DICOMOrientImageFilter.GetOrientationFromDirectionCosines
        letters = oriented(reader.GetDirection())
    except RuntimeError as error:  # no orientation or spacing that a scan can have
        raise _unreadable(header, error) from error
    x, y, z = ([_PATIENT_AXES[letter] for letter in letters].index(p) for p in range(3))
    return Scan(
        header=header,
        storage=storage,
        file_size=reader.GetSize(),
        axes=(x, y, z),
        reverse=(letters[x] == "R", letters[y] == "A", letters[z] == "I"),
        spacing=tuple(reader.GetSpacing()[axis] for axis in (x, y, z)),
        stencil=stencil,
    )


def storage_of(header: Path) -> Storage:
    """Reads how the voxels are stored, and compares the size of their file to the header.

    Args:
        header: A ``.mhd`` or ``.mha`` file.

    Returns:
        The storage.

    Raises:
        DataError: If the header or the voxels are missing, or the voxels are too few or too many.
    """
    fields = _fields(header)
    name = fields.get("ElementDataFile", "")
    if not name:
        raise DataError(f"{header} is no MetaImage header; copy it again or leave the scan out.")
    if name.split()[0] in ("LOCAL", "LIST") or "%" in name:
        return Storage(header, plain=False)
    file = header.parent / name
    try:
        found = file.stat().st_size
    except (OSError, ValueError):
        raise DataError(
            f"{file} is missing, but {header.name} names it; copy it there or leave the scan out."
        ) from None
    plain = (
        fields.get("ElementType") == "MET_SHORT"
        and fields.get("CompressedData", "False") == "False"
        and fields.get("ElementNumberOfChannels", "1") == "1"
        and fields.get("HeaderSize", "0") == "0"
        and fields.get("BinaryData", "True") == "True"
    )
    if not plain:
        return Storage(file, plain=False)
    sizes = fields.get("DimSize", "x").split()
    wanted = 2 * math.prod(int(n) if n.isdecimal() and len(n) < 10 else 0 for n in sizes)
    if not found == wanted > 0:
        raise DataError(
            f"{file} has {found} bytes, but {header.name} says {wanted}; copy it again or leave "
            "the scan out."
        )
    msb = fields.get("BinaryDataByteOrderMSB", fields.get("ElementByteOrderMSB", "False"))
    return Storage(file, plain=True, dtype=">i2" if msb == "True" else "<i2")


def _fields(header: Path) -> dict[str, str]:
    """The header's lines ``Key = value``, up to the one that names the voxels."""
    try:
        with header.open("rb") as file:
            text = file.read(_HEADER_BYTES).decode("latin-1")
    except OSError as error:
        raise _unreadable(header, error) from error
    counts = re.findall(r"NDims\s*[=:]?[ \t]*(\S*)", text)
    if not set(counts) <= set("1234"):  # ITK ends the whole process where it is -1
        raise _unreadable(header, ValueError(f"NDims = {', '.join(counts):.40}"))
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals:
            fields[key.strip()] = value.strip()
        if key.strip() == "ElementDataFile":
            break
    return fields


def _unreadable(file: Path, error: Exception) -> DataError:
    reason = str(error).strip().splitlines()[-1].removeprefix("Reason: ")
    return DataError(
        f"{file} is truncated or corrupt ({reason}); copy it again or leave the scan out."
    )
