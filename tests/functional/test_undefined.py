"""Every metric on every small weighting, some of which leave nothing: a plain loop, or undefined.

A weighting that takes away a class, all events or all who were followed long enough must leave a
metric undefined, never small: what is lost from a sum must not stay in its divisor.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from medfed.functional.detection import ALARM, HIT, SCAN, lesion_scores
from medfed.functional.scores import (
    CLASS_SCORES,
    class_scores,
    finding_scores,
    froc_scores,
    outcome_scores,
)
from medfed.functional.statistics import draws, percentiles
from medfed.functional.survival import survival_scores
from medfed.models.segmentation_meter import overlap_scores

WEIGHTS = np.array(list(itertools.product((0.0, 1.0, 3.0), repeat=4)))
PROBS = np.array([[0.9, 0.1], [0.4, 0.6], [0.3, 0.7], [0.4, 0.6]])
NAN = math.nan


def repeated(*columns, weights):
    """Columns in which each row is as often as its weight says."""
    times = weights.astype(int)
    return [np.repeat(column, times, axis=0) for column in columns]


def mean(values) -> float:
    values = [*values]
    return sum(values) / len(values) if values else NAN


def plain_classes(probs, label):
    """Two classes, from the definitions."""
    chosen = [int(p[1] > 0.5) for p in probs]
    rows = [*zip(probs[:, 1].tolist(), label.tolist(), chosen, strict=True)]
    recall = [mean(c == k for _, y, c in rows if y == k) for k in (0, 1)]
    pairs = [(p > q) + 0.5 * (p == q) for p, y, _ in rows if y for q, z, _ in rows if not z]
    hits, ones = sum(y and c for _, y, c in rows), sum(y for _, y, _ in rows)
    return {
        "accuracy": mean(y == c for _, y, c in rows),
        "balanced_accuracy": mean(recall),
        "auroc": mean(pairs),
        "sensitivity": recall[1],
        "specificity": recall[0],
        "f1": 2 * hits / (ones + sum(c for *_, c in rows)) if ones else NAN,
        "brier": mean((p - y) ** 2 for p, y, _ in rows),
        "log_loss": mean(-math.log(p if y else 1 - p) for p, y, _ in rows),
    }


def alike(found, expected):
    for name, value in expected.items():
        assert float(found[name]) == pytest.approx(value, rel=1e-12, nan_ok=True), name


@pytest.mark.parametrize("label", [(0, 1, 1, 0), (0, 0, 0, 1), (1, 1, 1, 1)], ids=str)
def test_classes(label):
    label = np.array(label)
    scores = class_scores(PROBS, label, WEIGHTS)
    undefined = 0
    for n, weights in enumerate(WEIGHTS):
        expected = plain_classes(*repeated(PROBS, label, weights=weights))
        alike({name: values[n] for name, values in scores.items()}, expected)
        undefined += math.isnan(expected["auroc"])
    assert undefined > 0


def test_findings_of_which_nothing_is_known():
    cases = {
        "finding": np.array(["a", "a", "b", "b"]),
        "label": np.array([0, 1, 1, 1]),
        "probability": np.array([0.2, 0.7, 0.3, 0.9]),
    }
    scores = finding_scores(cases, ["a", "b", "c"], WEIGHTS)
    both = (WEIGHTS[:, 0] > 0) & (WEIGHTS[:, 1] > 0)
    np.testing.assert_array_equal(np.isnan(scores["auroc"]), ~both)
    np.testing.assert_array_equal(scores["auroc"][both], 1.0)
    assert np.isnan(scores["auroc/b"]).all()
    assert np.isnan(scores["auroc/c"]).all()


def three_classes(rng, patients):
    """Twelve patients of three classes, of which one is rare and a fourth has nobody."""
    probs, label = rng.dirichlet(np.ones(4), patients), np.arange(patients) % 2
    label[:2] = 2
    each = np.eye(4)[label].T == 1
    return lambda w: class_scores(probs, label, w), each[:3]


def three_findings(rng, patients):
    """Findings that few have, or all have, or nobody was asked about."""
    known = [*itertools.product(range(patients), range(3))]
    label = np.array([{0: n < 2, 1: n % 2, 2: True}[k] for n, k in known]).astype(int)
    cases = {"finding": np.array([*"abc"])[[k for _, k in known]], "label": label}
    cases["probability"] = rng.uniform(size=len(known))
    each = [[n < 2 for n in range(patients)], [n % 2 == 1 for n in range(patients)]]
    each = np.array([*each, *(~np.array(each))])
    return lambda w: finding_scores(cases, [*"abcd"], w.repeat(3, axis=1)), each


def two_regions(rng, patients):
    """Regions of which one is outlined in two scans alone."""
    rows = [(n, r) for n in range(patients) for r in "ab" if r == "a" or n < 2]
    names = ("true_positive", "predicted", "labelled", "voxels")
    counts = rng.integers(1, 9, (3, len(rows)))
    counts = [counts[0], counts[0] + counts[1], counts[0] + counts[2], np.full(len(rows), 50)]
    cases = {"region": np.array([r for _, r in rows]), **dict(zip(names, counts, strict=True))}
    scan = [n for n, _ in rows]
    each = np.array([[True] * patients, [n < 2 for n in range(patients)]])
    return lambda w: overlap_scores(cases, [*"abc"], w[:, scan]), each


@pytest.mark.parametrize("parts", [three_classes, three_findings, two_regions])
def test_a_mean_over_parts_is_of_all_parts_or_of_none(parts):
    """A resample without any patient of a class, finding or region has no mean over them."""
    patients = 12
    measure, each = parts(np.random.default_rng(2), patients)
    weights = np.concatenate([np.ones((1, patients)), draws(patients, 400, 1)]).astype(float)
    whole = (weights @ each.T > 0).all(axis=1)
    assert 0 < (~whole).sum() < 200
    scores = measure(weights)
    plain = {"accuracy", "brier", "log_loss"}
    means = {n: v for n, v in scores.items() if "/" not in n and n not in plain}
    assert len(means) >= 1
    for values in means.values():
        np.testing.assert_array_equal(np.isnan(values), ~whole)
    for name, values in means.items():  # and it is the mean of the parts that occur
        of = np.stack([v for n, v in scores.items() if n.startswith(f"{name}/")] or [values])
        of = of[~np.isnan(of[:, 0])]
        np.testing.assert_allclose(values[whole], of[:, whole].mean(axis=0), rtol=1e-12)
    assert {*plain, *means} == {*CLASS_SCORES} or parts is not three_classes


def test_what_few_resamples_define_has_no_interval():
    """Nine rare findings: the few resamples that draw each of them stand for no other patients."""
    cases = {n: np.tile(np.arange(40), 9) for n in ("probability", "label")}
    cases["finding"] = np.repeat([*"abcdefghi"], 40)
    cases["label"] = (cases["label"] == np.repeat(range(9), 40)).astype(int)
    weights = draws(40, 1000, 0).astype(float)
    scores = finding_scores(cases, [*"abcdefghi"], np.tile(weights, 9))
    assert 0 < (~np.isnan(scores["auroc"])).sum() < 100
    assert all(map(math.isnan, percentiles(scores["auroc"])))
    assert all(low <= high for low, high in (percentiles(scores[f"auroc/{n}"]) for n in "abi"))


def test_outcomes():
    predicted, true = np.array([1.0, 2.0, 2.5, 7.0]), np.array([1.5, 2.0, 2.0, 5.0])
    scores = outcome_scores(predicted, true, WEIGHTS)
    for n, weights in enumerate(WEIGHTS):
        p, t = repeated(predicted, true, weights=weights)
        square = mean((p - t) ** 2)
        spread = mean((t - mean(t)) ** 2)
        expected = {
            "rmse": math.sqrt(square),
            "mae": mean(abs(p - t)),
            "r2": 1 - square / spread if len({*t}) > 1 else NAN,
        }
        alike({name: values[n] for name, values in scores.items()}, expected)


def test_detections_and_candidates():
    """Four scans; the second and the fourth have a lesion, which a box finds in the second."""
    found = np.array([SCAN] * 4 + [HIT, ALARM, ALARM])
    cases = {
        "found": found,
        "lesions": np.array([0, 1, 0, 1, 0, 0, 0]),
        "score": np.array([0, 0, 0, 0, 0.9, 0.6, 0.5]),
    }
    scan_of = [0, 1, 2, 3, 1, 0, 1]
    scores = lesion_scores(cases, WEIGHTS[:, scan_of])
    lesions = WEIGHTS[:, 1] + WEIGHTS[:, 3]
    with np.errstate(invalid="ignore"):
        share = WEIGHTS[:, 1] / lesions
    np.testing.assert_allclose(scores["lesions_found"], share, rtol=1e-12)
    np.testing.assert_allclose(scores["lesion_cpm"], share, rtol=1e-12)  # no alarm is before it
    positive, of = np.array([True, False]), WEIGHTS[:, [1, 0]]
    curve = froc_scores(np.array([0.9, 0.1]), positive, of, WEIGHTS.sum(1))
    expected = np.where(WEIGHTS[:, 1] > 0, 1.0, NAN)
    np.testing.assert_array_equal(curve["cpm"], expected)


def plain_survival(time, event, alive, horizon):
    """The Brier score and the AUROC at a horizon by Graf's weights, over the patients one by one.

    None where the probability of being uncensored at the horizon is unknown or 0, unless everyone's
    state there is known.
    """

    def uncensored(until, strictly):
        share = 1.0
        for t in sorted({*time[event == 0]}):
            if t < until or (t == until and not strictly):
                lost = ((time == t) & (event == 0)).sum()
                share *= 1 - lost / ((time > t).sum() + lost)
        return share

    if not len(time):
        return {}
    dead = (time <= horizon) & (event == 1)
    if not (time > horizon).any() and not dead[time == time.max()].all():
        return {}
    weights = [
        1 / uncensored(t, True) if d else 1 / uncensored(horizon, False) if t > horizon else 0.0
        for t, d in zip(time, dead, strict=True)
    ]
    assert sum(weights) == pytest.approx(len(time))
    states = zip(weights, alive, time > horizon, strict=True)
    return {"brier/5": sum(w * (a - x) ** 2 for w, a, x in states) / len(time)}


@pytest.mark.parametrize(
    ("time", "event"),
    [
        ((2.0, 4.0, 6.0, 9.0), (1, 0, 1, 0)),
        ((2.0, 4.0, 4.0, 4.5), (1, 0, 1, 0)),  # nobody is followed until the horizon
        ((2.0, 3.0, 4.0, 4.5), (0, 0, 0, 1)),  # the last one dies before it
        ((6.0, 7.0, 8.0, 9.0), (0, 0, 0, 0)),  # no event
        ((5.0, 5.0, 5.0, 9.0), (1, 0, 1, 1)),  # ties at the horizon
        ((1.0, 2.0, 3.0, 4.0), (0, 0, 0, 0)),  # nothing is known
    ],
    ids=["mixed", "short", "last dies", "no event", "ties", "unknown"],
)
def test_survival(time, event):
    time, event = np.array(time), np.array(event)
    alive, risk = np.array([0.2, 0.5, 0.6, 0.9]), np.array([0.9, 0.5, 0.4, 0.1])
    cases = {"time": time, "event": event, "risk": risk, "survival/5": alive}
    scores = survival_scores(cases, WEIGHTS, [5.0], 5.0, least=1)
    for n, weights in enumerate(WEIGHTS):
        t, e, a, r = repeated(time, event, alive, risk, weights=weights)
        found = {name: values[n] for name, values in scores.items()}
        expected = {"brier/5": NAN, **plain_survival(t, e, a, 5.0)}
        order = [
            (r[i] > r[j]) + 0.5 * (r[i] == r[j])
            for i in np.flatnonzero(e)
            for j in range(len(t))
            if t[i] < t[j] or (t[i] == t[j] and not e[j])
        ]
        alike(found, {**expected, "cindex": mean(order), "pairs": float(len(order))})
        if math.isnan(expected["brier/5"]):
            assert math.isnan(found["auroc/5"])
