"""Areas, scores and calibration with their errors, against brute force and statsmodels."""

from __future__ import annotations

import numpy as np
import pytest
import statsmodels.api as sm
from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score

from medfed.functional import discrimination

RNG = np.random.default_rng(2)
N = 160
TRUTH = RNG.normal(size=N)
LABEL = (RNG.random(N) < 1 / (1 + np.exp(-TRUTH))).astype(float)
P = np.round(1 / (1 + np.exp(-(0.7 * TRUTH + 0.3 * RNG.normal(size=N)))), 2).clip(0.01, 0.99)
Q = 1 / (1 + np.exp(-(TRUTH + RNG.normal(size=N))))


def _components(scores):
    """DeLong's structural components, pair by pair."""
    positive, negative = scores[LABEL == 1], scores[LABEL == 0]
    wins = (positive[:, None] > negative) + 0.5 * (positive[:, None] == negative)
    return wins.mean(1), wins.mean(0)


def area(scores, label, other=None):
    """That of one column."""
    one, *_ = discrimination.areas(
        scores[:, None], None if other is None else other[:, None], label[:, None]
    )
    return one


@pytest.mark.parametrize("other", [None, Q], ids=["one", "two"])
def test_areas_are_delongs(other):
    ours = area(P, LABEL, other)
    each = [_components(s) for s in (P, *([] if other is None else [other]))]
    up, down = (a - (b if len(each) > 1 else 0) for a, b in zip(each[0], each[-1], strict=True))
    expected = roc_auc_score(LABEL, P) - (0 if other is None else roc_auc_score(LABEL, other))
    assert ours.value == pytest.approx(expected, rel=1e-12)
    variance = up.var(ddof=1) / len(up) + down.var(ddof=1) / len(down)
    assert ours.error == pytest.approx(np.sqrt(variance), rel=1e-12)


def test_scores_are_scikit_learns():
    brier = discrimination.mean_of((P - LABEL) ** 2)
    assert brier.value == pytest.approx(brier_score_loss(LABEL, P), rel=1e-12)
    loss = discrimination.mean_of(discrimination.log_losses(P, LABEL))
    assert loss.value == pytest.approx(log_loss(LABEL, P), rel=1e-12)


def test_calibration_is_statsmodels():
    linear = np.log(P / (1 - P))
    binomial = sm.families.Binomial()
    large = sm.GLM(LABEL, np.ones(N), family=binomial, offset=linear).fit(tol=1e-13)
    slope = sm.GLM(LABEL, sm.add_constant(linear), family=binomial).fit(tol=1e-13)
    ours = discrimination.calibration(P, LABEL)
    np.testing.assert_allclose(
        [*ours["calibration in the large"], *ours["calibration slope"]],
        [large.params[0], large.bse[0], slope.params[1], slope.bse[1]],
        rtol=1e-7,
    )


def test_delongs_error_is_that_of_new_patients():
    """Over draws of new patients the areas vary as the error says."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(400):
        label = (rng.random(120) < 0.4).astype(float)
        found.append(area(rng.normal(size=120) + label, label))
    values, errors = np.transpose(found)
    assert np.mean(errors) == pytest.approx(values.std(), rel=0.12)
