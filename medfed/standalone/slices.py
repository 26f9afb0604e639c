"""Axial slices of volumes, as 2-D networks see them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def plane_of(grid: Tensor) -> Tensor:
    """Returns the matrix (3, 3) of the axial slices of a grid (4, 4) that leaves slices in place.

    Example:
        >>> plane_of(torch.diag(torch.tensor([2.0, 3.0, 1.0, 1.0]))).tolist()
        [[2.0, 0.0, 0.0], [0.0, 3.0, 0.0], [0.0, 0.0, 1.0]]
    """
    axes = [0, 1, 3]
    return grid[axes][:, axes]


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
    return torch.stack([padded[..., n : n + depth] for n in range(count)], dim=1).flatten(0, 1)


def axial(volume: Tensor, slices: Tensor) -> Tensor:
    """Stacks axial slices of (C, H, W, D): (S, C, H, W), contiguous."""
    # By NumPy: PyTorch takes nine times as long to bring the last axis to the front.
    taken = volume.numpy()[..., slices.numpy()].transpose(3, 0, 1, 2)
    return torch.from_numpy(np.ascontiguousarray(taken))


def brain_slices(brain: Tensor, every: int = 1) -> Tensor:
    """Chooses axial slices of a brain (H, W, D) by a rule that does not use the label."""
    slices = brain.flatten(0, 1).any(dim=0).nonzero().ravel()
    return slices[min(every // 2, max(len(slices) - 1, 0)) :: every]
