"""The network lasso: points drawn together along the edges of a graph.

Source: pFedNet, the personal step and its ADMM, corrected (V is held fixed through the iterations,
and each p has its true proximal map), and Boyd et al. 2011, sections 3.3 and 3.4.1.

The problem is ``min_Z sum_e weight_e ||z_i - z_j||_p + sum_n mass_n ||z_n - v_n||^2 / 2``, the
paper's multiplied by its step size eta: ``weight`` is lambda * eta, and ``rho`` here is eta times
the paper's. Masses other than 1 stand for nodes whose V came about by steps of other lengths.

======  ===========================================================
symbol  here
======  ===========================================================
Q       ``edges``, +1 at the first and -1 at the second end
W       prox of ``state.point`` with threshold weight / rho
Omega   rho times what remains of ``state.point``
======  ===========================================================

Its ADMM runs in main memory, as fused loops, whatever device the points are on: so the solution has
the same bits everywhere. One (M, d) array is kept, ``a = W + U``, the splitting plus the scaled
dual U = Omega / rho. The proximal map gives both back, W = prox(a) and U = a - W, so storing either
one would be redundant.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from medfed.functional.graph import connected_components, graph_laplacian, incidence
from medfed.functional.prox import check_norm, dual_norm
from medfed.standalone.errors import ConfigError

CHECK_EVERY = 5  # iterations between two looks at the residuals, which cost about half an iteration

_CACHE_BYTES = 64 * 1024
# Nodes beyond which iterations, and consensus, use no inverse: it grows with their cube.
_MANY, _DENSE = 32, 1000


class ResidualNorms(NamedTuple):
    """The five norms in Boyd's stopping rule (Boyd et al. 2011, section 3.3)."""

    primal: float  # norm of ZQ - W
    dual: float  # norm of mass (V - Z) - Omega Q^T, which is rho (W - W_before) Q^T
    gaps: float  # norm of ZQ
    splitting: float  # norm of W
    pull: float  # norm of Omega Q^T


@dataclass(eq=False)
class AdmmSteps:
    """The iterates of one problem in main memory, in one pass over ``a`` per iteration.

    In large graphs three gradient steps stand for the solution of Z's linear system: a proximal
    ADMM (Deng, Yin 2016), which converges to the same solution and is linear in the edges.

    Attributes:
        v: ``(N, d)`` floating tensor.
        mass: ``(N,)`` float64 tensor on the CPU, positive.
        edges: ``(M, 2)`` long tensor on the CPU, without self-loops.
        weight: ``(M,)`` float64 tensor on the CPU, positive.
        p: 1, 2 or infinity.
        a: ``(M, d)`` start of the iteration; overwritten.
        rho: Penalty.
    """

    v: Tensor
    mass: Tensor
    edges: Tensor
    weight: Tensor
    p: float
    a: Tensor
    rho: float

    def __post_init__(self) -> None:
        self.z = self.v.clone()
        self._prepare()

    def rescale(self, rho: float) -> None:
        """Changes rho, keeping W and the unscaled dual."""
        # U = Omega / rho: to keep Omega, U is scaled. The cuts are those of the last step.
        for row, cut in zip(self.a, self._cut.tolist(), strict=True):
            inside = row * cut if self._norm == 2 else row.clamp(-cut, cut)
            dual = row - inside if self._norm == 0 else inside
            row.add_(dual, alpha=self.rho / rho - 1)
        self.rho = rho
        self._prepare()

    def _inverse(self) -> Tensor:
        """``(N, N)`` inverse of diag(mass) + rho L, in float64 and factored once per rho.

        The explicit inverse is harmless: the matrix is positive definite with smallest
        eigenvalue near 1, and one small product per block replaces two triangular solves.
        """
        matrix = torch.diag(self.mass) + self.rho * graph_laplacian(self.v.shape[0], self.edges)
        return torch.cholesky_inverse(torch.linalg.cholesky(matrix))

    def _prepare(self) -> None:
        # Imported on first use: compiled code has no business in `import medfed`.
        from medfed.functional import kernels

        self._kernels = kernels
        m, (n, d) = self.edges.shape[0], self.v.shape
        self._tau = (self.weight / self.rho).numpy()
        self._norm = {1.0: 1, 2.0: 2, math.inf: 0}[self.p]
        self._width = block_width(m, n, d, self.v.element_size())
        mass = self.mass.to(self.v.dtype).numpy()
        self._arrays = (self.a.numpy(), self.z.numpy(), self.v.numpy(), mass, self.edges.numpy())
        inverse = self._inverse() if n <= _MANY else self.v.new_empty(0, 0)
        degree = np.bincount(self.edges.flatten().numpy(), minlength=n).astype(mass.dtype)
        scale = 1 / (mass + 2 * mass.dtype.type(self.rho) * degree)
        self._system = inverse.to(self.v.dtype).numpy(), scale
        self._rho_scalar = self._arrays[0].dtype.type(self.rho)
        self._levels = np.zeros(m)
        # Row by row, so that no second (M, d) array in double precision comes about.
        norms = [torch.linalg.vector_norm(row, dtype=torch.float64) for row in self.a]
        self._update_cut(torch.stack(norms).square().numpy())

    def _update_cut(self, squares: np.ndarray[Any, Any]) -> None:
        """Finds the number per row that splits the present ``a`` into W and U."""
        cut = self._tau
        if self._norm == 2:
            # A quotient of norms, so that an infinite tau gives 1, never inf / inf.
            tiny = np.finfo(np.float64).tiny
            cut = 1.0 / np.maximum(1.0, np.sqrt(squares) / np.maximum(cut, tiny))
        elif self._norm == 0:
            self._kernels.clip_levels(self._arrays[0], cut, self._levels)
            cut = self._levels
        # By way of torch, whose conversion takes a huge threshold to infinity without a warning.
        self._cut = torch.from_numpy(cut).to(self.v.dtype).numpy()

    def step(self) -> None:
        """One iteration: new Z, W and dual."""
        options = self._rho_scalar, self._cut, self._norm, self._width
        sums = self._kernels.admm_step(self._arrays, self._system, *options)
        self._update_cut(sums.sum(axis=1))

    def residuals(self) -> ResidualNorms:
        """The residuals of the present iterate."""
        options = self._rho_scalar, self._cut, self._norm, self._width
        sums = self._kernels.residual_norms(self._arrays, *options)
        return ResidualNorms(*np.sqrt(sums.sum(axis=1)).tolist())


