"""Statistics from sums, against SciPy and statsmodels on the rows of all hospitals."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from scipy import stats

from medfed.functional import pooled
from medfed.standalone.errors import DataError

sm = pytest.importorskip("statsmodels.api")
RNG = np.random.default_rng(5)
N, HOSPITALS = 900, 4
HOSPITAL = RNG.integers(0, HOSPITALS, N)
AGE = np.round(RNG.normal(70, 11, N) + 2 * HOSPITAL)
SEX = RNG.integers(0, 2, N)
X = np.stack([(AGE - 70) / 20, SEX], axis=1).astype(float)
DEAD = (RNG.random(N) < 1 / (1 + np.exp(-(1.5 * X[:, 0] - 0.4 * SEX + 0.5 * HOSPITAL - 1)))).astype(
    float
)
TIME = np.ceil(RNG.exponential(20, N) * np.exp(-0.5 * SEX)).astype(int)
EVENT = (RNG.random(N) < 0.6).astype(int)


def test_moments_and_welch_are_those_of_all_rows():
    groups = [AGE[g == SEX] for g in (0, 1)]
    count = np.array([len(g) for g in groups], float)
    mean, sd = pooled.mean_and_sd(count, [g.sum() for g in groups], [(g**2).sum() for g in groups])
    np.testing.assert_allclose(mean, [g.mean() for g in groups], rtol=1e-13)
    np.testing.assert_allclose(sd, [g.std(ddof=1) for g in groups], rtol=1e-11)
    ours, theirs = pooled.welch(count, mean, sd), stats.ttest_ind(*groups, equal_var=False)
    np.testing.assert_allclose(ours, [theirs.statistic, theirs.pvalue], rtol=1e-9)


def test_tests_of_counts_are_scipys():
    table = np.histogram2d(HOSPITAL, SEX, [HOSPITALS, 2])[0].astype(int)
    theirs = stats.chi2_contingency(table, correction=False)
    np.testing.assert_allclose(
        pooled.chi_squared(table), [theirs.statistic, theirs.pvalue], rtol=1e-12
    )
    values = np.unique(AGE)
    by_value = np.array([[(AGE[h == HOSPITAL] == v).sum() for h in range(4)] for v in values])
    theirs = stats.kruskal(*[AGE[h == HOSPITAL] for h in range(4)])
    ours = pooled.kruskal_wallis(by_value)
    np.testing.assert_allclose(ours, [theirs.statistic, theirs.pvalue], rtol=1e-11)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_quartiles_lie_within_their_bin(share):
    edges = np.arange(20.0, 121.0, 5.0)
    place = np.searchsorted(edges, AGE, side="right")
    counts = np.bincount(place, minlength=len(edges) + 1)
    assert abs(pooled.quantile(counts, edges, share) - np.quantile(AGE, share)) < 1.0


def test_curves_and_log_rank_are_statsmodels():
    times = np.arange(1, TIME.max() + 1)
    counts = np.array(
        [
            [[((t == TIME) & (e == EVENT) & (g == SEX)).sum() for g in (0, 1)] for t in times]
            for e in (1, 0)
        ]
    )
    _, curve, error = pooled.survival_curve(*counts.sum(axis=2))
    theirs = sm.SurvfuncRight(TIME, EVENT)
    at = np.array(theirs.surv_times, int) - 1
    np.testing.assert_allclose(curve[at], theirs.surv_prob, rtol=1e-12)
    np.testing.assert_allclose(error[at][:-1], theirs.surv_prob_se[:-1], rtol=1e-9)
    statistic, p = sm.duration.survdiff(TIME, EVENT, SEX)
    ours = pooled.log_rank(*counts)
    np.testing.assert_allclose([ours.statistic, ours.p], [statistic, p], rtol=1e-9)


def _fitted(model, *hospitals):
    """Newton's method, as server and hospitals do it."""
    fit = model.fit(hospitals[0][0].shape[1])
    return pooled.result_of(fit, lambda beta: sum(model.sums(x, y, beta) for x, y in hospitals))


def _dealt(x, y):
    return [(x[h == HOSPITAL], y[h == HOSPITAL]) for h in range(HOSPITALS)]


