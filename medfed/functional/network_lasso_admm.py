"""The network lasso's ADMM: its steps in plain PyTorch and as fused loops, and when it stops.

Both keep one (M, d) array ``a = W + U``, the splitting plus the scaled dual U = Omega / rho. The
proximal map gives both back, W = prox(a) and U = a - W, so storing either one would be redundant.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from medfed.common.errors import ConfigError
from medfed.functional.graph import graph_laplacian, incidence
from medfed.functional.prox import prox_norm, prox_rows

CHECK_EVERY = 5
"""Iterations between two looks at the residuals, which cost about half an iteration."""

_CACHE_BYTES = 64 * 1024


class ResidualNorms(NamedTuple):
    """The five norms in Boyd's stopping rule (Boyd et al. 2011, section 3.3)."""

    primal: float
    """Norm of ZQ - W."""
    dual: float
    """Norm of mass (V - Z) - Omega Q^T, which is rho (W - W_before) Q^T."""
    gaps: float
    """Norm of ZQ."""
    splitting: float
    """Norm of W."""
    pull: float
    """Norm of Omega Q^T."""


class AdmmSteps(ABC):
    """The iterates of one problem and the operations on them.

    Args:
        v: ``(N, d)`` floating tensor.
        mass: ``(N,)`` float64 tensor on the CPU, positive.
        edges: ``(M, 2)`` long tensor on the CPU, without self-loops.
        weight: ``(M,)`` float64 tensor on the CPU, positive.
        p: 1, 2 or infinity.
        a: ``(M, d)`` start of the iteration; overwritten.
        rho: Penalty.
    """

    def __init__(
        self,
        v: Tensor,
        mass: Tensor,
        edges: Tensor,
        weight: Tensor,
        p: float,
        a: Tensor,
        rho: float,
    ) -> None:
        self.v, self.mass, self.edges, self.weight, self.p, self.a = v, mass, edges, weight, p, a
        self.z = torch.empty_like(v)
        self.rho = rho
        self._prepare()

    def rescale(self, rho: float) -> None:
        """Changes rho, keeping W and the unscaled dual."""
        ratio = self.rho / rho
        tau = self.weight / self.rho
        for row, t in zip(self.a.split(1), tau, strict=True):
            w = prox_norm(row, float(t), self.p)
            row.sub_(w).mul_(ratio).add_(w)
        self.rho = rho
        self._prepare()

    def _inverse(self) -> Tensor:
        """``(N, N)`` inverse of diag(mass) + rho L, in float64 and factored once per rho.

        The explicit inverse is harmless: the matrix is positive definite with smallest
        eigenvalue near 1, and one small product per block replaces two triangular solves.
        """
        laplacian = graph_laplacian(self.v.shape[0], self.edges)
        matrix = torch.diag(self.mass) + self.rho * laplacian
        return torch.cholesky_inverse(torch.linalg.cholesky(matrix))

    @abstractmethod
    def _prepare(self) -> None:
        """Computes what depends on rho."""

    @abstractmethod
    def step(self) -> None:
        """One iteration: new Z, W and dual."""

    @abstractmethod
    def residuals(self) -> ResidualNorms:
        """The residuals of the present iterate."""


class TorchSteps(AdmmSteps):
    """The readable reference, and the path for tensors on an accelerator.

    A step waits for no value there, and the residuals for one.
    """

    def _prepare(self) -> None:
        self.inverse = self._inverse().to(self.v)
        self.tau = (self.weight / self.rho).to(self.v)
        self.heads, self.tails = self.edges.to(self.v.device).unbind(1)
        # A product, as index_add_ adds in no fixed order on an accelerator.
        self.ends = incidence(self.v.shape[0], self.edges).to(self.v)
        self.column = self.mass.to(self.v).unsqueeze(1)

    def step(self) -> None:
        """One iteration: new Z, W and dual."""
        w = prox_rows(self.a, self.tau.unsqueeze(1), self.p)
        u = self.a.sub_(w)
        self.z = self.inverse @ (self.column * self.v + self.rho * self._to_nodes(w.sub_(u)))
        del w
        self.a = u.add_(self._gaps())

    def residuals(self) -> ResidualNorms:
        """The residuals of the present iterate."""
        w = prox_rows(self.a, self.tau.unsqueeze(1), self.p)
        gaps = self._gaps()
        pull = self.rho * self._to_nodes(self.a - w)
        parts = (gaps - w, self.column * (self.v - self.z) - pull, gaps, w, pull)
        # Norms in double: the squares of a long float32 row lose digits.
        norms = [torch.linalg.vector_norm(x, dtype=torch.float64) for x in parts]
        return ResidualNorms(*torch.stack(norms).tolist())

    def _gaps(self) -> Tensor:
        """ZQ: the difference over every edge."""
        return self.z[self.heads] - self.z[self.tails]

    def _to_nodes(self, rows: Tensor) -> Tensor:
        """Rows Q^T: adds every edge to its head and subtracts it from its tail."""
        return self.ends @ rows


