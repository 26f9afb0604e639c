"""k-means in one dimension: the few numbers that many are replaced by.

On a line the clusters are intervals, so the best ones are found exactly by dynamic programming over
sorted points (Wang and Song, The R Journal 3, 2011), here with divide and conquer in O(k m log m).
More than ``POINTS`` distinct values are first gathered in as many narrow intervals, and the centres
are then improved by Lloyd's iteration on all values (from 2^17 values on, on classes of values that
agree in 12 bits of precision). The general-purpose k-means of scikit-learn starts at random, stops
in a local optimum, and measures the distance of each value from each centre.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

Array = np.ndarray[Any, Any]

POINTS = 2048
_MANY = 2**17
_LLOYD = 20


def kmeans_line(values: Array, weights: Array, entries: int) -> Array:
    """Returns the centres that minimise sum_i weights_i min_c (values_i - c)^2.

    Exact for up to ``POINTS`` distinct values, a local optimum near the exact one otherwise.

    Args:
        values: ``(n,)`` finite float32, n >= 1.
        weights: ``(n,)`` positive numbers.
        entries: The most centres that are wanted.

    Returns:
        ``(min(entries, number of distinct values),)`` float32 at most, increasing.

    Example:
        >>> kmeans_line(np.float32([1, 9, 2, 10]), np.array([1, 1, 3, 1]), 2)
        array([1.75, 9.5 ], dtype=float32)
    """
    x, w = _classes(values, weights) if values.size > _MANY else _sorted(values, weights)
    if x.size <= entries:
        return x.astype(np.float32)
    if x.size <= POINTS:
        return _means(x * w, w, _intervals(x, w, entries)).astype(np.float32)
    moments, starts = x * w, _gather(x, w)
    coarse, mass = _means(moments, w, starts), np.add.reduceat(w, starts)
    centres = _means(coarse * mass, mass, _intervals(coarse, mass, entries))
    for _ in range(_LLOYD):
        improved = _means(moments, w, _starts(x, centres))
        if np.array_equal(improved, centres):
            break
        centres = improved
    return np.unique(centres.astype(np.float32))


def nearest(values: Array, centres: Array) -> Array:
    """Returns for each of ``(n,)`` values the index of the nearest of the increasing centres.

    Example:
        >>> nearest(np.float32([0, 6, 4]), np.float32([1, 9]))
        array([0, 1, 0])
    """
    found: Array = np.searchsorted(_middles(centres), values)
    return found


def _sorted(values: Array, weights: Array) -> tuple[Array, Array]:
    """The distinct values in order, in float64, which holds their squares, and their weights."""
    order = np.argsort(values)
    x = values[order].astype(np.float64)
    kept = np.flatnonzero(np.diff(x, prepend=-np.inf))
    return x[kept], np.add.reduceat(weights[order].astype(np.float64), kept)


def _classes(values: Array, weights: Array) -> tuple[Array, Array]:
    """As :func:`_sorted`, but numbers that share their first 20 bits are one, at their mean."""
    bits = values.view(np.uint32)
    # Bits in the order of the numbers: negative ones are turned round and put first.
    keys = (bits ^ np.where(bits >> 31, np.uint32(2**32 - 1), np.uint32(2**31))) >> 12
    mass = np.bincount(keys, weights)
    taken = np.flatnonzero(mass)
    if taken.size < 8 * POINTS:
        # Numbers that are close together relative to their size would be lumped.
        return _sorted(values, weights)
    moments = np.bincount(keys, weights * values.astype(np.float64))
    return moments[taken] / mass[taken], mass[taken]


def _middles(centres: Array) -> Array:
    """The numbers as near to one centre as to the next, which go to the lower."""
    middles: Array = (centres[1:].astype(np.float64) + centres[:-1]) / 2
    return middles


def _means(moments: Array, w: Array, starts: Array) -> Array:
    """The means of consecutive intervals of sorted points, of which w x and w are given."""
    means: Array = np.add.reduceat(moments, starts) / np.add.reduceat(w, starts)
    return means


def _starts(x: Array, centres: Array) -> Array:
    """Where the intervals nearest to each centre begin; centres that are nearest to none go."""
    begins = np.searchsorted(x, _middles(centres), side="right")
    return np.unique(np.concatenate(([0], begins[begins < x.size])))


def _gather(x: Array, w: Array) -> Array:
    """Begins of at most ``POINTS`` intervals: a third each of equal width, weight and count.

    Equal counts see to it that there are enough, wherever outliers and heavy points lie.
    """
    third = POINTS // 3
    by_width = np.searchsorted(x, np.linspace(x[0], x[-1], third, endpoint=False))
    mass = np.cumsum(w)
    by_weight = np.searchsorted(mass, np.linspace(0, mass[-1], third, endpoint=False))
    by_count = np.arange(third) * x.size // third
    return np.unique(np.concatenate((by_width, by_weight, by_count)))


def _intervals(x: Array, w: Array, entries: int) -> Array:
    """Begins of the ``entries`` intervals of sorted points with the least squared error."""
    # Moved to the middle and to unit size, so that the prefix sums below cancel little.
    scaled = (x - x.mean()) / max(float(np.abs(x - x.mean()).max()), np.finfo(np.float64).tiny)
    sums = np.zeros((3, x.size + 1))
    for row, term in zip(sums, (w, w * scaled, w * scaled**2), strict=True):
        np.cumsum(term, out=row[1:])
    best: Array = _partition(sums, entries)
    return best


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _error(sums: Array, i: int, j: int) -> float:
    """The squared error of points i to j - 1 around their mean."""
    w, wx, wxx = sums[0, j] - sums[0, i], sums[1, j] - sums[1, i], sums[2, j] - sums[2, i]
    error: float = max(wxx - wx * wx / w, 0.0)
    return error


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _partition(sums: Array, k: int) -> Array:
    """Dynamic programming over the number of intervals; the best last begin grows with the end."""
    m = sums.shape[1] - 1
    begin = np.zeros((k, m + 1), np.int64)
    least = np.empty(m + 1)
    least[0] = 0.0
    for j in range(1, m + 1):
        least[j] = _error(sums, 0, j)
    for c in range(1, k):
        new = np.full(m + 1, np.inf)
        row = begin[c]
        step = 1
        while step <= m:
            step *= 2
        # Ends j = step, 3 step, 5 step ... lie between two that are known.
        while step > 1:
            step //= 2
            for j in range(step, m + 1, 2 * step):
                lo = max(row[j - step], c)
                hi = min(row[j + step], j - 1) if j + step <= m else j - 1
                for i in range(lo, hi + 1):
                    error = least[i] + _error(sums, i, j)
                    if error < new[j]:
                        new[j] = error
                        row[j] = i
        least = new
    starts = np.empty(k, np.int64)
    end = m
    for c in range(k - 1, -1, -1):
        end = begin[c, end]
        starts[c] = end
    return starts
