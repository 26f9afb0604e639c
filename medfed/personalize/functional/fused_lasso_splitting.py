"""The paper's ADMM for the 1-D fused lasso of CER, corrected: for comparison, and as an oracle.

Source: pFedNet, the ADMM of CER, and Boyd et al. 2011, section 3.3. Deviations: the threshold is
gamma / rho (the printed rho is wrong), the linear system is solved as the tridiagonal one it is,
without a d x d eigen-decomposition, and the residuals stop the iteration.

======  ==================================================
symbol  here
======  ==================================================
Lambda  :func:`differences`; its last row is w_d alone
s       ``s``, the splitting, equal to Lambda w in the end
u       ``u``, the dual divided by rho
======  ==================================================
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.linalg import lapack
from torch import Tensor

from medfed.personalize.functional.fused_lasso_exact import check_gamma, check_vector, magnitude
from medfed.personalize.functional.lasso_checks import check_limits

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class FusedLassoResult:
    """What :func:`fused_lasso_admm` found.

    Attributes:
        w: ``(d,)`` minimiser to within the tolerance, in the dtype of the input. Fused neighbours
            are close to each other, not equal.
        iterations: Iterations done.
        primal: Norm of Lambda w - s at the end.
        dual: Norm of rho Lambda^T (s - s_before) at the end.
        converged: Whether both lie below ``tol`` times the norm of g.
    """

    w: Tensor
    iterations: int
    primal: float
    dual: float
    converged: bool


def fused_lasso_admm(
    g: Tensor, gamma: float, rho: float = 1.0, iterations: int = 10_000, tol: float = 1e-6
) -> FusedLassoResult:
    """Solves the problem of :func:`fused_lasso` by ADMM; use that one, unless to compare.

    Args:
        g: ``(d,)`` float32 or float64 tensor; computed in float64, in main memory.
        gamma: Weight of the differences, 0 to infinity.
        rho: Penalty, the paper's. It changes the path, not the solution.
        iterations: Iterations at most; a warning is issued where they do not suffice.
        tol: Both residuals' bound, relative to the norm of g.

    Returns:
        The minimiser, iterations and residuals.

    Raises:
        ConfigError: If ``g`` is no such tensor, or a number is out of range.
        ValueError: If ``g`` holds NaN or infinity, or numbers whose sum overflows.

    Example:
        >>> g = torch.tensor([4.0, 1.0, 2.0], dtype=torch.float64)
        >>> fused_lasso_admm(g, gamma=0.5).w.round(decimals=4)
        tensor([3.5000, 1.5000, 1.5000], dtype=torch.float64)
    """
    check_limits(tol, iterations, rho)
    cut = check_gamma(gamma) / rho
    vector = check_vector(g)
    if magnitude(vector) == 0:
        return FusedLassoResult(torch.zeros_like(g), 0, 0.0, 0.0, True)
    y = vector.double().numpy()
    limit = tol * _norm(y)
    s, u = np.zeros_like(y), np.zeros_like(y)
    factor = _factor(len(y), rho)
    for count in range(1, iterations + 1):
        w = lapack.dpttrs(*factor, y + rho * adjoint(s - u))[0]
        a = differences(w) + u
        # What soft-thresholding takes away is the new dual.
        taken = np.clip(a, -cut, cut)
        primal = _norm(taken - u)
        before, s, u = s, a - taken, taken
        dual = rho * _norm(adjoint(s - before))
        if primal <= limit and dual <= limit:
            return FusedLassoResult(torch.from_numpy(w).to(g), count, primal, dual, True)
    warnings.warn(
        f"The fused lasso's ADMM stopped after iterations={iterations} above its tolerance; "
        "raise iterations or tol, or use fused_lasso.",
        RuntimeWarning,
        stacklevel=2,
    )
    return FusedLassoResult(torch.from_numpy(w).to(g), iterations, primal, dual, False)


def differences(w: Array) -> Array:
    """Lambda w: every element minus its right neighbour, which is 0 for the last.

    Example:
        >>> differences(np.array([4.0, 1.0, 2.0])).tolist()
        [3.0, -1.0, 2.0]
    """
    out = w.copy()
    out[:-1] -= w[1:]
    return out


def adjoint(u: Array) -> Array:
    """Lambda^T u: every element minus its left neighbour, which is 0 for the first.

    Example:
        >>> adjoint(np.array([4.0, 1.0, 2.0])).tolist()
        [4.0, -3.0, 1.0]
    """
    out = u.copy()
    out[1:] -= u[:-1]
    return out


def _norm(x: Array) -> float:
    # By PyTorch, whose threads the run sets; BLAS would start its own.
    return float(torch.linalg.vector_norm(torch.from_numpy(x)))


def _factor(d: int, rho: float) -> tuple[Array, Array]:
    """The factors of I + rho Lambda^T Lambda, which is tridiagonal and positive definite."""
    diagonal = np.full(d, 1.0 + 2.0 * rho)
    diagonal[0] = 1.0 + rho
    # SciPy wants one entry beside the diagonal even where the matrix has none.
    d_factor, e_factor, _ = lapack.dpttrf(diagonal, np.full(max(d - 1, 1), -rho))
    return d_factor, e_factor
