"""Statistics over splits, against SciPy, tables, brute force and simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.stats import binomtest, t, ttest_1samp

from medfed.functional.statistics import (
    difference,
    holm,
    noncentrality,
)


def test_splits_of_other_patients_are_a_plain_t_test():
    values = np.random.default_rng(0).normal(0.1, 0.2, 7)
    found, other = difference(values.tolist()), ttest_1samp(values, 0)
    interval = other.confidence_interval(0.95)
    assert found.p == pytest.approx(other.pvalue)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))


@pytest.mark.parametrize("splits", [2, 3, 4, 6])
def test_differences_that_are_equal_by_chance_prove_nothing(splits):
    """Two methods that are equally good, scored by the accuracy among ten patients."""
    rng, wrong, count = np.random.default_rng(3), 0, 2000
    differ = rng.binomial(10, 0.1, (count, splits))  # patients whom one method alone gets right
    for gaps in (2 * rng.binomial(differ, 0.5) - differ) / 10 + 0.7 - 0.7:
        wrong += difference(gaps.tolist(), overlap=0.25).p < 0.05
    assert wrong / count < 0.05 + 3 * math.sqrt(0.05 * 0.95 / count)


@pytest.mark.parametrize("gap", [0.1, -3.0], ids=["better", "worse"])
def test_equal_differences_have_the_p_value_of_their_signs(gap):
    for splits in range(2, 9):
        values = [gap * (1 + 1e-15 * i) for i in range(splits)]  # but for rounding
        found = difference(values)
        assert found.p == pytest.approx(binomtest(0, splits).pvalue)
        assert math.isnan(found.low), "equal steps do not tell how far others would go"
    assert difference([0.0] * 5)[:4] == (0.0, 0.0, 0.0, 1.0)


def test_splits_of_the_same_patients_have_the_variance_of_nadeau_and_bengio():
    values, overlap = [0.1, 0.3, 0.2, 0.4, 0.0], 1 / 4
    found = difference(values, overlap)
    variance = (1 / 5 + overlap) * np.var(values, ddof=1)
    assert found.error == pytest.approx(math.sqrt(variance))
    assert found.p == pytest.approx(2 * t.sf(0.2 / math.sqrt(variance), 4))
    assert found.low == pytest.approx(0.2 - t.ppf(0.975, 4) * math.sqrt(variance))


def test_the_detectable_difference_is_detected_as_often_as_is_said():
    splits, rng = 5, np.random.default_rng(1)
    delta = noncentrality(splits - 1, 0.05, 0.8) / math.sqrt(splits)  # of deviation 1
    drawn = rng.normal(delta, 1, (20_000, splits))
    found = ttest_1samp(drawn, 0, axis=1).pvalue < 0.05
    assert found.mean() == pytest.approx(0.8, abs=0.01)
    one = difference([0.1, 0.2, 0.3])
    ten = difference([0.1, 0.2, 0.3], comparisons=10)
    assert ten.detectable > one.detectable > abs(one.mean)


def test_holm_is_the_closed_test_of_bonferroni():
    rng = np.random.default_rng(2)
    for _ in range(20):
        p = rng.uniform(0, 0.2, 5)
        subsets = [s for n in range(1, 6) for s in itertools.combinations(range(5), n)]
        closed = [
            min(1, max(len(s) * min(p[list(s)]) for s in subsets if i in s)) for i in range(5)
        ]
        assert holm(p.tolist()) == pytest.approx(closed)
    assert holm([math.nan, 0.04, 0.03])[1:] == pytest.approx([0.06, 0.06])


def test_one_split_says_nothing_but_its_mean():
    found = difference([0.3])
    assert found.mean == 0.3
    assert all(map(math.isnan, found[1:]))
    assert math.isnan(difference([math.nan]).mean)
    assert difference([math.inf, 1.0]).mean == math.inf
