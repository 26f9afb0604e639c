"""In which units a model answers of a continuous outcome: the mean and deviation in training.

All clients must mean the same by an output, so they agree on one mean and one deviation, of the
training rows of all of them. Each tells a count and two sums, of which nobody needs the summands.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from medfed.datamodules.table_columns import Array
from medfed.datamodules.table_scaling import moments

SUMS, SCALE = 3, 2  # how many numbers a client tells, and is answered


def sums_of(outcomes: Array) -> list[float]:
    """Returns the count of (N,) outcomes, their sum and the sum of their squares.

    Example:
        >>> sums_of(np.array([5.0, 7.0]))
        [2.0, 12.0, 74.0]
    """
    return [float(len(outcomes)), float(outcomes.sum()), float(np.square(outcomes).sum())]


def scale_of(told: Sequence[Sequence[float]]) -> list[float]:
    """Returns mean and deviation (divided by N) of all outcomes together.

    Args:
        told: `sums_of` the outcomes of every client.

    Returns:
        The deviation is 1 where all outcomes are the same. Of its 16 digits, sums about 0 leave
        4 where the mean is a million times as large.

    Example:
        >>> scale_of([sums_of(np.array([5.0, 7.0])), sums_of(np.array([3.0, 9.0]))])
        [6.0, 2.23606797749979]
    """
    count, total, squares = (np.array([column]) for column in np.sum(told, axis=0))
    mean, sd = moments(count, np.zeros(1), total, squares)
    return [float(mean[0]), float(sd[0])]
