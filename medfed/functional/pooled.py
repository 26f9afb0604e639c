"""Statistics of patients at several hospitals, from sums over the hospitals.

Nothing here sees a patient: a table of counts gives shares, quartiles and tests, sums give means
and deviations, counts by time give survival, and sums of scores give regressions.

Sources: Y. Yang and J. E. Dalton, "A unified approach to measuring the effect size between two
groups", SAS Global Forum 2012 (differences of categories); N. Mantel, "Evaluation of survival data
and two new rank order statistics", Cancer Chemotherapy Reports 50, 1966; R. C. Paule and J. Mandel,
"Consensus values and weighting factors", Journal of Research of the NBS 87, 1982; J. Hartung and
G. Knapp, Statistics in Medicine 20, 2001; J. P. T. Higgins, S. G. Thompson, D. J. Spiegelhalter, "A
re-evaluation of random-effects meta-analysis", JRSS A 172, 2009 (the interval of prediction).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from medfed.functional.statistics import LEVEL
from medfed.standalone.errors import DataError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Family = Literal["logistic", "poisson", "hazard"]
_FAR, _CLOSE = 30.0, 1e-12  # of a hospital's own intercept
_SINGULAR, _TOLERANCE, _LEAP = 1e12, 1e-9, 4.0  # of Newton's steps
_LEAST = 1e-24  # variance of an estimate, of two scores that are equal


class Verdict(NamedTuple):
    """A test's statistic and its p-value."""

    statistic: float
    p: float


UNDEFINED = Verdict(math.nan, math.nan)


def mean_and_sd(count: ArrayLike, total: ArrayLike, squares: ArrayLike) -> tuple[Floats, Floats]:
    """Returns means and standard deviations (n - 1) of sums and sums of squares; NaN of too few.

    Example:
        >>> [float(v) for v in mean_and_sd(3, 6.0, 14.0)]
        [2.0, 1.0]
    """
    n, s, q = (np.asarray(v, float) for v in (count, total, squares))
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.where(n > 0, s / n, np.nan)
        return mean, np.sqrt(np.where(n > 1, np.maximum(q - s * mean, 0) / (n - 1), np.nan))


def quantile(counts: Ints, edges: Floats, share: float) -> float:
    """Returns a quantile as if the values of each bin were spread evenly.

    Args:
        counts: (B + 2,) values below the first edge, in the B bins, and from the last edge on.
        edges: (B + 1,) increasing.
        share: Of the values that lie below.

    Returns:
        An edge where the quantile lies beyond all; NaN without values.

    Example:
        >>> quantile(np.array([0, 4, 4, 0]), np.array([0.0, 10.0, 20.0]), 0.75)
        15.0
    """
    if not (total := counts.sum()):
        return math.nan
    below = np.concatenate([[counts[0]], counts[0] + counts[1:-1].cumsum()])
    return float(np.interp(share * total, below, edges))


def standardised_difference(shares: Floats) -> float:
    """Returns the standardised difference of two groups' shares (2, K) of K categories.

    Example:
        >>> round(standardised_difference(np.array([[0.5, 0.5], [0.4, 0.6]])), 4)
        0.202
    """
    some = shares[:, (shares > 0).any(axis=0)][:, 1:]
    apart = some[0] - some[1]
    each = [np.diag(p) - np.outer(p, p) for p in some]
    return math.sqrt(max(apart @ np.linalg.pinv((each[0] + each[1]) / 2) @ apart, 0.0))


def chi_squared(table: Ints) -> Verdict:
    """Tests whether rows and columns (R, C) of counts are independent, without correction."""
    some = table[table.any(axis=1)][:, table.any(axis=0)]
    if min(some.shape, default=0) < 2:
        return UNDEFINED
    from scipy import stats  # late, as in each function here: reading a plan needs none

    test = stats.chi2_contingency(some, correction=False)
    return Verdict(float(test.statistic), float(test.pvalue))


def welch(count: Floats, mean: Floats, sd: Floats) -> Verdict:
    """Tests whether two groups (2,) have one mean."""
    from scipy import stats

    groups = (mean[0], sd[0], count[0]), (mean[1], sd[1], count[1])
    test = stats.ttest_ind_from_stats(*groups[0], *groups[1], equal_var=False)
    return Verdict(float(test.statistic), float(test.pvalue))


def kruskal_wallis(counts: Ints) -> Verdict:
    """Tests whether groups have one distribution, from counts (bins, groups); bins are ties."""
    from scipy import stats

    some = counts[counts.any(axis=1)][:, counts.any(axis=0)]
    if min(some.shape, default=0) < 2:
        return UNDEFINED
    test = stats.kruskal(*(np.repeat(np.arange(len(some)), of) for of in some.T))
    return Verdict(float(test.statistic), float(test.pvalue))


