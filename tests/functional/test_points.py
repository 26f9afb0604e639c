"""Thresholds and calibration against scikit-learn's curves and logistic regression."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize, minimize_scalar
from sklearn.metrics import log_loss as sk_log_loss
from sklearn.metrics import roc_curve
from torch import nn
from torch.optim import SGD

from medfed.config.compose import described
from medfed.functional.points import (
    PRIOR,
    Chooser,
    calibrated,
    choose_threshold,
    common,
    fit_calibration,
    variance_of_shifts,
)
from medfed.functional.scores import case_class_scores
from medfed.models.classification import ClassificationTask
from medfed.models.networks.small import LogisticRegression
from medfed.run.experiment import chooser_of
from medfed.standalone.errors import ConfigError


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


@pytest.mark.parametrize("count", [12, 40, 400])
@pytest.mark.parametrize("variance", [0.01, 0.3, 5.0])
def test_a_shift_is_the_most_likely_one_under_its_prior(count, variance):
    probs, label = cases(count, count=count)
    odds = np.log(probs[:, 1] / probs[:, 0])

    def cost(shift: float) -> float:
        return np.logaddexp(0, -(2 * label - 1) * (odds + shift)).sum() + shift**2 / (2 * variance)

    best = minimize_scalar(cost, bounds=(-9, 9), method="bounded", options={"xatol": 1e-9})
    point = fit_calibration(probs, label, "shift", variance)
    assert point["shift"] == pytest.approx(best.x, abs=1e-5)
    step = 1e-3
    curve = cost(best.x + step) - 2 * cost(best.x) + cost(best.x - step)
    assert point["information"] == pytest.approx(curve / step**2 - 1 / variance, rel=1e-4)
    assert calibrated(probs, point)[:, 1] == pytest.approx(1 / (1 + np.exp(-odds - best.x)))


@pytest.mark.parametrize("method", ["temperature", "platt"])
def test_a_slope_is_the_most_likely_one_under_its_prior(method):
    probs, label = cases(5)
    odds = np.log(probs[:, 1] / probs[:, 0])

    def cost(at: np.ndarray) -> float:
        eta = np.exp(at[0]) * odds + (at[1] if method == "platt" else 0.0)
        return np.logaddexp(0, -(2 * label - 1) * eta).sum() + at @ at / (2 * PRIOR)

    best = minimize(cost, [0.0, 0.0], method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-13})
    point = fit_calibration(probs, label, method)
    assert [np.log(point["slope"]), point["shift"]] == pytest.approx([*best.x], abs=1e-5)


@pytest.mark.parametrize("spread", [0.2, 0.6, 0.9])
@pytest.mark.parametrize("hospitals", [3, 25])
def test_the_variance_of_shifts_is_that_of_em_over_patients(hospitals, spread):
    rng = np.random.default_rng(3)
    odds = rng.normal(0.5, 1.5, (hospitals, 60))
    chance = 1 / (1 + np.exp(-odds - rng.normal(0, spread, (hospitals, 1))))
    label = (rng.random(odds.shape) < chance).astype(int)
    shift, variance = np.zeros((hospitals, 1)), PRIOR
    for _ in range(300):  # each hospital is fitted anew, on its patients, by Newton's steps
        for _ in range(5):
            p = 1 / (1 + np.exp(-odds - shift))
            information = (p * (1 - p)).sum(1, keepdims=True)
            slope = (label - p).sum(1, keepdims=True) - shift / variance
            shift = shift + slope / (information + 1 / variance)
        each = shift**2 + 1 / (information + 1 / variance)
        variance = (each.sum() + 2 * PRIOR) / (hospitals + 2)
    probs = 1 / (1 + np.exp(-np.stack([-odds, odds], -1)))
    sent = [fit_calibration(p, y, "shift") for p, y in zip(probs, label, strict=True)]
    assert variance_of_shifts(sent) == pytest.approx(variance, abs=0.001 + 0.02 * variance)


def test_a_temperature_of_many_classes_is_the_best_one():
    probs, label = cases(7, classes=4)

    def loss(temperature: float) -> float:
        powers = probs ** (1 / temperature)
        loss = sk_log_loss(label, powers / powers.sum(1, keepdims=True), normalize=False)
        return loss + np.log(temperature) ** 2 / (2 * PRIOR)

    best = minimize_scalar(loss, bounds=(0.1, 20), method="bounded", options={"xatol": 1e-10})
    point = fit_calibration(probs, label, "temperature")
    assert 1 / point["slope"] == pytest.approx(best.x, rel=1e-4)
    assert point["shift"] == 0.0
    test = rows_of(probs, label)
    metrics = Chooser(4, None, "temperature").apply(test, point)
    expected = sk_log_loss(label, calibrated(probs, point))
    assert metrics["log_loss/calibrated"] == pytest.approx(expected)
    assert "decision" not in test[0]
    columns = {name: np.array([row[name] for row in test]) for name in test[0]}
    scores = case_class_scores(columns, np.ones((1, len(test))))
    assert scores["brier/calibrated"][0] == pytest.approx(metrics["brier/calibrated"])
    assert (
        scores["brier/calibrated"][0]
        < scores["brier"][0]
        == pytest.approx(np.square(probs - np.eye(4)[label]).sum(1).mean() / 2)
    )


def test_what_validation_cannot_say_is_what_the_others_say():
    probs, label = cases(1)
    chooser = Chooser(2, "youden", "platt")
    few = label.copy()
    few[np.flatnonzero(label)[4:]] = 0
    assert {*chooser.choose(rows_of(probs, few))} == {"slope", "shift", "variance"}
    assert chooser.choose(rows_of(probs[:9], label[:9])) == {}
    assert chooser.choose(rows_of(np.full((80, 2), np.nan), label)) == {}
    right = chooser.choose(rows_of(np.eye(2)[label], label))  # no infinite slope
    assert 0 < right["slope"] < 10
    own = chooser.choose(rows_of(probs, label))
    others = common({"a": own, "b": {}, "c": {**own, "threshold": 0.9}})
    assert others == {"threshold": pytest.approx((own["threshold"] + 0.9) / 2, abs=1e-4)}
    assert chooser.choose(rows_of(probs, label), others=others) == own
    point = chooser.choose(rows_of(probs, few), others=others)
    assert (point["threshold"], point["pooled"]) == (others["threshold"], 1.0)
    rows = rows_of(probs, label)
    chosen = chooser.apply(rows, point)
    final = calibrated(probs, point)[:, 1]
    assert [row["decision"] for row in rows] == (final >= point["threshold"]).tolist()
    expected = rates(final, label, point["threshold"])
    assert (chosen["sensitivity/point"], chosen["specificity/point"]) == pytest.approx(expected)
    assert all(np.isnan(v) for v in chooser.apply([], {}).values())
    lost = chooser.apply(rows_of(np.full((80, 2), np.nan), label), own)
    assert (lost["sensitivity/point"], lost["log_loss/calibrated"]) == (0.0, np.inf)


def test_the_others_variance_moves_a_shift_and_training_cases_do():
    probs, label = cases(2, count=30)
    chooser, rows = Chooser(2, None, "shift", linear=True), rows_of(probs, label)
    for training in ((), rows_of(*cases(3))):
        every = [*rows, *training]
        point = chooser.choose(rows, training, {"variance": 0.1})
        again = [row["label"] for row in every]
        together = np.array([[row[f"probability/{k}"] for k in (0, 1)] for row in every])
        assert point["shift"] == fit_calibration(together, np.array(again), "shift", 0.1)["shift"]
        assert (point["slope"], point["variance"]) == (1.0, 0.1)


EXTREMES = {
    "one": [0.1, 0.9, 1.0, 1.0],
    "zero": [0.0, 0.0, 0.4, 1.0],
    "next to one": [0.1, float(np.nextafter(np.float32(1), np.float32(0))), 1.0, 1.0],
    "below one": [0.1, 0.2, 0.3, float(np.nextafter(np.float32(1), np.float32(0)))],
}


@pytest.mark.parametrize("scores", EXTREMES.values(), ids=EXTREMES)
@pytest.mark.parametrize("labels", [[0, 1, 0, 1], [1, 0, 1, 0], [0, 0, 1, 1], [1, 1, 0, 0]])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 1.0])
def test_a_rule_gets_what_it_asks_for_at_the_ends_of_probabilities(scores, labels, share):
    scores, label = np.array(scores), np.array(labels)
    single = scores.astype(np.float32)
    at = choose_threshold(scores, label == 1, {"sensitivity": share})
    assert min(rates(s, label, at)[0] for s in (scores, single)) >= share
    at = choose_threshold(scores, label == 1, {"specificity": share})
    assert min(rates(s, label, at)[1] for s in (scores, single)) >= share
    wrong, right, _ = roc_curve(label, scores, drop_intermediate=False)
    at = choose_threshold(scores, label == 1, "youden")
    assert sum(rates(scores, label, at)) == pytest.approx(1 + (right - wrong).max())


DEFAULTS = {
    "linear": (["experiment=clinical_pfednet"], LogisticRegression(2, 2), ("shift", True)),
    "protected": (
        ["experiment=clinical_pfednet", "privacy.example={epsilon:4,delta:1e-3,clip:1.0}"],
        *(LogisticRegression(2, 2), ("shift", False)),
    ),
    "another network": (["experiment=clinical_pfednet"], nn.Linear(2, 2), ("shift", False)),
    "three classes": (["experiment=digits_pfednet"], nn.Linear(2, 3), None),
}


@pytest.mark.parametrize(("overrides", "network", "expected"), DEFAULTS.values(), ids=DEFAULTS)
def test_levels_are_the_default_of_two_classes(overrides, network, expected):
    classes = 3 if expected is None else 2
    task = ClassificationTask(network, SGD, num_classes=classes)
    chooser = chooser_of(described(overrides), task)
    assert (chooser and (chooser.method, chooser.linear)) == expected


def test_a_stated_sensitivity_needs_two_classes():
    config = described(
        ["experiment=digits_pfednet", "evaluation.operating_point={sensitivity: 0.9}"]
    )
    with pytest.raises(ConfigError, match="needs a classification into two classes; set it"):
        chooser_of(config, ClassificationTask(nn.Linear(2, 3), SGD, num_classes=3))
