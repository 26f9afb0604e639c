"""Metrics of weighted samples, for many weightings at once: what a bootstrap asks for.

scikit-learn and TorchMetrics measure one weighting per call, and a thousand resamples of every
client would take minutes. So each metric is defined here, once, for W weightings (W, N) of N
samples; the plain metric is that of weights of one. The tests compare each with scikit-learn's.

FROC: how many of the lesions are found, at how many false alarms per scan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medfed.common.scores import mean_of_parts

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Columns = Mapping[str, NDArray[Any]]  # of a table of cases, (N,) each

CLASS_SCORES = (
    *("accuracy", "balanced_accuracy", "auroc", "sensitivity", "specificity", "f1"),
    *("brier", "log_loss"),
)
OUTCOME_SCORES = ("rmse", "mae", "r2")
PROBABILITY = "probability/{}"  # the column of a class in a table of cases


def case_class_scores(cases: Columns, weights: Floats) -> dict[str, Floats]:
    """Measures a table of classified cases, see :func:`class_scores`.

    Args:
        cases: By column: the label, the probability of each class, and, if validation chose
            them, the ``decision`` by a threshold and the calibrated probabilities.
        weights: (W, N).
    """
    label = cases["label"].astype(np.int64)
    kinds = "probability/", "calibrated/"
    before, after = ([v for n, v in cases.items() if n.startswith(k)] for k in kinds)
    scores = class_scores(np.stack(before, axis=1), label, weights)
    if after:
        final = proper_scores(np.stack(after, axis=1), label, weights)
        scores |= {f"{name}/calibrated": values for name, values in final.items()}
    return scores | (decided(cases["decision"], label, weights) if "decision" in cases else {})


def decided(decision: NDArray[Any], label: Ints, weights: Floats) -> dict[str, Floats]:
    """Measures decisions between two classes, made by a threshold that validation chose.

    Args:
        decision: (N,) 0 or 1.
        label: (N,) 0 or 1.
        weights: (W, N).

    Example:
        >>> decided(np.array([1, 1, 0]), np.array([1, 0, 0]), np.ones((1, 3)))
        {'sensitivity/point': array([1.]), 'specificity/point': array([0.5])}
    """
    shares = {}
    for name, k in (("sensitivity/point", 1), ("specificity/point", 0)):
        with np.errstate(invalid="ignore"):
            shares[name] = weights @ ((label == k) & (decision == k)) / (weights @ (label == k))
    return shares


def proper_scores(probs: Floats, label: Ints, weights: Floats) -> dict[str, Floats]:
    """Returns ``brier`` and ``log_loss``, as :func:`class_scores` defines them."""
    with np.errstate(divide="ignore", invalid="ignore"):
        squares = np.square(probs - np.eye(probs.shape[1])[label]).sum(1) / 2
        logs = -np.log(np.maximum(probs[range(len(label)), label], np.finfo(float).tiny))
        each = {"brier": squares, "log_loss": logs}
        return {n: (weights * values).sum(1) / weights.sum(1) for n, values in each.items()}


def class_scores(probs: Floats, label: Ints, weights: Floats) -> dict[str, Floats]:
    """Measures probabilities of exclusive classes.

    Of two classes, ``sensitivity``, ``specificity`` and ``f1`` are those of class 1 where it is the
    more probable one (above 0.5). Of more, they are means over the classes that occur, each against
    the rest; see :func:`medfed.common.scores.mean_of_parts`. ``balanced_accuracy`` is the mean
    recall of the classes that occur, ``auroc`` the mean of one class against the rest (of two: that
    of class 1).

    ``brier`` is half the mean squared distance between the probabilities and the truth, from 0 to
    1; of two classes that is the mean of ``(p - y)^2``. ``log_loss`` is the mean of the true
    classes' negative logarithms. No calibration error of bins is among them: of 20 cases it is
    about 0.2 for the true probabilities.

    Args:
        probs: (N, K).
        label: (N,) class numbers.
        weights: (W, N), 0 or more.

    Returns:
        (W,) per name. NaN where the labels leave it undefined, whatever is predicted: everything
        without samples, sensitivity and F1 of two classes without class 1, specificity without
        class 0, and of one class alone balanced accuracy, AUROC and all means over classes.
    """
    k = probs.shape[1]
    confusion = sums(weights, label * k + probs.argmax(1), k * k).reshape(-1, k, k)
    hits, true = np.einsum("wkk->wk", confusion), confusion.sum(2)
    chosen, total = confusion.sum(1), weights.sum(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        present, occurs = true > 0, np.isin(range(k), label)

        def macro(values: Floats) -> Floats:
            """The mean over the classes that occur; undefined of one, where it says nothing."""
            mean = mean_of_parts(np.where(present, values, np.nan), occurs, 1)
            return mean if occurs.sum() > 1 else np.full(len(weights), np.nan)

        recall, f1 = hits / true, 2 * hits / (true + chosen)
        specificity = 1 - (chosen - hits) / (total[:, None] - true)
        if k == 2:
            rates = recall[:, 1], recall[:, 0], np.where(present[:, 1], f1[:, 1], np.nan)
            auroc = area(probs[:, 1], label == 1, weights)
        else:
            rates = macro(recall), macro(specificity), macro(f1)
            auroc = macro(np.stack([area(probs[:, c], label == c, weights) for c in range(k)], 1))
        values = hits.sum(1) / total, macro(recall), auroc, *rates
    values = *values, *proper_scores(probs, label, weights).values()
    return dict(zip(CLASS_SCORES, values, strict=True))


def finding_scores(cases: Columns, findings: Sequence[str], weights: Floats) -> dict[str, Floats]:
    """Returns the AUROC of each finding (``auroc/NAME``), and the mean of those with both labels.

    Args:
        cases: N known cells by column: ``finding``, ``label`` (0 or 1) and ``probability``.
        findings: Names of all findings.
        weights: (W, N).
    """
    each, occurs = {}, []
    for name in findings:
        rows = cases["finding"] == name
        probability, positive = cases["probability"][rows].astype(float), cases["label"][rows] == 1
        each[f"auroc/{name}"] = area(probability, positive, weights[:, rows])
        occurs.append(len({*positive.tolist()}) == 2)
    parts = np.stack([*each.values()])
    return {"auroc": mean_of_parts(parts, np.array(occurs)[:, None], 0), **each}


def outcome_scores(predicted: Floats, true: Floats, weights: Floats) -> dict[str, Floats]:
    """Measures predictions (N,) of a continuous outcome, by weights (W, N), 0 or more.

    Returns:
        (W,) each: ``rmse`` and ``mae`` in that unit; ``r2``, 1 for a perfect prediction, 0 for the
        samples' own mean, NaN where all outcomes are equal.
    """
    error = predicted - true
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = weights / weights.sum(1, keepdims=True)
        squares = (shares * error**2).sum(1)
        centred = true - (shares * true).sum(1, keepdims=True)
        used = weights > 0
        least = np.where(used, true, np.inf).min(1)
        spread = least < np.where(used, true, -np.inf).max(1)
        r2 = 1 - squares / (shares * centred**2).sum(1)
    values = np.sqrt(squares), (shares * np.abs(error)).sum(1), np.where(spread, r2, np.nan)
    return dict(zip(OUTCOME_SCORES, values, strict=True))


def area(scores: Floats, positive: NDArray[np.bool_], weights: Floats) -> Floats:
    """Returns the area under the ROC curve; NaN where positives or negatives have no weight.

    Args:
        scores: (N,) higher for positives.
        positive: (N,).
        weights: (W, N).

    Returns:
        (W,).

    Example:
        >>> scores, positive = np.array([0.1, 0.4, 0.4, 0.8]), np.array([False, True, False, True])
        >>> area(scores, positive, np.array([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.0]])).tolist()
        [0.875, 0.75]
    """
    right, wrong = accepted(scores, positive, weights)
    with np.errstate(divide="ignore", invalid="ignore"):
        area = (np.diff(wrong) * (right[:, 1:] + right[:, :-1])).sum(1) / 2
        share: Floats = area / (right[:, -1] * wrong[:, -1])
    return share


def accepted(scores: Floats, positive: NDArray[np.bool_], weights: Floats) -> tuple[Floats, Floats]:
    """Returns the weight (W, N) of what each threshold accepts, from the strictest on.

    Returns:
        (W, U + 1) positives and negatives: 0, then those of the highest score, then of the two
        highest, and so on over all U distinct scores.
    """
    order = np.argsort(-scores, kind="stable")
    starts = np.flatnonzero(np.diff(scores[order], prepend=np.nan))
    both = np.zeros((2, len(weights), len(starts) + 1))
    for out, of in zip(both, (positive, ~positive), strict=True):
        np.cumsum(_pieces((weights * of)[:, order], starts), axis=1, out=out[:, 1:])
    return both[0], both[1]


def sums(values: Floats, group: Ints, count: int) -> Floats:
    """Sums columns by group, in a fixed order, so that equal values give equal bits.

    Args:
        values: (W, N).
        group: (N,) numbers below `count`.
        count: Of the groups.

    Returns:
        (W, count).

    Example:
        >>> sums(np.array([[1.0, 2.0, 4.0]]), np.array([2, 0, 2]), 3).tolist()
        [[2.0, 0.0, 5.0]]
    """
    out = np.zeros((len(values), count))
    order = np.argsort(group, kind="stable")
    starts = np.flatnonzero(np.diff(group[order], prepend=-1))
    out[:, group[order][starts]] = _pieces(values[:, order], starts)
    return out


def _pieces(values: Floats, starts: Ints) -> Floats:
    """(W, n) sums from each start to the next."""
    return np.add.reduceat(values, starts, axis=1) if len(starts) else values


# False positives per scan at which LUNA16 reads the sensitivity.
ALARMS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
CPM = ("cpm", *(f"cpm/{alarm:g}" for alarm in ALARMS))


def sensitivities(
    scores: Floats,
    positive: NDArray[np.bool_],
    weights: Floats,
    scans: Floats,
    alarms: tuple[float, ...] = ALARMS,
    lesions: Floats | None = None,
) -> Floats:
    """Returns the sensitivity at given numbers of false positives per scan.

    Between two thresholds it is interpolated, as LUNA16's evaluation does. Beyond the last one,
    where all are accepted, it stays: at 1 for candidates, which hold all lesions, and at the share
    of the lesions that are found for detections. Equal scores are accepted together.

    Source: A. A. A. Setio et al., "Validation, comparison, and combination of algorithms for
    automatic detection of pulmonary nodules in computed tomography images: The LUNA16 challenge",
    Medical Image Analysis 42, 2017.

    Args:
        scores: (N,) of the candidates or detections.
        positive: (N,) which of them are lesions.
        weights: (W, N).
        scans: (W,) number of scans, those without a candidate among them.
        alarms: A of them.
        lesions: (W,) number of lesions, the missed ones among them; None: no other than the
            positive candidates.

    Returns:
        (W, A); NaN where there is no lesion.

    Example:
        >>> scores, positive = np.array([0.9, 0.8, 0.7, 0.6]), np.array([True, False, True, False])
        >>> sensitivities(scores, positive, np.ones((1, 4)), np.array([2.0]), (0.25, 0.5, 1.0))
        array([[0.5, 1. , 1. ]])
    """
    right, wrong = accepted(scores, positive, weights)
    with np.errstate(divide="ignore", invalid="ignore"):
        every = right[:, -1:] if lesions is None else lesions[:, None]
        sensitivity, alarm = right / every, wrong / scans[:, None]
        columns = []
        for wanted in alarms:
            # The last threshold with no more alarms, and the next one.
            left = (alarm <= wanted).sum(1) - 1
            next_one = np.minimum(left + 1, alarm.shape[1] - 1)
            places, curves = (left, next_one), (alarm, sensitivity)
            (x0, x1), (y0, y1) = ([t[np.arange(len(t)), i] for i in places] for t in curves)
            share = np.where(x1 > x0, (wanted - x0) / (x1 - x0), 0.0)
            columns.append(y0 + share * (y1 - y0))
    return np.stack(columns, axis=1)


def froc_scores(
    scores: Floats, positive: NDArray[np.bool_], weights: Floats, scans: Floats
) -> dict[str, Floats]:
    """Returns ``cpm``, LUNA16's mean sensitivity over :data:`ALARMS`, and each (``cpm/0.5``)."""
    curve = sensitivities(scores, positive, weights, scans)
    return dict(zip(CPM, [curve.mean(1), *curve.T], strict=True))
