"""Random rounding of magnitudes to whole units, so that the expectation is exact."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

Array = np.ndarray[Any, Any]

_CHUNK = 1 << 16


def round_randomly(values: Array, units: Array, bucket: int, rng: np.random.Generator) -> Array:
    """Returns |v| / unit, rounded up with the probability of its fraction and down otherwise.

    The uniform numbers have 53 bits: with the 24 of float32, magnitudes below 2^-24 of a unit would
    come out too large on average.

    Args:
        values: ``(d,)`` float32.
        units: ``(ceil(d / bucket),)`` float64, one for each bucket; where it is zero, so are the
            magnitudes.
        bucket: Elements in a bucket.
        rng: Source of d uniform numbers.

    Returns:
        ``(d,)`` int64.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> round_randomly(np.float32([2.0, -4.0, 3.0]), np.array([1.0, 2.0]), 2, rng)[:2]
        array([2, 4])
    """
    levels = np.empty(values.size, np.int64)
    uniforms = np.empty(min(_CHUNK, values.size))
    for start in range(0, values.size, _CHUNK):
        stop = min(start + _CHUNK, values.size)
        rng.random(out=uniforms[: stop - start])
        _round(values, units, bucket, start, uniforms[: stop - start], levels)
    return levels


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _round(
    values: Array, units: Array, bucket: int, start: int, uniforms: Array, levels: Array
) -> None:
    place = start // bucket
    edge = (place + 1) * bucket
    for j in range(uniforms.shape[0]):
        i = start + j
        if i == edge:
            place += 1
            edge += bucket
        unit = units[place]
        x = abs(np.float64(values[i])) / unit if unit > 0 else 0.0
        low = np.int64(x)
        levels[i] = low + (1 if uniforms[j] < x - low else 0)
