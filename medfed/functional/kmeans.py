"""k-means on a line, without chance: the few numbers that many are replaced by.

It gives the centres of quantised weights their start, as in QuPeL's initialisation, and a message
its codebook. On a line the clusters are intervals, so the best ones of up to ``POINTS`` distinct
values are found exactly, by dynamic programming (Wang and Song, The R Journal 3, 2011). More values
are first gathered in as many narrow intervals; Lloyd's iteration on all values then leads from
there to a local optimum. The general-purpose k-means of scikit-learn starts at random, and measures
the distance of each value from each centre.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]

POINTS = 2048
_LLOYD = 100


def initial_centers(x: Tensor, bits: int) -> Tensor:
    """``2**bits`` centres for the elements of a tensor, in ascending order.

    They have the least squared error, exact for up to ``POINTS`` distinct values and a local
    optimum next to it for more.

    Args:
        x: Finite floating tensor of any shape, at least one element.
        bits: 1 to 8.

    Returns:
        ``(2**bits,)`` tensor in the dtype and on the device of ``x``. Where ``x`` has fewer
        distinct values, the largest of them is repeated.

    Example:
        >>> initial_centers(torch.tensor([0.0, 1.0, 9.0, 10.0]), bits=1).tolist()
        [0.5, 9.5]
    """
    values = x.detach().cpu().reshape(-1)
    # In its own dtype where NumPy has it: half the bytes to sort.
    flat = (values if values.dtype == torch.float32 else values.double()).numpy()
    if not np.isfinite(flat).all():
        raise ValueError("x holds NaN or infinity, and has no centres.")
    centers = kmeans(flat, 2**bits)
    centers = np.pad(centers, (0, 2**bits - centers.size), mode="edge")
    return torch.from_numpy(centers).to(x)


def kmeans(values: Array, m: int) -> Array:
    """The centres that minimise ``sum_i min_c (values_i - c)^2``, in ascending order.

    Exact for up to ``POINTS`` distinct values, a local optimum next to the exact one otherwise.

    Example:
        >>> kmeans(np.array([1.0, 9.0, 2.0, 10.0, 2.0, 2.0]), 2)
        array([1.75, 9.5 ])
    """
    distinct, counts = np.unique(values, return_counts=True)
    # Unit size, so that squares neither overflow nor vanish.
    size = float(max(abs(distinct[0]), abs(distinct[-1]))) or 1.0
    x, w = distinct.astype(np.float64) / size, counts.astype(np.float64)
    if x.size <= m:
        return size * x
    mass, moments = _sums(w), _sums(w * x)
    begins = _gather(x, mass)
    coarse = _means(mass, moments, begins)
    weight = np.diff(np.append(mass[begins], mass[-1]))
    centers = _means(mass, moments, begins[_partition(coarse, weight, m)])
    if begins.size == x.size:
        return size * centers
    for _ in range(_LLOYD):
        nearest = np.searchsorted(x, (centers[1:] + centers[:-1]) / 2, side="right")
        improved = _means(mass, moments, np.append(0, nearest), centers)
        if np.array_equal(improved, centers):
            break
        centers = improved
    return size * centers


def _sums(values: Array) -> Array:
    """Sums of the first k values, k from 0 on."""
    return np.append(0.0, np.cumsum(values))


def _means(mass: Array, moments: Array, starts: Array, empty: Array | None = None) -> Array:
    """The means of consecutive intervals, from prefix sums of weights and of weighted values."""
    ends = np.append(starts, mass.size - 1)
    means = np.zeros(starts.size) if empty is None else empty.copy()
    weights = np.diff(mass[ends])
    np.divide(np.diff(moments[ends]), weights, out=means, where=weights > 0)
    return means


def _gather(x: Array, mass: Array) -> Array:
    """Begins of at most ``POINTS`` intervals of sorted values: half of equal width and of weight.

    Equal widths keep outliers apart, equal weights tell values apart where most of them are. Where
    an outlier and a heavy value take nearly all, equal counts of distinct values see to the others.
    """
    if x.size <= POINTS:
        return np.arange(x.size)
    half = POINTS // 2
    by_width = np.searchsorted(x, np.linspace(x[0], x[-1], half, endpoint=False))
    by_weight = np.searchsorted(mass[1:], np.linspace(0, mass[-1], half, endpoint=False))
    begins = np.unique(np.concatenate((by_width, by_weight)))
    by_count = np.arange(half) * x.size // half
    return begins if begins.size >= half else np.union1d(begins, by_count)


def _partition(x: Array, w: Array, m: int) -> Array:
    """Begins of the ``m`` intervals of sorted points with the least squared error."""
    # Imported on first use: compiled code has no business in `import medfed`.
    from medfed.functional.kernels import partition

    # Around their mean, so that the differences of sums cancel little.
    shifted = x - np.average(x, weights=w)
    return np.asarray(partition(np.stack([_sums(w), _sums(w * shifted), _sums(w * shifted**2)]), m))
