"""Thresholds and calibration of probabilities, chosen on a hospital's validation cases.

A *point* holds what a hospital's model needs to decide, by name: ``threshold`` of the probability
of class 1, or of a voxel's in each region (``threshold/whole``); ``slope`` and ``shift`` of the
calibration (Platt, "Probabilistic outputs for support vector machines", 1999; Guo et al., "On
calibration of modern neural networks", ICML 2017): class k has the logit ``slope * log p_k``, class
1 plus ``shift``. The slope of temperature T is 1 / T.

The shift of a hospital, its level, is drawn towards 0 as far as the hospitals' shifts are alike:
each sends its shift and the information behind it, and gets their variance back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from medfed.common.scores import rounded, worst_value
from medfed.functional import scores as measures
from medfed.functional.scores import PROBABILITY, Columns, Floats, Ints

# Validation cases of each class from which a hospital chooses a threshold; it calibrates from twice
# as many of all.
FEWEST = 5
# The variance of hospitals' shifts and logarithms of slopes where hospitals do not say it.
PRIOR = 0.3
# How many hospitals of that variance count beside those that there are, lest few hospitals by
# chance alike give up their levels: a simulation has 2 as good as or better than 0, 1 and 4.
HOSPITALS = 2
ERRORS = 1.0  # standard errors by which a threshold of a region must be better than the usual one
_STEPS = 500  # of EM
_NEVER = 1 + 2e-6  # halfway to it, a threshold is above 1 in single precision, too
Point = dict[str, float]
Others = Mapping[str, float] | None  # what all hospitals together say, see `common`
Rule = str | Mapping[str, float]  # see `choose_threshold`
Rows = Sequence[dict[str, Any]]  # a meter's table of cases


def choose_threshold(scores: Floats, positive: NDArray[np.bool_], rule: Rule) -> float:
    """Returns a threshold halfway between two scores."""
    counts = measures.accepted(scores, positive, np.ones((1, len(scores))))
    right, wrong = (part[0] / part[0, -1] for part in counts)
    if isinstance(rule, str):
        at = int(np.argmax(right - wrong))
    elif "sensitivity" in rule:
        at = int(np.argmax(right >= rule["sensitivity"] - 1e-9))
    else:
        at = int(np.flatnonzero(1 - wrong >= rule["specificity"] - 1e-9)[-1])
    top = 1.0 if scores.max() < 1 else _NEVER
    edges = np.concatenate([[top], np.unique(scores)[::-1], [0.0]])
    return float(edges[at] + edges[at + 1]) / 2


def fit_calibration(probs: Floats, label: Ints, method: str, variance: float = PRIOR) -> Point:
    """Fits a calibration by maximum likelihood, less what it costs to leave the probabilities.

    The cost of a shift a is a² / 2τ², that of a slope b is (log b)² / 2τ²: so few cases change
    little.
    """
    from scipy.optimize import minimize  # imported here: predictions need none

    free, each = np.array([method != "shift", method != "temperature"]), np.ones((1, len(label)))

    def point(at: Floats) -> Point:
        log_slope, shift = (at * free).tolist()
        return {"slope": math.exp(log_slope), "shift": shift}

    def cost(at: Floats) -> float:
        final = measures.proper_scores(calibrated(probs, point(at)), label, each)
        return len(label) * float(final["log_loss"][0]) + float(at @ at) / (2 * variance)

    options = {"gtol": 1e-9, "ftol": 1e-15}
    fitted = point(minimize(cost, np.zeros(2), method="L-BFGS-B", options=options).x)
    if method == "shift":
        fitted["information"] = float(calibrated(probs, fitted).prod(1).sum())
    return fitted


def variance_of_shifts(points: Iterable[Mapping[str, float]]) -> float | None:
    """Estimates τ², the variance of hospitals' shifts around 0, by EM over two numbers of each.

    Each hospital fitted its shift a with τ² = :data:`PRIOR`. Where its likelihood is about normal,
    of information I, its own best shift is a (1 + 1 / (PRIOR I)).

    Example:
        >>> points = [{"shift": a, "information": 1e6} for a in (-1.0, 1.0, -1.0, 1.0)]
        >>> variance_of_shifts(points)  # (4 + 2 * 0.3) / (4 + 2)
        0.7667
    """
    pairs = [(p["shift"], p["information"]) for p in points if p.get("information")]
    if not pairs:
        return None
    shift, information = np.array(pairs).T
    weighted, variance = shift * (information + 1 / PRIOR), PRIOR  # own is times the information
    for _ in range(_STEPS):
        spread = 1 / (information + 1 / variance)
        total = float(((spread * weighted) ** 2 + spread).sum())
        variance = (total + HOSPITALS * PRIOR) / (len(pairs) + HOSPITALS)
    return rounded(variance)


def calibrated(probs: Floats, point: Mapping[str, float]) -> Floats:
    """Returns probabilities ``(N, K)`` calibrated by a point, if it has a slope.

    Example:
        >>> calibrated(np.array([[0.2, 0.8]]), {"slope": 2.0, "shift": 0.0}).round(3)
        array([[0.059, 0.941]])
    """
    if "slope" not in point:
        return probs
    terms = point["slope"] * np.log(np.maximum(probs, np.finfo(float).tiny))
    terms[:, 1] += point["shift"]
    odds = np.exp(terms - terms.max(1, keepdims=True))
    return np.asarray(odds / odds.sum(1, keepdims=True))


@dataclass(frozen=True)
class Chooser:
    """Chooses points on validation cases, and measures test cases there.

    Attributes:
        classes: K.
        rule: See :func:`choose_threshold`, of two classes; ``None``: no threshold.
        method: See :func:`fit_calibration`; ``None``: no calibration.
        linear: Whether models are linear: training cases then tell their level, too.
    """

    levels: ClassVar[Sequence[float]] = ()  # none at which meters count
    classes: int
    rule: Rule | None
    method: str | None = None
    linear: bool = False

    def choose(self, rows: Rows, training: Rows = (), others: Others = None) -> Point:
        """Returns the point of a hospital; empty if its cases are too few, or not usable.

        Args:
            rows: Validation cases.
            training: Training cases, which calibrate, too.
            others: What all hospitals together say, see :func:`common`.

        Example:
            >>> Chooser(2, "youden").choose([], others={"threshold": 0.25})
            {'threshold': 0.25, 'pooled': 1.0}
        """
        (probs, label), others, point = self._cases(rows), others or {}, Point()
        fitted = self._cases([*rows, *training])
        if np.isnan(fitted[0]).any():
            return {}
        if self.method and len(fitted[1]) >= 2 * FEWEST:
            variance = others.get("variance", PRIOR)
            point = fit_calibration(*fitted, self.method, variance) | {"variance": variance}
        if self.rule and np.bincount(label, minlength=2).min() >= FEWEST:
            scores = calibrated(probs, point)[:, 1]
            point["threshold"] = choose_threshold(scores, label == 1, self.rule)
        elif "threshold" in others:
            point |= {"threshold": others["threshold"], "pooled": 1.0}
        return point

    def apply(self, rows: Rows, point: Point) -> dict[str, float]:
        """Adds decisions and calibrated probabilities to test cases; returns their metrics."""
        probs, label = self._cases(rows)
        final, weights = calibrated(np.nan_to_num(probs), point), np.ones((1, len(rows)))
        metrics: dict[str, Floats] = {}
        if self.rule:
            decision = (final[:, 1] >= point.get("threshold", 0.5)).astype(int)
            for row, made in zip(rows, decision.tolist(), strict=True):
                row["decision"] = made
            metrics |= measures.decided(decision, label, weights)
        if self.method:
            for row, probabilities in zip(rows, final.tolist(), strict=True):
                row |= {f"calibrated/{k}": p for k, p in enumerate(probabilities)}
            after = measures.proper_scores(final, label, weights)
            metrics |= {f"{n}/calibrated": values for n, values in after.items()}
        failed = np.isnan(probs).any()
        plain = {n: float(v[0]) for n, v in metrics.items()}
        return {n: worst_value(n) if failed and v == v else v for n, v in plain.items()}

    def _cases(self, rows: Rows) -> tuple[Floats, Ints]:
        names = [PROBABILITY.format(k) for k in range(self.classes)]
        probs = np.array([[row[n] for n in names] for row in rows], dtype=float)
        return probs.reshape(-1, self.classes), np.array([r["label"] for r in rows], dtype=np.int64)


# The thresholds among which validation chooses those of regions.
LEVELS = tuple(k / 20 for k in range(1, 20))
AT_POINT = ("true_positive/point", "predicted/point")


@dataclass(frozen=True)
class RegionChooser:
    """Chooses the threshold of each region by the Dice of validation cases.

    A threshold is worth the mean gain of Dice over the usual one, less :data:`ERRORS` standard
    errors of this mean over cases. So the usual one stays unless validation can tell.

    Attributes:
        regions: Their names.
        usual: The threshold of the model.
        measure: From columns of cases and weights to metrics.
    """

    linear: ClassVar[bool] = False
    regions: Sequence[str]
    usual: float
    measure: Callable[[Columns, Floats], dict[str, Floats]]

    @property
    def levels(self) -> tuple[float, ...]:
        """The thresholds at which the meters of cases count."""
        return tuple(sorted({*LEVELS, self.usual}))

    def choose(self, rows: Rows, training: Rows = (), others: Others = None) -> Point:
        """Returns a hospital's thresholds of the regions with :data:`FEWEST` validation cases."""
        point, usual = Point(), self.levels.index(self.usual)
        for region in self.regions:
            cases = [row for row in rows if row["region"] == region and "counts" in row]
            if len(cases) < FEWEST:
                continue
            hits, predicted = np.array([row["counts"] for row in cases], dtype=float).T  # (G, N)
            voxels = predicted + [row["labelled"] for row in cases]
            dice = np.where(voxels > 0, 2 * hits / np.maximum(voxels, 1), 1.0)
            gains = dice - dice[usual]
            error = gains.std(1, ddof=1) / math.sqrt(len(cases))
            best = int(np.argmax(gains.mean(1) - ERRORS * error))
            gains_more = gains[best].mean() > ERRORS * error[best]
            point[f"threshold/{region}"] = self.levels[best if gains_more else usual]
        return point

    def apply(self, rows: Rows, point: Point) -> dict[str, float]:
        """Adds the overlaps at the thresholds to test cases; returns their metrics."""
        nothing = [(0, 0)] * len(self.levels)  # of a model that has failed
        failed = any("counts" not in row for row in rows)
        for row in rows:
            at = self.levels.index(point.get(f"threshold/{row['region']}", self.usual))
            row |= zip(AT_POINT, row.pop("counts", nothing)[at], strict=True)
        if not rows:
            return dict.fromkeys(at_point(self.regions), math.nan)
        columns = {n: np.array([row[n] for row in rows]) for n in rows[0]}
        scores = self.measure(columns, np.ones((1, len(rows))))
        values = {n: float(scores[n][0]) for n in at_point(self.regions)}
        return {n: worst_value(n) if failed and v == v else v for n, v in values.items()}


