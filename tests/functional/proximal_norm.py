"""The proximal map of a norm, as the definition has it: a reference."""

from __future__ import annotations

import torch
from torch import Tensor

from medfed.functional.prox import check_norm

_SORTED_AT_ONCE = 2**22


def prox_norm(a: Tensor, tau: float | Tensor, p: float) -> Tensor:
    """The minimiser of ``tau * ||w||_p + ||w - a||^2 / 2`` for each row.

    Source: pFedNet, Eq. 8, corrected: p = 1 soft-thresholds each element, p = 2 shortens the row,
    p = inf subtracts the projection onto the l1 ball of radius tau (Moreau's identity).

    Args:
        a: ``(M, d)`` floating tensor; M and d may be 0.
        tau: One threshold, or one per row ``(M,)``; 0 returns the row, infinity returns zeros.
        p: 1, 2 or ``math.inf``.

    Returns:
        ``(M, d)`` tensor of the same dtype.

    Raises:
        ConfigError: If p is unknown, or a threshold is negative, NaN or of the wrong shape.

    Example:
        >>> prox_norm(torch.tensor([[3.0, -4.0]]), 2.5, 2.0)
        tensor([[ 1.5000, -2.0000]])
        >>> prox_norm(torch.tensor([[3.0, -4.0]]), 2.5, 1.0)
        tensor([[ 0.5000, -1.5000]])
        >>> prox_norm(torch.tensor([[3.0, -4.0]]), 2.5, float("inf"))
        tensor([[ 2.2500, -2.2500]])
    """
    p, t = check_norm(p), _per_row(a, tau)
    if a.numel() == 0:
        return a.clone()
    if p == 1.0:
        # The sum of two one-sided shrinks: sign(a) * relu(|a| - t) would make nan of 0 * inf.
        return torch.relu(a - t) - torch.relu(-a - t)
    if p == 2.0:
        norm = torch.linalg.vector_norm(a, dim=1, keepdim=True)
        return torch.where(norm > t, 1.0 - t / norm, 0.0) * a
    cut = _l1_threshold(a, t)
    return torch.clamp(a, min=-cut, max=cut)


def _per_row(a: Tensor, tau: float | Tensor) -> Tensor:
    """``tau`` as an ``(M, 1)`` or ``(1, 1)`` column in the dtype of ``a``."""
    t = torch.as_tensor(tau, dtype=a.dtype, device=a.device)
    return t.reshape(-1, 1)


def _l1_threshold(a: Tensor, radius: Tensor) -> Tensor:
    """``(M, 1)``: the t >= 0 with sum(relu(|a| - t)) = radius, or 0 inside the ball."""
    if a.numel() == 0:
        return a.new_zeros(a.shape[0], 1)
    radius = radius.double().expand(a.shape[0], 1)
    # In groups of rows: sorting takes several times the memory of what is sorted.
    rows = max(1, _SORTED_AT_ONCE // a.shape[1])
    parts = zip(a.split(rows), radius.split(rows), strict=True)
    return torch.cat([_sorted_threshold(part, r) for part, r in parts])


def _sorted_threshold(a: Tensor, radius: Tensor) -> Tensor:
    """:func:`_l1_threshold` for a group of rows."""
    size = torch.sort(a.abs().double(), dim=1, descending=True).values
    rank = torch.arange(1, a.shape[1] + 1, dtype=size.dtype, device=a.device)
    candidates = (size.cumsum(1) - radius) / rank
    # The support is the longest prefix whose last magnitude stays above its own threshold.
    last = (size > candidates).sum(1, keepdim=True).clamp(min=1) - 1
    cut = torch.relu(candidates.gather(1, last))
    return torch.where(radius == 0, size[:, :1], cut).to(a.dtype)
