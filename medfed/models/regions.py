"""Regions of images: which slice shows most of them, how far predicted and true ones agree.

Where a metric is undefined (the Dice of a region that is nowhere), its value is NaN and no warning
is raised.
"""

from __future__ import annotations

import math
import warnings

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

    Args:
        counts: ``(..., 3)`` with TP, P, L, as from :func:`overlap_counts`.

    Returns:
        Two tensors of shape ``(...)``, float64, NaN where nothing is predicted or labelled.

    Example:
        >>> iou, dice = iou_and_dice(torch.tensor([[1, 2, 2], [0, 0, 0]]))
        >>> [round(v, 4) for v in iou.tolist()], dice.tolist()
        ([0.3333, nan], [0.5, nan])
    """
    tp, p, t = counts.double().unbind(-1)
    return tp / (p + t - tp), 2 * tp / (p + t)


def hausdorff95(pred: Tensor, truth: Tensor) -> Tensor:
    """95th percentile Hausdorff distance of each image and region, in voxels.

    Args:
        pred: ``(B, R, *spatial)`` boolean.
        truth: The same shape, boolean.

    Returns:
        ``(B, R)``: NaN where both are empty, the diagonal of the image where one of them is.

    Example:
        >>> pred, truth = torch.zeros(1, 1, 8, 8).bool(), torch.zeros(1, 1, 8, 8).bool()
        >>> pred[..., 2, 2], truth[..., 2, 5] = True, True
        >>> hausdorff95(pred, truth).item()
        3.0
    """
    # Late: few runs measure distances.
    from monai.metrics import compute_hausdorff_distance

    pred, truth = pred.cpu(), truth.cpu()  # distance transforms come from SciPy
    some_pred, some_truth = pred.flatten(2).any(2), truth.flatten(2).any(2)
    diagonal = math.sqrt(sum((n - 1) ** 2 for n in pred.shape[2:]))
    distance = torch.full(pred.shape[:2], math.nan, dtype=torch.float64)
    distance[some_pred ^ some_truth] = diagonal
    with warnings.catch_warnings():
        # MONAI 1.6 calls its own function with an argument that it has deprecated.
        warnings.filterwarnings(
            "ignore", message=".*always_return_as_numpy", category=FutureWarning
        )
        for b, r in (some_pred & some_truth).nonzero().tolist():
            p, t = (m[b, r][None, None].float() for m in (pred, truth))
            distance[b, r] = compute_hausdorff_distance(
                p, t, include_background=True, percentile=95
            ).item()
    return distance
