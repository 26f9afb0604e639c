"""FROC against a threshold by threshold count, and against MONAI."""

from __future__ import annotations

import numpy as np
import pytest
from monai.metrics import compute_froc_curve_data, compute_froc_score

from medfed.functional.scores import ALARMS, froc_scores, sensitivities


def by_hand(scores: np.ndarray, positive: np.ndarray, scans: int) -> list[float]:
    """Counts at every threshold in turn, and draws straight lines between them."""
    points = [(0.0, 0.0)]
    for threshold in sorted(set(scores), reverse=True):
        hits = sum(p for s, p in zip(scores, positive, strict=True) if s >= threshold)
        alarms = sum(not p for s, p in zip(scores, positive, strict=True) if s >= threshold)
        points.append((alarms / scans, hits / sum(positive)))
    found = []
    for wanted in ALARMS:
        before = [p for p in points if p[0] <= wanted][-1]
        after = [p for p in points if p[0] > wanted][:1]
        if not after:
            found.append(before[1])
            continue
        ((x1, y1),) = after
        x0, y0 = before
        found.append(y0 + (wanted - x0) / (x1 - x0) * (y1 - y0))
    return found


@pytest.mark.parametrize(("size", "scans", "decimals"), [(80, 4, 3), (200, 7, 1), (30, 40, 2)])
def test_sensitivities_are_those_counted_by_hand(size, scans, decimals):
    rng = np.random.default_rng(size)
    positive = rng.random(size) < 0.2
    scores = (rng.random(size) + 0.4 * positive).round(decimals)  # with ties
    found = froc_scores(scores, positive, np.ones((1, size)), np.array([float(scans)]))
    expected = by_hand(scores, positive, scans)
    assert [float(v[0]) for v in list(found.values())[1:]] == pytest.approx(expected)
    assert found["cpm"][0] == pytest.approx(np.mean(expected))


def test_the_score_is_that_of_monai():
    rng = np.random.default_rng(1)
    positive = rng.random(150) < 0.3
    scores = rng.random(150) + 0.3 * positive
    alarms, hits = compute_froc_curve_data(scores[~positive], scores[positive], positive.sum(), 5)
    theirs = compute_froc_score(alarms, hits, ALARMS)
    ours = froc_scores(scores, positive, np.ones((1, 150)), np.array([5.0]))
    assert ours["cpm"][0] == pytest.approx(theirs)


def test_weights_are_scans_that_come_so_often():
    rng = np.random.default_rng(2)
    scan, positive = np.repeat(np.arange(6), 10), rng.random(60) < 0.3
    scores = rng.random(60)
    times = np.array([2, 0, 1, 1, 0, 2])
    weighted = sensitivities(scores, positive, times[scan][None].astype(float), np.array([6.0]))
    often = np.repeat(np.arange(60), times[scan])
    plain = np.ones((1, len(often)))
    copied = sensitivities(scores[often], positive[often], plain, np.array([6.0]))
    assert weighted == pytest.approx(copied)


def test_without_a_lesion_there_is_no_sensitivity():
    found = froc_scores(np.ones(3), np.zeros(3, bool), np.ones((1, 3)), np.ones(1))
    assert all(np.isnan(v[0]) for v in found.values())
