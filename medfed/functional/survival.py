"""Survival: Kaplan-Meier curves, and metrics of predictions, for many weightings at once.

``time`` is when a patient had the event, or was last seen without it (censored).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medfed.functional.scores import Floats, area, sums

LEAST_EVENTS = 5  # events of a hospital below which its concordance is undefined
SURVIVAL = "survival/{}"  # the column of the survival until a time in a table of cases
_EDGES = np.array([0.0, *(10 ** (np.arange(19) / 3 - 1))])
BINS = len(_EDGES) - 1
_ROWS = 1000  # events that are compared with all others at once


def kaplan_meier(
    time: Floats, event: Floats, weights: Floats, of_censoring: bool = False
) -> tuple[Floats, Floats, Floats]:
    """Estimates the probability of survival over time, once for each row of weights.

    Source: E. L. Kaplan and P. Meier, "Nonparametric Estimation from Incomplete Observations",
    Journal of the American Statistical Association 53, 1958.

    Args:
        time: (N,).
        event: (N,) 1 for an event, 0 for a censored patient.
        weights: (W, N).
        of_censoring: The curve of staying uncensored; of equal times, events come first.

    Returns:
        The U distinct times; (W, U) weights at risk just before them, and the curves after them.
    """
    times, place = np.unique(time, return_inverse=True)
    died = sums(weights * event, place, len(times))
    everyone = sums(weights, place, len(times))
    at_risk = everyone[:, ::-1].cumsum(1)[:, ::-1]
    lost, of = (everyone - died, at_risk - died) if of_censoring else (died, at_risk)
    share = np.divide(lost, of, out=np.zeros_like(lost), where=of > 0)
    return times, at_risk, np.cumprod(1 - share, axis=1)


def _inverse_censoring(time: Floats, event: Floats, horizon: float, weights: Floats) -> Floats:
    """Weighs patients whose state at a horizon is known for those whose state is not.

    Source: E. Graf et al., "Assessment and comparison of prognostic classification schemes for
    survival data", Statistics in Medicine 18, 1999.

    Example:
        >>> time, event = np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 0.0, 1.0, 0.0])
        >>> _inverse_censoring(time, event, 3.0, np.ones((1, 4))).round(3).tolist()
        [[1.0, 0.0, 1.5, 1.5]]
    """
    times, _, curve = kaplan_meier(time, event, weights, of_censoring=True)
    curve = np.concatenate([np.ones((len(weights), 1)), curve], axis=1)
    happened, alive = (time <= horizon) & (event == 1), time > horizon
    before = curve[:, np.searchsorted(times, time, side="left")]
    then = curve[:, [np.searchsorted(times, horizon, side="right")]]
    uncensored = np.where(happened, before, np.where(alive, then, np.inf))
    return np.divide(weights, uncensored, out=np.zeros(weights.shape), where=uncensored > 0)


def _concordant(
    time: Floats, event: Floats, risk: Floats, group: NDArray[Any], weights: Floats
) -> tuple[Floats, Floats]:
    """Compares each patient who had the event with those of the same group who had it later.

    A patient censored at the time of an event counts as later. Equal risks count one half.
    """
    right, pairs = np.zeros((2, *weights.shape))
    events = np.flatnonzero(event == 1)
    for start in range(0, len(events), _ROWS):
        i = events[start : start + _ROWS]
        later = (time[i, None] < time) | ((time[i, None] == time) & (event == 0))
        later &= group[i, None] == group
        order = (risk[i, None] > risk) + 0.5 * (risk[i, None] == risk)
        pairs[:, i] = weights[:, i] * (weights @ later.T)
        right[:, i] = weights[:, i] * (weights @ (order * later).T)
    return right, pairs


def survival_scores(
    cases: Mapping[str, NDArray[Any]],
    weights: Floats,
    cuts: Sequence[float],
    horizon: float | None = None,
    least: int = LEAST_EVENTS,
) -> dict[str, Floats]:
    """Measures predictions of survival.

    ``cindex`` is Harrell's: the share of comparable pairs whose order the risk predicts;
    ``cindex/uno`` weighs pairs by inverse censoring, up to the last cut. At the horizon,
    ``auroc`` separates those who had the event from those who had not, and ``brier`` is the mean
    squared error of the predicted survival; both are weighted by inverse censoring, and undefined
    (NaN) where these weights lose patients, since nobody was followed beyond the horizon.

    Sources: F. E. Harrell et al., "Evaluating the yield of medical tests", JAMA 247, 1982; H. Uno
    et al., "On the C-statistics for evaluating overall adequacy of risk prediction procedures with
    censored survival data", Statistics in Medicine 30, 2011.

    Args:
        cases: N patients by column: ``time``, ``event``, ``risk``; ``survival/CUT`` for each cut,
            without which there is no Brier score; and ``hospital`` if there are several, whose
            patients no concordance compares.
        weights: (W, N).
        cuts: Times until which survival is predicted.
        horizon: A time until the last cut; None for the middle cut.
        least: Events below which concordances are NaN.

    Returns:
        (W,) per name; ``pairs`` is the number of comparable pairs.
    """
    horizon = middle(cuts) if horizon is None else horizon
    time, event, risk = (cases[n].astype(float) for n in ("time", "event", "risk"))
    group = cases.get("hospital", np.zeros(len(time)))
    right, pairs = _concordant(time, event, risk, group, weights)
    few, total = event.sum() < least, weights.sum(1)
    known = _inverse_censoring(time, event, cuts[-1], weights) * ((time <= cuts[-1]) & (event == 1))
    factor = np.square(np.divide(known, weights, out=np.zeros(weights.shape), where=weights > 0))
    with np.errstate(divide="ignore", invalid="ignore"):
        harrell = right.sum(1) / pairs.sum(1)
        uno = (factor * right).sum(1) / (factor * pairs).sum(1)
        ipcw = _inverse_censoring(time, event, horizon, weights)
        # Those who were censored pass their weight on to those who were seen later, if any were.
        ipcw[~np.isclose(ipcw.sum(1), total, rtol=1e-6)] = np.nan
        unknown = np.full(len(weights), np.nan)
        scores = {"cindex": unknown if few else harrell, "pairs": pairs.sum(1)}
        scores |= {"cindex/uno": unknown if few else uno}
        scores[f"auroc/{horizon:g}"] = area(risk, time <= horizon, ipcw)
        if SURVIVAL.format(f"{cuts[0]:g}") in cases:
            columns = [cases[SURVIVAL.format(f"{cut:g}")] for cut in cuts]
            alive = between(np.stack([np.ones(len(time)), *columns]), cuts, horizon)
            scores[f"brier/{horizon:g}"] = (ipcw * (alive - (time > horizon)) ** 2).sum(1) / total
    return scores


def middle(cuts: Sequence[float]) -> float:
    """Returns the middle cut, the horizon by default.

    Example:
        >>> middle([1.0, 2.0, 3.0]), middle([1.0, 2.0])
        (2.0, 1.0)
    """
    return cuts[(len(cuts) - 1) // 2]


def between(curves: Floats, cuts: Sequence[float], horizon: float) -> Floats:
    """Interpolates (J + 1, N) survival at 0 and at J cuts: (N,) at a horizon until the last cut.

    Example:
        >>> between(np.array([[1.0], [0.8], [0.4]]), [10.0, 20.0], 15.0).round(3).tolist()
        [0.6]
    """
    ends = [0.0, *cuts]
    at = int(np.searchsorted(cuts, horizon))
    share = (horizon - ends[at]) / (ends[at + 1] - ends[at])
    return np.asarray(curves[at] + share * (curves[at + 1] - curves[at]))


def histogram(time: Floats, event: Floats) -> list[float]:
    """Counts the events in bins that are the same for all data, three per power of ten.

    Example:
        >>> sum(histogram(np.array([30.0, 2.0, 300.0]), np.array([1.0, 0.0, 1.0])))
        2.0
    """
    clipped = np.clip(time[event == 1], 0, _EDGES[-1])
    place = np.maximum(np.searchsorted(_EDGES, clipped, side="left") - 1, 0)
    return [float(count) for count in np.bincount(place, minlength=BINS)]


def quantile_cuts(counts: Sequence[float], intervals: int) -> list[float]:
    """Returns the ends of intervals with about the same number of events each.

    Args:
        counts: The sum of all hospitals' `histogram`.
        intervals: J.

    Returns:
        J times with four digits, increasing; within a bin events count as evenly spread. The last
        one is the upper end of the last bin with an event, and so no patient's time.

    Example:
        >>> quantile_cuts(histogram(np.array([30.0, 300.0]), np.ones(2)), 2)
        [215.4, 464.2]
    """
    total = np.cumsum([0.0, *counts])
    filled = np.flatnonzero(np.diff(total, append=total[-1]) > 0)
    ends = np.unique([*filled, *(filled + 1)])
    shares = np.arange(1, intervals + 1) / intervals * total[-1]
    return [float(f"{cut:.4g}") for cut in np.interp(shares, total[ends], _EDGES[ends])]
