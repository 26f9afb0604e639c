"""Bootstrap intervals against SciPy's, and how often they hold the truth."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import roc_auc_score

from medfed.functional.scores import area, class_scores, outcome_scores
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


def binned(probs: np.ndarray, label: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """A calibration error of 15 bins, which grows where patients are drawn twice."""
    bins = np.minimum(15 * probs, 14).astype(int)
    gaps = [np.abs((weights * (probs - label))[:, bins == b].sum(1)) for b in range(15)]
    return sum(gaps) / weights.sum(1)


@pytest.mark.parametrize("patients", [5, 20, 200])
def test_an_interval_holds_its_own_value_or_there_is_none(patients):
    """All metrics of classes and outcomes have theirs; a statistic that drawing moves has none."""
    missing, rng = {"kept": [], "binned": []}, np.random.default_rng(patients)
    for seed in range(20):
        weights = draws(patients, 300, seed).astype(float)
        weights = np.concatenate([np.ones((1, patients)), weights])
        chance = rng.uniform(size=patients)
        label = (rng.random(patients) < chance).astype(int)
        probs = np.stack([1 - chance, chance], 1)
        scores = class_scores(probs, label, weights)
        scores |= outcome_scores(chance, label + rng.normal(size=patients), weights)
        for name, values in [*scores.items(), ("binned", binned(chance, label, weights))]:
            low, high = percentiles(values[1:], of=float(values[0]))
            if not np.isnan(values[0]):
                assert np.isnan(low) or low - 1e-9 <= values[0] <= high + 1e-9
                missing["binned" if name == "binned" else "kept"].append(np.isnan(low))
    assert np.mean(missing["kept"]) <= 0.02
    assert patients < 200 or np.mean(missing["binned"]) >= 0.1
