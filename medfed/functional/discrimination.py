"""How good predicted probabilities are at one hospital, each number with its standard error.

Sources: E. R. DeLong, D. M. DeLong, D. L. Clarke-Pearson, "Comparing the areas under two or more
correlated receiver operating characteristic curves", Biometrics 44, 1988; X. Sun and W. Xu, "Fast
implementation of DeLong's algorithm", IEEE Signal Processing Letters 21, 2014; D. R. Cox, "Two
further applications of a model for binary regression", Biometrika 45, 1958 (calibration).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from medfed.functional.pooled import Regression, result_of

Floats = NDArray[np.float64]
_EDGE = 1e-6  # of probabilities whose logarithm is taken


class Estimate(NamedTuple):
    """A number and its standard error."""

    value: float
    error: float


def placements(scores: Floats, label: Floats) -> tuple[Floats, Floats]:
    """Returns the share of the other class that each case is on the right side of.

    Example:
        >>> up, down = placements(np.array([0.9, 0.4, 0.4]), np.array([1.0, 1.0, 0.0]))
        >>> up.tolist(), down.tolist()
        ([1.0, 0.5], [0.75])
    """
    from scipy import stats  # imported here: reading a plan needs none

    positive, negative = scores[label == 1], scores[label == 0]
    both = stats.rankdata(np.concatenate([positive, negative]))
    p, m = len(positive), len(negative)
    return (both[:p] - stats.rankdata(positive)) / m, 1 - (both[p:] - stats.rankdata(negative)) / p


def areas(scores: Floats, other: Floats | None, label: Floats) -> list[Estimate]:
    """Returns the area of each column against its labels, then that of the columns' mean.

    The standard error of the mean is DeLong's, too: it knows that the columns are of equal cases.

    Args:
        scores: (N, K).
        other: (N, K), whose areas are subtracted; ``None``: nothing is.
        label: (N, K) 1 or 0, at least two of each; NaN where it is not known.
    """
    values, moves = np.zeros(label.shape[1]), np.zeros(label.shape)
    for k, of in enumerate(label.T):
        values[k], moves[:, k] = _area_and_moves(scores[:, k], of)
        if other is not None:
            value, of_other = _area_and_moves(other[:, k], of)
            values[k] -= value
            moves[:, k] -= of_other
    values, moves = np.append(values, values.mean()), np.c_[moves, moves.mean(axis=1)]
    errors = np.sqrt((moves**2).sum(axis=0))
    return [Estimate(float(v), float(e)) for v, e in zip(values, errors, strict=True)]


def _area_and_moves(scores: Floats, label: Floats) -> tuple[float, Floats]:
    """The area, and how far each case (N,) moves it; the sum of their squares is its variance."""
    moves = np.zeros(len(label))
    for cases, placed in zip((label == 1, label == 0), placements(scores, label), strict=True):
        value, n = float(placed.mean()), len(placed)
        moves[cases] = (placed - value) / np.sqrt(n * (n - 1))
    return value, moves


def area_of_counts(positive: Floats, negative: Floats) -> Estimate:
    """Returns the area with DeLong's standard error from counts (B,) by cell of the scores.

    Example:
        >>> area_of_counts(np.array([0, 1, 1]), np.array([1, 1, 0])).value
        0.875
    """
    p, m = positive.sum(), negative.sum()
    up = (negative.cumsum() - negative / 2) / m
    down = 1 - (positive.cumsum() - positive / 2) / p
    value = float(positive @ up / p)
    of_positive = positive @ (up - value) ** 2 / (p - 1) / p
    variance = of_positive + negative @ (down - value) ** 2 / (m - 1) / m
    return Estimate(value, float(np.sqrt(variance)))


def mean_of(values: Floats) -> Estimate:
    """Returns a mean with its standard error."""
    return Estimate(float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values))))


def concordance(risk: Floats, time: Floats, event: Floats, other: Floats | None = None) -> Estimate:
    """Returns Harrell's concordance, or by how much it is larger than that of another risk.

    The standard error is that of the infinitesimal jackknife: how much each patient moves it.

    Args:
        risk: (N,) higher for an earlier event.
        time: (N,) until the event, or the last visit without it.
        event: (N,) 1 or 0.
        other: (N,); ``None``: nothing is subtracted.

    Example:
        >>> time, event = np.array([1.0, 2.0, 3.0]), np.array([1.0, 1.0, 0.0])
        >>> concordance(np.array([0.2, 0.9, 0.1]), time, event).value.__round__(3)
        0.667
    """
    first = np.flatnonzero(event == 1)[:, None]
    pairs = ((time[first] < time) | ((time[first] == time) & (event == 0))).astype(float)
    order = np.sign(risk[first] - risk) / 2 + (0.5 if other is None else 0.0)
    if other is not None:
        order = order - np.sign(other[first] - other) / 2
    right, count = order * pairs, max(float(pairs.sum()), 1.0)
    value = float(right.sum()) / count
    apart = right - value * pairs
    moves = apart.sum(axis=0)
    moves[first[:, 0]] += apart.sum(axis=1)
    return Estimate(value, float(np.sqrt((moves**2).sum())) / count)


def log_losses(p: Floats, label: Floats) -> Floats:
    """Returns each case's part (N,) of the log loss."""
    clipped = np.clip(p, _EDGE, 1 - _EDGE)
    return -(label * np.log(clipped) + (1 - label) * np.log1p(-clipped))


def calibration(p: Floats, label: Floats) -> dict[str, Estimate]:
    """Returns calibration in the large (0 is right) and the slope (1 is right), by Cox' models."""
    clipped = np.clip(p, _EDGE, 1 - _EDGE)
    linear = np.log(clipped) - np.log1p(-clipped)
    one = np.ones((len(p), 1))
    large = _fitted(one, label, linear)
    slope = _fitted(np.concatenate([linear[:, None], one], axis=1), label, np.zeros(len(p)))
    return {"calibration in the large": large, "calibration slope": slope}


def _fitted(x: Floats, label: Floats, offset: Floats) -> Estimate:
    """The first coefficient of a logistic regression."""
    model = Regression("logistic", intercepts=False)
    steps = model.fit(x.shape[1], steps=50)
    fit = result_of(steps, lambda beta: model.sums(x, label, beta, offset))
    return Estimate(float(fit.coefficients[0]), float(fit.errors[0]))
