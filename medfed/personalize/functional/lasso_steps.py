"""The steps of the network lasso's ADMM, in plain PyTorch and as fused loops.

Both keep one (M, d) array ``a = W + U``, the splitting plus the scaled dual U = Omega / rho. The
proximal map gives both back, W = prox(a) and U = a - W, so storing either one would be redundant.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from medfed.personalize.functional import lasso_kernels as kernels
from medfed.personalize.functional.graph_algebra import graph_laplacian
from medfed.personalize.functional.prox import prox_norm


class ResidualNorms(NamedTuple):
    """The five norms in Boyd's stopping rule (Boyd et al. 2011, section 3.3)."""

    primal: float
    """Norm of ZQ - W."""
    dual: float
    """Norm of V - Z - Omega Q^T, which is rho (W - W_before) Q^T."""
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
        edges: ``(M, 2)`` long tensor on the CPU, without self-loops.
        weight: ``(M,)`` float64 tensor on the CPU, positive.
        p: 1, 2 or infinity.
        a: ``(M, d)`` start of the iteration; overwritten.
        rho: Penalty.
    """

    def __init__(
        self, v: Tensor, edges: Tensor, weight: Tensor, p: float, a: Tensor, rho: float
    ) -> None:
        self.v, self.edges, self.weight, self.p, self.a = v, edges, weight, p, a
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
        """``(N, N)`` inverse of I + rho L, in float64 and factored once per rho.

        The explicit inverse is harmless: the matrix is positive definite with smallest
        eigenvalue 1, and one small product per block replaces two triangular solves.
        """
        n = self.v.shape[0]
        laplacian = graph_laplacian(n, self.edges)
        matrix = torch.eye(n, dtype=torch.float64) + self.rho * laplacian
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
    """The readable reference, and the path for tensors on an accelerator."""

    def _prepare(self) -> None:
        self.inverse = self._inverse().to(self.v)
        self.tau = (self.weight / self.rho).to(self.v)
        self.heads, self.tails = self.edges.to(self.v.device).unbind(1)

    def step(self) -> None:
        """One iteration: new Z, W and dual."""
        w = prox_norm(self.a, self.tau, self.p)
        u = self.a.sub_(w)
        self.z = self.inverse @ (self.v + self.rho * self._to_nodes(w.sub_(u)))
        del w
        self.a = u.add_(self._gaps())

    def residuals(self) -> ResidualNorms:
        """The residuals of the present iterate."""
        w = prox_norm(self.a, self.tau, self.p)
        gaps = self._gaps()
        pull = self.rho * self._to_nodes(self.a - w)
        parts = (gaps - w, self.v - self.z - pull, gaps, w, pull)
        # Norms in double: the squares of a long float32 row lose digits.
        return ResidualNorms(
            *(float(torch.linalg.vector_norm(x, dtype=torch.float64)) for x in parts)
        )

    def _gaps(self) -> Tensor:
        """ZQ: the difference over every edge."""
        return self.z[self.heads] - self.z[self.tails]

    def _to_nodes(self, rows: Tensor) -> Tensor:
        """Rows Q^T: adds every edge to its head and subtracts it from its tail."""
        nodes = torch.zeros_like(self.v)
        # Edge by edge: index_add_ adds in no fixed order on an accelerator.
        for row, i, j in zip(rows, self.edges[:, 0], self.edges[:, 1], strict=True):
            nodes[i] += row
            nodes[j] -= row
        return nodes


class FusedSteps(AdmmSteps):
    """The fast path for tensors in main memory: one pass over the (M, d) array per iteration."""

    def _prepare(self) -> None:
        m, (n, d) = self.edges.shape[0], self.v.shape
        self._tau = (self.weight / self.rho).numpy()
        self._norm = {1.0: kernels.ONE, 2.0: kernels.TWO}.get(self.p, kernels.MAX)
        self._width = kernels.block_width(m, n, d, self.v.element_size())
        self._arrays = (self.a.numpy(), self.z.numpy(), self.v.numpy(), self.edges.numpy())
        self._inverse_array = self._inverse().to(self.v.dtype).numpy()
        self._rho_scalar = self._arrays[0].dtype.type(self.rho)
        self._levels = np.zeros(m)
        # Row by row, so that no second (M, d) array in double precision comes about.
        norms = [torch.linalg.vector_norm(row, dtype=torch.float64) for row in self.a]
        self._update_cut(torch.stack(norms).square().numpy())

    def _update_cut(self, squares: kernels.Array) -> None:
        """Finds the number per row that splits the present ``a`` into W and U."""
        if self._norm == kernels.ONE:
            cut = self._tau
        elif self._norm == kernels.TWO:
            cut = kernels.ball_scales(squares, self._tau)
        else:
            kernels.clip_levels(self._arrays[0], self._tau, self._levels)
            cut = self._levels
        # By way of torch, whose conversion takes a huge threshold to infinity without a warning.
        self._cut = torch.from_numpy(cut).to(self.v.dtype).numpy()

    def step(self) -> None:
        """One iteration: new Z, W and dual."""
        sums = kernels.admm_step(
            *self._arrays,
            self._inverse_array,
            self._rho_scalar,
            self._cut,
            self._norm,
            self._width,
        )
        self._update_cut(sums.sum(axis=1))

    def residuals(self) -> ResidualNorms:
        """The residuals of the present iterate."""
        sums = kernels.residual_norms(
            *self._arrays, self._rho_scalar, self._cut, self._norm, self._width
        )
        return ResidualNorms(*np.sqrt(sums.sum(axis=1)).tolist())
