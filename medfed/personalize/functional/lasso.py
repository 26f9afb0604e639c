"""The network lasso: points drawn together along the edges of a graph.

Source: pFedNet, the personal step and its ADMM, corrected (V is held fixed through the iterations,
and each p has its true proximal map), and Boyd et al. 2011, sections 3.3 and 3.4.1.

The problem is ``min_Z sum_e weight_e ||z_i - z_j||_p + ||Z - V||_F^2 / 2``, the paper's multiplied
by its step size eta: ``weight`` is lambda * eta, and ``rho`` here is eta times the paper's.

======  ===========================================================
symbol  here
======  ===========================================================
Q       ``edges``, +1 at the first and -1 at the second end
W       prox of ``state.point`` with threshold weight / rho
Omega   rho times what remains of ``state.point``
======  ===========================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from medfed.errors import ConfigError
from medfed.personalize.functional.graph_algebra import consensus, initial_rho
from medfed.personalize.functional.lasso_checks import (
    check_edges,
    check_limits,
    check_points,
    check_weight,
)
from medfed.personalize.functional.lasso_iteration import Limits, iterate
from medfed.personalize.functional.prox import check_norm, dual_norm

if TYPE_CHECKING:
    from medfed.personalize.functional.lasso_steps import AdmmSteps


class LassoState(NamedTuple):
    """Where a later solve continues; two plain tensors, to be kept in a checkpoint."""

    point: Tensor
    """``(M, d)``: W + U, the splitting plus the scaled dual; the proximal map gives both back."""
    rho: Tensor
    """Scalar float64 penalty that U is scaled by."""


@dataclass(frozen=True)
class LassoResult:
    """What :func:`solve_network_lasso` found.

    Attributes:
        z: ``(N, d)`` minimiser, in the dtype of the input.
        state: Start for the next solve.
        iterations: ADMM iterations done; 0 where the solution is known in closed form.
        primal: Norm of ZQ - W at the end.
        dual: Norm of rho (W - W_before) Q^T at the end.
        converged: Whether both lie below their tolerances.
    """

    z: Tensor
    state: LassoState
    iterations: int
    primal: float
    dual: float
    converged: bool


def network_lasso(
    v: Tensor,
    edges: Tensor | Sequence[Sequence[int]],
    weight: float | Tensor,
    p: float = 2.0,
    tol: float = 1e-7,
    max_iter: int = 5000,
) -> Tensor:
    """Minimises ``sum_e weight_e ||z_i - z_j||_p + ||Z - V||_F^2 / 2`` over Z.

    Args:
        v: ``(N, d)`` floating tensor, a row per node.
        edges: ``(M, 2)`` integers, an undirected edge per row.
        weight: One number for all edges or ``(M,)``; 0 and infinity are allowed.
        p: Norm of the differences: 1, 2 or ``math.inf``.
        tol: Tolerance of the residuals, relative to the spread of ``v``.
        max_iter: ADMM iterations at most.

    Returns:
        ``(N, d)`` tensor in the dtype and on the device of ``v``.

    Raises:
        ConfigError: If the graph, a weight, p or a limit cannot be used.
        ValueError: If ``v`` holds NaN or infinity.

    Example:
        >>> v = torch.tensor([[0.0], [4.0]])
        >>> network_lasso(v, [[0, 1]], weight=1.0).tolist()
        [[1.0], [3.0]]
        >>> network_lasso(v, [[0, 1]], weight=9.0).tolist()
        [[2.0], [2.0]]
    """
    return solve_network_lasso(v, edges, weight, p, tol=tol, max_iter=max_iter).z


def solve_network_lasso(
    v: Tensor,
    edges: Tensor | Sequence[Sequence[int]],
    weight: float | Tensor,
    p: float = 2.0,
    *,
    state: LassoState | None = None,
    rho: float | None = None,
    tol: float = 1e-7,
    max_iter: int = 5000,
) -> LassoResult:
    """:func:`network_lasso` with a warm start, and with a report on the iteration.

    Args:
        v: ``(N, d)`` floating tensor, a row per node.
        edges: ``(M, 2)`` integers, an undirected edge per row.
        weight: One number for all edges or ``(M,)``; 0 and infinity are allowed.
        p: Norm of the differences: 1, 2 or ``math.inf``.
        state: Where an earlier solve on the same graph ended; ``v``, ``weight`` and p may differ.
        rho: A fixed penalty; ``None`` starts from the graph's spectrum and balances the residuals.
        tol: Tolerance of the residuals, relative to the spread of ``v``.
        max_iter: ADMM iterations at most; a warning is issued where they do not suffice.

    Returns:
        The minimiser, the state to continue from, iterations and residuals.

    Raises:
        ConfigError: If the graph, a weight, p, a limit or the state cannot be used.
        ValueError: If ``v`` holds NaN or infinity.

    Example:
        >>> v = torch.tensor([[0.0], [4.0], [5.0]], dtype=torch.float64)
        >>> edges = torch.tensor([[0, 1], [1, 2]])
        >>> first = solve_network_lasso(v, edges, 1.0)
        >>> again = solve_network_lasso(v, edges, 1.0, state=first.state)
        >>> again.iterations < first.iterations
        True
    """
    p, points = check_norm(p), check_points(v)
    links = check_edges(edges, v.shape[0])
    weights = check_weight(weight, links.shape[0])
    check_limits(tol, max_iter, rho)
    if state is not None and state.point.shape != (links.shape[0], v.shape[1]):
        raise ConfigError(
            f"The state has shape {tuple(state.point.shape)}, but there are {links.shape[0]} edges "
            f"and {v.shape[1]} columns; start without a state when the graph changes."
        )
    used = weights > 0
    if not bool(used.any()) or points.shape[1] == 0:
        point = points.new_zeros(links.shape[0], v.shape[1])
        return _closed_form(v, v.detach().clone(), point, rho or 1.0)
    if bool(used.all()):
        return _solve(v, points, links, weights, p, state, rho, tol, max_iter)
    # A weightless edge does nothing, and would only slow the iteration down.
    part = None if state is None else state._replace(point=state.point[used.to(v.device)])
    found = _solve(v, points, links[used], weights[used], p, part, rho, tol, max_iter)
    point = points.new_zeros(links.shape[0], v.shape[1])
    point[used.to(v.device)] = found.state.point
    return LassoResult(**{**vars(found), "state": found.state._replace(point=point)})


def _closed_form(v: Tensor, z: Tensor, point: Tensor, rho: float) -> LassoResult:
    state = LassoState(point, torch.tensor(rho, dtype=torch.float64))
    return LassoResult(z.to(v.dtype), state, 0, 0.0, 0.0, True)


def _solve(
    v: Tensor,
    points: Tensor,
    edges: Tensor,
    weight: Tensor,
    p: float,
    state: LassoState | None,
    rho: float | None,
    tol: float,
    max_iter: int,
) -> LassoResult:
    """Tries consensus, then ADMM; every weight is positive."""
    center, force = consensus(points, edges)
    start = rho or (initial_rho(points.shape[0], edges) if state is None else float(state.rho))
    if bool((dual_norm(force, p).cpu() <= weight).all()):
        return _closed_form(v, center, force.div_(start), start)
    spread = _norm(points - center)
    del center
    if state is None:
        steps = _steps(points, edges, weight, p, force.div_(start), start)
    else:
        del force
        point = state.point.to(points, copy=True).contiguous()
        steps = _steps(points, edges, weight, p, point, float(state.rho))
        if steps.rho != start:
            steps.rescale(start)
    limits = Limits(tol, spread, _norm(points), torch.finfo(points.dtype).eps)
    count, norms, converged = iterate(steps, limits, max_iter, adapt=rho is None)
    state = LassoState(steps.a, torch.tensor(steps.rho, dtype=torch.float64))
    z = steps.z.to(v.dtype)
    return LassoResult(z, state, count, norms.primal, norms.dual, converged)


def _steps(v: Tensor, edges: Tensor, weight: Tensor, p: float, a: Tensor, rho: float) -> AdmmSteps:
    """The fused loops in main memory, plain PyTorch elsewhere."""
    # Imported on first use: compiled code has no business in `import medfed`.
    from medfed.personalize.functional.lasso_steps import FusedSteps, TorchSteps

    kind = FusedSteps if v.device.type == "cpu" else TorchSteps
    return kind(v, edges, weight, p, a, rho)


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))
