"""The dynamic programme of k-means on a line as compiled loops."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

Array = np.ndarray[Any, Any]


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
    found = np.zeros(m, np.int64)
    end = n
    for k in range(m - 1, 0, -1):
        end = found[k] = begins[k, end]
    return found
