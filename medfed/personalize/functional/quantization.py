"""Quantised weights: nearest centres, and the proximal maps of their distance to them.

Source: QuPeL (Ozkara, Singh, Data and Diggavi 2021), with R(x, c) = min_z ||z - x||_1 / 2 over the
z whose elements are centres, and the maps of x and of c solved exactly. Each function takes one
tensor and its own centres ``(m,)``, sorted in ascending order.

============  =========================================================================
symbol        here
============  =========================================================================
Q_c(x)        :func:`quantize`; an element half-way between two centres takes the lower
prox_x        :func:`prox_weights` with ``tau`` = lambda eta_1 / 2
h             :func:`center_gradient`
prox_c        :func:`prox_centers` with ``tau`` = lambda eta_2 / 2
soft Q_c(x)   :func:`soft_quantize`; ``sharpness`` is P
============  =========================================================================

Centres are rounded to the dtype of x before anything else. NaN in x stays NaN where the result has
the shape of x.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from medfed.errors import ConfigError


def quantize(x: Tensor, centers: Tensor) -> Tensor:
    """Each element's nearest centre, the lower one where two are equally near.

    Args:
        x: Float32 or float64 tensor of any shape.
        centers: ``(m,)`` finite, in ascending order.

    Returns:
        Tensor like ``x``, without gradient; every element equals a centre in the dtype of ``x``.

    Raises:
        ConfigError: If ``x`` or ``centers`` cannot be used.

    Example:
        >>> quantize(torch.tensor([-3.0, 0.4, 0.5, 0.6]), torch.tensor([0.0, 1.0])).tolist()
        [0.0, 0.0, 0.0, 1.0]
    """
    x, values, cuts = _prepare(x, centers)
    return torch.where(x.isnan(), x, values[torch.bucketize(x, cuts)])


def assign(x: Tensor, centers: Tensor) -> Tensor:
    """The index of each element's nearest centre, the lower one where two are equally near.

    Of equal centres the first takes what lies below or at them, the last what lies above.

    Args:
        x: Float32 or float64 tensor of any shape.
        centers: ``(m,)`` finite, in ascending order.

    Returns:
        Long tensor of the shape of ``x``, from 0 to m - 1.

    Raises:
        ConfigError: If ``x`` or ``centers`` cannot be used.
        ValueError: If ``x`` holds NaN.

    Example:
        >>> assign(torch.tensor([[-3.0, 0.4], [0.5, 0.6]]), torch.tensor([0.0, 1.0])).tolist()
        [[0, 0], [0, 1]]
    """
    x, _, cuts = _prepare(x, centers)
    if bool(x.isnan().any()):
        raise ValueError("x holds NaN, which has no nearest centre.")
    return torch.bucketize(x, cuts)


def prox_weights(y: Tensor, centers: Tensor, tau: float) -> Tensor:
    """The minimiser over x of ``|x - y|^2 / 2 + tau min_z |x - z|``, z over the centres.

    Each element moves towards its nearest centre by tau, and lands on it where it is that near.
    For a fixed z the least value depends on ``|y - z|`` alone and grows with it, so the nearest
    centre is the best: the minimiser is global.

    Args:
        y: Float32 or float64 tensor of any shape.
        centers: ``(m,)`` finite, in ascending order.
        tau: 0 returns y; infinity returns ``quantize(y, centers)``.

    Returns:
        Tensor like ``y``, without gradient.

    Raises:
        ConfigError: If an argument cannot be used.

    Example:
        >>> prox_weights(torch.tensor([-3.0, 0.375, 0.75]), torch.tensor([0.0, 1.0]), 0.25).tolist()
        [-2.75, 0.125, 1.0]
    """
    tau = _check_tau(tau)
    nearest = quantize(y, centers)
    gap = y.detach() - nearest
    step = torch.tensor(tau, dtype=y.dtype, device=y.device)
    moved = torch.where(gap > 0, y.detach() - step, y.detach() + step)
    return torch.where(gap.abs() <= step, nearest, moved)


def prox_centers(mu: Tensor, x: Tensor, centers: Tensor, tau: float) -> Tensor:
    """For each j the minimiser over c of ``|c - mu_j|^2 / 2 + tau sum_i |c - x_i|``, i assigned j.

    The assignment is that of ``centers``, from where a gradient step has led to ``mu``. A centre is
    drawn towards the median of its weights; while it passes none of them it moves by tau times the
    number above minus the number below. The result need not be in ascending order.

    Args:
        mu: ``(m,)`` finite floating tensor.
        x: Float32 or float64 tensor of any shape.
        centers: ``(m,)`` finite, in ascending order.
        tau: 0 or more; infinity gives medians.

    Returns:
        ``(m,)`` tensor like ``mu``, exact up to rounding; ``mu_j`` where nothing is assigned to j.

    Raises:
        ConfigError: If an argument cannot be used.
        ValueError: If ``x`` holds NaN.

    Example:
        >>> x = torch.tensor([0.0, 0.5, 1.0, 7.0, 9.0])
        >>> prox_centers(torch.tensor([0.25, 9.5]), x, torch.tensor([0.0, 8.0]), 0.125).tolist()
        [0.375, 9.25]
    """
    tau = _check_tau(tau)
    if mu.shape != centers.shape or not bool(torch.isfinite(mu).all()):
        raise ConfigError(f"mu must be finite and of shape {tuple(centers.shape)}.")
    index = assign(x, centers).flatten()
    moved = mu.detach().clone()
    for j in range(len(mu)):
        members = x.detach().flatten()[index == j].double().sort().values
        if len(members):
            moved[j] = _weighted_median(float(mu[j]), members, tau)
    return moved


def _weighted_median(mu: float, members: Tensor, tau: float) -> float:
    """The root of ``c - mu + tau (#below c - #above c)``, members in ascending order."""
    n = len(members)
    if tau == 0:
        return mu
    if math.isinf(tau):
        low, high = float(members[(n - 1) // 2]), float(members[n // 2])
        return min(max(mu, low), high)
    # The median of the members and of mu + tau (n - 2 k), k = 0 .. n.
    shifts = mu + tau * (n - 2.0 * torch.arange(n + 1, dtype=members.dtype, device=members.device))
    return float(torch.cat([members, shifts]).sort().values[n])


def center_gradient(gradient: Tensor, x: Tensor, centers: Tensor) -> Tensor:
    """The gradient with respect to each centre: the sum over the weights that it stands for.

    Args:
        gradient: Gradient at ``quantize(x, centers)``, of the shape of ``x``.
        x: Float32 or float64 tensor of any shape.
        centers: ``(m,)`` finite, in ascending order.

    Returns:
        ``(m,)`` float64 tensor on the device of ``x``, summed in float64.

    Raises:
        ConfigError: If an argument cannot be used.
        ValueError: If ``x`` holds NaN.

    Example:
        >>> x = torch.tensor([0.1, 0.2, 0.9])
        >>> center_gradient(torch.tensor([1.0, 2.0, 4.0]), x, torch.tensor([0.0, 1.0])).tolist()
        [3.0, 4.0]
    """
    if gradient.shape != x.shape:
        raise ConfigError(
            f"gradient has shape {tuple(gradient.shape)}, but x has {tuple(x.shape)}."
        )
    index = assign(x, centers).flatten()
    sums = torch.zeros(len(centers), dtype=torch.float64, device=x.device)
    return sums.index_add_(0, index, gradient.detach().flatten().double())


def soft_quantize(x: Tensor, centers: Tensor, sharpness: float) -> Tensor:
    """A smooth staircase through the centres, differentiable in x and in the centres.

    Source: QuPeL, ``c_1 + sum_j (c_{j+1} - c_j) sigmoid(P (x - (c_j + c_{j+1}) / 2))``. It tends to
    :func:`quantize` as the sharpness grows, but half-way between centres, where it takes the mean.

    Args:
        x: Float32 or float64 tensor of any shape.
        centers: ``(m,)`` finite, in ascending order.
        sharpness: P, above 0 and finite, in units of 1 / x.

    Returns:
        Tensor like ``x``.

    Raises:
        ConfigError: If an argument cannot be used.

    Example:
        >>> soft_quantize(torch.tensor([0.0, 0.5, 1.0]), torch.tensor([0.0, 1.0]), 10.0)
        tensor([0.0067, 0.5000, 0.9933])
    """
    if not 0 < sharpness < math.inf:
        raise ConfigError(f"sharpness is {sharpness}, but it must be above 0 and finite.")
    _prepare(x, centers)
    levels = centers.to(x)
    soft = levels[0].expand_as(x)
    for low, high in pairwise(levels):
        soft = soft + (high - low) * torch.sigmoid(sharpness * (x - (low + high) / 2))
    return soft


def _check_tau(tau: float) -> float:
    """Returns tau as a float where it is 0 or more."""
    if not float(tau) >= 0:
        raise ConfigError(f"tau is {float(tau)}, but it must be 0 or more.")
    return float(tau)


def _prepare(x: Tensor, centers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``x`` without gradient, the centres in its dtype, and the cuts between them."""
    if x.dtype not in (torch.float32, torch.float64):
        raise ConfigError(f"x must be a float32 or float64 tensor, not {x.dtype}; convert it.")
    if centers.ndim != 1 or len(centers) == 0 or not centers.is_floating_point():
        raise ConfigError(
            f"centers must be a floating tensor of shape (m,), m at least 1, "
            f"not {centers.dtype} {tuple(centers.shape)}."
        )
    values = centers.detach().to(x)
    if not bool(torch.isfinite(values).all()):
        raise ConfigError(f"centers must be finite, not {values.tolist()}.")
    if bool((values[1:] < values[:-1]).any()):
        raise ConfigError(f"centers must be in ascending order, not {values.tolist()}.")
    return x.detach(), values, _cuts(values)


def _cuts(values: Tensor) -> Tensor:
    """The largest numbers of their dtype that still belong to the lower of two centres."""
    low, high = values[:-1], values[1:]
    middle = low.double() / 2 + high.double() / 2
    cuts = middle.to(values.dtype)
    # Rounded down, so that an element beyond the middle is never taken for one before it; and a
    # centre belongs to itself even where no number lies between two of them.
    above = (cuts.double() > middle) | ((cuts >= high) & (high > low))
    return torch.where(above, torch.nextafter(cuts, torch.full_like(cuts, -math.inf)), cuts)