def block_width(edges: int, nodes: int, columns: int, itemsize: int) -> int:
    """The number of columns whose working set stays in cache."""
    per_column = (2 * edges + 2 * nodes) * itemsize
    fitting = max(64, min(1024, _CACHE_BYTES // max(per_column, 1)))
    return max(1, min(columns, 1 << (fitting.bit_length() - 1)))


def iterate(
    steps: AdmmSteps, tol: float, spread: float, max_iter: int, adapt: bool
) -> tuple[int, ResidualNorms, bool]:
    """Runs ADMM until both residuals are small; returns iterations, residuals and success.

    They are relative to Boyd's tolerances, the absolute one in units of the spread of the data.
    """
    # Below some rounding errors of the data itself no residual can fall.
    floor = 4.0 * torch.finfo(steps.v.dtype).eps * _norm(steps.v)
    next_change = CHECK_EVERY
    for count in range(1, max_iter + 1):
        steps.step()
        if count % CHECK_EVERY and count != max_iter:
            continue
        norms = steps.residuals()
        primal = norms.primal / (floor + tol * (spread + max(norms.gaps, norms.splitting)))
        dual = norms.dual / (floor + tol * (spread + norms.pull))
        if max(primal, dual) <= 1.0:
            return count, norms, True
        if adapt and count >= next_change:
            # Ever rarer, so that rho is constant in the end and convergence is certain.
            next_change = 2 * count
            _balance(steps, primal, dual)
    what = f"The network lasso stopped after max_iter={max_iter} iterations above its tolerance"
    warnings.warn(f"{what}; raise max_iter or tol.", RuntimeWarning, stacklevel=4)
    return max_iter, norms, False


def _balance(steps: AdmmSteps, primal: float, dual: float) -> None:
    """Changes rho where one residual is far larger than the other."""
    ratio = min(max(math.sqrt(primal / dual), 0.1), 10.0) if dual > 0 else 10.0
    if not 0.5 < ratio < 2.0:
        steps.rescale(steps.rho * ratio)


class LassoState(NamedTuple):
    """Where a later solve continues; two plain tensors, to be kept in a checkpoint."""

    # ``(M, d)``: W + U, the splitting plus the scaled dual; the proximal map gives both back.
    point: Tensor
    rho: Tensor  # scalar float64 penalty that U is scaled by


@dataclass(frozen=True)
class LassoResult:
    """The minimiser that :func:`solve_network_lasso` returns, and how its ADMM converged.

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


def solve_network_lasso(
    v: Tensor,
    edges: Tensor | Sequence[Sequence[int]],
    weight: float | Tensor,
    p: float = 2.0,
    *,
    mass: Tensor | None = None,
    state: LassoState | None = None,
    rho: float | None = None,
    tol: float = 1e-7,
    max_iter: int = 5000,
) -> LassoResult:
    """Minimises ``sum_e weight_e ||z_i - z_j||_p + sum_n mass_n ||z_n - v_n||^2 / 2`` over Z.

    Args:
        v: ``(N, d)`` floating tensor, a row per node.
        edges: ``(M, 2)`` integers, an undirected edge per row.
        weight: One number for all edges or ``(M,)``; 0 and infinity are allowed.
        p: Norm of the differences: 1, 2 or ``math.inf``.
        mass: ``(N,)`` positive numbers, near 1 on average; ``None``: 1 for every node.
        state: Where an earlier solve on the same graph ended; ``v``, ``weight`` and p may differ.
        rho: A fixed penalty; ``None`` starts from the mean degree and balances the residuals.
        tol: Tolerance of the residuals, relative to the spread of ``v``.
        max_iter: ADMM iterations at most; a warning is issued where they do not suffice.

    Returns:
        The minimiser, the state to continue from, iterations and residuals.
    """
    p, points = check_norm(p), _checked_points(v)
    links = _checked_edges(edges, v.shape[0])
    weights = _checked_weights(weight, links.shape[0])
    masses = torch.ones(len(v)).double() if mass is None else mass.detach().double().cpu()
    used = weights > 0
    if not bool(used.any()) or points.shape[1] == 0:
        point = points.new_zeros(links.shape[0], v.shape[1])
        return _closed_form(v, v.detach().clone(), point, rho or 1.0)
    if bool(used.all()):
        return _solve(v, points, masses, links, weights, p, state, rho, tol, max_iter)
    # A weightless edge does nothing, and would only slow the iteration down.
    part = None if state is None else state._replace(point=state.point[used.to(v.device)])
    solution = _solve(v, points, masses, links[used], weights[used], p, part, rho, tol, max_iter)
    point = solution.state.point.new_zeros(links.shape[0], v.shape[1])
    point[used.to(v.device)] = solution.state.point
    return replace(solution, state=solution.state._replace(point=point))


def component_means(v: Tensor, mass: Tensor, component: Tensor) -> Tensor:
    """The mean by mass of each point's component: the solution if the weights are large enough.

    Example:
        >>> v, ones = torch.tensor([[1.0], [5.0], [9.0]]), torch.ones(3, dtype=torch.float64)
        >>> component_means(v, ones, torch.tensor([0, 0, 1])).tolist()
        [[3.0], [3.0], [9.0]]
    """
    total = mass.new_zeros(int(component.max()) + 1).index_add_(0, component, mass)
    share = (mass / total[component]).to(v).unsqueeze(1)
    return v.new_zeros(len(total), v.shape[1]).index_add_(0, component, share * v)[component]


def smallest_dual(pull: Tensor, edges: Tensor, component: Tensor) -> Tensor:
    """The smallest Omega with Omega Q^T = ``pull``.

    mass (V - Z) = Omega Q^T at the optimum, each row of Omega in the dual ball of radius weight.
    Where the smallest Omega that reaches the component means fits, they are the exact solution.

    Example:
        >>> pull, edges = torch.tensor([[-2.0], [2.0]]), torch.tensor([[0, 1]])
        >>> smallest_dual(pull, edges, torch.tensor([0, 0])).tolist()
        [[-2.0]]
    """
    n, d = pull.shape
    if n <= _DENSE:
        same = (component.unsqueeze(0) == component.unsqueeze(1)).double()
        matrix = graph_laplacian(n, edges) + same / same.sum(1, keepdim=True)
        # The points first, then the edges: a product over all edges and nodes would cost far more.
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(matrix)).to(pull)
        return incidence(n, edges).T.to(pull) @ (inverse @ pull)
    from scipy.sparse import csc_array, diags_array
    from scipy.sparse.linalg import splu

    # One node of each component held at 0 makes the Laplacian regular. The order and the pivots
    # are those for symmetric matrices, which leave far fewer entries.
    first = np.zeros(n)
    first[np.unique(component.numpy(), return_index=True)[1]] = 1
    ends = incidence(n, edges).coalesce()
    sparse = csc_array((ends.values().numpy(), tuple(ends.indices().numpy())), ends.shape)
    matrix = (diags_array(first) + sparse @ sparse.T).tocsc()
    factors = splu(matrix, permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0)
    omega = pull.new_empty(len(edges), d)
    for lo in range(0, d, 256):
        z = torch.from_numpy(factors.solve(pull[:, lo : lo + 256].double().numpy()))
        omega[:, lo : lo + 256] = (z[edges[:, 0]] - z[edges[:, 1]]).to(omega)
    return omega


def _edges_suffice(pull: Tensor, edges: Tensor, weight: Tensor, p: float) -> bool:
    """Whether the edges of each point can hold it: their strengths exceed the norm of its pull."""
    strength = weight.new_zeros(len(pull))
    strength.index_add_(0, edges[:, 0], weight).index_add_(0, edges[:, 1], weight)
    return bool((dual_norm(pull, p) <= strength).all())


def _closed_form(v: Tensor, z: Tensor, point: Tensor, rho: float) -> LassoResult:
    state = LassoState(point.to(v.device), torch.tensor(rho, dtype=torch.float64))
    return LassoResult(z.to(v), state, 0, 0.0, 0.0, True)


def _solve(
    v: Tensor,
    points: Tensor,
    mass: Tensor,
    edges: Tensor,
    weight: Tensor,
    p: float,
    state: LassoState | None,
    rho: float | None,
    tol: float,
    max_iter: int,
) -> LassoResult:
    """Tries consensus, then ADMM; every weight is positive."""
    component = connected_components(len(points), edges)
    # The mean degree is near the mean of the graph's spectrum; the residuals then correct rho.
    usual = len(points) / (2 * len(edges)) if state is None else float(state.rho)
    start, force = rho or usual, None
    # In place, as each array of this size counts.
    pull = component_means(points, mass, component)
    torch.sub(points, pull, out=pull)
    spread = _norm(pull)
    pull.mul_(mass.to(points).unsqueeze(1))
    if len(points) <= _MANY or _edges_suffice(pull, edges, weight, p):
        force = smallest_dual(pull, edges, component)
        if bool((dual_norm(force, p) <= weight).all()):
            z = component_means(points, mass, component)
            return _closed_form(v, z, force.div_(start), start)
    del pull
    if state is None:
        if force is None:
            force = points.new_zeros(len(edges), points.shape[1])
        steps = AdmmSteps(points, mass, edges, weight, p, force.div_(start), start)
    else:
        del force
        point = state.point.to(points, copy=True).contiguous()
        steps = AdmmSteps(points, mass, edges, weight, p, point, float(state.rho))
        if steps.rho != start:
            steps.rescale(start)
    count, norms, converged = iterate(steps, tol, spread, max_iter, adapt=rho is None)
    state = LassoState(steps.a.to(v.device), torch.tensor(steps.rho, dtype=torch.float64))
    return LassoResult(steps.z.to(v), state, count, norms.primal, norms.dual, converged)


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))


def _checked_points(v: Tensor) -> Tensor:
    """``v`` detached, contiguous and in main memory, at least in single precision."""
    if not bool(torch.isfinite(v).all()):
        rows = (~torch.isfinite(v)).any(1).nonzero().flatten().tolist()
        raise ValueError(f"v holds NaN or infinity in row {rows[0]}; a client's reply diverged.")
    wide = v.dtype if v.dtype in (torch.float32, torch.float64) else torch.float32
    return v.detach().to("cpu", wide).contiguous()


def _checked_edges(edges: Tensor | Sequence[Sequence[int]], n: int) -> Tensor:
    """The edges as an ``(M, 2)`` long tensor on the CPU."""
    ends = torch.as_tensor(edges).cpu().long().reshape(-1, 2).contiguous()
    # Compiled code does not look where it writes.
    for i, j in ends.tolist():
        if not (0 <= i < n and 0 <= j < n and i != j):
            raise ConfigError(f"Edge ({i}, {j}) does not join two of the nodes 0 to {n - 1}.")
    return ends


def _checked_weights(weight: float | Tensor, m: int) -> Tensor:
    """One float64 weight per edge, on the CPU."""
    weights = torch.as_tensor(weight, dtype=torch.float64).detach().cpu()
    if bool((~(weights >= 0)).any()):
        bad = float(weights[~(weights >= 0)].flatten()[0])
        raise ConfigError(f"weight is {bad}, but it must be 0 or more.")
    return weights.expand(m).contiguous()
