"""CT scans: candidates and patches around them in 2-D, 2.5-D and 3-D; whole scans at one spacing.

A patch is axial and on the nearest axes of the patient, for every direction matrix of a scan: h
runs from front to back, w from the patient's right to left, d from foot to head. The candidate's
voxel is at ``size // 2``; voxels outside the scan are air. A whole scan has the same axes; there
voxel i reaches from i to i + 1.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from . import itk
from .checks import check_fields, check_positive
from .csv_files import csv_rows
from .errors import ConfigError, DataError
from .files import is_visible
from .volumes import Geometry, read_geometry, stored_voxels

Patches = NDArray[np.int16]
Ints = NDArray[np.int64]  # (3,) along x, y, z
Floats = NDArray[np.float64]
_HOUNSFIELD = 4096  # 12 bits; most of a scan lies within
_AIR = -200  # HU; other tissues, and other kinds of images, are above


@dataclass(frozen=True)
class PatchSpec:
    """Describes the patches to cut."""

    size: tuple[int, ...] = (32, 32)  # (h, w) for axial patches or (h, w, d) for cubes, in pixels
    # How many adjacent slices become the channels of a 2-D patch, an odd number: 3 is 2.5-D.
    slices: int = 1
    # mm per pixel to resample to, in-plane for 2-D and along all axes for 3-D; None keeps the
    # scan's spacing.
    spacing: Annotated[float | None, check_positive] = None
    window: tuple[int, int] = (-1000, 400)  # the least and greatest HU; values outside are clipped
    pad_hu: int = -1000  # HU outside the scan, before the clipping; -1000 is air.

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", tuple(self.size))
        object.__setattr__(self, "window", tuple(self.window))
        if len(self.size) not in (2, 3) or min(self.size) < 1:
            raise ConfigError(f"Patch size {list(self.size)} must be 2 or 3 positive numbers.")
        if self.slices < 1 or self.slices % 2 == 0 or (self.slices > 1 and len(self.size) == 3):
            what = f"slices={self.slices} must be an odd number"
            raise ConfigError(f"{what}, and 1 for 3-D patches (size {list(self.size)}).")
        check_fields("data.patches", self)
        hounsfield = (*self.window, self.pad_hu)
        if any(hu != int(hu) or abs(hu) >= 1 << 15 for hu in hounsfield) or len(hounsfield) != 3:
            what = f"window={list(self.window)} must be two HU and pad_hu={self.pad_hu} one"
            raise ConfigError(f"{what}: whole numbers above -32768 and below 32768.")
        if self.window[0] >= self.window[1]:
            raise ConfigError(f"window={list(self.window)} must have the lower HU first.")

    @property
    def shape(self) -> tuple[int, ...]:
        """(C, h, w) or (1, h, w, d)."""
        return (self.slices, *self.size)

    def channels(self, modality: str) -> tuple[str, ...]:
        """Names the channels: one per adjacent slice, from foot to head.

        Example:
            >>> PatchSpec().channels("CT"), PatchSpec(slices=3).channels("CT")
            (('CT',), ('CT-1', 'CT+0', 'CT+1'))
        """
        if self.slices == 1:
            return (modality,)
        return tuple(f"{modality}{n - self.slices // 2:+d}" for n in range(self.slices))

    @property
    def grid(self) -> Ints:
        """(3,) pixels along x, y, z."""
        h, w, d = (*self.size, self.slices)[:3]
        return np.array([w, h, d], dtype=np.int64)

    def steps(self, spacing: Sequence[float]) -> Floats:
        """Returns (3,) voxels per pixel along x, y, z for a scan of the given spacing (mm)."""
        if self.spacing is None:
            return np.ones(3)
        steps = self.spacing / np.asarray(spacing, dtype=np.float64)
        if len(self.size) == 2:
            steps[2] = 1.0  # the distance of slices does not change
        return steps


def read_patches(header: Path, candidates: Candidates, spec: PatchSpec) -> dict[str, NDArray[Any]]:
    """Reads the patches of one scan for the cache, with their labels and rows in the CSV."""
    image = extract(header, candidates, spec)
    return {"image": image, "label": candidates.label, "row": candidates.row}


def extract(header: Path, candidates: Candidates, spec: PatchSpec) -> Patches:
    """Cuts the patches of one scan."""
    grid = read_geometry(header, "LPS")
    voxels, centres = hounsfield(header, grid), centre_voxels(header, grid, candidates)
    first, last = _reach(spec, grid.spacing)
    size, steps = (last - first + 1)[::-1], spec.steps(grid.spacing)
    patches = np.empty((len(candidates), *spec.shape), dtype=np.int16)
    rows = []
    for patch, begin in zip(patches, (centres + first)[:, ::-1], strict=True):
        inner = np.maximum(begin, 0)
        box = tuple(map(slice, inner, begin + size))
        # A file stores whole rows along x, so checking them costs nothing more.
        rows.append(voxels[box[:2]])
        block = np.full(size, spec.pad_hu, dtype=np.int16)  # with air beyond the scan
        part = rows[-1][..., box[2]]
        block[tuple(slice(s, s + n) for s, n in zip(inner - begin, part.shape, strict=True))] = part
        if spec.spacing is not None:
            # Clipped first: otherwise interpolation would spread metal of 3,000 HU to its
            # neighbours.
            block = _resample(np.clip(block, *spec.window), first, spec.grid, steps)
        patch[:] = block if len(spec.size) == 2 else block.transpose(1, 2, 0)[None]
    check_hounsfield(header, rows)
    return np.clip(patches, *spec.window, out=patches)


def hounsfield(header: Path, grid: Geometry) -> NDArray[np.int16]:
    """Returns the voxels (z, y, x) of a scan, read from disk on access where that is possible."""
    from nibabel.orientations import apply_orientation

    voxels = stored_voxels(header)
    if voxels.shape[3:] == (1,):
        voxels = voxels[..., 0]
    whole = voxels.dtype == np.int16
    if voxels.ndim > 3 or not (whole or np.isfinite(voxels).all()):
        what = f"{header} has NaN or infinite voxels, or several values per voxel"
        raise DataError(f"{what}; repair the file or leave the scan out.")
    if not whole:
        ends = np.iinfo(np.int16)
        voxels = np.rint(np.clip(voxels, ends.min, ends.max)).astype(np.int16)
    return np.asarray(apply_orientation(voxels, grid.turn)).T


def locate(grid: Geometry, world: Floats) -> Floats:
    """Transforms a CSV's points (n, 3) mm, whose axes are ITK's, to indices into the voxels."""
    inverse = np.linalg.inv(itk.LPS @ grid.affine)
    return np.asarray(world @ inverse[:3, :3].T + inverse[:3, 3])


def centre_voxels(header: Path, grid: Geometry, candidates: Candidates) -> Ints:
    """Finds the voxels (n, 3) that hold the candidates.

    On the border of two this is the one further to the left, back or head, in every storage order.
    """
    # Rounding errors of the transform must not decide the side of a border.
    voxels = np.floor(np.round(locate(grid, candidates.world), 6) + 0.5).astype(np.int64)
    outside = ((voxels < 0) | (voxels >= grid.shape)).any(axis=1)
    if outside.any():
        at = int(outside.argmax())
        point = ", ".join(f"{mm:g}" for mm in candidates.world[at])
        where = f"{candidates.source}, data row {candidates.row[at]}"
        raise DataError(f"{where}: ({point}) mm lies outside scan {header}; mend or drop the row.")
    return voxels


def check_hounsfield(file: Path, parts: Sequence[NDArray[Any]]) -> None:
    """Refuses voxels of which most are not in Hounsfield units; metal may have any value."""
    count = sum(part.size for part in parts)
    values = {float(end) for part in parts for end in (part.min(), part.max())}
    if count > 1 and len(values) == 1:
        what = f"{file} has the value {values.pop():g} in every voxel that was read"
        raise DataError(f"{what}; copy the scan again or leave it out.")
    strange = sum(int((np.abs(part.astype(np.int32)) > _HOUNSFIELD).sum()) for part in parts)
    if 2 * strange > count:
        ends = f"{-_HOUNSFIELD} to {_HOUNSFIELD} HU"
        why = "so that ElementType or the byte order is wrong or the file is damaged"
        what = f"{file} has {strange / count:.0%} of its voxels outside of {ends}, {why}"
        raise DataError(f"{what}; mend it or leave the scan out.")


def to_unit(
    patches: Patches, window: tuple[int, int], present: NDArray[np.bool_] | None = None
) -> NDArray[np.float32]:
    """Scales HU (n, C, *spatial) in a window to [-1, 1]; channels that are not present are 0."""
    low, high = window
    unit = patches.astype(np.float32)
    unit -= np.float32((low + high) / 2)
    unit /= np.float32((high - low) / 2)
    if present is not None and not present.all():
        unit[:, ~present] = 0
    return unit


def _reach(spec: PatchSpec, spacing: Sequence[float]) -> tuple[Ints, Ints]:
    """(3,) first and last voxel that a patch touches, counted from its centre."""
    steps = spec.steps(spacing)
    before, after = spec.grid // 2 * steps, (spec.grid - 1 - spec.grid // 2) * steps
    return -np.ceil(before).astype(np.int64), np.ceil(after).astype(np.int64)


def _resample(block: Patches, first: Ints, grid: Ints, steps: Floats) -> Patches:
    """Linear interpolation of a block (z, y, x) that begins `first` voxels from the centre."""
    from scipy.ndimage import affine_transform

    # In voxels from the centre: whole steps are exact for every storage order. "nearest", as a
    # rounding error must not push a row beyond the block's end.
    start = -(grid // 2) * steps - first
    place = block, steps[::-1], start[::-1], tuple(grid[::-1].tolist()), np.float64
    return np.asarray(np.rint(affine_transform(*place, order=1, mode="nearest")), dtype=np.int16)


_WORLD = ("coordX", "coordY", "coordZ")


@dataclass(frozen=True)
class Candidates:
    """The points of a CSV in one scan."""

    world: Floats  # (n, 3) mm x y z, as in the CSV
    value: NDArray[Any]  # (n,) the last column: a class or a diameter in mm
    row: NDArray[np.int64]  # (n,) int64 row in the CSV; the first data row is 1
    source: str = "candidates"  # the CSV, for error sentences

    def __len__(self) -> int:
        return len(self.row)

    @property
    def label(self) -> NDArray[np.int64]:
        """(n,) int64, 1 = nodule."""
        return self.value.astype(np.int64)

    def some(self, chosen: NDArray[Any]) -> Candidates:
        """Returns those at some places, or of which a mask (n,) is true."""
        return Candidates(self.world[chosen], self.value[chosen], self.row[chosen], self.source)


def read_points(path: Path, last: str | None) -> dict[str, Candidates]:
    """Reads a CSV with the columns ``seriesuid, coordX, coordY, coordZ`` and one more, by scan."""
    names: dict[str, int] = {}
    scan, numbers = array("q"), array("d")
    wanted = ("seriesuid", *_WORLD, *([last] if last else []))
    rows = csv_rows(path)
    header = [cell.strip() for cell in next(rows, [])]
    if any(name not in header for name in wanted):
        what = f"{path} needs the columns {', '.join(wanted)}, but has {', '.join(header)}"
        raise DataError(f"{what}; give it the header line of LUNA16.")
    series_at, *number_at = (header.index(name) for name in wanted)
    of_row = itemgetter(*number_at)
    for number, row in enumerate(rows, start=1):
        try:
            numbers.extend(map(float, of_row(row)))
            scan.append(names.setdefault(row[series_at].strip(), len(names)))
        except (ValueError, IndexError):
            raise DataError(
                f"{path}, data row {number}: {', '.join(row):.80} has no number for each of "
                f"{', '.join(wanted[1:])}; mend the row."
            ) from None
    table = np.array(numbers).reshape(-1, len(wanted) - 1)
    if not len(table):
        raise DataError(f"{path} has no data rows.")
    if not np.isfinite(table).all():
        at = int((~np.isfinite(table)).any(axis=1).argmax())
        cells = ", ".join(f"{value:g}" for value in table[at])
        raise DataError(f"{path}, data row {at + 1}: {cells} are not all finite; mend the row.")
    value = table[:, 3] if last else np.zeros(len(table))
    every = Candidates(table[:, :3], value, np.arange(1, len(table) + 1), str(path))
    of = np.array(scan, dtype=np.int64)
    parts = np.split(np.argsort(of, kind="stable"), np.cumsum(np.bincount(of))[:-1])
    return {name: every.some(rows) for name, rows in zip(names, parts, strict=True)}


def find_scans(path: Path) -> dict[str, Path]:
    """Finds the headers in a folder and in its subfolders ``subset*``, also in one another."""
    scans: dict[str, Path] = {}
    inner = (sorted(path.glob("/".join(["subset*"] * depth))) for depth in (1, 2, 3))
    folders = [path, *filter(Path.is_dir, chain.from_iterable(inner))]
    for header in [file for folder in folders for file in sorted(folder.glob("*"))]:
        if header.suffix.lower() not in (".mhd", ".mha") or not is_visible(header.name):
            continue
        series = header.name[: -len(".mhd")]  # series ids contain dots
        if series in scans:
            raise DataError(f"{header} and {scans[series]} are the same series; remove one.")
        scans[series] = header
    if not scans:
        what = f"{path} has no .mhd scans, neither itself nor in folders subset0 to subset9"
        raise DataError(f"{what}; set data.path to the folder of LUNA16.")
    return scans


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


def world_of(grid: Geometry, places: Floats, spacing: Sequence[float]) -> Floats:
    """Undoes :func:`places`."""
    voxels = (places * np.array(spacing) / _old_spacing(grid) - 0.5)[:, [1, 0, 2]]
    affine = itk.LPS @ grid.affine
    return np.asarray(voxels @ affine[:3, :3].T + affine[:3, 3])


def _old_spacing(grid: Geometry) -> Floats:
    """(3,) mm along h, w, d."""
    return np.array(grid.spacing)[[1, 0, 2]]
