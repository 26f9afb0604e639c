"""Intervals: of what a metric is over splits of the patients, or over patients drawn anew.

With several splits an interval says how far other patients, to train on and to test, would move a
mean. With one split it knows of the tested patients alone.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from medfed.common.scores import mean_of_known
from medfed.functional.statistics import LEVEL, Difference, difference, percentiles
from medfed.reports.tasks import Scores

Floats = NDArray[np.float64]


def over_splits(values: Floats, drawn: Floats, overlap: float, comparisons: int = 1) -> Difference:
    """Returns a mean with its interval: over splits; of a single one over its patients.

    Args:
        values: (S,) one per split.
        drawn: (W,) their mean, of patients drawn anew; NaN or empty where that is unknown.
        overlap: Test patients per training patient, see :func:`difference`.
        comparisons: How many are made, for what is detectable.

    Example:
        >>> found = over_splits(np.array([0.5]), np.array([0.4, 0.5, 0.6]), 0.0)
        >>> round(found.low, 3), round(found.high, 3)
        (0.405, 0.595)
    """
    if len(values) > 1 or not np.isfinite(drawn).any():
        return difference(values.tolist(), overlap, LEVEL, comparisons=comparisons)
    mean, (low, high) = float(values[0]), percentiles(drawn, LEVEL)
    error = float(np.nanstd(drawn, ddof=1))
    p = 2 * float(norm.sf(abs(mean) / error)) if error else float(mean == 0)
    critical = float(norm.ppf(1 - (1 - LEVEL) / comparisons / 2) + norm.ppf(0.8))
    return Difference(mean, low, high, p, error, critical * error)


def paired(one: Scores, other: Scores) -> tuple[Floats, Floats]:
    """Returns (S, C) differences, and (S, W, C) those of the same patients drawn anew."""
    width = min(one.drawn.shape[1], other.drawn.shape[1])
    return one.values - other.values, one.drawn[:, :width] - other.drawn[:, :width]


def mean_drawn(values: Floats, drawn: Floats) -> Floats:
    """Returns (W,) means over clients and splits of patients drawn anew.

    A mean over clients of which one cannot be drawn anew is unknown, as is its interval: that of
    the other clients is the interval of another mean.

    Args:
        values: (S, C) as they were measured.
        drawn: (S, W, C).

    Example:
        >>> mean_drawn(np.array([[0.5, 0.7]]), np.array([[[0.4, 0.8], [0.6, 0.8]]])).tolist()
        [0.6000000000000001, 0.7]
        >>> mean_drawn(np.array([[0.5, 0.7]]), np.array([[[0.4, math.nan]]])).tolist()
        [nan]
    """
    lacking = np.isnan(drawn).all(axis=1) & ~np.isnan(values)
    means = mean_of_known(mean_of_known(drawn, axis=2), axis=0)
    return np.full_like(means, math.nan) if lacking.any() else means
