"""Patches for training, in two and three dimensions.

A 2-D patch (h, w) is a 3-D patch (h, w, 1) of an RAS volume, whose last axis runs from foot to
head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from medfed.datamodules.client_data import Rows, voxel_counts
from medfed.datamodules.extending import *
from medfed.standalone.preparation import on_grid


class PreparedCase(NamedTuple):
    """A case as a client's network sees it."""

    image: Tensor  # (C, h, w, d); channels that the client or the case lacks are 0
    label: Tensor  # (R, H, W, D) on the grid of its file
    brain: Tensor  # (h, w, d) bool, true if any channel is not 0
    present: Tensor  # (C,) bool, the channels that are there
    grid: Tensor | None  # (4, 4) from the label's voxels to the image's; None if they are the same
    # (3,) mm between the label's voxels; None if it was not read with the image.
    spacing: Tensor | None

    def mask(self) -> Tensor:
        """Returns the label (R, h, w, d) on the image's grid, by the nearest voxels."""
        if self.grid is None:
            return self.label
        return on_grid(self.label, self.grid.inverse(), self.image.shape[1:], nearest=True)


def patch_size_3d(patch_size: Sequence[int], spatial_dims: int) -> tuple[int, int, int]:
    """Completes a patch size to three axes: (h, w, 1) or (h, w, d).

    Example:
        >>> patch_size_3d((64, 64), 2)
        (64, 64, 1)
    """
    if spatial_dims not in (2, 3) or len(patch_size) != spatial_dims or min(patch_size) < 1:
        what = f"{list(patch_size)} does not fit data.spatial_dims={spatial_dims}"
        raise ConfigError(f"data.patch_size={what}; give 2 sizes for 2 dimensions, 3 for 3.")
    h, w, d = (*patch_size, 1)[:3]
    return h, w, d