def at_point(regions: Sequence[str]) -> list[str]:
    """Returns the names of the metrics at chosen thresholds.

    Example:
        >>> at_point(["whole"])[:2]
        ['iou/point', 'iou/whole/point']
    """
    of_kind = (("iou", "dice", "dice_case"), ("", *(f"/{region}" for region in regions)))
    return [f"{kind}{region}/point" for kind in of_kind[0] for region in of_kind[1]]


def common(points: Mapping[str, Point]) -> dict[str, float]:
    """Returns what all hospitals together say, by which each then chooses its point.

    Args:
        points: What each chose alone.

    Returns:
        ``variance``, see :func:`variance_of_shifts`; ``threshold``, the median, for hospitals with
        too few cases for one of their own. Either may be missing.

    Example:
        >>> common({"a": {"threshold": 0.25}, "b": {}})
        {'threshold': 0.25}
    """
    rounds = [{n: rounded(v) for n, v in point.items()} for point in points.values()]
    thresholds = [point["threshold"] for point in rounds if "threshold" in point]
    variance = variance_of_shifts(rounds)
    result = {} if variance is None else {"variance": variance}
    return result | ({"threshold": float(np.median(thresholds))} if thresholds else {})


def for_newcomer(points: Mapping[str, Point]) -> dict[str, float]:
    """Returns what the points of a finished run say to a hospital that joins later.

    Example:
        >>> for_newcomer({"a": {}, "b": {"shift": 0.5, "variance": 0.25}})
        {'variance': 0.25}
    """
    return next(({"variance": p["variance"]} for p in points.values() if "variance" in p), {})
