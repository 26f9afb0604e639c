"""Patches of CT scans around candidates: 2-D, 2.5-D and 3-D, reading only the slabs they need.

A patch is axial and lies on the patient grid of `readers.ct_scan`, whatever the direction matrix
of the scan: h runs from front to back, w from the patient's right to left, d from foot to head. The
voxel that holds the candidate comes to lie at ``size // 2``; what lies outside the scan is air.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from medfed.common.errors import ConfigError
from medfed.datamodules.cache.store import Arrays
from medfed.datamodules.readers.ct_scan import Scan, open_scan
from medfed.datamodules.readers.luna16 import Candidates, centre_voxels

Patches = NDArray[np.int16]
Ints = NDArray[np.int64]  # (3,) along x, y, z
SLAB_BYTES = 32 << 20  # at most so much of a scan at a time, unless one patch needs more
SEEK_BYTES = 256 << 10  # a read of its own costs as much as so many bytes more in another


@dataclass(frozen=True)
class PatchSpec:
    """What is cut.

    Attributes:
        size: (h, w) for axial patches or (h, w, d) for cubes, in pixels.
        slices: Adjacent slices that become the channels of a 2-D patch, an odd number: 3 is 2.5-D.
        spacing: mm per pixel to resample to, in-plane for 2-D and along all axes for 3-D; None
            keeps the scan's own.
        window: HU that are told apart; darker and brighter ones are clipped.
        pad_hu: HU outside the scan, before the clipping; -1000 is air.
    """

    size: tuple[int, ...] = (32, 32)
    slices: int = 1
    spacing: float | None = None
    window: tuple[int, int] = (-1000, 400)
    pad_hu: int = -1000

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", tuple(self.size))
        object.__setattr__(self, "window", tuple(self.window))
        if len(self.size) not in (2, 3) or min(self.size) < 1:
            raise ConfigError(f"Patch size {list(self.size)} must be 2 or 3 positive numbers.")
        if self.slices < 1 or self.slices % 2 == 0 or (self.slices > 1 and len(self.size) == 3):
            raise ConfigError(
                f"slices={self.slices} must be an odd number, and 1 for 3-D patches "
                f"(size {list(self.size)})."
            )
        if self.spacing is not None and not self.spacing > 0:
            raise ConfigError(f"spacing={self.spacing} must be positive (mm), or null.")
        hounsfield = (*self.window, self.pad_hu)
        if any(hu != int(hu) or abs(hu) >= 1 << 15 for hu in hounsfield) or len(hounsfield) != 3:
            raise ConfigError(
                f"window={list(self.window)} must be two HU and pad_hu={self.pad_hu} one: whole "
                "numbers above -32768 and below 32768."
            )
        if self.window[0] >= self.window[1]:
            raise ConfigError(f"window={list(self.window)} must have the lower HU first.")

    @property
    def shape(self) -> tuple[int, ...]:
        """(C, h, w) or (1, h, w, d).

        Example:
            >>> PatchSpec(slices=3).shape, PatchSpec(size=(8, 8, 4)).shape
            ((3, 32, 32), (1, 8, 8, 4))
        """
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

    def steps(self, spacing: Sequence[float]) -> NDArray[np.float64]:
        """Returns (3,) voxels per pixel along x, y, z for a scan of the given spacing (mm)."""
        if self.spacing is None:
            return np.ones(3)
        steps = self.spacing / np.asarray(spacing, dtype=np.float64)
        if len(self.size) == 2:
            steps[2] = 1.0  # slices stay the scan's own
        return steps


@dataclass
class Slab:
    """A box of a scan, read at once, and the patches that it serves.

    Attributes:
        low: (3,) first voxel x, y, z of the patient grid.
        high: (3,) one past the last.
        members: Indices of the candidates.
    """

    low: list[int]
    high: list[int]
    members: list[int]


def read_patches(header: Path, candidates: Candidates, spec: PatchSpec) -> Arrays:
    """Reads what the cache keeps of one scan; worker processes call it.

    Args:
        header: The scan's header.
        candidates: Its kept candidates, n of them.
        spec: Which patch to cut.

    Returns:
        ``image`` (n, C, h, w[, d]) int16 HU, ``label`` (n,) and ``row`` (n,) int64, the row in the
        candidates' CSV.
    """
    image = extract(header, candidates, spec)
    return {"image": image, "label": candidates.label, "row": candidates.row}


def extract(header: Path, candidates: Candidates, spec: PatchSpec) -> Patches:
    """Cuts the patches of one scan.

    Args:
        header: The scan's ``.mhd`` or ``.mha`` file.
        candidates: n points in it.
        spec: What to cut.

    Returns:
        (n, C, h, w) or (n, 1, h, w, d) int16 HU inside the window, in the order of the candidates.

    Raises:
        DataError: If the scan cannot be read or a candidate lies outside of it.
    """
    scan = open_scan(header)
    centres = centre_voxels(scan, candidates)
    first, last = _reach(spec, scan.spacing)
    size, steps = (last - first + 1)[::-1].tolist(), spec.steps(scan.spacing)
    patches = np.empty((len(candidates), *spec.shape), dtype=np.int16)
    slabs = plan_slabs(scan, centres, spec)
    boxes = scan.boxes([(slab.low, slab.high) for slab in slabs])
    for slab, voxels in zip(slabs, boxes, strict=True):
        begins = (centres[slab.members] + first - slab.low)[:, ::-1]
        for member, begin in zip(slab.members, begins.tolist(), strict=True):
            block = _cut(voxels, begin, size, spec.pad_hu)
            if spec.spacing is not None:
                block = _resample(np.clip(block, *spec.window), first, spec.grid, steps)
            patches[member] = block if len(spec.size) == 2 else block.transpose(1, 2, 0)[None]
    return np.clip(patches, *spec.window, out=patches)


def to_unit(
    patches: Patches, window: tuple[int, int], present: NDArray[np.bool_] | None = None
) -> NDArray[np.float32]:
    """Scales HU to [-1, 1].

    Args:
        patches: (n, C, *spatial) int16 HU inside the window.
        window: The HU that become -1 and 1.
        present: (C,) the client's channels; the others become 0. None has all.

    Returns:
        float32 of the same shape.

    Example:
        >>> hu = np.array([[[[-1000, -300]], [[400, 400]]]], np.int16)
        >>> to_unit(hu, (-1000, 400), np.array([True, False])).ravel().tolist()
        [-1.0, 0.0, 0.0, 0.0]
    """
    low, high = window
    unit = patches.astype(np.float32)
    unit -= np.float32((low + high) / 2)
    unit /= np.float32((high - low) / 2)
    if present is not None and not present.all():
        unit[:, ~present] = 0
    return unit


def plan_slabs(scan: Scan, centres: NDArray[np.int64], spec: PatchSpec) -> list[Slab]:
    """Groups patches that need the same part of the file.

    Patches either join wherever they share a slice, so that dense ones do not read it many times,
    or only where a common slab is hardly larger than the parts, so that sparse cubes do not read
    what lies between them: whichever costs less. No slab exceeds `SLAB_BYTES` unless one patch
    does: a scan is never held whole for the sake of its patches.

    Args:
        scan: The scan.
        centres: (n, 3) voxels x, y, z.
        spec: What to cut.

    Returns:
        Slabs whose members together are all n patches.
    """
    first, last = _reach(spec, scan.spacing)
    lows = np.maximum(centres + first, 0)
    highs = np.minimum(centres + last + 1, scan.size)
    order = np.argsort(lows[:, scan.slow_axis], kind="stable")
    # In plain numbers: a scan with all its candidates has hundreds of patches.
    boxes = list(zip(order.tolist(), lows[order].tolist(), highs[order].tolist(), strict=True))
    plans = [_join(scan, boxes, sparse) for sparse in (False, True)]
    return min(plans, key=lambda plan: sum(_cost(scan, s.low, s.high) for s in plan))


def _join(scan: Scan, boxes: list[tuple[int, list[int], list[int]]], sparse: bool) -> list[Slab]:
    """Joins boxes, sorted along the file's slices, to the slab before, where that pays."""
    slabs: list[Slab] = []
    for member, low, high in boxes:
        if slabs and low[scan.slow_axis] < (last := slabs[-1]).high[scan.slow_axis]:
            least, most = [*map(min, last.low, low)], [*map(max, last.high, high)]
            apart = _cost(scan, last.low, last.high) + _cost(scan, low, high)
            limit = min(SLAB_BYTES + SEEK_BYTES, apart) if sparse else SLAB_BYTES + SEEK_BYTES
            if _cost(scan, least, most) <= limit:
                last.low, last.high = least, most
                last.members.append(member)
                continue
        slabs.append(Slab(low, high, [member]))
    return slabs


