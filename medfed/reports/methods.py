"""Methods on the same patients: finished runs, their seeds pooled, and what to know of them.

Runs of one method that differ only in the seed are pooled: a number is then the mean over seeds,
and its spread the sample standard deviation over seeds (n - 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from medfed.common.scores import federation_statistics
from medfed.config.sections import select
from medfed.records.folder import Run
from medfed.reports.charts import Picture
from medfed.reports.findings import Report, report_on
from medfed.reports.runs import check_same_patients, chosen_metric, pool, seed_note, without_repeats


class Cell(NamedTuple):
    """A number, and its sample standard deviation over seeds where there are several."""

    value: float
    sd: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> Cell:
        """Pools one value per seed; what the data of a seed leave undefined is no part of it.

        Seeds are a sample of those that might have been, so the standard deviation divides by their
        number less one; one seed has none. A run that has failed (infinite) is in the mean.

        Example:
            >>> Cell.of([0.5, 1.0, 1.5]), Cell.of([2.0])
            (Cell(value=1.0, sd=0.5), Cell(value=2.0, sd=None))
            >>> Cell.of([0.5, math.inf])
            Cell(value=inf, sd=None)
        """
        known = [v for v in values if not math.isnan(v)]
        if not known:
            return cls(math.nan)
        spread = len(known) > 1 and all(map(math.isfinite, known))
        return cls(float(np.mean(known)), float(np.std(known, ddof=1)) if spread else None)


def _at(content: Mapping[str, Any], metric: str, place: str) -> float:
    """A metric of a client, or a statistic over clients; NaN where there is none."""
    if place in content["clients"]:
        return float(content["clients"][place].get(metric, math.nan))
    return float(content["federation"].get(metric, {}).get(place, math.nan))


@dataclass(frozen=True)
class Method:
    """Runs that differ only in the seed, one per seed."""

    name: str
    runs: tuple[Run, ...]

    @property
    def algorithm(self) -> str:
        """The algorithm, whatever its settings."""
        return str(self.runs[0].summary["algorithm"])

    def setting(self, key: str) -> Any:
        """Returns a setting, or ``None`` where the method has no such key."""
        return select(self.runs[0].config, key)

    def over_seeds(self, read: Callable[[dict[str, Any]], float]) -> Cell:
        """Returns mean and spread over seeds of what ``read`` finds in a summary."""
        return Cell.of([float(read(run.summary)) for run in self.runs])

    def scores(self, metric: str, place: str = "mean") -> list[float]:
        """Returns a test metric per seed: of a client, or ``mean``, ``sd`` or ``worst`` of all."""
        return [_at(run.summary, metric, place) for run in self.runs]

    def score(self, metric: str, place: str = "mean") -> Cell:
        """Returns mean and spread over seeds of :meth:`scores`."""
        return Cell.of(self.scores(metric, place))

    def mean_of(self, metric: str, clients: Sequence[str]) -> Cell:
        """Returns mean and spread over seeds of the mean over some clients."""
        return self.over_seeds(
            lambda s: federation_statistics([s["clients"][c][metric] for c in clients])["mean"]
        )

    def constant(self, name: str, metric: str, place: str = "mean") -> Cell:
        """Returns what a constant predictor reaches on the cases of these runs, as `score`."""
        return Cell.of([_at(r.summary["constant"][name], metric, place) for r in self.runs])

    def ends(self, metric: str, place: str = "mean") -> tuple[float, float] | None:
        """Returns the interval of a client's metric, or of the mean, where there is one seed."""
        intervals = self.runs[0].summary.get("intervals") if len(self.runs) == 1 else None
        if intervals is None:
            return None
        of = intervals["clients"].get(place, intervals["mean"] if place == "mean" else {})
        ends = of.get(metric)
        if ends is None or len(ends) != 2 or any(map(math.isnan, ends)):
            return None
        return ends[0], ends[1]


@dataclass(frozen=True)
class Comparison:
    """Methods on the same clients.

    Attributes:
        methods: In the order in which their runs were given.
        clients: Names of the clients.
        metrics: The metrics of which the table has the clients; pictures show the first.
        report: The verdict on the methods by the first metric, and what a reader must know.
        others: The other metrics, of which it has the means.
        constants: The constant predictors that all runs have.
    """

    methods: tuple[Method, ...]
    clients: tuple[str, ...]
    metrics: tuple[str, ...]
    report: Report
    others: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()

    @property
    def deciding(self) -> tuple[str, ...]:
        """The hospitals that decide: all but those with few test patients."""
        return tuple(c for c in self.clients if c not in self.report.tasks[0][0].small)

    @property
    def metric(self) -> str:
        """The metric of the pictures."""
        return self.metrics[0]


@dataclass(frozen=True)
class Finding:
    """Further content of a comparison; empty if it does not apply to the runs.

    A new finding is a module with a function ``find``, from the comparison to this, that is named
    in :data:`medfed.reports.comparison.FINDINGS`.

    Attributes:
        sentences: For the terminal and the report.
        tables: CSV texts by the names of their files.
        pictures: By the names of their files, in the order of the report.
    """

    sentences: Sequence[str] = ()
    tables: Mapping[str, str] = field(default_factory=dict)
    pictures: Mapping[str, Picture] = field(default_factory=dict)

    def __add__(self, other: Finding) -> Finding:
        """Returns both, this one first."""
        sentences, tables = [*self.sentences, *other.sentences], {**self.tables, **other.tables}
        return Finding(sentences, tables, {**self.pictures, **other.pictures})


def compare(
    folders: Sequence[Path], metric: str | None = None, pictures: bool = False
) -> Comparison:
    """Reads runs, checks that they can be compared, and pools seeds.

    Args:
        folders: Run folders.
        metric: The metric of the pictures; ``None`` takes the one that selected the rounds.
        pictures: Whether to read the content of pictures, too.

    Raises:
        CheckpointError: If a run is unfinished or runs are not on the same patients.
        ConfigError: If the metric is unknown.
    """
    runs = [Run(folder) for folder in folders]
    check_same_patients(runs)
    runs, notes = without_repeats(runs)
    by_name, more = pool(runs)
    methods = tuple(Method(name, tuple(kept)) for name, kept in by_name.items())
    report = report_on(by_name, chosen_metric(runs, metric), pictures)
    report.notes = [*notes, *more, seed_note(by_name), *report.notes]
    first = methods[0].runs[0].summary
    measured = [next(iter(r.summary["clients"].values())) for m in methods for r in m.runs]
    known = [n for n in measured[0] if all(n in metrics for metrics in measured)]
    wanted = [metric or first["selection"][0], first["selection"][0], "dice", "iou", "iou_both"]
    metrics = tuple(n for n in dict.fromkeys(wanted) if n in known)
    others = tuple(n for n in known if n not in metrics)
    every = [r.summary.get("constant", {}) for method in methods for r in method.runs]
    constants = tuple(n for n in every[0] if all(n in own for own in every))
    return Comparison(methods, tuple(first["clients"]), metrics, report, others, constants)