def survival_curve(events: Ints, leavings: Ints) -> tuple[Floats, Floats, Floats]:
    """Estimates Kaplan-Meier's curve from counts by interval.

    Args:
        events: (B,) patients with the event in each interval.
        leavings: (B,) those last seen in it without the event; they are at risk throughout.

    Returns:
        (B,) at risk, the curve after each interval, and Greenwood's standard errors.

    Example:
        >>> at_risk, curve, _ = survival_curve(np.array([1, 1, 0]), np.array([0, 1, 1]))
        >>> at_risk.tolist(), curve.tolist()
        ([4.0, 3.0, 1.0], [0.75, 0.5, 0.5])
    """
    at_risk = ((events + leavings)[::-1].cumsum()[::-1]).astype(float)
    share = np.divide(events, at_risk, out=np.zeros_like(at_risk), where=at_risk > 0)
    curve = np.cumprod(1 - share)
    rest = at_risk * (at_risk - events)
    terms = np.divide(events, rest, out=np.zeros_like(at_risk), where=rest > 0)
    return at_risk, curve, curve * np.sqrt(terms.cumsum())


def log_rank(events: Ints, leavings: Ints) -> Verdict:
    """Tests whether groups have one survival, from counts (B, G) by interval and group."""
    from scipy import stats

    at_risk = (events + leavings)[::-1].cumsum(axis=0)[::-1].astype(float)
    use = at_risk.any(axis=0)
    events, at_risk = events[:, use], at_risk[:, use]
    n, d = at_risk.sum(axis=1), events.sum(axis=1)
    events, at_risk, n, d = events[n > 1], at_risk[n > 1], n[n > 1], d[n > 1]
    share = at_risk / n[:, None]
    apart = (events - d[:, None] * share).sum(axis=0)
    scale = d * (n - d) / (n - 1)
    spread = np.diag(scale @ share) - (share * scale[:, None]).T @ share
    if len(apart) < 2 or not d.any():
        return UNDEFINED
    statistic = float(apart @ np.linalg.pinv(spread, hermitian=True) @ apart)
    return Verdict(statistic, float(stats.chi2.sf(statistic, len(apart) - 1)))


class Fit(NamedTuple):
    """A regression: P coefficients and their standard errors."""

    coefficients: Floats
    errors: Floats


def result_of(asking: Generator[Any, Any, Any], answer: Callable[[Any], Any]) -> Any:
    """Answers all questions of a generator, and returns its result.

    Args:
        asking: Yields questions and receives answers.
        answer: Gives them.
    """
    question = next(asking)
    while True:
        try:
            question = asking.send(answer(question))
        except StopIteration as end:
            return end.value