def _cost(scan: Scan, low: Sequence[int], high: Sequence[int]) -> int:
    """Bytes that reading a box takes, in which rows are read whole, and the seek before it."""
    size = [b - a for a, b in zip(low, high, strict=True)]
    size[scan.axes.index(0)] = scan.file_size[0]
    return 2 * math.prod(size) + SEEK_BYTES


def _reach(spec: PatchSpec, spacing: Sequence[float]) -> tuple[Ints, Ints]:
    """(3,) first and last voxel that a patch touches, counted from its centre."""
    steps = spec.steps(spacing)
    before, after = spec.grid // 2 * steps, (spec.grid - 1 - spec.grid // 2) * steps
    return -np.ceil(before).astype(np.int64), np.ceil(after).astype(np.int64)


def _cut(voxels: Patches, begin: Sequence[int], size: Sequence[int], pad_hu: int) -> Patches:
    """The block of a slab that begins at `begin`, all (z, y, x), with air beyond the slab."""
    ends = [b + s for b, s in zip(begin, size, strict=True)]
    inner = [max(b, 0) for b in begin]
    part = voxels[tuple(map(slice, inner, ends))]
    if part.shape == tuple(size):
        return part
    block = np.full(size, pad_hu, dtype=np.int16)
    starts = [i - b for i, b in zip(inner, begin, strict=True)]
    block[tuple(slice(s, s + n) for s, n in zip(starts, part.shape, strict=True))] = part
    return block


def _resample(block: Patches, first: Ints, grid: Ints, steps: NDArray[np.float64]) -> Patches:
    """Linear interpolation of a block (z, y, x) that begins `first` voxels from the centre."""
    from scipy.ndimage import affine_transform

    # In voxels, counted from the centre: whole steps stay exact, however the scan is stored. A
    # rounding error at the block's end must not let a row fall outside: hence "nearest".
    start = -(grid // 2) * steps - first
    values = affine_transform(
        block,
        steps[::-1],
        start[::-1],
        output_shape=tuple(grid[::-1].tolist()),
        output=np.float64,
        order=1,
        mode="nearest",
    )
    return np.asarray(np.rint(values), dtype=np.int16)
