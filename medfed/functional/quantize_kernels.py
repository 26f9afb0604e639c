"""Quantisation as fused loops over flat arrays in main memory.

The index of the nearest centre is the number of ``cuts`` that an element lies above. Chunks are
compared with one cut after the other: many simple comparisons that run side by side are faster
than a search with branches, for up to some hundred centres. Counts are integers and sums run in
the order of the elements, so the bits do not depend on vector width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

Array = np.ndarray[Any, Any]

_CHUNK = 1024
"""Elements that are compared at a time: with what is found they stay in the nearest cache."""


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def find_cuts(values: Array) -> tuple[Array, bool]:
    """The largest numbers of their dtype that still belong to the lower of two centres.

    Args:
        values: ``(m,)`` float32 or float64 centres.

    Returns:
        ``(m - 1,)`` array of the same dtype, and whether the centres are finite and in ascending
        order; the cuts mean nothing where they are not.
    """
    cuts = np.empty_like(values[1:])
    lowest = values.dtype.type(-np.inf)
    usable = np.isfinite(values[0])
    for j in range(cuts.shape[0]):
        low, high = np.float64(values[j]), np.float64(values[j + 1])
        usable = usable and np.isfinite(high) and low <= high
        middle = low / 2 + high / 2
        cuts[j] = middle
        # Rounded down, so that what lies beyond the middle is never taken for what lies before it;
        # and a centre belongs to itself even where no number lies between two of them.
        if np.float64(cuts[j]) > middle or (low < high and cuts[j] >= values[j + 1]):
            cuts[j] = np.nextafter(cuts[j], lowest)
    return cuts, usable


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _locate(x: Array, cuts: Array, index: Array) -> None:
    """Writes the index of the nearest centre of each element of a chunk; 0 for NaN."""
    for c in range(x.shape[0]):
        index[c] = 0
    for j in range(cuts.shape[0]):
        cut, beyond = cuts[j], index.dtype.type(j + 1)
        for c in range(x.shape[0]):
            index[c] = beyond if x[c] > cut else index[c]


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _round(x: Array, cuts: Array, values: Array, out: Array) -> None:
    """Writes the nearest centre of each element of a chunk; NaN stays."""
    first = values[0]
    for c in range(x.shape[0]):
        out[c] = first
    for j in range(cuts.shape[0]):
        cut, beyond = cuts[j], values[j + 1]
        for c in range(x.shape[0]):
            out[c] = beyond if x[c] > cut else out[c]
    for c in range(x.shape[0]):
        out[c] = out[c] if x[c] == x[c] else x[c]


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def round_all(x: Array, cuts: Array, values: Array, out: Array) -> None:
    """Writes the nearest centre of each element.

    Args:
        x: ``(n,)`` float32 or float64.
        cuts: ``(m - 1,)`` from :func:`find_cuts`, in the same dtype.
        values: ``(m,)`` centres, in the same dtype.
        out: ``(n,)`` of the same dtype, overwritten; not x itself.
    """
    for lo in range(0, x.shape[0], _CHUNK):
        _round(x[lo : lo + _CHUNK], cuts, values, out[lo : lo + _CHUNK])


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def locate_all(x: Array, cuts: Array, out: Array) -> bool:
    """Writes the index of each element's nearest centre; returns whether there is no NaN.

    Args:
        x: ``(n,)`` float32 or float64.
        cuts: ``(m - 1,)`` from :func:`find_cuts`, in the same dtype.
        out: ``(n,)`` int64, overwritten.
    """
    index = np.empty(_CHUNK, np.int32)
    missing = 0
    for lo in range(0, x.shape[0], _CHUNK):
        part = x[lo : lo + _CHUNK]
        _locate(part, cuts, index)
        for c in range(part.shape[0]):
            missing += part[c] != part[c]
            out[lo + c] = index[c]
    return missing == 0


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def shrink_all(y: Array, cuts: Array, values: Array, tau: float, x: Array, nearest: Array) -> None:
    """Writes the proximal map of the distance to the nearest centre, and that centre.

    Args:
        y: ``(n,)`` float32 or float64.
        cuts: ``(m - 1,)`` from :func:`find_cuts`, in the same dtype.
        values: ``(m,)`` centres, in the same dtype.
        tau: 0 or more, a scalar of the same dtype.
        x: ``(n,)`` of the same dtype, overwritten; may be y itself.
        nearest: ``(n,)`` of the same dtype, overwritten.
    """
    for lo in range(0, y.shape[0], _CHUNK):
        part, out, q = y[lo : lo + _CHUNK], x[lo : lo + _CHUNK], nearest[lo : lo + _CHUNK]
        _round(part, cuts, values, q)
        for c in range(part.shape[0]):
            gap = part[c] - q[c]
            moved = part[c] - tau if gap > 0 else part[c] + tau
            out[c] = q[c] if abs(gap) <= tau else moved


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def tally(x: Array, gradient: Array, cuts: Array, values: Array) -> tuple[Array, Array, bool]:
    """Counts the elements around each centre and sums their gradients, in one pass.

    Args:
        x: ``(n,)`` float32 or float64.
        gradient: ``(n,)`` of the same dtype, or empty where there is none.
        cuts: ``(m - 1,)`` from :func:`find_cuts`, in the same dtype.
        values: ``(m,)`` centres, in the same dtype.

    Returns:
        ``(m, 3)`` int64, for each centre the numbers of its elements below, at and above it;
        ``(m,)`` float64 sums; and whether there is no NaN in x.
    """
    counts = np.zeros((values.shape[0], 3), np.int64)
    sums = np.zeros(values.shape[0])
    index, side = np.empty(_CHUNK, np.int32), np.empty(_CHUNK, np.int32)
    missing = 0
    for lo in range(0, x.shape[0], _CHUNK):
        part, slopes = x[lo : lo + _CHUNK], gradient[lo : lo + _CHUNK]
        _locate(part, cuts, index)
        for c in range(part.shape[0]):
            missing += part[c] != part[c]
            center = values[index[c]]
            side[c] = np.int32(part[c] >= center) + np.int32(part[c] > center)
        for c in range(part.shape[0]):
            counts[index[c], side[c]] += 1
        for c in range(slopes.shape[0]):
            sums[index[c]] += slopes[c]
    return counts, sums, missing == 0


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def settle(mu: Array, values: Array, counts: Array, tau: float) -> tuple[Array, Array, bool]:
    """Where each centre comes to rest if it passes no element but those at ``values``.

    The slope ``c - mu + tau (#below c - #above c)`` grows with c. Its sign on both sides of the
    old centre tells on which side the root is, and the counts there how far away it is at most.
    All elements together pull by tau n, so that the root is no further from mu either.

    Args:
        mu: ``(m,)`` float64.
        values: ``(m,)`` centres that the counts belong to.
        counts: ``(m, 3)`` from :func:`tally`.
        tau: 0 or more; infinity is allowed.

    Returns:
        ``(m,)`` float64 places; ``(m, 2)`` float64 bounds of the roots, equal to the old centre
        where that is the root; and whether an element may have been passed.
    """
    rests, bounds = np.empty(mu.shape[0]), np.empty((mu.shape[0], 2))
    passing = False
    for j in range(mu.shape[0]):
        below, at, above = counts[j]
        up, down, total = above - below - at, above - below + at, above + below + at
        # Not 0 * inf where the elements are balanced.
        rightmost = mu[j] + (tau * up if up != 0 else 0.0)
        leftmost = mu[j] + (tau * down if down != 0 else 0.0)
        reach = tau * total if total != 0 else 0.0
        old = np.float64(values[j])
        rests[j] = rightmost if rightmost > old else min(leftmost, old)
        bounds[j] = old
        if rests[j] > old:
            bounds[j, 0], bounds[j, 1] = max(old, mu[j] - reach), rests[j]
            passing |= above > 0
        elif rests[j] < old:
            bounds[j, 0], bounds[j, 1] = rests[j], min(old, mu[j] + reach)
            passing |= below > 0
    return rests, bounds, passing


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def collect(
    x: Array, cuts: Array, values: Array, bounds: Array, between: Array, numbers: Array
) -> int:
    """The elements strictly between two bounds, and how many lie before them.

    Args:
        x: ``(n,)`` float32 or float64.
        cuts: ``(m - 1,)`` from :func:`find_cuts`, in the same dtype.
        values: ``(m,)`` centres, in the same dtype.
        bounds: ``(m, 2)`` from :func:`settle`.
        between: ``(n + 1,)`` of the dtype of x, receives the elements of all centres.
        numbers: ``(m, 3)`` int64 zeros, receives for each centre the numbers of its elements
            elsewhere, from the centre to the bounds, and between them.

    Returns:
        How many lie between the bounds.
    """
    index, kind = np.empty(_CHUNK, np.int32), np.empty(_CHUNK, np.int32)
    count = 0
    for lo in range(0, x.shape[0], _CHUNK):
        part = x[lo : lo + _CHUNK]
        _locate(part, cuts, index)
        for c in range(part.shape[0]):
            k, v = index[c], part[c]
            low, high, old = bounds[k, 0], bounds[k, 1], values[k]
            # Bitwise, and below written in any case: no branch to be guessed wrong.
            before = ((old < v) & (v <= low)) | ((high <= v) & (v < old))
            kind[c] = np.int32(before) + 2 * np.int32((low < v) & (v < high))
        for c in range(part.shape[0]):
            numbers[index[c], kind[c]] += 1
            between[count] = part[c]
            count += kind[c] == 2
    return count


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def walk(
    mu: Array,
    values: Array,
    counts: Array,
    tau: float,
    bounds: Array,
    between: Array,
    numbers: Array,
) -> Array:
    """The roots of the slopes: each centre passes the elements ahead of it, one after the other.

    Args:
        mu: ``(m,)`` float64.
        values: ``(m,)`` centres that the counts belong to.
        counts: ``(m, 3)`` from :func:`tally`.
        tau: 0 or more; infinity is allowed.
        bounds: ``(m, 2)`` from :func:`settle`.
        between: Elements from :func:`collect` in ascending order, so that those of the first centre
            come first.
        numbers: ``(m, 3)`` from :func:`collect`.

    Returns:
        ``(m,)`` float64.
    """
    roots = np.empty(mu.shape[0])
    start = 0
    for j in range(mu.shape[0]):
        old, size = np.float64(values[j]), numbers[j, 2]
        below, at, above = counts[j]
        # Downwards is upwards with all signs turned.
        sign = 1 if bounds[j, 1] > old else -1
        behind = at + (below if sign > 0 else above) + numbers[j, 1]
        total, place = below + at + above, start if sign > 0 else start + size - 1
        edge = bounds[j, 0] if sign > 0 else -bounds[j, 1]
        root = edge  # the root does not lie before the first bound
        for k in range(size + 1):
            pull = total - 2 * (behind + k)
            root = max(sign * mu[j] + (tau * pull if pull != 0 else 0.0), edge)
            if k == size or root <= sign * np.float64(between[place]):
                break
            edge = sign * np.float64(between[place])
            place += sign
        settled = bounds[j, 0] == old and bounds[j, 1] == old
        roots[j] = old if settled else sign * root + 0.0  # no -0
        start += size
    return roots
