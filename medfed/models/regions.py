"""Regions of images: which slice shows most of them, how far predicted and true ones agree.

Every measure has a value, also where a region is nowhere, by the conventions of the BraTS
challenges: a mask that is rightly empty is perfect (Dice 1, distance 0 mm), one that is wrongly
empty or wrongly not so is as wrong as can be (Dice 0, distance the diagonal of the image, which is
373.13 mm for BraTS's 240 x 240 x 155 voxels of 1 mm).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor


def slice_with_most(label: Tensor) -> int:
    """Picks the slice to show: the one with the most labelled voxels over all regions.

    Args:
        label: ``(S, R, H, W)``, a stack of slices.

    Returns:
        Its index.

    Example:
        >>> label = torch.zeros(3, 1, 4, 4)
        >>> label[1] = 1
        >>> slice_with_most(label)
        1
    """
    return int((label > 0.5).flatten(1).sum(1).argmax())


def overlap_counts(pred: Tensor, truth: Tensor) -> Tensor:
    """Counts true positives, predicted and labelled voxels.

    Args:
        pred: ``(B, R, *spatial)`` boolean.
        truth: The same shape, boolean.

    Returns:
        ``(B, R, 3)`` integers: TP, P, L.

    Example:
        >>> pred, truth = torch.tensor([[[1, 1, 0]]]).bool(), torch.tensor([[[0, 1, 1]]]).bool()
        >>> overlap_counts(pred, truth).tolist()
        [[[1, 2, 2]]]
    """
    return torch.stack([(m.flatten(2)).sum(2) for m in (pred & truth, pred, truth)], dim=-1)


def iou_and_dice(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Intersection over union ``TP / (P + L - TP)`` and Dice ``2 TP / (P + L)``.

    Both are 1 where nothing is predicted or labelled, and 0 where only one of them is.

    Args:
        counts: ``(..., 3)`` with TP, P, L, as from :func:`overlap_counts`.

    Returns:
        Two tensors of shape ``(...)``, float64.

    Example:
        >>> iou, dice = iou_and_dice(torch.tensor([[1, 2, 2], [0, 0, 0], [0, 3, 0]]))
        >>> [round(v, 4) for v in iou.tolist()], dice.tolist()
        ([0.3333, 1.0, 0.0], [0.5, 1.0, 0.0])
    """
    tp, p, t = counts.double().unbind(-1)
    nowhere = p + t == 0
    iou, dice = tp / (p + t - tp), 2 * tp / (p + t)
    return iou.masked_fill(nowhere, 1.0), dice.masked_fill(nowhere, 1.0)


def hausdorff95(pred: Tensor, truth: Tensor, spacing: Sequence[float] | None = None) -> Tensor:
    """95th percentile Hausdorff distance of each image and region, in millimetres.

    Args:
        pred: ``(B, R, *spatial)`` boolean.
        truth: The same shape, boolean.
        spacing: mm from voxel to voxel along each spatial axis; None for voxels of 1 mm.

    Returns:
        ``(B, R)``: 0 where both are empty, the diagonal of the image where one of them is.

    Example:
        >>> pred, truth = torch.zeros(1, 1, 8, 8).bool(), torch.zeros(1, 1, 8, 8).bool()
        >>> pred[..., 2, 2], truth[..., 2, 5] = True, True
        >>> hausdorff95(pred, truth).item(), hausdorff95(pred, truth, spacing=(1.0, 2.5)).item()
        (3.0, 7.5)
        >>> hausdorff95(pred, truth & False, spacing=(0.75, 1.0)).item()
        10.0
    """
    # Late: few runs measure distances.
    from monai.metrics import compute_hausdorff_distance

    pred, truth = pred.cpu(), truth.cpu()  # distance transforms come from SciPy
    some_pred, some_truth = pred.flatten(2).any(2), truth.flatten(2).any(2)
    size = pred.shape[2:]
    mm = [1.0] * len(size) if spacing is None else [float(s) for s in spacing]
    distance = torch.zeros(pred.shape[:2], dtype=torch.float64)
    distance[some_pred ^ some_truth] = math.hypot(*(n * s for n, s in zip(size, mm, strict=True)))
    with warnings.catch_warnings():
        # MONAI 1.6 calls its own function with an argument that it has deprecated.
        warnings.filterwarnings(
            "ignore", message=".*always_return_as_numpy", category=FutureWarning
        )
        for b, r in (some_pred & some_truth).nonzero().tolist():
            p, t = (m[b, r][None, None].float() for m in (pred, truth))
            distance[b, r] = compute_hausdorff_distance(
                p, t, include_background=True, percentile=95, spacing=mm
            ).item()
    return distance
