"""Runs that differ in one number alone: the paths of its test metric, and what they show.

Any number of a configuration makes a path: one method with the growing number, a point for each
run. Beside the metric stands what else changes with it: how well memberships recover planted
groups or mixtures, how far personal models are apart that a graph joins (Figure 2 of the pFedNet
paper), and what all clients send in a round (Figure 8). The first transfer of weights is dense, so
bytes are those of the median round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from medfed.common.scores import label_of, over_seeds
from medfed.common.untrusted import read_checkpoint, reading
from medfed.config.sections import select
from medfed.records.folder import Run
from medfed.reports.charts import Picture, curves, legend, looks_in_order, panels
from medfed.reports.findings import Report
from medfed.reports.runs import differences, grouped, value_at
from medfed.standalone.errors import CheckpointError
from medfed.standalone.files import csv_text

DELIVERY = "deliver"  # of the result, once, after the last round
# What the sentences call a number; another one has its key.
NAMES = {
    "algorithm.bits": "Bits per weight",
    "algorithm.strength": "Coupling λ",
    "canonical.count": "Canonical models",
    "channel.up.cer.gamma": "CER's strength γ before the codec",
}
MEASURED = {
    "adjusted_rand": "adjusted Rand index to the planted groups",
    "half_l1": "half L1 distance to the true mixtures",
    "coupling": "distances of personal models over the edges of the graph, last round",
    "kilobytes_up": "kilobytes up per round",
    "kilobytes_down": "kilobytes down per round",
}


class Point(NamedTuple):
    """One run: the number, the seed and the scores by name; None where one is unknown."""

    x: float
    seed: int
    scores: Mapping[str, float | None]


@dataclass(frozen=True)
class Path:
    """One method with a growing number."""

    name: str
    metric: str  # the metric's name
    points: tuple[Point, ...]  # a point per value and seed, by value
    # The number of groups by which the data were made, where it is known.
    planted: float | None = None

    @property
    def values(self) -> list[float]:
        """The distinct values, ascending."""
        return sorted({p.x for p in self.points})

    def over_seeds(self, score: str) -> list[float]:
        """Returns the mean over seeds of a score, for each value."""
        return [
            float(np.mean([p.scores[score] for p in self.points if p.x == x]))  # type: ignore[arg-type]
            for x in self.values
        ]

    def describe(self, key: str) -> str:
        """Says in a sentence what the number brings."""
        means, values = self.over_seeds("mean"), [f"{x:g}" for x in self.values]
        text = ", ".join(f"{m:.4f} ({x})" for x, m in zip(values, means, strict=True))
        for score in extra_scores([self]):
            more = zip(values, self.over_seeds(score), strict=True)
            text += f"; {MEASURED[score]} " + ", ".join(f"{v:.4g} ({x})" for x, v in more)
        return f"{NAMES.get(key, key)} of {self.name}: mean test {self.metric} {text}."


def extra_scores(paths: Sequence[Path]) -> list[str]:
    """Returns what is known of all runs beside the metric, and changes with the number."""
    scores = {n: [[p.scores.get(n) for p in path.points] for path in paths] for n in MEASURED}
    return [
        name
        for name, rows in scores.items()
        if all(v is not None for row in rows for v in row) and any(len({*row}) > 1 for row in rows)
    ]


def paths_of(report: Report) -> dict[str, list[Path]]:
    """Reads, by the key of each number in which alone some methods differ, their paths."""
    first, metric = {n: runs[0] for n, runs in report.runs.items()}, report.tasks[0][0].metric
    numbers = {
        frozenset(pair): number_of(*(first[name] for name in pair))
        for pair in combinations(first, 2)
        if len({first[name].summary["algorithm"] for name in pair}) == 1
    }
    paths = {}
    for key in sorted(filter(None, {*numbers.values()})):
        alike = grouped(first, lambda a, b, k=key: numbers.get(frozenset((a, b))) == k)  # type: ignore[misc]
        groups = sorted((g for g in alike if len(g) > 1), key=len, reverse=True)
        # The words that all names of a group have.
        words = [[name.split() for name in g] for g in groups]
        names = [" ".join(w for w in of[0] if all(w in name for name in of)) for of in words]
        paths[key] = [
            _path(
                name if names.count(name) == 1 else f"{name} {i + 1}",
                key,
                [run for method in g for run in report.runs[method]],
                metric,
            )
            for i, (name, g) in enumerate(zip(names, groups, strict=True))
        ]
    return paths


def number_of(one: Run, other: Run) -> str:
    """Returns the key of the only number in which two runs differ; empty if there is none."""
    keys = differences(one, other)
    pairs = [(select(one.config, key), select(other.config, key)) for key in keys]
    numbers = all(type(value) in (int, float) for pair in pairs for value in pair)
    return keys[-1] if numbers and len({*pairs}) == 1 else ""


def _path(name: str, key: str, runs: Sequence[Run], metric: str) -> Path:
    points, planted = [], None
    for run in sorted(runs, key=lambda run: float(select(run.config, key))):
        known = measured(run)
        planted = known.get("planted_groups")
        scores: dict[str, Any] = {score: known.get(score) for score in MEASURED}
        scores |= {e: value_at(run.summary, metric, e, run.clients) for e in ("mean", "worst")}
        points.append(Point(float(select(run.config, key)), run.seed, scores))
    return Path(name, metric, tuple(points), planted)


def measured(run: Run) -> dict[str, Any]:
    """Returns what is known of a run beside its metrics: memberships, kilobytes, coupling."""
    sums: dict[str, Counter[int]] = {"up": Counter(), "down": Counter()}
    for entry in run.ledger.entries:
        if entry.phase != DELIVERY and entry.round >= 0:
            sums[entry.direction][entry.round] += entry.bytes
    rounds = range(run.summary["rounds"])
    known: dict[str, Any] = dict(run.summary.get("memberships", {}))
    for way, count in sums.items():
        known[f"kilobytes_{way}"] = float(np.median([count[n] for n in rounds] or [0])) / 1000
    return known | ({"coupling": coupling(run)} if run.summary["algorithm"] == "pfednet" else {})


def coupling(run: Run) -> float:
    """Returns Σ_E ‖z_i − z_j‖_p of the personal models of a run of pFedNet after its last round."""
    # Late, as no other part of a comparison needs PyTorch or Lightning.
    import torch

    from medfed.federation.lightning.checkpoint import last_whole

    if (path := last_whole(run.checkpoints)) is None:
        raise CheckpointError(f"{run.checkpoints} holds no checkpoint; repeat the run.")
    server = read_checkpoint(path)["federation"]["server"]
    with reading(path):
        z = torch.cat([t.flatten(1).double() for t in server["personal"].values()], dim=1)
        start, end = server["graph"]["edges"].T
        order = float(run.config.algorithm.p)
        return float(torch.linalg.vector_norm(z[start] - z[end], ord=order, dim=1).sum())


def to_csv(key: str, paths: Sequence[Path]) -> str:
    """Returns a line per method, value and seed."""
    keys = ("mean", "worst", *extra_scores(paths))
    scores = [f"{s}_test_{paths[0].metric}" for s in keys[:2]]
    points = ((path.name, p) for path in paths for p in path.points)
    lines = ([name, f"{p.x:g}", p.seed, *(p.scores[s] for s in keys)] for name, p in points)
    return csv_text(["method", key.rpartition(".")[2], "seed", *scores, *keys[2:]], lines)


def draw(
    key: str, paths: Sequence[Path], others: Mapping[str, Sequence[float]] | None = None
) -> Figure:
    """Draws the test metric, and what changes with it, against the number, over seeds."""
    metric = f"test {label_of(paths[0].metric)}"
    titles = {"mean": f"{metric}, mean over clients", "worst": f"{metric}, worst client"}
    titles |= {score: MEASURED[score] for score in extra_scores(paths)}
    ends = [pick(v for path in paths for v in path.values) for pick in (min, max)]
    levels = {n: dict(zip(titles, v, strict=False)) for n, v in (others or {}).items()}
    axis = f"{NAMES.get(key, key)} (equal steps)"
    if paths[0].planted and key == "canonical.count":
        axis += f", {paths[0].planted:g} planted"
    lines = {
        score: {p.name: list(zip(p.values, p.over_seeds(score), strict=True)) for p in paths}
        | {n: [(x, v[score]) for x in ends] for n, v in levels.items() if score in v}
        for score in titles
    }
    looks = looks_in_order(lines["mean"])
    figure, column = panels(len(titles))
    for axes, (score, title) in zip(column, titles.items(), strict=True):
        curves(lines[score], axis, title, looks, evenly=True, axes=axes)
    legend(figure, looks, looks)
    return figure


def find(report: Report) -> None:
    """Adds what every number changes in which alone some methods differ."""
    for key, paths in paths_of(report).items():
        path = paths[0]
        others = {
            name: [
                over_seeds([value_at(r.summary, path.metric, end, r.clients) for r in runs])[0]
                for end in ("mean", "worst")
            ]
            for name, runs in report.runs.items()
            if select(runs[0].config, key) is None
        }
        name, caption = key.replace(".", "_"), f"Test metric against {key}, mean over seeds."
        report.notes += [path.describe(key) for path in paths]
        report.tables[name] = to_csv(key, paths)
        report.pictures[name] = Picture(draw(key, paths, others), caption)
