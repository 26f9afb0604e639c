"""Thresholds and calibration of class probabilities, chosen on a hospital's validation cases.

A *point* holds what a hospital's model needs to decide, by name: ``threshold`` of the probability
of class 1; ``slope`` and ``shift`` of the calibration (Platt, "Probabilistic outputs for support
vector machines", 1999; Guo et al., "On calibration of modern neural networks", ICML 2017): class
k has the logit ``slope * log p_k``, class 1 plus ``shift``. The slope of temperature T is 1 / T.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medfed.common.scores import rounded, worst_value
from medfed.functional.scores import PROBABILITY, Floats, Ints, accepted, class_scores, decided

FEWEST = 5
"""Validation cases of each class from which a hospital chooses a point; of many classes twice as
many of all."""
Point = dict[str, float]
Rows = Sequence[dict[str, Any]]
"""A meter's table of cases."""


def choose_threshold(
    scores: Floats, positive: NDArray[np.bool_], rule: str | Mapping[str, float]
) -> float:
    """Returns a threshold halfway between two scores.

    Args:
        scores: (N,) probabilities of class 1.
        positive: (N,), with both values.
        rule: ``"youden"``: the largest sum of sensitivity and specificity; ``{"sensitivity": s}``:
            the strictest threshold with at least this sensitivity; ``{"specificity": s}``: the
            loosest one with at least this specificity.

    Example:
        >>> scores, positive = np.array([0.1, 0.2, 0.3, 0.6]), np.array([0, 1, 0, 1], dtype=bool)
        >>> [round(choose_threshold(scores, positive, rule), 3)
        ...  for rule in ("youden", {"sensitivity": 0.9}, {"specificity": 0.5})]
        [0.45, 0.15, 0.15]
    """
    counts = accepted(scores, positive, np.ones((1, len(scores))))
    right, wrong = (part[0] / part[0, -1] for part in counts)
    if isinstance(rule, str):
        at = int(np.argmax(right - wrong))
    elif "sensitivity" in rule:
        at = int(np.argmax(right >= rule["sensitivity"] - 1e-9))
    else:
        at = int(np.flatnonzero(1 - wrong >= rule["specificity"] - 1e-9)[-1])
    edges = np.concatenate([[1.0], np.unique(scores)[::-1], [0.0]])
    return float(min((edges[at] + edges[at + 1]) / 2, 1 - 1e-7))


def fit_calibration(probs: Floats, label: Ints, method: str) -> Point:
    """Fits ``temperature`` or ``platt`` by maximum likelihood, without a penalty.

    Args:
        probs: (N, K).
        label: (N,).
        method: Platt's is for two classes.

    Returns:
        ``slope`` and ``shift``; empty if the best slope is infinite, as where all cases are
        right, or not above 0.

    Example:
        >>> probs = np.array([[0.9, 0.1], [0.9, 0.1], [0.9, 0.1], [0.1, 0.9]])
        >>> point = fit_calibration(probs, np.array([0, 0, 1, 1]), "temperature")
        >>> round(float(calibrated(probs, point)[0, 0]), 4)  # three of four are right
        0.75
    """
    from scipy.optimize import minimize  # late: few runs calibrate

    def point(at: Floats) -> Point:
        return {"slope": float(at[0]), "shift": float(at[1:].sum())}

    def loss(at: Floats) -> float:
        return log_loss(calibrated(probs, point(at)), label)

    start = [1.0, 0.0][: 1 + (method == "platt")]
    found = minimize(loss, start, method="L-BFGS-B", options={"gtol": 1e-9, "ftol": 1e-15})
    return point(found.x) if found.x[0] > 0 and found.fun > 1e-6 else {}


def log_loss(probs: Floats, label: Ints) -> float:
    """Returns the mean of the true classes' negative log probabilities; NaN without cases.

    Example:
        >>> round(log_loss(np.array([[0.5, 0.5]]), np.array([0])), 4)
        0.6931
    """
    with np.errstate(invalid="ignore"):
        return float(-_logs(probs)[range(len(label)), label].sum() / np.float64(len(label)))