class FusedSteps(AdmmSteps):
    """The fast path for tensors in main memory: one pass over the (M, d) array per iteration."""

    def _prepare(self) -> None:
        # Imported on first use: compiled code has no business in `import medfed`.
        from medfed.functional import network_lasso_kernels

        self._kernels = network_lasso_kernels
        m, (n, d) = self.edges.shape[0], self.v.shape
        self._tau = (self.weight / self.rho).numpy()
        self._norm = {1.0: 1, 2.0: 2, math.inf: 0}[self.p]
        self._width = block_width(m, n, d, self.v.element_size())
        mass = self.mass.to(self.v.dtype).numpy()
        self._arrays = (self.a.numpy(), self.z.numpy(), self.v.numpy(), mass, self.edges.numpy())
        self._inverse_array = self._inverse().to(self.v.dtype).numpy()
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
        sums = self._kernels.admm_step(*self._arrays, self._inverse_array, *options)
        self._update_cut(sums.sum(axis=1))

    def residuals(self) -> ResidualNorms:
        """The residuals of the present iterate."""
        options = self._rho_scalar, self._cut, self._norm, self._width
        sums = self._kernels.residual_norms(*self._arrays, *options)
        return ResidualNorms(*np.sqrt(sums.sum(axis=1)).tolist())


def block_width(edges: int, nodes: int, columns: int, itemsize: int) -> int:
    """The number of columns whose working set stays in cache.

    Example:
        >>> block_width(10, 5, 10**6, 8)
        256
        >>> block_width(10, 5, 60, 8)
        60
    """
    per_column = (2 * edges + 2 * nodes) * itemsize
    fitting = max(16, min(1024, _CACHE_BYTES // max(per_column, 1)))
    return max(1, min(columns, 1 << (fitting.bit_length() - 1)))


class Limits(NamedTuple):
    """Boyd's tolerances, the absolute one in units of the spread of the data."""

    tol: float
    spread: float
    size: float
    eps: float

    def excess(self, norms: ResidualNorms) -> tuple[float, float]:
        """The primal and the dual residual as multiples of their tolerances.

        Example:
            >>> norms = ResidualNorms(primal=2.0, dual=1.0, gaps=3.0, splitting=3.0, pull=0.0)
            >>> Limits(tol=1.0, spread=1.0, size=0.0, eps=0.0).excess(norms)
            (0.5, 1.0)
        """
        # Below some rounding errors of the data itself no residual can fall.
        floor = 4.0 * self.eps * self.size
        primal = floor + self.tol * (self.spread + max(norms.gaps, norms.splitting))
        dual = floor + self.tol * (self.spread + norms.pull)
        return norms.primal / primal, norms.dual / dual


def iterate(
    steps: AdmmSteps, limits: Limits, max_iter: int, adapt: bool
) -> tuple[int, ResidualNorms, bool]:
    """Runs ADMM until both residuals are small; returns iterations, residuals and success."""
    next_change = CHECK_EVERY
    for count in range(1, max_iter + 1):
        steps.step()
        if count % CHECK_EVERY and count != max_iter:
            continue
        norms = steps.residuals()
        primal, dual = limits.excess(norms)
        if max(primal, dual) <= 1.0:
            return count, norms, True
        if adapt and count >= next_change:
            # Ever rarer, so that rho is constant in the end and convergence is certain.
            next_change = 2 * count
            _balance(steps, primal, dual)
    warnings.warn(
        f"The network lasso stopped after max_iter={max_iter} iterations above its tolerance; "
        "raise max_iter or tol.",
        RuntimeWarning,
        stacklevel=4,
    )
    return max_iter, norms, False


def _balance(steps: AdmmSteps, primal: float, dual: float) -> None:
    """Changes rho where one residual is far larger than the other."""
    ratio = math.sqrt(primal / dual) if dual > 0 else 10.0
    ratio = min(max(ratio, 0.1), 10.0)
    if not 0.5 < ratio < 2.0:
        steps.rescale(steps.rho * ratio)


def check_limits(tol: float, max_iter: int, rho: float | None) -> None:
    """Checks the numbers that steer an ADMM.

    Raises:
        ConfigError: If one of them is out of range.

    Example:
        >>> check_limits(1e-6, 100, None)
    """
    if not tol > 0:
        raise ConfigError(f"tol is {tol}, but it must be above 0.")
    if max_iter < 1:
        raise ConfigError(f"max_iter is {max_iter}, but it must be 1 or more.")
    if rho is not None and not 0 < rho < math.inf:
        raise ConfigError(f"rho is {rho}, but it must be above 0 and finite.")
