"""The voxels of a volume in memory: checks, masks of regions, z-scores and axial slices."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .errors import DataError

log = logging.getLogger(__name__)


def check_finite(image: Tensor, channels: Sequence[str], paths: Sequence[Path]) -> None:
    """Refuses NaN and infinity."""
    for n, (name, voxels) in enumerate(zip(channels, image, strict=True)):
        # One pass without a mask; NumPy sums in float64 seven times faster than PyTorch.
        if not np.isfinite(voxels.numpy().sum(dtype=np.float64)):
            what = f"{paths[n] if len(paths) > 1 else paths[0]}: channel {name} has NaN or infinite"
            raise DataError(f"{what} voxels; repair the file or leave the patient out.")


def check_varied(image: Tensor, names: Sequence[str], paths: Sequence[Path]) -> None:
    """Refuses a channel of one value; zeros stand for a missing scan, and are said."""
    for channel, (name, voxels) in enumerate(zip(names, image, strict=True)):
        first = voxels.view(-1)[0].item()
        if voxels.numel() == 1 or voxels.view(-1)[-1] != first or not (voxels == first).all():
            continue
        path = paths[channel] if len(paths) > 1 else paths[0]
        if first:
            raise DataError(
                f"{path}: channel {name} has the value {first:g} in every voxel; copy the file "
                "again or leave the patient out."
            )
        log.warning("%s: channel %s is 0 in every voxel, as if it were missing.", path, name)


def masks_of(
    label: Tensor, regions: Iterable[Sequence[int]], known: Sequence[int], path: Path
) -> Tensor:
    """Turns label values (1, H, W, D) into (R, H, W, D) uint8; other values are refused."""
    if len(label) > 1:
        raise DataError(f"{path} holds {len(label)} masks; a patient has one, of label values.")
    values = label[0]
    codes = values.to(torch.uint8)
    strange = (codes != values) | ~_is_one_of(codes, known)
    if strange.any():
        raise DataError(
            f"{path}: unknown label value {values[strange][0].item():.9g}; known: "
            f"{', '.join(map(str, known))}. Check the mask, or name the values in data.reader."
        )
    return torch.stack([_is_one_of(codes, values) for values in regions]).to(torch.uint8)


def _is_one_of(codes: Tensor, values: Sequence[int]) -> Tensor:
    """As torch.isin, several times faster for uint8: by a table of all 256 values."""
    table = np.zeros(256, dtype=bool)
    table[list(values)] = True
    return torch.from_numpy(table.take(codes.numpy()))


def zscore(image: Tensor) -> Tensor:
    """Normalises each channel over its voxels that are not 0, in place; MONAI is slower.

    Example:
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


def among(image: Tensor, there: Sequence[bool]) -> Tensor:
    """Puts the channels of a normalised image in their places; the others are zero.

    Example:
        >>> among(torch.tensor([[5.0], [7.0]]), [True, False, True]).tolist()
        [[5.0], [0.0], [7.0]]
    """
    if all(there):
        return image
    whole = torch.zeros(len(there), *image.shape[1:])
    whole[torch.tensor(there)] = image
    return whole


def plane_of(grid: Tensor) -> Tensor:
    """Returns the matrix (3, 3) of the axial slices of a grid (4, 4) that leaves slices in place.

    Example:
        >>> plane_of(torch.diag(torch.tensor([2.0, 3.0, 1.0, 1.0]))).tolist()
        [[2.0, 0.0, 0.0], [0.0, 3.0, 0.0], [0.0, 0.0, 1.0]]
    """
    return grid[[0, 1, 3]][:, [0, 1, 3]]


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
