"""Grey values as a network sees them."""

from __future__ import annotations

from torch import Tensor


def zscore(image: Tensor) -> Tensor:
    """Normalises each channel over its voxels that are not zero; zero stays zero.

    Args:
        image: (C, *spatial) float32; changed in place.

    Returns:
        The same tensor. A channel of one value, or without any, becomes zero.

    Example:
        >>> import torch
        >>> zscore(torch.tensor([[0.0, 1.0, 3.0]]))
        tensor([[ 0., -1.,  1.]])
    """
    for channel in image:
        inside = channel != 0
        voxels = channel[inside]
        if len(voxels):
            mean, std = voxels.mean().item(), voxels.std(correction=0).item()
            channel[inside] = (voxels - mean) / (std or 1.0)
    return image
