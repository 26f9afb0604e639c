"""FROC: how many of the lesions are found, at how many false alarms per scan."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from medfed.functional.weighted_scores import Floats, accepted

ALARMS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""False positives per scan at which LUNA16 reads the sensitivity."""
CPM = ("cpm", *(f"cpm/{alarm:g}" for alarm in ALARMS))


def sensitivities(
    scores: Floats,
    positive: NDArray[np.bool_],
    weights: Floats,
    scans: Floats,
    alarms: tuple[float, ...] = ALARMS,
) -> Floats:
    """Returns the sensitivity at given numbers of false positives per scan.

    Between two thresholds it is interpolated, as LUNA16's evaluation does; beyond the last one,
    where every candidate is accepted, it is 1. Candidates of equal score are accepted together.

    Source: A. A. A. Setio et al., "Validation, comparison, and combination of algorithms for
    automatic detection of pulmonary nodules in computed tomography images: The LUNA16 challenge",
    Medical Image Analysis 42, 2017.

    Args:
        scores: (N,) of the candidates.
        positive: (N,) which of them are lesions.
        weights: (W, N).
        scans: (W,) number of scans, those without a candidate among them.
        alarms: A of them.

    Returns:
        (W, A); NaN where there is no lesion.

    Example:
        >>> scores, positive = np.array([0.9, 0.8, 0.7, 0.6]), np.array([True, False, True, False])
        >>> sensitivities(scores, positive, np.ones((1, 4)), np.array([2.0]), (0.25, 0.5, 1.0))
        array([[0.5, 1. , 1. ]])
    """
    right, wrong = accepted(scores, positive, weights)
    with np.errstate(divide="ignore", invalid="ignore"):
        found, alarm = right / right[:, -1:], wrong / scans[:, None]
        columns = []
        for wanted in alarms:
            # The last threshold with no more alarms, and the next one.
            left = (alarm <= wanted).sum(1) - 1
            next_one = np.minimum(left + 1, alarm.shape[1] - 1)
            ends = [[t[np.arange(len(t)), i] for i in (left, next_one)] for t in (alarm, found)]
            (x0, x1), (y0, y1) = ends
            share = np.where(x1 > x0, (wanted - x0) / (x1 - x0), 0.0)
            columns.append(y0 + share * (y1 - y0))
    return np.stack(columns, axis=1)


def froc_scores(
    scores: Floats, positive: NDArray[np.bool_], weights: Floats, scans: Floats
) -> dict[str, Floats]:
    """Returns ``cpm``, LUNA16's mean sensitivity over :data:`ALARMS`, and each one (``cpm/0.5``).

    Args:
        scores: As :func:`sensitivities` takes all four.
        positive: Which candidates are lesions.
        weights: Of the candidates.
        scans: Their number.

    Example:
        >>> found = froc_scores(np.array([0.9, 0.1]), np.array([True, False]),
        ...                     np.ones((1, 2)), np.ones(1))
        >>> found["cpm"].tolist(), list(found)[1]
        ([1.0], 'cpm/0.125')
    """
    found = sensitivities(scores, positive, weights, scans)
    return dict(zip(CPM, [found.mean(1), *found.T], strict=True))
