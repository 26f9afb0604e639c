"""Patches that are cut anew for every epoch, from volumes in memory or in a cache.

The place of a patch depends only on the epoch's seed and the patch's number. Patches on regions are
divided evenly among a patient's regions, so a small one appears as often as a large.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medfed.datamodules.cache.store import Arrays
from medfed.datamodules.client_data import Block, Rows, gather, voxel_counts
from medfed.datamodules.extending import *
from medfed.datamodules.patches import BoxedVolume, PatchRows, Places
from medfed.standalone.preparation import bounding_box

Rng = np.random.Generator
LARGEST = 10_000  # voxels of a region that patches are centred on: as many as nnU-Net keeps


def volume_of(
    image: Tensor, label: Tensor, inside: Tensor, rng: Rng, present: Tensor | None = None
) -> BoxedVolume:
    """Keeps a volume in memory; patches are centred in regions or `inside` (H, W, D)."""
    box = bounding_box(((image != 0).any(dim=0) | (label != 0).any(dim=0)).numpy())
    origin, shape = tuple(s.start for s in box), tuple(image.shape[1:])
    places = _places_of(label.numpy(), inside.numpy(), rng)
    there = None if present is None else present.numpy()
    boxed = _by_slice(image, box), None, _by_slice(label, box)
    return BoxedVolume(*boxed, origin, shape, places, there)


def volume_of_cache(
    arrays: Arrays, label: Tensor, inside: Tensor, present: Tensor, rng: Rng
) -> BoxedVolume:
    """Maps a volume from the cache; its label, on the image's grid, is kept in memory."""
    starts, ends, shape = np.asarray(arrays["box"]).tolist()
    box = tuple(map(slice, starts, ends))
    image = arrays["codes"] if "codes" in arrays else arrays["image"]
    values = np.array(arrays["values"]) if "values" in arrays else None
    places = _places_of(label.numpy(), inside.numpy(), rng)
    voxels = _by_slice(label, box)
    return BoxedVolume(image, values, voxels, tuple(starts), tuple(shape), places, present.numpy())


def _by_slice(volume: Tensor, box: Sequence[slice]) -> NDArray[Any]:
    """(C, h, w, d) of a box, whose slices lie in memory one after the other."""
    return np.ascontiguousarray(volume.numpy()[:, *box].transpose(3, 0, 1, 2)).transpose(1, 2, 3, 0)


def _places_of(label: NDArray[np.uint8], inside: NDArray[np.bool_], rng: Rng) -> tuple[Places, ...]:
    """(n, 3) voxels inside but in no region, then those of every region.

    Example:
        >>> label = np.zeros((1, 2, 2, 1), np.uint8)
        >>> label[0, 1, 0] = 1
        >>> off, on = _places_of(label, np.ones((2, 2, 1), bool), np.random.default_rng(0))
        >>> off.tolist(), on.tolist()
        ([[0, 0, 0], [0, 1, 0], [1, 1, 0]], [[1, 0, 0]])
    """
    places = []
    for mask in (inside & ~label.any(axis=0), *label.astype(bool)):
        flat = np.flatnonzero(mask)
        if len(flat) > LARGEST:
            flat = flat[np.sort(rng.choice(len(flat), LARGEST, replace=False))]
        places.append(np.stack(np.unravel_index(flat, mask.shape), axis=1).astype(np.int32))
    return tuple(places)


@dataclass(frozen=True)
class FreshPatches:
    """Draws a client's patches."""

    patients: Sequence[Sequence[BoxedVolume]]  # the volumes of every training patient
    count: int  # patches per patient and epoch
    # Share of patches centred outside all regions, rounded to whole patches; a patient without
    # regions has only such patches. The patient's regions share the rest in turn, independent of
    # their sizes.
    background_share: float
    # (h, w, d); patches move inwards so that they lie inside the volume.
    size: tuple[int, int, int]
    slices: int | None = None  # see `PatchRows`

    def block(self, seed: int) -> Block:
        """Draws the patches of one epoch."""
        rng = numpy_rng(seed, "patches")
        volumes = [volume for patient in self.patients for volume in patient]
        firsts = np.cumsum([0, *map(len, self.patients)])
        starts = [self._draw(patient, rng) for patient in self.patients]
        at = [d + np.array([n, 0, 0, 0]) for d, n in zip(starts, firsts, strict=False)]
        case = torch.arange(len(self.patients)).repeat_interleave(self.count)
        rows = PatchRows(volumes, np.concatenate(at), self.size, slices=self.slices)
        return {**rows.block(), "case": case}

    def some(self, cases: Sequence[int]) -> FreshPatches:
        """Restricts the patches to some of the patients."""
        return replace(self, patients=[self.patients[case] for case in cases])

    def _draw(self, volumes: Sequence[BoxedVolume], rng: Rng) -> NDArray[np.int64]:
        """(count, 4) volumes and first voxels of one patient's patches."""
        kinds = [[v.places[n] for v in volumes] for n in range(len(volumes[0].places))]
        off, *regions = [places for places in kinds if sum(map(len, places))]
        if not sum(map(len, kinds[0])):  # nothing but regions
            off, regions = [], [off, *regions]
        aside = round(self.count * self.background_share) if regions else self.count
        aside = aside if off else 0
        # The first region changes, so that each of many regions has its turn.
        turn = int(rng.integers(max(len(regions), 1)))
        chances = rng.random(self.count)
        at = np.empty((self.count, 4), dtype=np.int64)
        on_regions = np.arange(self.count - aside)
        for n, region in enumerate(regions):
            of_region = on_regions[(on_regions + turn) % len(regions) == n]
            at[of_region] = self._starts(volumes, region, chances[of_region])
        if aside:
            at[-aside:] = self._starts(volumes, off, chances[-aside:])
        return at

    def _starts(
        self, volumes: Sequence[BoxedVolume], places: Sequence[Places], chances: NDArray[np.float64]
    ) -> NDArray[np.int64]:
        """(n, 4) volumes and first voxels of patches around places, one per chance in [0, 1)."""
        ends = np.cumsum([len(p) for p in places])
        chosen = (chances * ends[-1]).astype(np.int64)
        number = np.searchsorted(ends, chosen, side="right")
        centres = np.concatenate(places)[chosen]
        room = np.array([v.shape for v in volumes])[number] - self.size
        starts = np.clip(centres - np.array(self.size) // 2, 0, np.maximum(room, 0))
        return np.column_stack([number, starts])


def counts_of(labels: Tensor | Rows) -> Tensor:
    """The `voxel_counts` of all patches, of which few are in memory at once."""
    parts = torch.arange(labels.shape[0]).split(64)
    return torch.stack([voxel_counts(gather(labels, part)) for part in parts]).sum(dim=0)