FAMILIES = {
    "logistic": lambda: sm.families.Binomial(),
    "poisson": lambda: sm.families.Poisson(),
}


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_regressions_are_statsmodels_on_all_rows(family, own):
    """With an intercept per hospital the profile equals a fit with dummies."""
    dummies = np.eye(HOSPITALS)[HOSPITAL] if own else np.ones((N, 1))
    x = X if own else np.concatenate([X, dummies], axis=1)
    model = pooled.Regression(family, own)
    ours = _fitted(model, *_dealt(x, DEAD))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = sm.GLM(DEAD, np.concatenate([X, dummies], axis=1), family=FAMILIES[family]())
        theirs = whole.fit(tol=1e-14, maxiter=100)
    k = x.shape[1]
    np.testing.assert_allclose(ours.coefficients, theirs.params[:k], rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(ours.errors, theirs.bse[:k], rtol=1e-7)


def test_a_hospital_without_an_event_changes_nothing():
    model, none = pooled.Regression("logistic"), np.zeros(50)
    alone = _fitted(model, *_dealt(X, DEAD))
    beside = _fitted(model, *_dealt(X, DEAD), (X[:50], none))
    np.testing.assert_allclose(beside.coefficients, alone.coefficients, rtol=1e-8)


@pytest.mark.parametrize("column", [DEAD, np.ones(N)], ids=["the outcome", "a constant"])
def test_a_column_that_cannot_be_told_apart_is_an_error(column):
    with pytest.raises(DataError, match=r"the outcome|say the same"):
        _fitted(pooled.Regression("logistic"), *_dealt(column[:, None], DEAD))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("seed", [3, 4, 6])
def test_meta_analysis_is_statsmodels(seed):
    from statsmodels.stats.meta_analysis import combine_effects

    rng = np.random.default_rng(seed)
    error = rng.uniform(0.1, 0.4, 8)
    y = rng.normal(0.5, error)
    ours = pooled.meta_analysis(y, error)
    theirs = combine_effects(y, error**2, method_re="iterated", use_t=True, atol=1e-14)
    assert ours.tau2 == pytest.approx(theirs.tau2, rel=1e-6, abs=1e-9)
    assert ours.mean == pytest.approx(theirs.mean_effect_re, rel=1e-9)
    table = theirs.summary_frame().loc["random effect wls"]
    factor = max(1.0, theirs.scale_hksj_re) / theirs.scale_hksj_re  # ours is at least 1
    reach = (table["ci_upp"] - table["ci_low"]) / 2 * np.sqrt(factor)
    assert (ours.high - ours.low) / 2 == pytest.approx(reach, rel=1e-6)


def test_the_variance_between_hospitals_solves_its_equation():
    """Paule and Mandel: the weighted squares are as many as the degrees of freedom."""
    rng = np.random.default_rng(3)
    error = rng.uniform(0.1, 0.4, 8)
    y = rng.normal(0.5, np.sqrt(0.16 + error**2))
    ours = pooled.meta_analysis(y, error)
    w = 1 / (error**2 + ours.tau2)
    assert ours.tau2 > 0
    assert (w * (y - ours.mean) ** 2).sum() == pytest.approx(7, rel=1e-9)


def test_meta_analysis_covers_what_it_says():
    """The truth lies in 95 % of the intervals where few hospitals differ."""
    rng = np.random.default_rng(0)
    covered = []
    for _ in range(400):
        error = rng.uniform(0.15, 0.4, 4)
        y = rng.normal(0, np.sqrt(0.1 + error**2))
        one = pooled.meta_analysis(y, error)
        covered.append(one.low <= 0 <= one.high)
    assert np.mean(covered) > 0.93


def test_differences_of_shares_are_those_of_the_textbook():
    """For two categories: the difference of shares over the root of the mean variance."""
    p, q = 0.3, 0.45
    expected = abs(p - q) / np.sqrt((p * (1 - p) + q * (1 - q)) / 2)
    ours = pooled.standardised_difference(np.array([[1 - p, p], [1 - q, q]]))
    assert ours == pytest.approx(expected, rel=1e-12)
