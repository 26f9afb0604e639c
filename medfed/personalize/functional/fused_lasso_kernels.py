"""Johnson's dynamic programme for the 1-D fused lasso as one compiled loop.

Source: Johnson 2013, "A dynamic programming algorithm for the fused lasso and L0-segmentation",
with the end condition w_{d+1} = 0 of CER added.

After element i the derivative of the best cost of the elements up to i, as a function of their last
value t, is ``f_i(t) = clip(f_{i-1}(t), -gamma, gamma) + t - g_i``: increasing and piecewise linear.
Clipping cuts off both ends and leaves a knot at each cut, ``low_i`` and ``high_i``. Backwards,
``w_i = clip(w_{i+1}, low_i, high_i)``.

======  ====================================================================================
symbol  here
======  ====================================================================================
knots   ``x``: positions in increasing order, from ``first`` to ``last``
        ``a``, ``b``: the line ``a t + b`` that the derivative gains to the right of a knot
line    ``slope t + level``: leftmost piece plus gamma, or minus the rightmost piece plus gamma
======  ====================================================================================

Heights are kept relative to the bound that they are cut at, so gamma enters once and a large one
does not swallow g. A knot that is passed is dropped for good, hence linear time on any input.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

Array = np.ndarray[Any, Any]

_START = 4096
"""Places for knots at first. Random data has some dozens of knots at a time: they stay in cache."""


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _recentred(old: Array, first: int, last: int, size: int) -> Array:
    """A copy with room for ``size`` knots and those from ``first`` to ``last`` in its middle."""
    new = np.empty(size)
    count = last - first + 1
    start = (size - count) // 2
    new[start : start + count] = old[first : last + 1]
    return new


@njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _forward(g: Array, gamma: float, low: Array, high: Array) -> None:
    """Writes the bounds that each element has towards its right neighbour."""
    size = min(_START, 2 * g.shape[0] + 2)
    x, a, b = np.empty(size), np.empty(size), np.empty(size)
    first = size // 2 - 1
    last = first + 1
    y = np.float64(g[0])
    x[first], a[first], b[first] = y - gamma, 1.0, gamma - y
    x[last], a[last], b[last] = y + gamma, -1.0, y + gamma
    low[0], high[0] = x[first], x[last]
    for i in range(1, g.shape[0]):
        if first == 0 or last == size - 1:
            # Copying half of the room at most, after a quarter of the room in steps: linear.
            room = 2 * size if 2 * (last - first + 1) > size else size
            count = last - first + 1
            x = _recentred(x, first, last, room)
            a = _recentred(a, first, last, room)
            b = _recentred(b, first, last, room)
            size = room
            first = (size - count) // 2
            last = first + count - 1
        y = np.float64(g[i])
        slope, level, left = 1.0, -y, first
        while left <= last and slope * x[left] + level <= 0.0:
            slope += a[left]
            level += b[left]
            left += 1
        fall, height, right = -1.0, y, last
        while right >= left and fall * x[right] + height <= 0.0:
            fall += a[right]
            height += b[right]
            right -= 1
        if right < left:
            # One line is cut twice. Stated, not summed, so that rounding does not build up.
            fall, height = -slope, 2.0 * gamma - level
            lower, upper = -level / slope, height / slope
        else:
            lower = min(-level / slope, x[left])
            upper = max(-height / fall, x[right])
        first, last = left - 1, right + 1
        x[first], a[first], b[first] = lower, slope, level
        x[last], a[last], b[last] = upper, fall, height
        low[i], high[i] = lower, upper


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _backward(w: Array, high: Array) -> None:
    """Turns the lower bounds in ``w`` into the solution, from the last element to the first."""
    value = w.dtype.type(0)
    for i in range(w.shape[0] - 1, -1, -1):
        # A value goes on bit by bit until a bound cuts it, so fused neighbours are equal floats.
        if value < w[i]:
            value = w[i]
        elif value > high[i]:
            value = high[i]
        w[i] = value


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def solve_chain(g: Array, gamma: float, out: Array) -> None:
    """Writes the minimiser of ``||w - g||^2 / 2 + gamma (sum_i |w_i - w_{i+1}| + |w_d|)``.

    The bounds are computed in float64 and kept in the dtype of ``out``: rounding keeps order, so
    clipping rounded bounds is rounding the clipped value.

    Args:
        g: ``(d,)`` finite float32 or float64 array, d at least 1.
        gamma: Above 0 and finite.
        out: ``(d,)`` array of the same dtype, overwritten.
    """
    high = np.empty_like(out)
    _forward(g, gamma, out, high)
    _backward(out, high)
