"""Bootstrap of patients: how far a metric would vary if other patients had come.

Source: B. Efron and R. J. Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13
(percentile intervals).

Paired differences over splits: intervals, corrected p-values, and which differences are detectable.

Each split of the patients gives one difference between two methods. Where splits are of the same
patients, the training sets overlap, and a plain t-test is too sure of itself.

Source: C. Nadeau and Y. Bengio, "Inference for the generalization error", Machine Learning, 2003
(the variance of resampled splits); S. Holm, "A simple sequentially rejective multiple test
procedure", Scandinavian Journal of Statistics, 1979.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from medfed.common.scores import defining
from medfed.common.seeding import derive_seed

Floats = NDArray[np.float64]
LEVEL = 0.95  # of all intervals
POWER = 0.8  # how often a test detects the smallest difference that is called detectable
RESAMPLES = 1000  # how often the patients of a client are drawn anew
_ROUNDING = 1e-9  # of a resample's metric that equals that of the patients


def patients_anew(patients: int, seed: int, client: str) -> NDArray[np.int64]:
    """Draws the patients of a client anew, for a run and for all that later reads the run.

    Methods that were run with one seed meet the same draws, so that their differences are paired.

    Args:
        patients: P.
        seed: Of the run.
        client: The client's name.

    Returns:
        (RESAMPLES, P) how often each patient was drawn.

    Example:
        >>> patients_anew(3, 0, "hospital_0").sum(1).tolist() == [3] * RESAMPLES
        True
    """
    return draws(patients, RESAMPLES, derive_seed(seed, "bootstrap", client))


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


def percentiles(
    values: Floats, level: float = 0.95, of: float | None = None
) -> tuple[float, float]:
    """Returns the interval that holds the middle share of resampled values.

    Some statistics move when patients are drawn twice: the interval is then of another number.

    Args:
        values: (W,) a metric of each resample; NaN where that resample leaves it undefined.
        level: The share.
        of: The metric of the patients themselves.

    Returns:
        Its ends; NaN where too few resamples define the metric, or the ends leave out the metric.

    Example:
        >>> percentiles(np.array([0.0, 0.25, 0.5, 0.75, 1.0, np.nan]), 0.5)
        (0.25, 0.75)
    """
    known = defining(values)
    if not len(known):
        return math.nan, math.nan
    low, high = np.quantile(known, [(1 - level) / 2, (1 + level) / 2])
    slack = _ROUNDING * max(abs(low), abs(high))
    if of is not None and not low - slack <= of <= high + slack:
        return math.nan, math.nan
    return float(low), float(high)


class Difference(NamedTuple):
    """A mean difference over splits.

    Attributes:
        mean: The mean.
        low: The lower end of its interval.
        high: The upper end.
        p: Two-sided p-value of no difference.
        error: Standard error of the mean.
        detectable: The smallest true difference that the test detects with a power of 80 %.
    """

    mean: float
    low: float
    high: float
    p: float
    error: float
    detectable: float

    @property
    def half(self) -> float:
        """Half of the width of its interval."""
        return (self.high - self.low) / 2

    def within(self, limits: tuple[float, float]) -> Difference:
        """Returns it with its interval cut at the ends of what is possible.

        The truth is never outside of them, so that the cut interval holds it as often.

        Args:
            limits: The least and the greatest possible value.

        Example:
            >>> difference([0.9, 1.0, 0.95]).within((0.0, 1.0)).high
            1.0
        """
        low, high = limits
        return self._replace(low=max(self.low, low), high=min(self.high, high))


def difference(
    values: Sequence[float], overlap: float = 0.0, level: float = LEVEL, comparisons: int = 1
) -> Difference:
    """Returns the mean of paired differences, with what can be said of it.

    Args:
        values: (S,) one difference per split.
        overlap: Test patients per training patient where splits are of the same patients: the
            variance of the mean is ``s² (1/S + overlap)`` rather than ``s² / S``. 0 where every
            split is of other patients.
        level: Of the interval.
        comparisons: How many are made; `detectable` is that of a test at a level divided by them.

    Returns:
        The difference; with one split, all but its mean is unknown (NaN). Of equal differences
        that are not 0, the p-value is that of their signs, and their interval is unknown.
    """
    from scipy.stats import t as student

    known = np.asarray([v for v in values if not math.isnan(v)], dtype=float)
    if not len(known):
        return Difference(*[math.nan] * 6)
    mean, count = float(known.mean()), len(known)
    if count < 2 or not np.isfinite(known).all():
        return Difference(mean, *[math.nan] * 5)
    spread = float(known.std(ddof=1))
    if spread <= _ROUNDING * abs(mean):
        if mean == 0:
            return Difference(0.0, 0.0, 0.0, 1.0, 0.0, 0.0)
        # Scores of few patients move in steps, and two splits often give the same step by chance.
        # Only the signs then tell something.
        return Difference(mean, math.nan, math.nan, 2.0 ** (1 - count), 0.0, math.nan)
    error = spread * math.sqrt(1 / count + overlap)
    free = count - 1
    half = float(student.ppf((1 + level) / 2, free)) * error
    p = 2 * float(student.sf(abs(mean) / error, free))
    detectable = error * noncentrality(free, (1 - level) / comparisons, POWER)
    return Difference(mean, mean - half, mean + half, p, error, detectable)


@cache
def noncentrality(free: int, alpha: float, power: float) -> float:
    """Returns how many standard errors a true difference must have, to be found that often.

    Example:
        >>> round(noncentrality(1000, 0.05, 0.8), 1)
        2.8
    """
    from scipy.optimize import brentq
    from scipy.stats import nct
    from scipy.stats import t as student

    critical = float(student.ppf(1 - alpha / 2, free))

    def lacking(delta: float) -> float:
        return float(nct.sf(critical, free, delta)) - power

    return float(brentq(lacking, 0.0, 3 * critical + 10))


def detectable_by(
    splits: int, now: Difference, count: int, overlap: float = 0.0, comparisons: int = 1
) -> float:
    """Returns the smallest true difference that another number of splits detects.

    Example:
        >>> found = difference([0.1, -0.1, 0.2, 0.1], overlap=0.25)
        >>> detectable_by(4, found, 4, 0.25) == found.detectable > detectable_by(20, found, 4, 0.25)
        True
    """
    error = now.error * math.sqrt((1 / splits + overlap) / (1 / count + overlap))
    return error * noncentrality(splits - 1, (1 - LEVEL) / comparisons, POWER)


def splits_needed(
    target: float, now: Difference, count: int, overlap: float = 0.0, comparisons: int = 1
) -> int:
    """Returns how many splits make a difference detectable.

    More splits of the same patients leave the share of the variance that comes of their being the
    same; beyond it only other patients help.

    Example:
        >>> found = difference([0.1, -0.1, 0.2, 0.1])
        >>> splits_needed(0.075, found, 4), splits_needed(0.075, found, 4, overlap=0.25)
        (25, 0)
    """

    def enough(splits: int) -> bool:
        return detectable_by(splits, now, count, overlap, comparisons) <= target

    return 2 + bisect_left(range(2, 1001), True, key=enough) if enough(1000) else 0


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns p-values corrected for their number, by Holm's procedure.

    Args:
        p_values: (M,) of the comparisons that are made; NaN where one could not be, which counts as
            no comparison.

    Example:
        >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
        [0.03, 0.06, 0.06]
    """
    known = sorted((p, i) for i, p in enumerate(p_values) if not math.isnan(p))
    corrected, largest = [math.nan] * len(p_values), 0.0
    for rank, (p, i) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        corrected[i] = largest
    return corrected


def shapley(worth: Mapping[frozenset[str], Floats]) -> dict[str, Floats]:
    """Shares what all are worth together: each gets its mean gain over all orders of joining.

    Source: L. S. Shapley, "A value for n-person games", 1953.
    """
    members = sorted({name for present in worth for name in present})
    orders = math.factorial(len(members))
    shares = {member: np.zeros_like(worth[frozenset()]) for member in members}
    for present, value in worth.items():
        before, after = len(present), len(members) - len(present) - 1
        for member in {*members} - present:
            ways = math.factorial(before) * math.factorial(after)
            shares[member] += ways / orders * (worth[present | {member}] - value)
    return shares
