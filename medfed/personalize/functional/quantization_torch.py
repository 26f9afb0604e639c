"""Quantisation in plain PyTorch, for tensors that are not in main memory.

Function by function the same as :mod:`medfed.personalize.functional.quantization_kernels`, and
equal to the last bit but for the order of a sum.
"""

from __future__ import annotations

import torch
from torch import Tensor


def locate_all(x: Tensor, cuts: Tensor) -> Tensor:
    """The index of each element's nearest centre.

    Args:
        x: Floating tensor of any shape.
        cuts: ``(m - 1,)`` the largest numbers that belong to the lower of two centres.

    Returns:
        Long tensor of the shape of ``x``.

    Example:
        >>> locate_all(torch.tensor([0.0, 0.5, 2.0]), torch.tensor([0.5]))
        tensor([0, 0, 1])
    """
    return torch.bucketize(x, cuts)


def round_all(x: Tensor, cuts: Tensor, values: Tensor) -> Tensor:
    """Each element's nearest centre; NaN stays.

    Args:
        x: Floating tensor of any shape.
        cuts: ``(m - 1,)`` the largest numbers that belong to the lower of two centres.
        values: ``(m,)`` centres.

    Returns:
        Tensor like ``x``.

    Example:
        >>> round_all(torch.tensor([0.0, 2.0]), torch.tensor([0.5]), torch.tensor([0.25, 0.75]))
        tensor([0.2500, 0.7500])
    """
    return torch.where(x.isnan(), x, values[torch.bucketize(x, cuts)])


def shrink_all(y: Tensor, cuts: Tensor, values: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """The proximal map of the distance to the nearest centre, and that centre.

    Args:
        y: Floating tensor of any shape.
        cuts: ``(m - 1,)`` the largest numbers that belong to the lower of two centres.
        values: ``(m,)`` centres.
        tau: 0 or more.

    Returns:
        Two tensors like ``y``.

    Example:
        >>> shrink_all(torch.tensor([0.0, 2.0]), torch.tensor([0.5]), torch.tensor([0.0, 1.0]), 0.5)
        (tensor([0.0000, 1.5000]), tensor([0., 1.]))
    """
    nearest = round_all(y, cuts, values)
    gap, step = y - nearest, torch.tensor(tau, dtype=y.dtype, device=y.device)
    moved = torch.where(gap > 0, y - step, y + step)
    return torch.where(gap.abs() <= step, nearest, moved), nearest


def tally(
    x: Tensor, gradient: Tensor | None, cuts: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, bool]:
    """Counts the elements around each centre and sums their gradients.

    Args:
        x: Floating tensor of any shape.
        gradient: Tensor of the same shape.
        cuts: ``(m - 1,)`` the largest numbers that belong to the lower of two centres.
        values: ``(m,)`` centres.

    Returns:
        ``(m, 3)`` int64, for each centre the numbers of its elements below, at and above it;
        ``(m,)`` float64 sums; and whether there is no NaN in x.

    Example:
        >>> x = torch.tensor([0.0, 1.0, 3.0])
        >>> tally(x, torch.ones(3), torch.tensor([1.5]), torch.tensor([1.0, 2.0]))[:2]
        (tensor([[1, 1, 0],
                [0, 0, 1]]), tensor([2., 1.], dtype=torch.float64))
    """
    index = torch.bucketize(x, cuts)
    center = values[index]
    side = (x >= center).long() + (x > center).long()
    counts = torch.bincount((3 * index + side).flatten(), minlength=3 * len(values))
    sums = torch.zeros(len(values), dtype=torch.float64, device=x.device)
    if gradient is not None:
        # One sum per centre: adding into places in parallel would differ from run to run.
        for j in range(len(values)):
            sums[j] = gradient.where(index == j, 0.0).sum(dtype=torch.float64)
    return counts.view(-1, 3), sums, not bool(x.isnan().any())


def collect(x: Tensor, cuts: Tensor, values: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
    """The elements strictly between two bounds of their centre, and how many lie before them.

    Args:
        x: Floating tensor of any shape.
        cuts: ``(m - 1,)`` the largest numbers that belong to the lower of two centres.
        values: ``(m,)`` centres.
        bounds: ``(m, 2)`` float64, both on one side of the centre.

    Returns:
        The elements, and for each centre ``(m, 3)`` int64 the numbers of its elements elsewhere,
        from the centre to the bounds, and between them.

    Example:
        >>> x = torch.tensor([1.0, 2.0, 3.0])
        >>> bounds = torch.tensor([[2.5, 3.5]], dtype=torch.float64)
        >>> collect(x, torch.tensor([]), torch.tensor([1.0]), bounds)
        (tensor([3.]), tensor([[1, 1, 1]]))
    """
    index = torch.bucketize(x, cuts)
    (low, high), old = bounds[index].unbind(-1), values[index]
    between = (low < x) & (x < high)
    before = ((old < x) & (x <= low)) | ((high <= x) & (x < old))
    kind = before.long() + 2 * between.long()
    numbers = torch.bincount((3 * index + kind).flatten(), minlength=3 * len(values))
    return x[between], numbers.view(-1, 3)
