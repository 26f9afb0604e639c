"""When the network lasso's ADMM stops, and how its penalty follows the residuals."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from medfed.personalize.functional.lasso_steps import AdmmSteps, ResidualNorms

CHECK_EVERY = 5
"""Iterations between two looks at the residuals, which cost about half an iteration."""


class Limits(NamedTuple):
    """Boyd's tolerances, the absolute one in units of the spread of the data."""

    tol: float
    spread: float
    size: float
    eps: float

    def excess(self, norms: ResidualNorms) -> tuple[float, float]:
        """The primal and the dual residual as multiples of their tolerances.

        Example:
            >>> from medfed.personalize.functional.lasso_steps import ResidualNorms
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
