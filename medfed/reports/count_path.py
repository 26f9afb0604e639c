"""The number of canonical models: test metric and recovery of what was planted, against K.

Runs that differ only in ``canonical.count`` (and the seed) give a path, one for every method over
canonical models.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from medfed.federation.callbacks.evaluation import smaller_is_better
from medfed.reports.comparison import Comparison, Method
from medfed.reports.sweeps import number_of, sweeps

COUNT = "canonical.count"
_SHORTEST = 2  # numbers of models that make a path


class CountPoint(NamedTuple):
    """One run.

    Attributes:
        models: K.
        seed: The seed of the run.
        mean: Test metric of the selected round, mean over clients.
        worst: The same of the worst client.
        leading: Models that lead some client.
        adjusted_rand: To the planted groups, where there are some.
        half_l1: To the true mixtures, where they are known.
    """

    models: int
    seed: int
    mean: float
    worst: float
    leading: int | None = None
    adjusted_rand: float | None = None
    half_l1: float | None = None


@dataclass(frozen=True)
class CountPath:
    """One method with growing K.

    Attributes:
        name: The method.
        metric: The metric's name.
        points: A point per K and seed, by K.
        groups: The number of planted groups, where it is known.
    """

    name: str
    metric: str
    points: tuple[CountPoint, ...]
    groups: int | None = None

    @property
    def counts(self) -> list[int]:
        """The distinct K, ascending."""
        return sorted({p.models for p in self.points})

    def over_seeds(self, field: str) -> list[float]:
        """Returns the mean over seeds of a field of the points, for each K.

        Example:
            >>> points = [CountPoint(k, s, 0.5 * k + s, 0.0) for k in (1, 2) for s in (0, 1)]
            >>> CountPath("ppfl", "accuracy", tuple(points)).over_seeds("mean")
            [1.0, 1.5]
        """
        return [
            float(np.mean([getattr(p, field) for p in self.points if p.models == k]))
            for k in self.counts
        ]

    def describe(self) -> str:
        """Says in a sentence what more canonical models bring.

        Example:
            >>> points = [CountPoint(k, 0, v, 0.0) for k, v in ((1, 0.5), (2, 0.9), (4, 0.88))]
            >>> CountPath("ppfl", "accuracy", tuple(points)).describe()
            'Canonical models of ppfl: mean test accuracy 0.5000 (K = 1), 0.9000 (K = 2), \
0.8800 (K = 4); best at K = 2.'
        """
        means = self.over_seeds("mean")
        told = ", ".join(f"{m:.4f} (K = {k})" for k, m in zip(self.counts, means, strict=True))
        best = self.counts[int((np.argmin if smaller_is_better(self.metric) else np.argmax)(means))]
        return (
            f"Canonical models of {self.name}: mean test {self.metric} {told}; best at K = {best}."
        )


def count_paths(comparison: Comparison) -> list[CountPath]:
    """Reads a path for every method that was run with several numbers of canonical models.

    Args:
        comparison: The methods and their runs.
    """
    mixing = [m for m in comparison.methods if "memberships" in m.runs[0].summary]
    groups = [g for g in sweeps(mixing, COUNT) if len(g) >= _SHORTEST]
    names = [str(g[0].runs[0].summary["algorithm"]) for g in groups]
    return [
        _path(name if names.count(name) == 1 else f"{name} {i + 1}", group, comparison.metric)
        for i, (name, group) in enumerate(zip(names, groups, strict=True))
    ]


def to_csv(paths: Sequence[CountPath]) -> str:
    """Returns a line per method, K and seed.

    Example:
        >>> print(to_csv([CountPath("ppfl", "iou", (CountPoint(2, 0, 0.5, 0.25, 2),))]), end="")
        method,canonical_models,seed,mean_test_iou,worst_test_iou,leading,adjusted_rand,half_l1
        ppfl,2,0,0.5,0.25,2,,
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    metric = paths[0].metric
    fixed = ["method", "canonical_models", "seed", f"mean_test_{metric}", f"worst_test_{metric}"]
    writer.writerow([*fixed, "leading", "adjusted_rand", "half_l1"])
    for path in paths:
        for point in path.points:
            writer.writerow([path.name, *("" if v is None else v for v in point)])
    return text.getvalue()


def _path(name: str, methods: Sequence[Method], metric: str) -> CountPath:
    points = [
        _point(int(number_of(m, COUNT)), run.seed, run.summary, metric)
        for m in methods
        for run in m.runs
    ]
    found = methods[0].runs[0].summary["memberships"]
    return CountPath(name, metric, tuple(points), found.get("planted_groups"))


def _point(count: int, seed: int, summary: dict[str, Any], metric: str) -> CountPoint:
    scores, found = summary["federation"][metric], summary["memberships"]
    return CountPoint(
        count,
        seed,
        scores["mean"],
        scores["worst"],
        found["leading"],
        found.get("adjusted_rand"),
        found.get("half_l1"),
    )
