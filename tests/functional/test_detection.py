"""FROC over lesions against brute force: missed lesions, no hits, ties, resampled scans."""

from __future__ import annotations

import numpy as np
import pytest

from medfed.functional.detection import AGAIN, ALARM, HIT, SCAN, lesion_scores, match_lesions
from medfed.functional.scores import ALARMS


def a_scan(rng: np.random.Generator, lesions: int, boxes: int) -> tuple:
    """Lesions that may overlap, boxes of which many are near one, and scores with ties."""
    places, radii = rng.uniform(0, 30, (lesions, 3)), rng.uniform(2, 8, lesions)
    centres = rng.uniform(0, 30, (boxes, 3))
    if lesions:
        near = places[rng.integers(lesions, size=boxes)] + rng.normal(0, 3, (boxes, 3))
        centres = np.where(rng.random((boxes, 1)) < 0.6, near, centres)
    return centres, rng.random(boxes).round(1), places, radii


def by_hand(scans: list, threshold: float) -> tuple[int, int]:
    """Found lesions and false alarms among the boxes that a threshold accepts."""
    found, alarms = set(), 0
    for number, (centres, scores, places, radii) in enumerate(scans):
        for centre, score in zip(centres, scores, strict=True):
            if score < threshold:
                continue
            gaps = [(float(np.linalg.norm(centre - p)), n) for n, p in enumerate(places)]
            hit = min(((gap, n) for gap, n in gaps if gap <= radii[n]), default=None)
            if hit is None:
                alarms += 1
            else:
                found.add((number, hit[1]))
    return len(found), alarms


def sensitivity_by_hand(scans: list, wanted: float) -> float:
    """Straight lines between the points of all thresholds; after the last one the curve is flat."""
    lesions = sum(len(places) for _, _, places, _ in scans)
    points = [(0.0, 0.0)]
    for threshold in sorted({s for _, scores, _, _ in scans for s in scores}, reverse=True):
        hits, alarms = by_hand(scans, threshold)
        points.append((alarms / len(scans), hits / lesions))
    x0, y0 = [p for p in points if p[0] <= wanted][-1]
    after = [p for p in points if p[0] > wanted]
    if not after:
        return y0
    x1, y1 = after[0]
    return y0 + (wanted - x0) / (x1 - x0) * (y1 - y0)


def table(scans: list) -> dict[str, np.ndarray]:
    rows = []
    for number, (centres, scores, places, radii) in enumerate(scans):
        rows.append((number, SCAN, 0.0, len(places)))
        found = match_lesions(centres, scores, places, radii)
        rows += [(number, f, s, 0) for f, s in zip(found, scores, strict=True)]
    columns = map(np.array, zip(*rows, strict=True))
    return dict(zip(("case", "found", "score", "lesions"), columns, strict=True))


@pytest.mark.parametrize("seed", range(12))
def test_the_curve_is_that_counted_by_hand(seed):
    rng = np.random.default_rng(seed)
    scans = [a_scan(rng, *rng.integers(0, 6, 2) * (1, 4)) for _ in range(6)]
    scans.append(a_scan(rng, 3, 0))  # a scan without a box, whose lesions are missed
    scans.append(a_scan(rng, 0, 7))  # a scan without a lesion, whose boxes are all false
    cases = table(scans)
    scores = lesion_scores(cases, np.ones((1, len(cases["case"]))))
    expected = [sensitivity_by_hand(scans, wanted) for wanted in ALARMS]
    assert [scores[f"lesion_cpm/{a:g}"][0] for a in ALARMS] == pytest.approx(expected)
    assert scores["lesion_cpm"][0] == pytest.approx(np.mean(expected))
    hits, _ = by_hand(scans, -1)
    assert scores["lesions_found"][0] == pytest.approx(hits / sum(len(s[2]) for s in scans))
    # Resampled scans are scans that come so often.
    times = rng.integers(0, 3, len(scans))
    weighted = lesion_scores(cases, times[cases["case"]][None].astype(float))
    again = [s for s, n in zip(scans, times, strict=True) for _ in range(n)]
    assert weighted["lesion_cpm/1"][0] == pytest.approx(sensitivity_by_hand(again, 1.0))


def test_a_missed_lesion_keeps_the_curve_below_one_and_no_hit_is_zero():
    one = (np.zeros((1, 3)), np.array([0.9]), np.array([[0.0, 0, 0], [50, 0, 0]]), np.ones(2))
    assert lesion_scores(table([one]), np.ones((1, 2)))["lesion_cpm"][0] == 0.5
    none = (np.full((2, 3), 20.0), np.array([0.9, 0.8]), one[2], one[3])
    empty = (np.zeros((0, 3)), np.zeros(0), one[2], one[3])
    for scan, rows in ((none, 3), (empty, 1)):
        scores = lesion_scores(table([scan]), np.ones((1, rows)))
        assert {float(v[0]) for v in scores.values()} == {0.0}
    healthy = (none[0], none[1], np.zeros((0, 3)), np.zeros(0))
    assert np.isnan(lesion_scores(table([healthy]), np.ones((1, 3)))["lesion_cpm"][0])


def test_the_best_box_counts_once_and_of_equal_ones_the_first():
    centres = np.array([[0.5, 0, 0], [0.0, 0, 0], [0.1, 0, 0], [9.0, 0, 0]])
    lesion = np.zeros((1, 3)), np.array([2.0])
    found = match_lesions(centres, np.array([0.2, 0.7, 0.7, 0.7]), *lesion)
    assert found.tolist() == [AGAIN, HIT, AGAIN, ALARM]
