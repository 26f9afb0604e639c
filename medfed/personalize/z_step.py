"""The Z step of pFedNet with its state as tensors, for checkpoints, and how it went."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from medfed.federation.tensors import Tensors
from medfed.personalize.functional.lasso import LassoState, solve_network_lasso


def solve_z_step(
    v: Tensor,
    edges: Tensor,
    weight: float | Tensor,
    p: float,
    warm: Mapping[str, Tensor],
    rho: float | None = None,
    tolerance: float = 1e-6,
    max_iter: int = 500,
) -> tuple[Tensor, Tensors, Tensors]:
    """Solves argmin_Z sum_m weight_m |z_i - z_j|_p + |Z - V|^2 / 2 (pFedNet, Eq. 6 to 8).

    Args:
        v: ``(N, d)``, a row per client.
        edges: ``(M, 2)`` the pairs (i, j).
        weight: Of every edge, or ``(M,)``.
        p: Norm of the coupling.
        warm: The state that an earlier step returned, or nothing.
        rho: The ADMM's penalty; ``None`` balances the residuals.
        tolerance: Of the residuals.
        max_iter: Iterations, at most.

    Returns:
        Z, the state to start from the next time, and how the iteration went, in float64.

    Example:
        >>> v, edge = torch.tensor([[0.0], [4.0]]), torch.tensor([[0, 1]])
        >>> z, state, report = solve_z_step(v, edge, 1.0, 2.0, {})
        >>> z.round(decimals=4).flatten().tolist(), bool(report["converged"])
        ([1.0, 3.0], True)
    """
    done = solve_network_lasso(
        v,
        edges,
        weight,
        p,
        state=LassoState(warm["point"], warm["rho"]) if warm else None,
        rho=rho,
        tol=tolerance,
        max_iter=max_iter,
    )
    report = {
        "iterations": done.iterations,
        "primal_residual": done.primal,
        "dual_residual": done.dual,
        "converged": done.converged,
    }
    numbers = {k: torch.tensor(float(n), dtype=torch.float64) for k, n in report.items()}
    return done.z, done.state._asdict(), numbers
