"""Proximal maps of the p-norms, row by row, and of the fused lasso; penalties of a client's loss.

Source: pFedNet, Eq. 8, corrected. The printed equation shrinks by the dual norm for every p, which
is right for p = 2 only; here each p has its own map.

The 1-D fused lasso of CER draws together what is sent along its length. Source: pFedNet, the
communication-efficient regulariser (CER), corrected. The printed minimisation over models,
``argmin_y <g, y> + gamma ||Lambda (y - y_t)||_1 + ||y - y_t||^2 / (2 eta)``, becomes with
``w = (y_t - y) / eta`` the proximal map of `fused_lasso`, from which eta and y_t have gone. It is
solved exactly, in linear time, by Johnson's dynamic programme (Johnson 2013), not by the printed
ADMM, which ``benchmarks/speed/kernels.py`` has for comparison.

======  ==================================================================
symbol  here
======  ==================================================================
g       ``g``, a gradient, a displacement or any other vector to be sent
Lambda  differences of neighbours; its last row is w_d alone (w_{d+1} = 0)
w       the result
======  ==================================================================
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from medfed.standalone.checks import check_positive
from medfed.standalone.errors import ConfigError

NORMS = (1.0, 2.0, math.inf)  # the values of p that have a proximal map here


def check_norm(p: float) -> float:
    """Returns p as a float where it is 1, 2 or infinity.

    Example:
        >>> check_norm(2)
        2.0
    """
    known = isinstance(p, int | float) and not isinstance(p, bool) and float(p) in NORMS
    if not known:
        raise ConfigError(f"p is {p!r}, but a norm here has p = 1, 2 or inf; choose one of these.")
    return float(p)


def dual_norm(rows: Tensor, p: float) -> Tensor:
    """The norm of each row of ``(M, d)`` that is dual to the p-norm, 1/p + 1/q = 1.

    Example:
        >>> dual_norm(torch.tensor([[3.0, -4.0]]), 1.0)
        tensor([4.])
    """
    q = {1.0: math.inf, 2.0: 2.0, math.inf: 1.0}[check_norm(p)]
    if rows.shape[1] == 0:
        return rows.new_zeros(rows.shape[0])
    norms: Tensor = torch.linalg.vector_norm(rows, ord=q, dim=1)
    return norms


def check_scad(section: str, rho: float, a: float, smoothing: float) -> None:
    """Checks that :func:`shrink_scad` is a proximal map.

    Example:
        >>> check_scad("algorithm", rho=0.25, a=3.0, smoothing=1e-4)
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.ConfigError: algorithm.rho must be above 1 / (a - 1) = 0.5, not \
0.25.
    """
    if not a > 2:
        raise ConfigError(f"{section}.a must be above 2, not {a}.")
    if not rho > (least := 1 / (a - 1)):
        raise ConfigError(f"{section}.rho must be above 1 / (a - 1) = {least:.3g}, not {rho}.")
    check_positive(f"{section}.smoothing", smoothing)


def shrink_scad(n: Tensor, strength: float, rho: float, a: float, smoothing: float) -> Tensor:
    """The factor s by which s d = argmin_t P(|t|) + (rho/2) |t - d|^2, for vectors d of length n.

    Source: Yu, Liu, Wang, Sun 2024 (FPFC), the theta step of Algorithm 1. P is SCAD: its slope is
    ``strength`` up to there, falls to 0 at ``a * strength``, and near 0 it is a parabola.

    Args:
        n: The lengths of vectors, a tensor of any shape.
        strength: lambda.
        rho: Weight of the distance, above 1 / (a - 1).
        a: Above 2.
        smoothing: xi, up to which the penalty is a parabola; positive.

    Returns:
        The factors, in [0, 1], in the shape of ``n``.

    Example:
        >>> factors = shrink_scad(torch.tensor([0.5, 2.0, 3.0, 4.0]), 1.0, 1.0, 3.7, 1e-4)
        >>> [f"{factor:.4f}" for factor in factors]
        ['0.0001', '0.5000', '0.8627', '1.0000']
    """
    curve = (a - 1) * rho
    factor = torch.where(n <= a * strength, (1 - a * strength / (curve * n)) / (1 - 1 / curve), 1.0)
    factor = torch.where(n <= strength + strength / rho, 1 - strength / (rho * n), factor)
    flat = smoothing * rho / (strength + smoothing * rho)
    return torch.where(n <= smoothing + strength / rho, flat, factor)


@dataclass(frozen=True)
class Proximity:
    """The penalty (μ/2)‖w − a‖² over the names of the anchor a.

    Attributes:
        weight: μ.
        anchor: Name to tensor; parameters that it does not name are free.
    """

    weight: float
    anchor: Mapping[str, Tensor]

    def __call__(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Returns the penalty at ``parameters``, a scalar; 0 where the anchor is empty."""
        if not self.anchor:
            return torch.zeros(())
        squares = torch.stack([gap.square().sum() for gap in self._gaps(parameters)])
        return self.weight / 2 * squares.sum()

    def add_gradient(self, parameters: Mapping[str, Tensor]) -> None:
        """Adds μ(w − a) to the gradients of the parameters: autograd's bits, at less cost."""
        if self.anchor:
            steps = self._gaps(parameters)
            torch._foreach_mul_(steps, self.weight)
            _add_to_gradients([parameters[n] for n in self.anchor], steps)

    def _gaps(self, parameters: Mapping[str, Tensor]) -> list[Tensor]:
        present = [parameters[n] for n in self.anchor]
        return list(torch._foreach_sub(present, list(self.anchor.values())))


