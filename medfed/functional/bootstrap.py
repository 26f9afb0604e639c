"""Bootstrap of patients: how far a metric would vary if other patients had come.

Source: B. Efron and R. J. Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13
(percentile intervals).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def draws(patients: int, resamples: int, seed: int) -> NDArray[np.int64]:
    """Draws as many patients as there are, with replacement, again and again.

    Args:
        patients: P.
        resamples: W.
        seed: Of the draws.

    Returns:
        (W, P) how often each patient was drawn.

    Example:
        >>> found = draws(3, 4, seed=0)
        >>> found.shape, found.sum(1).tolist()
        ((4, 3), [3, 3, 3, 3])
    """
    chosen = np.random.default_rng(seed).integers(0, patients, (resamples, patients))
    place = chosen + patients * np.arange(resamples)[:, None]
    return np.bincount(place.ravel(), minlength=resamples * patients).reshape(resamples, patients)


def percentiles(values: Floats, level: float = 0.95) -> tuple[float, float]:
    """Returns the interval that holds the middle share of resampled values.

    Args:
        values: (W,) a metric of each resample; NaN where that resample leaves it undefined.
        level: The share.

    Returns:
        Its ends; NaN where no resample defines the metric.

    Example:
        >>> percentiles(np.array([0.0, 0.25, 0.5, 0.75, 1.0, np.nan]), 0.5)
        (0.25, 0.75)
    """
    known = values[~np.isnan(values)]
    if not len(known):
        return math.nan, math.nan
    low, high = np.quantile(known, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