def sample_centres(
    tumour: Tensor,
    brain: Tensor,
    count: int,
    background_share: float,
    size: Sequence[int],
    generator: torch.Generator,
) -> Tensor:
    """(count, 3) patch centres inside a volume: on tumour voxels, and a share on other brain."""
    background = round(count * background_share) if tumour.any() else count
    chosen = _draw(tumour, count - background, generator)
    centres = torch.cat([chosen, _draw(brain & ~tumour, background, generator)])
    sides = torch.tensor(size)
    room = (torch.tensor(tumour.shape) - sides).clamp(min=0)
    return centres.clamp(min=sides // 2, max=room + sides // 2)


def _draw(mask: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """(count, 3) voxels of a mask, with replacement."""
    voxels = mask.nonzero()
    if not count or not len(voxels):
        return torch.empty(0, 3, dtype=torch.int64)
    return voxels[torch.randint(len(voxels), (count,), generator=generator)]


Places = NDArray[np.int32]


@dataclass(frozen=True)
class BoxedVolume:
    """A volume, kept as the box outside of which everything is 0."""

    image: NDArray[Any]  # (C, h, w, d) float32, or uint16 codes into `values`
    # (C, K) float32, the meaning of the codes; None if there are none.
    values: NDArray[np.float32] | None
    label: NDArray[np.uint8]  # (R, h, w, d) uint8
    origin: tuple[int, ...]  # (3,) the box's first voxel
    shape: tuple[int, ...]  # (3,) of the whole volume
    # Possible patch centres: (n, 3) voxels outside all regions, then of every region.
    places: tuple[Places, ...]
    # (C,) bool, the channels that are there; the others are 0. None has all.
    present: NDArray[np.bool_] | None = None

    def cut(self, out: NDArray[Any], start: Sequence[int], labels: bool = False) -> None:
        """Copies a patch into `out`.

        `out` is (C, h, w, d) or (R, h, w, d), zeros. `start` is (3,) its first voxel; voxels
        outside the volume stay 0.
        """
        source = self.label if labels else self.image
        # From voxels of the volume to those of the box that is kept.
        low = [int(s) - o for s, o in zip(start, self.origin, strict=True)]
        inner = [max(a, 0) for a in low]
        ends = [min(a + n, m) for a, n, m in zip(low, out.shape[1:], source.shape[1:], strict=True)]
        if any(b <= a for a, b in zip(inner, ends, strict=True)):
            return
        box = tuple(map(slice, inner, ends))
        into = tuple(slice(a - b, e - b) for a, e, b in zip(inner, ends, low, strict=True))
        stored = source[:, *box]
        if labels or self.values is None:
            out[:, *into] = stored
        else:
            for channel, values, codes in zip(out, self.values, stored, strict=True):
                channel[into] = values.take(codes)
        if not labels and self.present is not None and not self.present.all():
            out[~self.present] = 0


@dataclass(frozen=True)
class PatchRows:
    """Patches of a client's volumes, cut on demand."""

    volumes: Sequence[BoxedVolume]  # the client's
    at: NDArray[np.int64]  # (N, 4) the number of the volume and the first voxel of every patch
    size: tuple[int, int, int]  # (h, w, d) of a patch
    labels: bool = False  # whether these are labels (N, R, ...) uint8 or images (N, C, ...) float32
    # None for volumes. Else d is 1, and an image has this many adjacent slices as channels: for the
    # first channel the slices below, the slice, those above; then for the second.
    slices: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, C, h, w[, d])."""
        many = 1 if self.labels else self.slices or 1
        return (len(self.at), self._channels * many, *self.size[: 3 if self.slices is None else 2])

    @property
    def _channels(self) -> int:
        first = self.volumes[0]
        return len(first.label if self.labels else first.image)

    def take(self, index: Tensor) -> Tensor:
        """See `Rows.take`."""
        at = self.at[index.numpy()]
        depth = self.size[2] if self.slices is None or self.labels else self.slices
        kind = np.uint8 if self.labels else np.float32
        out = np.zeros((len(at), self._channels, *self.size[:2], depth), dtype=kind)
        below = (depth - self.size[2]) // 2
        for patch, (number, x, y, z) in zip(out, at.tolist(), strict=True):
            self.volumes[number].cut(patch, (x, y, z - below), self.labels)
        if self.slices is not None:
            out = out.transpose(0, 1, 4, 2, 3)
        return torch.from_numpy(np.ascontiguousarray(out).reshape(len(at), *self.shape[1:]))

    def some(self, index: Tensor) -> PatchRows:
        """See `Rows.some`."""
        return replace(self, at=self.at[index.numpy()])

    def block(self) -> dict[str, Tensor | Rows]:
        """Returns images with their labels, and the channels of each where volumes know theirs."""
        block: dict[str, Tensor | Rows] = {"image": self, "label": replace(self, labels=True)}
        there = [volume.present for volume in self.volumes if volume.present is not None]
        if len(there) == len(self.volumes):
            of = torch.from_numpy(np.stack(there)[self.at[:, 0]])
            # A contrast includes its neighbours.
            block["present"] = of.repeat_interleave(self.slices or 1, dim=1)
        return block


def fixed_patches(
    case: PreparedCase,
    count: int,
    background_share: float,
    size: tuple[int, int, int],
    slices: int | None,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Cuts patches of a case once, around `sample_centres`; see `fresh_patches`."""
    label = case.mask()
    centres = sample_centres(label.any(dim=0), case.brain, count, background_share, size, generator)
    boxed = (0, 0, 0), tuple(label.shape[1:]), (), case.present.numpy()
    volume = BoxedVolume(case.image.numpy(), None, label.numpy(), *boxed)
    at = np.pad(centres.numpy() - np.array(size) // 2, ((0, 0), (1, 0)))  # all of volume 0
    rows, every = PatchRows([volume], at, size, slices=slices).block(), torch.arange(len(at))
    return {n: v if isinstance(v, Tensor) else v.take(every) for n, v in rows.items()}


def joined_patches(blocks: Sequence[Mapping[str, Tensor]]) -> tuple[dict[str, Tensor], Tensor]:
    """Joins the patches of several cases; also returns their `voxel_counts`."""
    joined = {key: torch.cat([block[key] for block in blocks]) for key in blocks[0]}
    counts = voxel_counts(joined["label"])
    return {**joined, "label": joined["label"].float()}, counts