@dataclass(frozen=True)
class Linear:
    """The penalty <s, w> over the names of the slope s.

    Attributes:
        slope: Name to tensor; parameters that it does not name are free.

    Example:
        >>> w = {"x": torch.tensor([3.0, 1.0])}
        >>> Linear({"x": torch.tensor([1.0, -1.0])})(w)
        tensor(2.)
    """

    slope: Mapping[str, Tensor]

    def __call__(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Returns the penalty at ``parameters``, a scalar; 0 where the slope is empty."""
        terms = [(parameters[n] * t).sum() for n, t in self.slope.items()]
        return torch.stack(terms).sum() if terms else torch.zeros(())

    def add_gradient(self, parameters: Mapping[str, Tensor]) -> None:
        """Adds s to the gradients of the parameters: autograd's bits, at less cost."""
        if self.slope:
            _add_to_gradients([parameters[n] for n in self.slope], list(self.slope.values()))


def _add_to_gradients(parameters: Sequence[Tensor], terms: list[Tensor]) -> None:
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:  # the loss does not depend on it
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    torch._foreach_add_(gradients, terms)


def fused_lasso(g: Tensor, gamma: float) -> Tensor:
    """Minimises ``||w - g||^2 / 2 + gamma (sum_{i<d} |w_i - w_{i+1}| + |w_d|)`` over w.

    The result is exact up to rounding and piecewise constant: where neighbours are fused they are
    the same float, bit by bit, in float32 too. A NumPy array goes in by ``torch.from_numpy``,
    which copies nothing.

    Args:
        g: ``(d,)`` float32 or float64 tensor on any device; d may be 0. Sums are kept in float64.
        gamma: 0 returns g; infinity, and anything above ``max_i |g_1 + ... + g_i|``, returns zeros.

    Returns:
        ``(d,)`` tensor in the dtype and on the device of ``g``, sharing no memory with it.
    """
    source = g.detach().cpu().contiguous()
    total = _magnitude(source)
    if gamma == 0:
        return g.detach().clone()
    if gamma >= total:
        return torch.zeros_like(g, memory_format=torch.contiguous_format)
    # Imported on first use: compiled code has no business in `import medfed`.
    from medfed.functional.kernels import solve_chain

    out = torch.empty(g.shape, dtype=g.dtype)
    solve_chain(source.numpy(), gamma, out.numpy())
    return out.to(g.device)


def _magnitude(g: Tensor) -> float:
    """The sum of magnitudes in float64, a bound on every sum in the dynamic programme."""
    with np.errstate(over="ignore"):
        total = float(np.abs(g.numpy()).sum(dtype=np.float64))
    # Four times, because a line's height may reach twice gamma plus the sum.
    if 4 * total < float("inf"):
        return total
    bad = (~torch.isfinite(g)).nonzero().flatten().tolist()
    if bad:
        raise ValueError(f"g[{bad[0]}] is {float(g[bad[0]])}, but it must be finite.")
    raise ValueError("g holds numbers so large that their sum overflows; scale it down.")
