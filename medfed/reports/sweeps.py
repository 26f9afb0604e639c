"""Runs that differ in one number alone: the paths of its test metric, and what they show.

A path is one method with a growing number, a point for each run. Where a run deals its clients
different bits per weight, the poorest of them are also compared with themselves in the run in which
all clients have these few bits. What CER saves as its strength grows is after Figure 8 of the
pFedNet paper; the first transfer of weights is dense, so bytes per round are the median round's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from medfed.common.files import csv_text
from medfed.common.scores import label_of, smaller_is_better
from medfed.records.folder import Run
from medfed.reports.charts import Picture, curves, looks_in_order, panels
from medfed.reports.methods import Cell, Comparison, Finding, Method, sweeps

_SHORTEST = 2  # values of the number that make a path
DELIVERY = "deliver"  # of the result, once, after the last round


class Point(NamedTuple):
    """One run: the number, the seed and the scores by name; None where one is unknown."""

    x: float
    seed: int
    scores: Mapping[str, float | None]


@dataclass(frozen=True)
class Path:
    """One method with a growing number.

    Attributes:
        name: The method.
        metric: The metric's name.
        points: A point per value and seed, by value.
        planted: The value by which the data were made, where it is known.
    """

    name: str
    metric: str
    points: tuple[Point, ...]
    planted: float | None = None

    @property
    def values(self) -> list[float]:
        """The distinct values, ascending."""
        return sorted({p.x for p in self.points})

    def over_seeds(self, score: str) -> list[float]:
        """Returns the mean over seeds of a score, for each value.

        Example:
            >>> points = [Point(k, s, {"mean": 0.5 * k + s}) for k in (1, 2) for s in (0, 1)]
            >>> Path("ppfl", "accuracy", tuple(points)).over_seeds("mean")
            [1.0, 1.5]
        """
        return [
            float(np.mean([p.scores[score] for p in self.points if p.x == x]))  # type: ignore[arg-type]
            for x in self.values
        ]


@dataclass(frozen=True)
class Sweep:
    """A number in which runs differ.

    Attributes:
        key: Its key in a configuration.
        name: Of its table and picture.
        column: Its column in the table.
        heading: How the sentence begins.
        value: How the sentence writes a value.
        axis: The label of the axis.
        caption: Of the picture.
        applies: Whether a method has the number; the others are horizontal lines.
        measure: What else is known of a run, by column.
        further: The columns of it that the table has; what has a title is drawn where all runs have
            it.
        said: The columns that the sentence has, in addition to the mean.
        optimum: Whether the sentence says which value is best.
        along: Keys that may have other values with the number.
    """

    key: str
    name: str
    column: str
    heading: str
    value: str
    axis: str
    caption: str
    applies: Callable[[Method], bool]
    measure: Callable[[Run], Mapping[str, Any]] = lambda run: {}
    further: Mapping[str, str | None] = field(default_factory=dict)
    said: Sequence[str] = ()
    optimum: bool = False
    along: Sequence[str] = ()

    def paths(self, comparison: Comparison) -> list[Path]:
        """Reads a path for every method that was run with several values."""
        having = [m for m in comparison.methods if self.applies(m)]
        alike = sweeps(having, self.key, lambda key: key in self.along)
        groups = [g for g in alike if len(g) >= _SHORTEST]
        # The words that all names of a group have.
        words = [[m.name.split() for m in g] for g in groups]
        names = [" ".join(w for w in of[0] if all(w in name for name in of)) for of in words]
        return [
            self._path(name if names.count(name) == 1 else f"{name} {i + 1}", g, comparison.metric)
            for i, (name, g) in enumerate(zip(names, groups, strict=True))
        ]

    def _path(self, name: str, methods: Sequence[Method], metric: str) -> Path:
        points = []
        for method in methods:
            pairs = zip(*(method.scores(metric, s) for s in ("mean", "worst")), strict=True)
            for run, (mean, worst) in zip(method.runs, pairs, strict=True):
                known = self.measure(run)
                further = {column: known.get(column) for column in self.further}
                scores = {"mean": mean, "worst": worst, **further}
                points.append(Point(float(method.setting(self.key)), run.seed, scores))
        return Path(name, metric, tuple(points), known.get("planted_groups"))

    def describe(self, path: Path) -> str:
        """Says in a sentence what the number brings.

        Example:
            >>> path = Path("ppfl", "iou", tuple(Point(k, 0, {"mean": k / 4}) for k in (1, 2)))
            >>> COUNT.describe(path)
            'Canonical models of ppfl: mean test iou 0.2500 (K = 1), 0.5000 (K = 2); best at K = 2.'
            >>> BITS.describe(path)
            'Bits per weight of ppfl: mean test iou 0.2500 (1), 0.5000 (2).'
        """
        means = path.over_seeds("mean")
        values = [self.value.format(x) for x in path.values]
        scores = ", ".join(f"{m:.4f} ({x})" for x, m in zip(values, means, strict=True))
        pick = np.argmin if smaller_is_better(path.metric) else np.argmax
        known = self.optimum and bool(np.isfinite(means).any() and not np.isnan(means).any())
        best = f"; best at {values[int(pick(means))]}" if known else ""
        for column in self.said:
            more = zip(values, path.over_seeds(column), strict=True)
            best += f"; {self.further[column]} " + ", ".join(f"{v:.4g} ({x})" for x, v in more)
        return f"{self.heading} of {path.name}: mean test {path.metric} {scores}{best}."

    def to_csv(self, paths: Sequence[Path]) -> str:
        """Returns a line per method, value and seed.

        Example:
            >>> point = Point(2.5, 0, {"mean": 0.5, "worst": 0.25})
            >>> print(BITS.to_csv([Path("qupel", "iou", (point,))]), end="")
            method,bits,seed,mean_test_iou,worst_test_iou
            qupel,2.5,0,0.5,0.25
        """
        scores = [f"{s}_test_{paths[0].metric}" for s in ("mean", "worst")]
        return csv_text(
            ["method", self.column, "seed", *scores, *self.further],
            (
                [path.name, f"{p.x:g}", p.seed, *p.scores.values()]
                for path in paths
                for p in path.points
            ),
        )

    def draw(
        self, paths: Sequence[Path], others: Mapping[str, Sequence[float]] | None = None
    ) -> Figure:
        """Draws the test metric, and what else is known of all runs, against the number.

        Args:
            paths: A path per method, drawn as the mean over seeds.
            others: Mean and worst client of methods without the number, for comparison.
        """
        metric = f"test {label_of(paths[0].metric)}"
        titles = {"mean": f"{metric}, mean over clients", "worst": f"{metric}, worst client"}
        titles |= {
            score: title
            for score, title in self.further.items()
            if title and all(p.scores[score] is not None for path in paths for p in path.points)
        }
        ends = [pick(v for path in paths for v in path.values) for pick in (min, max)]
        levels = {n: dict(zip(titles, v, strict=False)) for n, v in (others or {}).items()}
        axis = f"{self.axis} ({paths[0].planted:g} planted)" if paths[0].planted else self.axis
        lines = {
            score: {p.name: list(zip(p.values, p.over_seeds(score), strict=True)) for p in paths}
            | {n: [(x, v[score]) for x in ends] for n, v in levels.items() if score in v}
            for score in titles
        }
        looks = looks_in_order(lines["mean"])
        figure, column = panels(len(titles))
        for axes, (score, title) in zip(column, titles.items(), strict=True):
            curves(lines[score], axis, title, looks, evenly=True, axes=axes)
        return figure

    def find(self, comparison: Comparison) -> Finding:
        """Finds what the number changes."""
        if not (paths := self.paths(comparison)):
            return Finding()
        others = {
            m.name: [m.score(comparison.metric, s).value for s in ("mean", "worst")]
            for m in comparison.methods
            if not self.applies(m)
        }
        picture = Picture(self.draw(paths, others), self.caption)
        sentences = [self.describe(path) for path in paths]
        return Finding(sentences, {self.name: self.to_csv(paths)}, {self.name: picture})


BITS = Sweep(
    key="algorithm.bits",
    name="bits",
    column="bits",
    heading="Bits per weight",
    value="{:g}",
    axis="bits per quantised weight, mean over clients",
    caption="Test metric against the bits per quantised weight, mean over seeds.",
    applies=lambda method: method.setting("algorithm.bits") is not None,
)
COUNT = Sweep(
    key="canonical.count",
    name="canonical_count",
    column="canonical_models",
    heading="Canonical models",
    value="K = {:g}",
    axis="K, canonical models",
    caption="Test metric against the number of canonical models, mean over seeds.",
    applies=lambda method: "memberships" in method.runs[0].summary,
    measure=lambda run: run.summary.get("memberships", {}),
    further={
        "leading": None,
        "adjusted_rand": "adjusted Rand index to the planted groups",
        "half_l1": "half L1 distance to the true mixtures",
    },
    optimum=True,
)


def _kilobytes(run: Run) -> dict[str, float]:
    """What all clients sent in the median round, by column."""
    sums: dict[str, Counter[int]] = {"up": Counter(), "down": Counter()}
    for entry in run.ledger.entries:
        if entry.phase != DELIVERY and entry.round >= 0:
            sums[entry.direction][entry.round] += entry.bytes
    rounds = range(run.summary["rounds"])
    return {
        f"kilobytes_{way}": float(np.median([count[n] for n in rounds] or [0])) / 1000
        for way, count in sums.items()
    }


GAMMA = Sweep(
    key="channel.up.cer.gamma",
    name="communication",
    column="gamma",
    heading="CER's strength γ before the codec",
    value="γ = {:g}",
    axis="γ / mean magnitude (equal steps)",
    caption="Test metric and kilobytes of all clients in the median round against CER's γ, mean "
    "over seeds.",
    applies=lambda method: method.setting("channel.up.cer.gamma") is not None,
    measure=_kilobytes,
    further={
        "kilobytes_up": "kilobytes up per round",
        "kilobytes_down": "kilobytes down per round",
    },
    said=("kilobytes_up", "kilobytes_down"),
    along=("channel.down.cer.gamma",),
)


def find(comparison: Comparison) -> Finding:
    """Finds what more canonical models, more bits, richer partners and CER bring."""
    gains = [p.describe(comparison.metric) for p in partners(comparison)]
    paths = COUNT.find(comparison) + BITS.find(comparison)
    return paths + Finding(gains) + GAMMA.find(comparison)


class Partners(NamedTuple):
    """Clients with few bits, in company of richer ones and among themselves.

    Attributes:
        name: The method.
        poor: Bits of the poor clients.
        rich: Bits of their partners.
        clients: How many are poor.
        among_rich: Their mean test metric with the richer partners.
        among_poor: Theirs, the same clients', where all have as few bits.
        gain: The first less the second, seed by seed.
    """

    name: str
    poor: int
    rich: tuple[int, ...]
    clients: int
    among_rich: Cell
    among_poor: Cell
    gain: Cell

    def describe(self, metric: str) -> str:
        """Says in a sentence what richer partners change."""
        rich = " or ".join(str(b) for b in self.rich)
        spread = "" if self.gain.sd is None else f" ± {self.gain.sd:.4f} over seeds"
        return (
            f"Partners of {self.name}: the {self.clients} clients with {self.poor} per weight have "
            f"a mean test {metric} of {self.among_rich.value:.4f} with partners with {rich} and "
            f"{self.among_poor.value:.4f} with partners with {self.poor} "
            f"({self.gain.value:+.4f}{spread})."
        )


def partners(comparison: Comparison) -> list[Partners]:
    """Compares poor clients with richer partners and the same clients with poor partners.

    Args:
        comparison: The methods and their runs.
    """
    quantising = [m for m in comparison.methods if BITS.applies(m)]
    pairs_of_partners = []
    for group in sweeps(quantising, BITS.key, lambda key: key.startswith("algorithm.client_bits")):
        bits = [_bits_of_clients(m, comparison.clients) for m in group]
        pairs = list(zip(group, bits, strict=True))
        uniform = {min(b.values()): m for m, b in pairs if len(set(b.values())) == 1}
        pairs_of_partners += [
            _partners(m, uniform[min(b.values())], b, comparison.metric)
            for m, b in pairs
            if len(set(b.values())) > 1 and min(b.values()) in uniform
        ]
    return pairs_of_partners


def _bits_of_clients(method: Method, clients: Sequence[str]) -> dict[str, int]:
    from medfed.personalize.quantized_base import assign_bits  # late: it needs PyTorch

    config = method.runs[0].config.algorithm
    given = {str(c): int(b) for c, b in (config.client_bits or {}).items()}
    return assign_bits(float(config.bits), list(clients), given)


def _partners(mixed: Method, uniform: Method, bits: Mapping[str, int], metric: str) -> Partners:
    least = min(bits.values())
    poor = [c for c, b in bits.items() if b == least]
    with_rich, with_poor = (
        [float(np.mean([run.summary["clients"][c][metric] for c in poor])) for run in m.runs]
        for m in (mixed, uniform)
    )
    gain = [a - b for a, b in zip(with_rich, with_poor, strict=True)]
    name, rich = mixed.algorithm, tuple(sorted({*bits.values()} - {least}))
    return Partners(name, least, rich, len(poor), *map(Cell.of, (with_rich, with_poor, gain)))
