"""Patches for training, and slices or volumes for evaluation, in two and three dimensions.

A 2-D patch (h, w) is a 3-D patch (h, w, 1) of an RAS volume, whose last axis runs from foot to
head: so both dimensions take the same path.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from medfed.common.errors import ConfigError


def patch_size_3d(patch_size: Sequence[int], spatial_dims: int) -> tuple[int, int, int]:
    """Completes a patch size to three axes.

    Args:
        patch_size: (h, w) or (h, w, d).
        spatial_dims: 2 or 3.

    Returns:
        (h, w, 1) or (h, w, d).

    Raises:
        ConfigError: If the two do not fit together.

    Example:
        >>> patch_size_3d((64, 64), 2)
        (64, 64, 1)
    """
    if spatial_dims not in (2, 3) or len(patch_size) != spatial_dims or min(patch_size) < 1:
        raise ConfigError(
            f"data.patch_size={list(patch_size)} does not fit data.spatial_dims={spatial_dims}; "
            "give 2 sizes for 2 dimensions, 3 for 3."
        )
    h, w, d = (*patch_size, 1)[:3]
    return h, w, d


def pad_to(volume: Tensor, size: Sequence[int]) -> Tensor:
    """Pads a volume with zeros at its far ends, where it is smaller than a patch.

    Args:
        volume: (C, H, W, D).
        size: (h, w, d).

    Returns:
        (C, max(H, h), max(W, w), max(D, d)).

    Example:
        >>> pad_to(torch.ones(1, 4, 4, 4), (6, 4, 1)).shape
        torch.Size([1, 6, 4, 4])
    """
    missing = [max(s - n, 0) for s, n in zip(size, volume.shape[1:], strict=True)]
    if not any(missing):
        return volume
    return functional.pad(volume, [p for m in reversed(missing) for p in (0, m)])


def sample_centres(
    tumour: Tensor,
    brain: Tensor,
    count: int,
    background_share: float,
    size: Sequence[int],
    generator: torch.Generator,
) -> Tensor:
    """Draws patch centres: on tumour voxels, and a fixed share on other brain voxels.

    Args:
        tumour: (H, W, D) bool.
        brain: (H, W, D) bool.
        count: Number of patches.
        background_share: Share of background patches, rounded to whole patches. A patient without
            tumour has only background patches.
        size: (h, w, d); centres move inwards so that the patch lies inside the volume.
        generator: Source of randomness.

    Returns:
        (count, 3) int64, tumour centres first.

    Example:
        >>> tumour = torch.zeros(8, 8, 4, dtype=torch.bool)
        >>> tumour[3, 5, 2] = True
        >>> sample_centres(tumour, tumour, 1, 0.0, (4, 4, 1), torch.Generator()).tolist()
        [[3, 5, 2]]
    """
    from monai.transforms.utils import correct_crop_centers  # takes seconds to import

    background = round(count * background_share) if tumour.any() else count
    centres = [
        _draw(tumour, count - background, generator),
        _draw(brain & ~tumour, background, generator),
    ]
    moved = [
        correct_crop_centers(centre, tuple(size), tuple(tumour.shape))
        for centre in torch.cat(centres).tolist()
    ]
    return torch.tensor([[int(x) for x in centre] for centre in moved]).reshape(-1, 3)


def _draw(mask: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """(count, 3) voxels of a mask, with replacement."""
    voxels = mask.nonzero()
    if not count or not len(voxels):
        return torch.empty(0, 3, dtype=torch.int64)
    return voxels[torch.randint(len(voxels), (count,), generator=generator)]


def crop(volume: Tensor, centre: Sequence[int], size: Sequence[int]) -> Tensor:
    """Cuts one patch; voxel ``centre`` comes to lie at ``size // 2``.

    Args:
        volume: (C, H, W, D).
        centre: (3,) voxel.
        size: (h, w, d).

    Returns:
        (C, h, w, d), a view.

    Example:
        >>> crop(torch.arange(6.0).reshape(1, 6, 1, 1), (3, 0, 0), (2, 1, 1)).ravel().tolist()
        [2.0, 3.0]
    """
    starts = [int(c) - s // 2 for c, s in zip(centre, size, strict=True)]
    window = tuple(slice(a, a + s) for a, s in zip(starts, size, strict=True))
    return volume[(slice(None), *window)]


def brain_slices(brain: Tensor, every: int = 1) -> Tensor:
    """Chooses axial slices by a rule that cannot see the label.

    Args:
        brain: (H, W, D) bool.
        every: Keep every n-th of the slices that contain brain, beginning with the middle of the
            first n.

    Returns:
        (S,) slice numbers.

    Example:
        >>> brain = torch.tensor([0, 1, 1, 1, 0]).bool().reshape(1, 1, 5)
        >>> brain_slices(brain).tolist(), brain_slices(brain, every=3).tolist()
        ([1, 2, 3], [2])
    """
    found = brain.flatten(0, 1).any(dim=0).nonzero().ravel()
    return found[min(every // 2, max(len(found) - 1, 0)) :: every]


def axial(volume: Tensor, slices: Tensor) -> Tensor:
    """Stacks axial slices.

    Args:
        volume: (C, H, W, D).
        slices: (S,) slice numbers.

    Returns:
        (S, C, H, W), contiguous.

    Example:
        >>> axial(torch.zeros(2, 5, 6, 7), torch.tensor([1, 3])).shape
        torch.Size([2, 2, 5, 6])
    """
    # By NumPy: PyTorch takes nine times as long to bring the last axis to the front.
    taken = volume.numpy()[..., slices.numpy()].transpose(3, 0, 1, 2)
    return torch.from_numpy(np.ascontiguousarray(taken))


def with_neighbours(volume: Tensor, count: int) -> Tensor:
    """Gives every axial slice its neighbours as channels; beyond the ends they are 0.

    Args:
        volume: (C, H, W, D).
        count: Odd: 3 gives each slice the one below and the one above.

    Returns:
        (C * count, H, W, D): of the first channel the slices below, itself, those above; then of
        the second.

    Example:
        >>> with_neighbours(torch.tensor([[[[1.0, 2.0, 3.0]]]]), 3)[:, 0, 0].tolist()
        [[0.0, 1.0, 2.0], [1.0, 2.0, 3.0], [2.0, 3.0, 0.0]]
    """
    if count == 1:
        return volume
    depth = volume.shape[3]
    padded = functional.pad(volume, [count // 2, count // 2])
    shifted = [padded[..., n : n + depth] for n in range(count)]
    return torch.stack(shifted, dim=1).flatten(0, 1)


def voxel_counts(label: Tensor) -> Tensor:
    """Counts background and region voxels.

    Args:
        label: (N, R, *spatial), 0 or 1; regions may overlap.

    Returns:
        (1 + R,) float32: voxels in no region, then voxels of every region.

    Example:
        >>> voxel_counts(torch.tensor([[[0, 1, 1, 0]], [[0, 0, 0, 0]]])).tolist()
        [6.0, 2.0]
    """
    regions = label.bool().transpose(0, 1).flatten(1)
    background = (~regions.any(dim=0)).sum()
    return torch.cat([background[None], regions.sum(dim=1)]).float()


def bounding_box(mask: NDArray[np.bool_]) -> tuple[slice, ...]:
    """Finds the smallest box around the voxels of a mask.

    Args:
        mask: Of any number of axes.

    Returns:
        A slice per axis; of one voxel at the origin where the mask is empty.

    Example:
        >>> mask = np.zeros((4, 4, 4), bool)
        >>> mask[1:3, 2, 0] = True
        >>> bounding_box(mask)
        (slice(1, 3, None), slice(2, 3, None), slice(0, 1, None))
    """
    axes = range(mask.ndim)
    found = [np.flatnonzero(mask.any(axis=tuple({*axes} - {axis}))).tolist() for axis in axes]
    return tuple(slice(at[0], at[-1] + 1) if at else slice(0, 1) for at in found)