@dataclass(frozen=True)
class Regression:
    """Newton's method for a generalised linear model, of which hospitals send sums.

    Attributes:
        family: ``logistic``, ``poisson``, or ``hazard``: a Poisson regression of events in
            intervals of time on the time at risk, whose coefficients are near those of Cox'
            proportional hazards.
        intercepts: Whether each hospital has one of its own, which it finds and keeps: of the
            coefficients only the profile's score and information leave.
    """

    family: Family
    intercepts: bool = True

    def _parts(self, linear: Floats, y: Floats) -> tuple[Floats, Floats]:
        """Each row's score, and its weight in the information."""
        if self.family == "logistic":
            p = np.exp(-np.logaddexp(0.0, -linear))
            return y - p, p * (1 - p)
        mean = np.exp(np.minimum(linear, 500.0))
        return y - mean, mean

    def _linear(self, x: Floats, y: Floats, beta: Floats, offset: Floats | float) -> Floats:
        """(N,) with the hospital's own intercept, the one that fits best beside `beta`."""
        from scipy import optimize

        linear: Floats = x @ beta + offset

        def score(a: float) -> float:
            return float(self._parts(linear + a, y)[0].sum())

        if not self.intercepts or not len(y):
            return linear
        low, high = -np.median(linear) - _FAR, -np.median(linear) + _FAR
        if score(low) <= 0 or score(high) >= 0:  # nobody has the outcome, or everybody
            return linear + float(low if score(low) <= 0 else high)
        return linear + float(optimize.brentq(score, low, high, xtol=_CLOSE))

    def weights(self, x: Floats, y: Floats, beta: Floats, offset: Floats | float = 0.0) -> Floats:
        """Returns what each row (N,) counts at these coefficients; see `sums`."""
        return self._parts(self._linear(x, y, beta, offset), y)[1]

    def sums(self, x: Floats, y: Floats, beta: Floats, offset: Floats | float = 0.0) -> Floats:
        """Returns a hospital's score (P,) and the upper half of its information, end to end.

        Args:
            x: (N, P).
            y: (N,).
            beta: (P,) the coefficients of this step.
            offset: (N,) what is added to the linear predictor, as the logarithm of time at risk.
        """
        apart, weight = self._parts(self._linear(x, y, beta, offset), y)
        score, information = x.T @ apart, (x * weight[:, None]).T @ x
        if self.intercepts and (total := weight.sum()) > 0:
            towards = x.T @ weight
            information -= np.outer(towards, towards) / total
            score -= towards * apart.sum() / total
        return np.concatenate([score, information[np.triu_indices(len(beta))]])

    def fit(
        self, size: int, steps: int = 12, names: Sequence[str] = ()
    ) -> Generator[Floats, Floats, Fit]:
        """Asks for the sums of all hospitals until no coefficient moves.

        It yields coefficients (P,), first 0, and receives the hospitals' added `sums` at them.

        Args:
            size: P.
            steps: At most so many questions.
            names: Of the first coefficients, for errors.
        """
        beta, upper = np.zeros(size), np.triu_indices(size)
        for _ in range(steps):
            sums = yield beta
            information = np.zeros((size, size))
            information[upper] = sums[size:]
            information += np.triu(information, 1).T
            if not np.linalg.cond(information) < _SINGULAR:
                weak = np.abs(np.linalg.eigh(np.nan_to_num(information))[1][:, 0])
                same = [name for name, w in zip(names, weak, strict=False) if w > 0.01]
                who = f"{', '.join(same) or 'the columns'} say the same"
                of = "all patients of each hospital" if self.intercepts else "all patients"
                raise DataError(f"{who}, or the same of {of}; leave one out")
            inverse = np.linalg.inv(information)
            move = inverse @ sums[:size]
            if (furthest := float(np.abs(move).max(initial=0))) < _TOLERANCE:
                return Fit(beta, np.sqrt(np.diag(inverse)))
            beta = beta + move * min(1.0, _LEAP / furthest)
        hint = "perhaps a column gives the outcome"
        raise DataError(f"the coefficients do not settle in {steps} steps; {hint}")


class Meta(NamedTuple):
    """A random-effects mean of hospitals' estimates.

    Attributes:
        mean: The estimate.
        low: Lower end of its interval.
        high: Upper end.
        tau2: Variance between hospitals.
        i2: Share of the variance that lies between hospitals.
        next_low: Lower end of the interval of prediction, for one more hospital.
        next_high: Its upper end.
    """

    mean: float
    low: float
    high: float
    tau2: float
    i2: float
    next_low: float
    next_high: float


def meta_analysis(estimates: ArrayLike, errors: ArrayLike, level: float = LEVEL) -> Meta:
    """Joins hospitals' estimates: Paule and Mandel's variance, Hartung and Knapp's interval.

    The factor of Hartung and Knapp is at least 1, so that no interval is shorter than without it.

    Args:
        estimates: (K,).
        errors: (K,) their standard errors.
        level: Of the intervals.

    Returns:
        The mean with its intervals; NaN for those that two or three hospitals cannot give.
    """
    from scipy import optimize, stats

    y, v = np.asarray(estimates, float), np.maximum(np.asarray(errors, float) ** 2, _LEAST)
    k = len(y)

    def excess(tau2: float) -> float:
        w = 1 / (v + tau2)
        return float((w * (y - (w @ y) / w.sum()) ** 2).sum()) - (k - 1)

    tau2, high = 0.0, float(np.var(y, ddof=1)) if k > 1 else 0.0
    if k > 1 and excess(0.0) > 0:
        while excess(high) > 0:
            high *= 2
        tau2 = float(optimize.brentq(excess, 0.0, high, xtol=1e-15, rtol=1e-12))
    w = 1 / (v + tau2)
    mean = float((w @ y) / w.sum())
    if k < 2:
        z = float(stats.norm.ppf((1 + level) / 2) * np.sqrt(v[0]))
        return Meta(mean, mean - z, mean + z, 0.0, math.nan, math.nan, math.nan)
    factor = max(1.0, float((w * (y - mean) ** 2).sum()) / (k - 1))
    error = math.sqrt(factor / w.sum())
    reach = float(stats.t.ppf((1 + level) / 2, k - 1)) * error
    q = excess(0.0) + (k - 1)
    i2 = max(0.0, 1 - (k - 1) / q) if q > 0 else 0.0
    beyond = math.nan
    if k > 2:
        beyond = float(stats.t.ppf((1 + level) / 2, k - 2)) * math.sqrt(tau2 + error**2)
    return Meta(mean, mean - reach, mean + reach, tau2, i2, mean - beyond, mean + beyond)
