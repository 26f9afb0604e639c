"""Sets of classes and intervals that hold the truth at a chosen rate: split conformal prediction.

A case has a *misfit*: of classes 1 less the probability of its class, or 0 where that is the
likeliest; of an outcome the distance from its prediction; of a region's volume the logarithm of how
many times it is larger or smaller than predicted. A quantile of the misfits of validation patients
bounds sets and intervals for other patients. The cases of a patient share his weight (R. Dunn, L.
Wasserman and A. Ramdas, "Distribution-free prediction sets for two-layer hierarchical models",
JASA 118, 2023).

A hospital with :data:`ENOUGH` validation patients has a quantile of its own. The others share the
mean of the quantiles of hospitals with :data:`LEAST` patients or more, after the calibration: each
sends one number, as in P. Humbert et al., "One-shot federated conformal prediction", ICML 2023.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from medfed.common.scores import worst_value
from medfed.functional import points
from medfed.functional.points import Chooser, Others, Point, RegionChooser, Rows
from medfed.functional.scores import Floats

# Validation patients from which a hospital has its own quantile, if the level needs no more.
ENOUGH = 100
# Validation patients from which a hospital takes part in the quantile of the others, likewise.
LEAST = 20
SMALL = 10  # voxels added to the volumes of a ratio, so that an empty mask is no infinite misfit
Kind = Literal["classes", "outcome", "volumes"]
_SIZES: dict[Kind, str] = {"classes": "set_size", "outcome": "width", "volumes": "factor"}


def fewest(level: float, least: int) -> int:
    """Returns how many patients a finite quantile takes.

    Example:
        >>> fewest(0.9, 20), fewest(0.99, 20)
        (20, 99)
    """
    return max(least, math.ceil(level / (1 - level) - 1e-9))


def quantile(misfits: Floats, patients: NDArray[Any], level: float, exact: bool = True) -> float:
    """Returns a bound that the misfit of another patient's case keeps at the level or more often.

    Args:
        misfits: (N,) of cases.
        patients: (N,) whose they are.
        level: The rate.
        exact: Whether to take the misfit of a case, rather than to interpolate between two, which
            keeps the level on average over hospitals.

    Example:
        >>> misfits = np.arange(1.0, 20.0)
        >>> quantile(misfits, np.arange(19), 0.9), quantile(misfits, np.arange(19), 0.875, False)
        (18.0, 17.5)
    """
    _, place, counts = np.unique(patients, return_inverse=True, return_counts=True)
    order = np.argsort(misfits, kind="stable")
    shares = np.cumsum((1 / counts[place])[order]) / (len(counts) + 1)
    if not exact:
        return float(np.interp(level, shares, misfits[order]))
    return float(misfits[order][np.searchsorted(shares, level - 1e-9)])


def range_of_coverage(patients: float, level: float) -> tuple[float, float]:
    """Returns where the coverage of a quantile lies in 5 to 95 % of draws of its patients.

    Source: V. Vovk, "Conditional validity of inductive conformal predictors", ACML 2012: with n
    patients and the k-th of their misfits, each of one case, it has the law Beta(k, n + 1 - k).

    Example:
        >>> [round(end, 2) for end in range_of_coverage(100, 0.9)]
        [0.85, 0.94]
    """
    from scipy.special import betaincinv  # imported here: predictions need none

    k = math.ceil((patients + 1) * level - 1e-9)
    low, high = betaincinv(k, patients + 1 - k, [0.05, 0.95])
    return float(low), float(high)


def volumes_within(voxels: float, bound: float) -> tuple[float, float]:
    """Returns the least and the greatest volume whose misfit keeps a bound.

    Example:
        >>> [round(end, 6) for end in volumes_within(90, math.log(2))]
        [40.0, 190.0]
    """
    ratio = math.exp(bound)
    return max(0.0, (voxels + SMALL) / ratio - SMALL), (voxels + SMALL) * ratio - SMALL


def upwards(value: float) -> float:
    """Rounds up to three digits, which leave a hospital.

    Example:
        >>> upwards(0.87654), upwards(1234.0), upwards(0.0)
        (0.877, 1240.0, 0.0)
    """
    if value == 0:
        return value
    step = 10.0 ** (math.floor(math.log10(value)) - 2)
    return float(f"{math.ceil(value / step - 1e-9) * step:.3g}")


@dataclass(frozen=True)
class Covering:
    """Chooses quantiles on validation cases, beside what another chooser chooses.

    Attributes:
        level: The rate at which sets and intervals are to hold the truth.
        kind: What the truth is.
        parts: ``/REGION`` of each region; of other kinds one empty text.
        chooser: Of the threshold and the calibration, which come first; ``None``: neither.
    """

    level: float
    kind: Kind
    parts: Sequence[str] = ("",)
    chooser: Chooser | RegionChooser | None = None

    @property
    def linear(self) -> bool:
        """Whether training cases calibrate, too."""
        return self.chooser is not None and self.chooser.linear

    @property
    def levels(self) -> Sequence[float]:
        """See :attr:`RegionChooser.levels`."""
        return () if self.chooser is None else self.chooser.levels

    def choose(self, rows: Rows, training: Rows = (), others: Others = None) -> Point:
        """Returns the point of a hospital, see :meth:`Chooser.choose`, with its quantiles.

        ``quantile`` rests on so many ``patients`` of the hospital; 0: on other hospitals. It is
        missing where patients are too few or a misfit is not finite.
        """
        others, rows = others or {}, [dict(row) for row in rows]
        point = Point(level=self.level)
        if self.chooser is not None:
            point |= self.chooser.choose(rows, training, others)
            self.chooser.apply(rows, point)
        for part in self.parts:
            of = self._of(rows, part)
            patients, misfits = np.array([row["case"] for row in of]), self._misfits(of)
            count, shared = len({*patients.tolist()}), others.get(f"quantile{part}")
            enough = count >= fewest(self.level, ENOUGH)
            if not np.isfinite(misfits).all():
                continue
            if enough or (shared is None and count >= fewest(self.level, LEAST)):
                bound = upwards(quantile(misfits, patients, self.level, enough))
                point |= {f"quantile{part}": bound, f"patients{part}": float(count)}
            elif shared is not None:
                point |= {f"quantile{part}": shared, f"patients{part}": 0.0}
        return point

    def apply(self, rows: Rows, point: Point) -> dict[str, float]:
        """Adds to test cases whether the truth is covered, and how large the set or interval is.

        Returns:
            The metrics of the chooser; the share of covered cases, mean over patients; the mean
            size. NaN where the point has no quantile.
        """
        metrics = {} if self.chooser is None else self.chooser.apply(rows, point)
        size = _SIZES[self.kind]
        for part in self.parts:
            of, bound = self._of(rows, part), point.get(f"quantile{part}", math.nan)
            misfits, sizes = self._misfits(of), self._sizes(of, bound)
            covered = np.where(math.isnan(bound), math.nan, (misfits <= bound).astype(float))
            for row, *values in zip(of, covered.tolist(), sizes.tolist(), strict=True):
                row |= dict(zip(("covered", size), values, strict=True))
            for name, numbers in (("coverage", covered), (size, sizes)):
                value = _mean([row["case"] for row in of], numbers)
                lost = not np.isfinite(misfits).all() and not math.isnan(value)
                metrics[f"{name}{part}/point"] = worst_value(name) if lost else value
        return metrics

    def _of(self, rows: Rows, part: str) -> Rows:
        return [row for row in rows if row["region"] == part[1:]] if part else rows

    def _misfits(self, rows: Rows) -> Floats:
        if self.kind == "classes":
            chances, label = _chances(rows), np.array([row["label"] for row in rows], dtype=int)
            true = chances[np.arange(len(rows)), label]
            misfits: Floats = np.where(true < chances.max(1, initial=0), 1 - true, true * 0)
            return misfits
        if self.kind == "outcome":
            return np.array([abs(row["label"] - row["prediction"]) for row in rows], dtype=float)
        # The voxels of a region at its own threshold where it has one.
        predicted = [row.get("predicted/point", row["predicted"]) for row in rows]
        pairs = np.array([[row["labelled"] for row in rows], predicted], dtype=float).T
        logs: Floats = np.log(pairs.reshape(-1, 2) + SMALL)
        return np.abs(logs[:, 0] - logs[:, 1])

    def _sizes(self, rows: Rows, bound: float) -> Floats:
        if self.kind == "classes" and not math.isnan(bound):
            chances = _chances(rows)
            inside = (1 - chances <= bound) | (chances >= chances.max(1, initial=0, keepdims=True))
            sizes: Floats = inside.sum(1).astype(float)
            return sizes
        if self.kind == "volumes":
            bound = math.exp(bound)
        return np.full(len(rows), 2 * bound if self.kind == "outcome" else bound)


def _chances(rows: Rows) -> Floats:
    """The probabilities (N, K), calibrated where they are."""
    for kind in ("calibrated/", "probability/"):
        names = [n for n in (rows[0] if rows else ()) if n.startswith(kind)]
        if names:
            return np.array([[row[n] for n in names] for row in rows], dtype=float)
    return np.empty((0, 1))


def _mean(patients: Sequence[Any], values: Floats) -> float:
    """The mean over patients of the means over their cases."""
    if not patients:
        return math.nan
    _, place, counts = np.unique(patients, return_inverse=True, return_counts=True)
    return float(values @ (1 / counts[place]) / len(counts))


def common(known: Mapping[str, Point]) -> dict[str, float]:
    """Returns what all hospitals together say, see :func:`medfed.functional.points.common`.

    Example:
        >>> sent = [{"quantile": 0.9, "patients": 30.0}, {"quantile": 0.7, "patients": 60.0}]
        >>> common(dict(zip("ab", sent)))
        {'quantile': 0.767}
    """
    shared = points.common(known)
    for name in dict.fromkeys(n for point in known.values() for n in _quantiles(point)):
        quantiles = [(p[name], p[_counted(name)]) for p in known.values() if p.get(_counted(name))]
        if quantiles:
            values, patients = np.array(quantiles).T
            shared[name] = upwards(float(np.average(values, weights=patients)))
    return shared


def for_newcomer(known: Mapping[str, Point]) -> dict[str, float]:
    """Returns what the points of a finished run say to a hospital that joins later."""
    answer = points.for_newcomer(known) | _quantiles(common(known))
    for point in known.values():
        answer |= {n: v for n, v in _quantiles(point).items() if not point[_counted(n)]}
    return answer


def _quantiles(point: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in point.items() if name.startswith("quantile")}


def _counted(name: str) -> str:
    """The entry that counts the patients of a quantile."""
    return name.replace("quantile", "patients", 1)