def calibrated(probs: Floats, point: Mapping[str, float]) -> Floats:
    """Returns probabilities ``(N, K)`` calibrated by a point, if it has a slope.

    Example:
        >>> calibrated(np.array([[0.2, 0.8]]), {"slope": 2.0, "shift": 0.0}).round(3)
        array([[0.059, 0.941]])
    """
    if "slope" not in point:
        return probs
    terms = point["slope"] * _logs(probs)
    terms[:, 1] += point["shift"]
    odds = np.exp(terms - terms.max(1, keepdims=True))
    shares: Floats = odds / odds.sum(1, keepdims=True)
    return shares


def _logs(probs: Floats) -> Floats:
    logs: Floats = np.log(np.maximum(probs, np.finfo(float).tiny))
    return logs


@dataclass(frozen=True)
class Chooser:
    """Chooses points on validation cases, and measures test cases there.

    Attributes:
        classes: K.
        rule: See :func:`choose_threshold`, of two classes; ``None``: no threshold.
        method: See :func:`fit_calibration`; ``None``: no calibration.
        bins: Of the calibration error.
    """

    classes: int
    rule: str | Mapping[str, float] | None
    method: str | None = None
    bins: int = 15

    def choose(self, rows: Rows) -> Point:
        """Returns the point of validation cases; empty if they are too few, or not usable.

        Example:
            >>> Chooser(2, "youden").choose([])
            {}
        """
        probs, label = self._cases(rows)
        least = np.bincount(label, minlength=2).min() if self.classes == 2 else len(label) / 2
        if least < FEWEST or np.isnan(probs).any():
            return {}
        point = fit_calibration(probs, label, self.method) if self.method else {}
        if self.rule and (point or not self.method):
            scores = calibrated(probs, point)[:, 1]
            point["threshold"] = choose_threshold(scores, label == 1, self.rule)
        return point

    def apply(self, rows: Rows, point: Point) -> dict[str, float]:
        """Adds decisions and calibrated probabilities to test cases; returns their metrics."""
        probs, label = self._cases(rows)
        final, weights = calibrated(np.nan_to_num(probs), point), np.ones((1, len(rows)))
        metrics: dict[str, float] = {}
        if self.rule:
            decision = (final[:, 1] >= point.get("threshold", 0.5)).astype(int)
            for row, made in zip(rows, decision.tolist(), strict=True):
                row["decision"] = made
            metrics = {n: float(v[0]) for n, v in decided(decision, label, weights).items()}
        if self.method:
            for row, probabilities in zip(rows, final.tolist(), strict=True):
                row |= {f"calibrated/{k}": p for k, p in enumerate(probabilities)}
            after = class_scores(final, label, weights, self.bins)
            metrics |= {f"{n}/calibrated": float(after[n][0]) for n in ("ece", "brier")}
            losses = {"calibrated": final, "uncalibrated": probs}
            metrics |= {f"log_loss/{n}": log_loss(p, label) for n, p in losses.items()}
        if np.isnan(probs).any():  # the model has failed
            return {n: v if np.isnan(v) else worst_value(n) for n, v in metrics.items()}
        return metrics

    def _cases(self, rows: Rows) -> tuple[Floats, Ints]:
        names = [PROBABILITY.format(k) for k in range(self.classes)]
        probs = np.array([[row[n] for n in names] for row in rows], dtype=float)
        return probs.reshape(-1, self.classes), np.array([r["label"] for r in rows], dtype=np.int64)


def settled(points: Mapping[str, Point]) -> dict[str, Point]:
    """Gives clients without a point the median of the others' numbers, marked as ``pooled``.

    Example:
        >>> settled({"a": {"threshold": 0.25}, "b": {}})["b"]
        {'threshold': 0.25, 'pooled': 1.0}
    """
    known = [point for point in points.values() if point]
    names = known[0] if known else ()
    values = {n: [rounded(point[n]) for point in known if n in point] for n in names}
    pooled = {n: float(np.median(each)) for n, each in values.items()}
    return {client: point or {**pooled, "pooled": 1.0} for client, point in points.items()}
