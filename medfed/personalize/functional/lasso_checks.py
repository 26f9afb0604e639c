"""Validation of the network lasso's arguments."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from medfed.errors import ConfigError


def check_points(v: Tensor) -> Tensor:
    """Returns ``v`` detached and contiguous, at least in single precision.

    Raises:
        ConfigError: If it is no floating matrix.
        ValueError: If it holds NaN or infinity.

    Example:
        >>> check_points(torch.zeros(2, 3, dtype=torch.float16)).dtype
        torch.float32
    """
    if v.ndim != 2 or not v.is_floating_point():
        raise ConfigError(
            f"v must be a floating tensor of shape (N, d), not {v.dtype} {tuple(v.shape)}."
        )
    if not bool(torch.isfinite(v).all()):
        rows = (~torch.isfinite(v)).any(1).nonzero().flatten().tolist()
        raise ValueError(f"v holds NaN or infinity in row {rows[0]}; a client's reply diverged.")
    wide = v.dtype if v.dtype in (torch.float32, torch.float64) else torch.float32
    return v.detach().to(wide).contiguous()


def check_edges(edges: Tensor | Sequence[Sequence[int]], n: int) -> Tensor:
    """Returns the edges as an ``(M, 2)`` long tensor on the CPU.

    Raises:
        ConfigError: If the shape or dtype is wrong, an index is not 0 to n - 1, or an edge joins a
            node to itself.

    Example:
        >>> check_edges([[0, 1]], n=2)
        tensor([[0, 1]])
    """
    found = torch.as_tensor(edges).cpu()
    if found.numel() == 0:
        return torch.zeros(0, 2, dtype=torch.long)
    integral = not (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool)
    if found.ndim != 2 or found.shape[1] != 2 or not integral:
        raise ConfigError(
            f"Edges must be an integer tensor (M, 2), not {found.dtype} {tuple(found.shape)}."
        )
    for i, j in found.tolist():
        if not (0 <= i < n and 0 <= j < n):
            raise ConfigError(f"Edge ({i}, {j}) is out of range; the nodes are 0 to {n - 1}.")
        if i == j:
            raise ConfigError(f"Edge ({i}, {j}) joins a node to itself; remove it.")
    return found.long().contiguous()


def check_weight(weight: float | Tensor, m: int) -> Tensor:
    """Returns one float64 weight per edge, on the CPU.

    Raises:
        ConfigError: If the shape is wrong or a weight is negative or NaN.

    Example:
        >>> check_weight(2.0, m=3)
        tensor([2., 2., 2.], dtype=torch.float64)
    """
    found = torch.as_tensor(weight, dtype=torch.float64).detach().cpu()
    if found.ndim != 0 and found.shape != (m,):
        raise ConfigError(
            f"weight has shape {tuple(found.shape)}; give one number or one per edge, ({m},)."
        )
    if bool((~(found >= 0)).any()):
        bad = float(found[~(found >= 0)].flatten()[0])
        raise ConfigError(f"weight is {bad}, but it must be 0 or more.")
    return found.expand(m).contiguous()


def check_limits(tol: float, max_iter: int, rho: float | None) -> None:
    """Checks the numbers that steer the iteration.

    Raises:
        ConfigError: If one of them is out of range.

    Example:
        >>> check_limits(1e-6, 100, None)
    """
    if not tol > 0:
        raise ConfigError(f"tol is {tol}, but it must be above 0.")
    if max_iter < 1:
        raise ConfigError(f"max_iter is {max_iter}, but it must be 1 or more.")
    if rho is not None and not 0 < rho < float("inf"):
        raise ConfigError(f"rho is {rho}, but it must be above 0 and finite.")
