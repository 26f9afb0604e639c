"""Which elements are sent: the k largest magnitudes, in three reads, or k random ones."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from medfed.errors import ConfigError

Array = np.ndarray[Any, Any]

_HIGH, _LOW = 16, 15
"""The 31 bits of a float32 magnitude, whose order is that of the numbers, in two halves."""


def check_share(name: str, share: float) -> float:
    """Returns a share of elements that a codec can keep.

    Raises:
        ConfigError: If it is not in (0, 1]; ``name`` is named.

    Example:
        >>> check_share("sparsity", 0.5)
        0.5
    """
    if not 0 < share <= 1:
        raise ConfigError(f"codec {name}={share} must be above 0 and at most 1.")
    return float(share)


def count_of(share: float, length: int) -> int:
    """The number of elements that a share is, rounded up.

    Example:
        >>> count_of(0.01, 7_000_000), count_of(0.01, 1), count_of(0.01, 0)
        (70000, 1, 0)
        >>> count_of(0.07, 100)
        7
    """
    # 0.07 * 100 is a little more than 7 in floating point, which would keep one more.
    return min(length, math.ceil(share * length * (1 - 1e-12)))


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


def random_positions(d: int, k: int, seed: int) -> Array:
    """Returns ``k`` of ``d`` positions, all subsets with equal probability (Floyd's method).

    The stream (SplitMix64) is written out here because both ends must draw the same positions,
    whatever their versions of NumPy.

    Args:
        d: How many positions there are.
        k: How many are drawn, at most d.
        seed: From 0 to 2^64 - 1.

    Returns:
        ``(k,)`` int64, increasing.

    Example:
        >>> random_positions(10, 3, 1), random_positions(3, 3, 5)
        (array([4, 6, 9]), array([0, 1, 2]))
    """
    taken: Array = _floyd(d, k, np.uint64(seed))
    return np.flatnonzero(taken)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _floyd(d: int, k: int, state: Any) -> Array:
    """The drawn positions as ``(d,)`` booleans."""
    taken = np.zeros(d, np.bool_)
    for last in range(d - k, d):
        state += np.uint64(0x9E3779B97F4A7C15)
        z = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
        at = np.int64(np.float64(z >> np.uint64(11)) * 2.0**-53 * (last + 1))
        taken[last if taken[at] else at] = True
    return taken
