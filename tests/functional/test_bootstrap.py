"""Bootstrap intervals against SciPy's, and how often they hold the truth."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import roc_auc_score

from medfed.functional.scores import area
from medfed.functional.statistics import draws, percentiles


def test_intervals_are_those_of_scipy():
    rng = np.random.default_rng(3)
    label = rng.integers(2, size=40)
    scores = rng.normal(size=40) + label

    def auroc(s: np.ndarray, y: np.ndarray) -> float:
        return roc_auc_score(y, s)

    options = {"paired": True, "vectorized": False, "method": "percentile", "n_resamples": 300}
    theirs = stats.bootstrap((scores, label), auroc, rng=np.random.default_rng(5), **options)
    ours = area(scores, label == 1, draws(40, 300, seed=5).astype(float))
    assert percentiles(ours) == pytest.approx(tuple(theirs.confidence_interval))


def test_samples_of_one_patient_are_drawn_together():
    rng = np.random.default_rng(4)
    patient = np.repeat(np.arange(12), 5)
    values = np.repeat(rng.normal(size=12), 5)  # five times the same
    counts = draws(12, 400, seed=1)
    weights = counts[:, patient].astype(float)
    ours = percentiles((weights * values).sum(1) / weights.sum(1))
    of_patients = stats.bootstrap(
        (values[::5],),
        np.mean,
        n_resamples=400,
        method="percentile",
        rng=np.random.default_rng(1),
    )
    assert ours == pytest.approx(tuple(of_patients.confidence_interval))


@pytest.mark.parametrize("apart", [0.5, 1.5])
def test_intervals_hold_the_truth_about_as_often_as_they_say(apart):
    truth = stats.norm.cdf(apart / np.sqrt(2))  # of two normal distributions
    rng = np.random.default_rng(0)
    held = 0
    for seed in range(300):
        label = np.arange(60) % 2 == 1
        scores = rng.normal(size=60) + apart * label
        low, high = percentiles(area(scores, label, draws(60, 200, seed).astype(float)))
        held += low <= truth <= high
    assert 0.90 <= held / 300 <= 0.98  # 0.95 less what 60 patients and 200 resamples cost


def test_what_no_resample_defines_has_no_interval():
    assert all(map(np.isnan, percentiles(np.array([np.nan, np.nan]))))
