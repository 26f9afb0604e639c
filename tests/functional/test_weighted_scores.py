"""Weighted metrics against scikit-learn's sample weights, one weighting at a time."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn import metrics as sk

from medfed.functional.scores import area, class_scores, outcome_scores, sums


def drawn(k: int, n: int = 60, rows: int = 7) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(k)
    probs = rng.dirichlet(np.ones(k), n).round(1) + 0.01  # with ties
    label = rng.integers(k, size=n)
    return probs / probs.sum(1, keepdims=True), label, rng.integers(3, size=(rows, n)).astype(float)


@pytest.mark.parametrize("k", [2, 3])
def test_every_weighting_is_that_of_scikit_learn(k):
    probs, label, weights = drawn(k)
    found = class_scores(probs, label, weights)
    predicted = probs.argmax(1)
    average = {"average": "binary" if k == 2 else "macro"}
    for w, row in enumerate(weights):
        more = {"sample_weight": row}
        brier = sk.brier_score_loss(label, probs, labels=range(k), scale_by_half=True, **more)
        areas = [sk.roc_auc_score(label == c, probs[:, c], **more) for c in range(k)]
        tables = sk.multilabel_confusion_matrix(label, predicted, **more)
        tn, fp = tables[:, 0, 0], tables[:, 0, 1]
        expected = {
            "accuracy": sk.accuracy_score(label, predicted, **more),
            "balanced_accuracy": sk.balanced_accuracy_score(label, predicted, **more),
            "auroc": np.mean(areas),
            "sensitivity": sk.recall_score(label, predicted, **average, **more),
            "specificity": (tn / (tn + fp))[1 if k == 2 else slice(None)].mean(),
            "f1": sk.f1_score(label, predicted, **average, **more),
            "brier": brier,
        }
        assert {n: found[n][w] for n in expected} == pytest.approx(expected)


@pytest.mark.parametrize("k", [2, 3])
def test_a_weight_is_a_sample_that_comes_so_often(k):
    probs, label, weights = drawn(k)
    found = class_scores(probs, label, weights)
    for w, row in enumerate(weights.astype(int)):
        often = class_scores(probs.repeat(row, 0), label.repeat(row), np.ones((1, row.sum())))
        assert {n: v[w] for n, v in found.items()} == pytest.approx(
            {n: v[0] for n, v in often.items()}
        )


def test_classes_that_do_not_occur_are_no_part_of_the_means():
    probs, label, _ = drawn(4)
    label[label == 3] = 0
    found = class_scores(probs, label, np.ones((1, len(label))))
    expected = [sk.roc_auc_score(label == c, probs[:, c]) for c in range(3)]
    assert found["auroc"][0] == pytest.approx(np.mean(expected))
    f1 = sk.f1_score(label, probs.argmax(1), labels=[0, 1, 2], average="macro")
    assert found["f1"][0] == pytest.approx(f1)


@pytest.mark.parametrize(
    ("label", "undefined"),
    [
        ([1, 1], {"balanced_accuracy", "auroc", "specificity"}),
        ([0, 0], {"balanced_accuracy", "auroc", "sensitivity", "f1"}),
    ],
)
def test_what_one_class_leaves_undefined_is_not_a_matter_of_the_prediction(label, undefined):
    for p in (0.1, 0.9):
        found = class_scores(np.array([[1 - p, p]] * 2), np.array(label), np.ones((1, 2)))
        assert {n for n, v in found.items() if np.isnan(v[0])} == undefined


def test_a_certain_mistake_has_a_finite_log_loss():
    found = class_scores(np.eye(2), np.array([1, 1]), np.ones((1, 2)))
    assert 300 < found["log_loss"][0] < np.inf


def test_outcomes_are_measured_as_scikit_learn_does():
    rng = np.random.default_rng(0)
    true, found = rng.normal(size=(2, 30))
    weights = rng.integers(3, size=(5, 30)).astype(float)
    scores = outcome_scores(found, true, weights)
    for w, row in enumerate(weights):
        more = {"sample_weight": row}
        assert scores["rmse"][w] == pytest.approx(sk.root_mean_squared_error(true, found, **more))
        assert scores["mae"][w] == pytest.approx(sk.mean_absolute_error(true, found, **more))
        assert scores["r2"][w] == pytest.approx(sk.r2_score(true, found, **more))
    equal = outcome_scores(found, true, np.eye(30)[:1])  # one sample
    assert np.isnan(equal["r2"][0])


def test_no_samples_leave_everything_undefined():
    empty = class_scores(np.zeros((0, 2)), np.zeros(0, int), np.zeros((1, 0)))
    assert all(np.isnan(v[0]) for v in empty.values())
    assert np.isnan(area(np.zeros(0), np.zeros(0, bool), np.zeros((2, 0)))).all()
    assert sums(np.zeros((2, 0)), np.zeros(0, int), 3).tolist() == [[0.0] * 3] * 2
