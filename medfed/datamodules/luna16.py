"""Lung nodule classification: CT patches at candidates, mapped from a cache on disk.

Patches of CT scans around candidates: 2-D, 2.5-D and 3-D, reading only the slabs they need.

A patch is axial and lies on the patient grid of `readers.ct_scan`, whatever the direction matrix
of the scan: h runs from front to back, w from the patient's right to left, d from foot to head. The
voxel that holds the candidate comes to lie at ``size // 2``; what lies outside the scan is air.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medfed.common.errors import ConfigError, DataError
from medfed.common.files import digest
from medfed.common.seeding import derive_seed
from medfed.datamodules.cache.store import Arrays, Item, Recipe, Store
from medfed.datamodules.cache.volumes import CachedDataModule
from medfed.datamodules.client_data import ArrayRows, Block, ClientData
from medfed.datamodules.duplicates import Sample, content
from medfed.datamodules.plans import ClientPlan
from medfed.datamodules.readers.ct_scan import Scan, open_scan
from medfed.datamodules.readers.luna16 import Candidates, Luna16Reader, centre_voxels
from medfed.datamodules.readers.samples import Index, select_rows
from medfed.datamodules.scanner import scan_each
from medfed.datamodules.splits import SPLITS, Split

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


log = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class Luna16DataModule(CachedDataModule[Luna16Reader]):
    """Patches at nodule candidates: ``image`` (B, C, h, w[, d]) in [-1, 1], ``label`` (B,) int64.

    The patches of all kept candidates are extracted once, into a cache that every run maps; a
    client is a set of its rows. Only where a site effect changes the images are a client's patches
    held in memory. A scan is a patient: its candidates never straddle splits or clients.

    A partition says in which proportions each client has nodules: every split of it is thinned to
    these.

    Attributes:
        patches: Which patch is cut at a candidate, of two or three dimensions. The cache depends on
            it, but on no seed.
    """

    patches: PatchSpec

    def __post_init__(self) -> None:
        super().__post_init__()
        self._kept: dict[str, dict[str, Any]] = {}

    @property
    def spatial_dims(self) -> int:
        """2 for slices (one, or several as channels), 3 for cubes."""
        return len(self.patches.size)

    def prepare_data(self) -> None:
        """Generates the cohort where no path is given and it is not there yet."""
        self.channel_names = self.patches.channels(self.scans.channels[0])
        self.class_names = self.scans.classes

    def recipe(self) -> Recipe:
        """What the cache is made of: one item per scan, of all its kept candidates."""
        items = (
            Item(
                id=p.id,
                files=tuple(p.files.values()),
                hashed=(p.files["header"],) if "raw" in p.files else (),
                args=(p.files["header"], self.scans.candidates_of(p.id), self.patches),
            )
            for p in self.list_patients()
        )
        settings = {"reader": self.scans.record(), "patches": asdict(self.patches)}
        where = "" if self.path is None else f" data.path={self.path}"
        again = f"medfed prepare data=luna16{where}"
        return Recipe("luna16", settings, tuple(items), read_patches, command=again)

    def build_clients(self, plans: Mapping[str, ClientPlan]) -> dict[str, ClientData]:
        """Maps every client's rows of the cache, which is made first where it is missing."""
        store = self.find_cache()
        if store is None:
            store = self.build_cache()
            log.info("Prepared the patches once for all runs, in %s.", store.folder)
        labels = np.array(store.array("label"))
        return {name: self._client(name, plan, store, labels) for name, plan in plans.items()}

    def _client(
        self, name: str, plan: ClientPlan, store: Store, labels: NDArray[np.int64]
    ) -> ClientData:
        blocks: dict[Split, Block] = {}
        for split in SPLITS:
            ranges = [store.rows(series) for series in plan.patients[split]]
            seed = derive_seed(self.seed, "thin", name, split)
            rows, case = select_rows(ranges, labels, plan.shares, seed)
            blocks[split] = {
                "image": self._images(plan, split, store, rows, case),
                "label": torch.from_numpy(labels[rows]),
                "case": torch.from_numpy(case),
            }
            self._kept.setdefault(name, {})[split] = {
                "counts": np.bincount(labels[rows], minlength=self.num_classes).tolist(),
                "rows_sha256": digest(store.array("row")[rows].tolist()),
            }
            if plan.patients[split] and not len(rows):
                if split == "train":
                    raise DataError(
                        f"Client {name} has no training patch; give it more scans, or class shares "
                        "that its nodules suffice for."
                    )
                log.warning("Client %s has no %s patch after thinning.", name, split)
        return self.labelled_client(name, plan, blocks)

    def _images(
        self, plan: ClientPlan, split: Split, store: Store, rows: Index, case: Index
    ) -> Tensor | ArrayRows:
        """Patches, which stay on disk unless a scanner changes them."""
        window, present = self.patches.window, plan.channels.numpy()
        if plan.scanner is None:
            unit = partial(to_unit, window=window, present=present)
            return ArrayRows(store.path("image"), rows, unit)
        images = torch.from_numpy(to_unit(store.array("image")[rows], window))
        series = [plan.patients[split][i] for i in case]
        keys = zip(series, store.array("row")[rows].tolist(), strict=True)
        scan_each(images, plan.scanner, keys)[:, ~plan.channels] = 0
        return images

    def data_remarks(self) -> list[str]:
        """See the base class: non-nodules beyond those kept for every nodule."""
        record = self.scans.record()
        listed, kept = (sum(record[key].values()) for key in ("listed", "kept"))
        if listed == kept:
            return []
        return [
            f"Of {listed:,} candidates {kept:,} are used: of the scans that are there all nodules, "
            f"and data.reader.negatives_per_positive={record['negatives_per_positive']} others for "
            "each."
        ]

    def contents(self) -> tuple[str, Iterator[Sample]]:
        """See the base class: patches, in HU."""
        assert self.store is not None
        images, labels = self.store.array("image"), self.store.array("label")
        used = (i for plan in self.plans.values() for ids in plan.patients.values() for i in ids)
        return "patches", (
            Sample(series, f"candidate {n - rows.start} of {series}", found, int(labels[n]))
            for series in used
            for rows in [self.store.rows(series)]
            for n in rows
            if (found := content(images[n])) is not None
        )

    def preprocessing(self, client: str) -> dict[str, Any]:
        """See the base class: patches at candidates on the patient grid, HU windowed to [-1, 1]."""
        spec = asdict(self.patches)
        spec = {k: list(v) if isinstance(v, tuple) else v for k, v in spec.items()}
        return {
            **super().preprocessing(client),
            "orientation": "LPS",
            "normalization": {"name": "window", "hu": list(self.patches.window), "to": [-1, 1]},
            "input": {"kind": "ct_patches", "patches": spec},
        }

    def positive_of(self, client: str) -> int | None:
        """A nodule is 1, or what the client's own order of the classes calls it."""
        order = self.plans[client].label_order
        return 1 if order is None else order[1]

    def test_remarks(self) -> list[str]:
        """That fewer candidates make fewer false positives per scan."""
        record = self.scans.record()
        kept, listed = (record[key]["non-nodule"] for key in ("kept", "listed"))
        if kept == listed and all(plan.shares is None for plan in self.plans.values()):
            return []
        thinned = "" if kept < listed else ", thinned to the shares of the partition"
        return [
            f"cpm is of the candidates kept ({kept} of {listed} non-nodules{thinned}), not of all "
            "that LUNA16 lists: with fewer false positives per scan it is higher; "
            "data.reader.negatives_per_positive=null keeps all."
        ]

    def settings(self) -> dict[str, Any]:
        """How candidates were chosen and patches cut, and what each client and split kept of them.

        The kept candidates are given as samples per class and a hash of their rows in the CSV.
        """
        return {
            "reader": self.scans.record(),
            "patches": asdict(self.patches),
            "candidates": self._kept,
        }

    def file_hashes(self, patients: Sequence[str]) -> dict[str, str]:
        """SHA-256 of the CSV and the headers; a scan's voxels count by its patches' checksum.

        Hashing 120 GB of voxels at every run would take longer than training.
        """
        assert self.store is not None
        record = self.scans.record()
        found = {str(self.scans.path / record["candidates"]): str(record["sha256"])}
        for series in patients:
            entry, files = self.store.entry(series), self._patients[series].files
            found |= {str(f): entry.hashes.get(f.name, entry.checksum) for f in files.values()}
        return dict(sorted(found.items()))
