"""The k largest magnitudes of a vector in three reads, without sorting it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

Array = np.ndarray[Any, Any]

_HIGH, _LOW = 16, 15
"""The 31 bits of a float32 magnitude, whose order is that of the numbers, in two halves."""


def largest(values: Array, k: int) -> Array:
    """Returns the positions of the ``k`` largest magnitudes, increasing.

    Of equal magnitudes those at lower positions are taken; zeros never are, so there may be fewer
    than ``k``. The k-th magnitude is found in two histograms, of the high bits and, among the
    elements that share them, of the low bits.

    Args:
        values: ``(d,)`` finite float32.
        k: How many at most.

    Returns:
        ``(min(k, number of non-zeros),)`` int64.

    Example:
        >>> largest(np.float32([1, -3, 0, 3, 2]), 2)
        array([1, 3])
        >>> largest(np.float32([0, 5, 0]), 3)
        array([1])
    """
    if k <= 0:
        return np.empty(0, np.int64)
    result: Array = _select(np.ascontiguousarray(values, np.float32).view(np.uint32), k)
    return result


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _from_the_top(counts: Array, k: int) -> tuple[int, int]:
    """The bin that holds the k-th largest, and how many of it belong to the k (all, if fewer)."""
    for place in range(counts.shape[0] - 1, 0, -1):
        if counts[place] >= k:
            return place, k
        k -= counts[place]
    return 0, min(k, counts[0])


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _select(bits: Array, k: int) -> Array:
    """See :func:`largest`; ``bits`` are the float32 numbers as uint32."""
    magnitude, low_bits = np.uint32(0x7FFFFFFF), np.uint32((1 << _LOW) - 1)
    shift = np.uint32(_LOW)
    high = np.zeros(1 << _HIGH, np.int64)
    for i in range(bits.shape[0]):
        high[(bits[i] & magnitude) >> shift] += 1
    # Zeros share their bin with the smallest of all numbers but are none of the k.
    place, wanted = _from_the_top(high, k)
    low = np.zeros(1 << _LOW, np.int64)
    for i in range(bits.shape[0]):
        x = bits[i] & magnitude
        if x >> shift == place:
            low[x & low_bits] += 1
    if place == 0:
        low[0] = 0
    rest, ties = _from_the_top(low, wanted)
    level = np.uint32((place << _LOW) + rest)
    out = np.empty(min(k, bits.shape[0]), np.int64)
    count = 0
    for i in range(bits.shape[0]):
        x = bits[i] & magnitude
        if x > level:
            out[count] = i
            count += 1
        elif x == level and ties > 0:
            out[count] = i
            count += 1
            ties -= 1
    return out[:count]
