"""Quantised weights: their nearest centres, and the proximal map of the distance to them.

Source: QuPeL (Ozkara, Singh, Data and Diggavi 2021), with R(x, c) = min_z ||z - x||_1 / 2 over the
z whose elements are centres. Each function takes one tensor and its own centres ``(m,)``, sorted in
ascending order, which are rounded to the dtype of the tensor before anything else. Compiled
loops do the work, in main memory whatever device the weights are on: so the results have the same
bits everywhere.

============  =========================================================================
symbol        here
============  =========================================================================
Q_c(x)        :func:`quantize`; an element half-way between two centres takes the lower
prox_x        :func:`prox_quantize` with ``tau`` = lambda eta_1 / 2
soft Q_c(x)   :func:`soft_quantize`; ``sharpness`` is P
============  =========================================================================

The step of the centres of quantised weights: their gradient and their exact proximal map.

Source: QuPeL (Ozkara, Singh, Data and Diggavi 2021), Algorithm 2, corrected. The printed
linearisation of the proximal map has its sign reversed, and passes the median of many weights.
Here the map is solved exactly with assignments held fixed.

======  ==================================================================================
symbol  here
======  ==================================================================================
h       :func:`center_gradient`
mu      ``mu``, the centres after their gradient step, c - eta_2 h
prox_c  :func:`prox_centers` with ``tau`` = lambda eta_2 / 2; :func:`step_centers` has both
======  ==================================================================================
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from medfed.standalone.errors import ConfigError

Array = np.ndarray[Any, Any]
_NAN = "The weights hold NaN, which has no nearest centre; training diverged."


def quantize(x: Tensor, centers: Tensor) -> Tensor:
    """Each element's nearest centre, the lower one where two are equally near.

    Example:
        >>> quantize(torch.tensor([-3.0, 0.4, 0.5, 0.6]), torch.tensor([0.0, 1.0])).tolist()
        [0.0, 0.0, 0.0, 1.0]
    """
    levels, flat = _check_levels(x, centers), _flat(x)
    from medfed.functional.kernels import round_all

    nearest = np.empty_like(flat)
    round_all(flat, levels.cuts, levels.values, nearest)
    return _shaped(nearest, x)


def assign(x: Tensor, centers: Tensor) -> Tensor:
    """The index of each element's nearest centre, the lower one where two are equally near.

    Of equal centres the first takes what lies below or at them, the last what lies above.

    Example:
        >>> assign(torch.tensor([[-3.0, 0.4], [0.5, 0.6]]), torch.tensor([0.0, 1.0])).tolist()
        [[0, 0], [0, 1]]
    """
    levels, flat = _check_levels(x, centers), _flat(x)
    from medfed.functional.kernels import locate_all

    index = np.empty(len(flat), np.int64)
    if not locate_all(flat, levels.cuts, index):
        raise ValueError(_NAN)
    return _shaped(index, x)


def prox_quantize(y: Tensor, centers: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """The minimiser over x of ``|x - y|^2 / 2 + tau min_z |x - z|``, z over the centres.

    Each element moves towards its nearest centre by tau, and lands on it where it is that near.
    For a fixed z the least value depends on ``|y - z|`` alone and grows with it, so the nearest
    centre is the best: the minimiser is global. (Half-way between centres there are two, and the
    one towards the lower centre is taken.) An element that moves towards its nearest centre keeps
    it, so that the nearest centre of y is that of x, too.

    Args:
        y: Float32 or float64 tensor of any shape.
        centers: ``(m,)`` finite, in ascending order.
        tau: 0 returns y; infinity returns ``quantize(y, centers)``.

    Returns:
        x, a tensor like ``y`` without gradient, and ``quantize(x, centers)``. NaN stays NaN.

    Example:
        >>> y, centers = torch.tensor([-3.0, 0.375, 0.75]), torch.tensor([0.0, 1.0])
        >>> prox_quantize(y, centers, 0.25)
        (tensor([-2.7500,  0.1250,  1.0000]), tensor([0., 0., 1.]))
    """
    levels, flat = _check_levels(y, centers), _flat(y)
    from medfed.functional.kernels import shrink_all

    x, nearest = np.empty_like(flat), np.empty_like(flat)
    shrink_all(flat, levels.cuts, levels.values, flat.dtype.type(tau), x, nearest)
    return _shaped(x, y), _shaped(nearest, y)


def soft_quantize(x: Tensor, centers: Tensor, sharpness: float) -> Tensor:
    """A smooth staircase through the centres, differentiable in x and in the centres.

    Source: QuPeL, ``c_1 + sum_j (c_{j+1} - c_j) sigmoid(P (x - (c_j + c_{j+1}) / 2))``. It tends to
    :func:`quantize` as the sharpness grows, but for elements half-way between two centres, where
    it tends to the mean of both.

    Example:
        >>> soft_quantize(torch.tensor([0.0, 0.5, 1.0]), torch.tensor([0.0, 1.0]), 10.0)
        tensor([0.0067, 0.5000, 0.9933])
    """
    _check_levels(x, centers)
    steps = centers.to(x)
    soft = steps[0].expand_as(x)
    for low, high in pairwise(steps):
        soft = soft + (high - low) * torch.sigmoid(sharpness * (x - (low + high) / 2))
    return soft


class Levels(NamedTuple):
    """Checked centres in the dtype of the weights, in main memory."""

    values: Array  # ``(m,)`` centres in ascending order
    cuts: Array  # ``(m - 1,)``: the largest numbers that still belong to the lower of two centres


def _check_levels(x: Tensor, centers: Tensor) -> Levels:
    """Returns the centres of a weight tensor, and what separates them.

    Example:
        >>> _check_levels(torch.zeros(2, dtype=torch.float64), torch.tensor([0.0, 1.0, 3.0])).cuts
        array([0.5, 2. ])
    """
    if x.dtype not in (torch.float32, torch.float64):
        raise ConfigError(f"The weights must be float32 or float64, not {x.dtype}; convert them.")
    values: Array = centers.detach().to("cpu", x.dtype).contiguous().numpy()
    low, high = values[:-1].astype(np.float64), values[1:].astype(np.float64)
    if not np.isfinite(values).all() or (low > high).any():
        raise ConfigError(f"centers must be finite and in ascending order, not {values.tolist()}.")
    middle = low / 2 + high / 2
    cuts = middle.astype(values.dtype)
    # Rounded down, so that what lies beyond the middle is never taken for what lies before it; and
    # a centre belongs to itself even where no number lies between two of them.
    beyond = (cuts > middle) | ((low < high) & (cuts >= values[1:]))
    return Levels(values, np.where(beyond, np.nextafter(cuts, values.dtype.type(-np.inf)), cuts))


def _flat(x: Tensor) -> Array:
    """Returns the elements, in main memory; a copy only where that takes one."""
    return np.asarray(x.detach().cpu().reshape(-1).numpy())


def _shaped(flat: Array, like: Tensor) -> Tensor:
    """Returns elements in the shape of a tensor, on its device."""
    return torch.from_numpy(flat).view(like.shape).to(like.device)


def center_gradient(gradient: Tensor, x: Tensor, centers: Tensor) -> Tensor:
    """The gradient with respect to each centre: the sum, in float64, over its weights.

    Example:
        >>> x = torch.tensor([0.1, 0.2, 0.9])
        >>> center_gradient(torch.tensor([1.0, 2.0, 4.0]), x, torch.tensor([0.0, 1.0])).tolist()
        [3.0, 4.0]
    """
    nearest, slopes = _flat(assign(x, centers)), _flat(gradient.to(x.dtype))
    return torch.from_numpy(np.bincount(nearest, slopes, len(centers))).double().to(x.device)


def prox_centers(mu: Tensor, x: Tensor, centers: Tensor, tau: float) -> Tensor:
    """For each j the minimiser over c of ``|c - mu_j|^2 / 2 + tau sum_i |c - x_i|``, i assigned j.

    The assignment is that of ``centers``, from where a gradient step has led to ``mu``. A centre is
    drawn towards the median of its weights; while it passes none of them it moves by tau times the
    number above minus the number below. Sorted once, the weights of each centre are neighbours.

    Args:
        mu: ``(m,)`` finite floating tensor.
        x: Float32 or float64 tensor of any shape.
        centers: ``(m,)`` finite, in ascending order.
        tau: 0 or more; infinity gives the nearest median.

    Returns:
        ``(m,)`` tensor like ``mu``, exact up to rounding; ``mu_j`` where nothing is assigned to j.
        It need not be in ascending order: sort it before it is used as centres.

    Example:
        >>> x = torch.tensor([0.0, 0.5, 1.0, 7.0, 9.0])
        >>> prox_centers(torch.tensor([0.25, 9.5]), x, torch.tensor([0.0, 8.0]), 0.125).tolist()
        [0.375, 9.25]
    """
    cuts, starts = _check_levels(x, centers).cuts, mu.detach().double().tolist()
    if not np.isfinite(starts).all():
        raise ValueError(f"The centres step to {starts}; their gradient is not finite.")
    ordered = np.sort(_flat(x))
    if np.isnan(ordered[-1:]).any():  # they are the last
        raise ValueError(_NAN)
    ends = [0, *np.searchsorted(ordered, cuts, "right").tolist(), len(ordered)]
    parts = [ordered[low:high] for low, high in pairwise(ends)]
    rests = [_rest(start, weights, tau) for start, weights in zip(starts, parts, strict=True)]
    return torch.tensor(rests, dtype=torch.float64).to(mu)


def _rest(mu: float, weights: Array, tau: float) -> float:
    """The root of ``c - mu + tau (#below c - #above c)``, for weights in ascending order."""

    def between(below: int) -> float:
        """Where c would rest with so many weights below it, and all others above it."""
        pull = len(weights) - 2 * below
        return mu + (tau * pull if pull else 0.0)  # not infinity * 0

    # The more weights lie below c the lower it rests: the first place that is not above the next.
    below = bisect_left(range(len(weights)), True, key=lambda n: between(n) <= float(weights[n]))
    rest = max(between(below), float(weights[below - 1])) if below else between(0)
    return rest + 0.0  # no -0


def step_centers(centers: Tensor, gradient: Tensor, x: Tensor, lr: float, tau: float) -> Tensor:
    """A proximal gradient step of the centres.

    Example:
        >>> x, gradient = torch.tensor([0.0, 0.5, 1.0]), torch.tensor([1.0, 1.0, 0.0])
        >>> step_centers(torch.tensor([0.25, 1.25]), gradient, x, lr=0.125, tau=0.0625).tolist()
        [0.0, 1.1875]
    """
    mu = centers.detach().double() - lr * center_gradient(gradient, x, centers)
    return prox_centers(mu, x, centers, tau).sort().values.to(centers)
