"""Images on other grids: from where a network sees a volume to where its mask was drawn, and back.

Source: MONAI's ``SpatialResample``, which interpolates linearly or takes the nearest voxel.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


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


def plane_of(grid: Tensor) -> Tensor:
    """Returns the matrix (3, 3) of the axial slices of a grid (4, 4) that leaves slices in place.

    Example:
        >>> plane_of(torch.diag(torch.tensor([2.0, 3.0, 1.0, 1.0]))).tolist()
        [[2.0, 0.0, 0.0], [0.0, 3.0, 0.0], [0.0, 0.0, 1.0]]
    """
    kept = [0, 1, 3]
    return grid[kept][:, kept]


def with_neighbours(volume: Tensor, count: int) -> Tensor:
    """Gives every axial slice of (C, H, W, D) its neighbours as channels; 0 beyond the ends.

    Example:
        >>> with_neighbours(torch.tensor([[[[1.0, 2.0, 3.0]]]]), 3)[:, 0, 0].tolist()
        [[0.0, 1.0, 2.0], [1.0, 2.0, 3.0], [2.0, 3.0, 0.0]]
    """
    if count == 1:
        return volume
    depth = volume.shape[3]
    padded = torch.nn.functional.pad(volume, [count // 2, count // 2])
    shifted = [padded[..., n : n + depth] for n in range(count)]
    return torch.stack(shifted, dim=1).flatten(0, 1)


def axial(volume: Tensor, slices: Tensor) -> Tensor:
    """Stacks axial slices of (C, H, W, D): (S, C, H, W), contiguous."""
    # By NumPy: PyTorch takes nine times as long to bring the last axis to the front.
    taken = volume.numpy()[..., slices.numpy()].transpose(3, 0, 1, 2)
    return torch.from_numpy(np.ascontiguousarray(taken))


def brain_slices(brain: Tensor, every: int = 1) -> Tensor:
    """Chooses axial slices of a brain (H, W, D) by a rule that does not use the label."""
    slices = brain.flatten(0, 1).any(dim=0).nonzero().ravel()
    return slices[min(every // 2, max(len(slices) - 1, 0)) :: every]


def bounding_box(mask: NDArray[np.bool_]) -> tuple[slice, ...]:
    """Finds the smallest box around a mask's voxels; one voxel at the origin if it is empty."""
    axes = range(mask.ndim)
    occupied = [np.flatnonzero(mask.any(axis=tuple({*axes} - {axis}))).tolist() for axis in axes]
    return tuple(slice(at[0], at[-1] + 1) if at else slice(0, 1) for at in occupied)
