"""Thresholds and calibration against scikit-learn's curves and logistic regression."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss as sk_log_loss
from sklearn.metrics import roc_curve
from torch import nn
from torch.optim import SGD

from medfed.common.errors import ConfigError
from medfed.config.compose import described
from medfed.functional.points import (
    Chooser,
    calibrated,
    choose_threshold,
    fit_calibration,
    settled,
)
from medfed.functional.scores import case_class_scores
from medfed.models.classification import ClassificationTask
from medfed.run.experiment import chooser_of


def cases(seed: int, classes: int = 2, count: int = 80) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities that are far too sure."""
    rng = np.random.default_rng(seed)
    label = np.arange(count) % classes
    logits = 2 * rng.normal(size=(count, classes)) + 2 * np.eye(classes)[label] + np.arange(classes)
    odds = np.exp(logits)
    return odds / odds.sum(1, keepdims=True), label


def rows_of(probs: np.ndarray, label: np.ndarray) -> list[dict[str, float]]:
    names = [f"probability/{k}" for k in range(probs.shape[1])]
    return [
        {"label": y, **dict(zip(names, p, strict=True))} for p, y in zip(probs, label, strict=True)
    ]


def rates(scores: np.ndarray, label: np.ndarray, threshold: float) -> tuple[float, float]:
    chosen = scores >= threshold
    return chosen[label == 1].mean(), (~chosen)[label == 0].mean()


@pytest.mark.parametrize("seed", range(5))
def test_thresholds_are_points_of_scikit_learns_curve(seed):
    probs, label = cases(seed)
    scores = probs[:, 1].round(2)  # with ties
    wrong, right, _ = roc_curve(label, scores, drop_intermediate=False)
    at = choose_threshold(scores, label == 1, "youden")
    assert sum(rates(scores, label, at)) == pytest.approx(1 + (right - wrong).max())
    at = choose_threshold(scores, label == 1, {"sensitivity": 0.9})
    best = wrong[right >= 0.9].min()
    assert rates(scores, label, at) == pytest.approx(
        (right[wrong == best].min(), 1 - best), abs=0.1
    )
    assert rates(scores, label, at)[0] >= 0.9
    assert 1 - rates(scores, label, at)[1] == pytest.approx(best)
    at = choose_threshold(scores, label == 1, {"specificity": 0.9})
    assert rates(scores, label, at)[0] == pytest.approx(right[1 - wrong >= 0.9].max())


@pytest.mark.parametrize("seed", range(3))
def test_platt_is_logistic_regression_without_penalty(seed):
    probs, label = cases(seed)
    odds = np.log(probs[:, 1] / probs[:, 0])[:, None]
    oracle = LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000).fit(odds, label)
    point = fit_calibration(probs, label, "platt")
    assert point["slope"] == pytest.approx(oracle.coef_[0, 0], rel=1e-4)
    assert point["shift"] == pytest.approx(oracle.intercept_[0], rel=1e-3, abs=1e-4)
    expected = oracle.predict_proba(odds)
    np.testing.assert_allclose(calibrated(probs, point), expected, atol=1e-5)


def test_a_temperature_of_many_classes_is_the_best_one():
    probs, label = cases(7, classes=4)

    def loss(temperature: float) -> float:
        powers = probs ** (1 / temperature)
        return sk_log_loss(label, powers / powers.sum(1, keepdims=True))

    best = minimize_scalar(loss, bounds=(0.1, 20), method="bounded", options={"xatol": 1e-10})
    point = fit_calibration(probs, label, "temperature")
    assert 1 / point["slope"] == pytest.approx(best.x, rel=1e-4)
    assert point["shift"] == 0.0
    test = rows_of(probs, label)
    metrics = Chooser(4, None, "temperature").apply(test, point)
    assert metrics["log_loss/calibrated"] == pytest.approx(best.fun)
    assert metrics["log_loss/uncalibrated"] == pytest.approx(sk_log_loss(label, probs))
    assert "decision" not in test[0]
    columns = {name: np.array([row[name] for row in test]) for name in test[0]}
    scores = case_class_scores(columns, np.ones((1, len(test))))
    assert scores["brier/calibrated"][0] == pytest.approx(metrics["brier/calibrated"])
    assert (
        scores["brier/calibrated"][0]
        < scores["brier"][0]
        == pytest.approx(np.square(probs - np.eye(4)[label]).sum(1).mean() / 2)
    )


def test_what_validation_cannot_say_is_the_others_median():
    probs, label = cases(1)
    chooser = Chooser(2, "youden", "platt")
    few = label.copy()
    few[np.flatnonzero(label)[4:]] = 0
    assert chooser.choose(rows_of(probs, few)) == {}
    assert chooser.choose(rows_of(np.eye(2)[label], label)) == {}  # all right: an infinite slope
    assert chooser.choose(rows_of(np.full((80, 2), np.nan), label)) == {}
    own = chooser.choose(rows_of(probs, label))
    points = settled({"a": own, "b": {}, "c": {**own, "threshold": 0.9}})
    assert points["b"]["threshold"] == pytest.approx((own["threshold"] + 0.9) / 2, abs=1e-4)
    assert points["a"] is own
    rows = rows_of(probs, label)
    chosen = chooser.apply(rows, points["b"])
    final = calibrated(probs, points["b"])[:, 1]
    assert [row["decision"] for row in rows] == (final >= points["b"]["threshold"]).tolist()
    expected = rates(final, label, points["b"]["threshold"])
    assert (chosen["sensitivity/point"], chosen["specificity/point"]) == pytest.approx(expected)
    assert all(np.isnan(v) for v in chooser.apply([], {}).values())
    lost = chooser.apply(rows_of(np.full((80, 2), np.nan), label), own)
    assert (lost["sensitivity/point"], lost["log_loss/calibrated"]) == (0.0, np.inf)


def test_a_stated_sensitivity_needs_two_classes():
    config = described(
        ["experiment=digits_pfednet", "evaluation.operating_point={sensitivity: 0.9}"]
    )
    with pytest.raises(ConfigError, match="needs a classification into two classes; set it"):
        chooser_of(config, ClassificationTask(nn.Linear(2, 3), SGD, num_classes=3))
