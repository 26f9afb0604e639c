"""Detections against lesions: which of them hit one, and the FROC over lesions.

The FROC of candidates (:func:`medfed.functional.scores.froc_scores`, ``cpm``) knows only the
lesions that are among the candidates, so it ends at 1. That of detections (``lesion_cpm``) divides
by all annotated lesions: one that no box hits is missed at every threshold.

Source: A. A. A. Setio et al., "Validation, comparison, and combination of algorithms for automatic
detection of pulmonary nodules in computed tomography images: The LUNA16 challenge", Medical Image
Analysis 42, 2017.
"""

from __future__ import annotations

import numpy as np

from medfed.functional.scores import ALARMS, Columns, Floats, Ints, sensitivities

LESION_CPM = ("lesion_cpm", *(f"lesion_cpm/{alarm:g}" for alarm in ALARMS), "lesions_found")
# A row of a table of cases: the box that finds a lesion, a false alarm, a further hit on a lesion
# that a box of a higher score has found, which is neither; or a scan.
HIT, ALARM, AGAIN, SCAN = 1, 0, -1, -2


def match_lesions(centres: Floats, scores: Floats, lesions: Floats, radii: Floats) -> Ints:
    """Says what each box of a scan is.

    A box hits the lesion whose centre is nearest to its own, of those within whose radius it lies.
    Of the boxes that hit a lesion the one of the highest score counts (of equal ones the first).

    Args:
        centres: (N, 3) of the boxes, in mm.
        scores: (N,).
        lesions: (M, 3) centres in mm.
        radii: (M,) in mm.

    Returns:
        (N,) :data:`HIT`, :data:`ALARM` or :data:`AGAIN`.

    Example:
        >>> boxes = np.array([[0.0, 0, 0], [1.0, 0, 0], [9.0, 0, 0]])
        >>> match_lesions(boxes, np.array([0.5, 0.7, 0.9]), np.zeros((1, 3)), np.array([2.0]))
        array([-1,  1,  0])
    """
    matches = np.full(len(scores), ALARM)
    if not len(lesions) or not len(scores):
        return matches
    distance = np.linalg.norm(centres[:, None] - lesions[None], axis=2)
    distance = np.where(distance <= radii, distance, np.inf)
    lesion = np.where(np.isfinite(distance).any(1), distance.argmin(1), -1)
    order = np.argsort(-scores, kind="stable")
    hits = order[lesion[order] >= 0]
    matches[hits] = AGAIN
    matches[hits[np.unique(lesion[hits], return_index=True)[1]]] = HIT
    return matches


def lesion_scores(cases: Columns, weights: Floats) -> dict[str, Floats]:
    """Measures the boxes of many scans.

    Args:
        cases: N rows by column. Of a scan: ``found`` is :data:`SCAN` and ``lesions`` their number.
            Of a box: ``found`` as of :func:`match_lesions` and ``score``.
        weights: (W, N): all rows of a scan have the same weight.

    Returns:
        (W,) each: ``lesion_cpm``, the mean of the sensitivities at 1/8, 1/4, 1/2, 1, 2, 4 and 8
        false alarms per scan, each of these (``lesion_cpm/0.5``), and ``lesions_found``, the share
        that any box finds. 0 without a hit; NaN where there is no lesion.
    """
    curve = lesion_curve(cases, weights, (*ALARMS, np.inf))
    return dict(zip(LESION_CPM, [curve[:, :-1].mean(1), *curve.T], strict=True))


def lesion_curve(cases: Columns, weights: Floats, alarms: tuple[float, ...]) -> Floats:
    """Returns the sensitivity (W, A) at A numbers of false alarms per scan; see `lesion_scores`."""
    matches = cases["found"].astype(int)
    boxes = (matches == HIT) | (matches == ALARM)
    lesions, scans = weights @ cases["lesions"].astype(float), weights @ (matches == SCAN)
    of = cases["score"][boxes].astype(float), matches[boxes] == HIT, weights[:, boxes]
    return sensitivities(*of, scans, alarms, lesions)
