"""The two dynamic programmes on a line, compiled: of the fused lasso and of k-means.

The fused lasso: Johnson 2013, "A dynamic programming algorithm for the fused lasso and
L0-segmentation", with the end condition w_{d+1} = 0 of CER added.

After element i the derivative of the best cost of the elements up to i, as a function of their last
value t, is ``f_i(t) = clip(f_{i-1}(t), -gamma, gamma) + t - g_i``: increasing and piecewise linear.
Clipping cuts off both ends and leaves a knot at each cut, ``low_i`` and ``high_i``. Backwards,
``w_i = clip(w_{i+1}, low_i, high_i)``.

======  ====================================================================================
symbol  here
======  ====================================================================================
knots   ``(position, a, b)`` with positions in increasing order from ``first`` to ``last``;
        the derivative gains the line ``a t + b`` to the right of a knot
low     where ``slope t + level``, the piece at that place plus gamma, is 0
high    where ``fall t + height``, gamma minus the piece at that place, is 0
======  ====================================================================================

Heights are kept relative to the bound that they are cut at, so gamma enters once and a large one
does not swallow g. A knot that is passed is dropped for good, hence linear time on any input.

K-means: Wang and Song, The R Journal 3, 2011, divided and conquered, in O(m n log n).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

Array = np.ndarray[Any, Any]

_START = 4096
"""Places for knots at first. Random data has a dozen knots at a time: they stay in cache."""


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _recentred(knots: Array, first: int, last: int) -> tuple[Array, int, int]:
    """The knots from ``first`` to ``last`` in the middle of their room, or of one twice as large.

    It is called where a knot touches an end of the room. At most half of the new room is filled,
    so a quarter of it in steps passes before the next call: linear time in all.
    """
    count, room = last - first + 1, knots.shape[0]
    moved = np.empty((2 * room if 2 * count > room else room, 3))
    start = (moved.shape[0] - count) // 2
    moved[start : start + count] = knots[first : last + 1]
    return moved, start, start + count - 1


@njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _forward(g: Array, gamma: float, low: Array, high: Array) -> None:
    """Writes the bounds that each element has towards its right neighbour."""
    # One row per knot: position, slope, level. Read together, they lie together.
    knots = np.empty((min(_START, 2 * g.shape[0] + 2), 3))
    first = knots.shape[0] // 2 - 1
    last = first + 1
    y = np.float64(g[0])
    knots[first, 0], knots[first, 1], knots[first, 2] = y - gamma, 1.0, gamma - y
    knots[last, 0], knots[last, 1], knots[last, 2] = y + gamma, -1.0, y + gamma
    low[0], high[0] = y - gamma, y + gamma
    for i in range(1, g.shape[0]):
        if first == 0 or last == knots.shape[0] - 1:
            knots, first, last = _recentred(knots, first, last)
        y = np.float64(g[i])
        slope, level, left = 1.0, -y, first
        while left <= last and slope * knots[left, 0] + level <= 0.0:
            slope += knots[left, 1]
            level += knots[left, 2]
            left += 1
        fall, height, right = -1.0, y, last
        while right >= left and fall * knots[right, 0] + height <= 0.0:
            fall += knots[right, 1]
            height += knots[right, 2]
            right -= 1
        if right < left:
            # One line is cut twice. Stated, not summed, so that rounding does not build up.
            fall, height = -slope, 2.0 * gamma - level
            lower, upper = -level / slope, height / slope
        else:
            lower = min(-level / slope, knots[left, 0])
            upper = max(-height / fall, knots[right, 0])
        first, last = left - 1, right + 1
        knots[first, 0], knots[first, 1], knots[first, 2] = lower, slope, level
        knots[last, 0], knots[last, 1], knots[last, 2] = upper, fall, height
        low[i], high[i] = lower, upper


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _backward(w: Array, high: Array) -> None:
    """Turns the lower bounds in ``w`` into the solution, from the last element to the first."""
    value = w.dtype.type(0)
    for i in range(w.shape[0] - 1, -1, -1):
        # A value goes on bit by bit until a bound cuts it, so fused neighbours are equal floats.
        # Selected, not branched on: which bound cuts is as random as the data.
        value = w[i] if value < w[i] else value
        value = high[i] if value > high[i] else value
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


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _error(sums: Array, i: int, j: int) -> float:
    """The squared error of the points i to j - 1 around their mean."""
    w, wx, wxx = sums[0, j] - sums[0, i], sums[1, j] - sums[1, i], sums[2, j] - sums[2, i]
    error: float = max(wxx - wx * wx / w, 0.0)
    return error


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def partition(sums: Array, m: int) -> Array:
    """Splits sorted points into the ``m`` intervals with the least squared error.

    ``least[j]`` is the error of the first j points in k intervals. The best begin of the last one
    never falls as j grows, so each is searched for between two that are known: O(m n log n).

    Args:
        sums: ``(3, n + 1)`` sums over the first j points of w, w x and w x^2, w being weights.
        m: Intervals, 1 to n, none of them empty.

    Returns:
        ``(m,)`` int64 begins, in ascending order.
    """
    n = sums.shape[1] - 1
    begins = np.zeros((m, n + 1), np.int64)
    least = np.zeros(n + 1)
    for j in range(1, n + 1):
        least[j] = _error(sums, 0, j)
    width = 1
    while width <= n:
        width *= 2
    for k in range(1, m):
        fewer, least = least, np.full(n + 1, np.inf)
        stride = width
        while stride > 1:
            half = stride // 2
            for j in range(half, n + 1, stride):
                last = j - 1 if j + half > n else min(j - 1, begins[k, j + half])
                for i in range(max(k, begins[k, j - half]), last + 1):
                    error = fewer[i] + _error(sums, i, j)
                    if error < least[j]:
                        least[j], begins[k, j] = error, i
            stride = half
    starts = np.zeros(m, np.int64)
    end = n
    for k in range(m - 1, 0, -1):
        end = starts[k] = begins[k, end]
    return starts
