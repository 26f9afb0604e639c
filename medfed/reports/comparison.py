"""Compares finished runs on the same patients: methods, their seeds, and what to know of them.

Runs of one method that differ only in the seed are pooled: a number is then the mean over seeds,
and its spread the standard deviation over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from omegaconf import DictConfig, OmegaConf

from medfed.errors import CheckpointError, ConfigError, did_you_mean
from medfed.reports.runs import Run, check_same_patients, differences, read_run, without_repeats


class Cell(NamedTuple):
    """A number, and its standard deviation over seeds where there are several."""

    value: float
    sd: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> Cell:
        """Pools one value per seed; undefined ones are left out.

        Example:
            >>> Cell.of([0.5, 1.0]), Cell.of([2.0])
            (Cell(value=0.75, sd=0.25), Cell(value=2.0, sd=None))
        """
        finite = [v for v in values if math.isfinite(v)]
        if not finite:
            return cls(math.nan)
        return cls(float(np.mean(finite)), float(np.std(finite)) if len(finite) > 1 else None)


@dataclass(frozen=True)
class Method:
    """Runs that differ only in the seed, one per seed."""

    name: str
    runs: tuple[Run, ...]

    def over_seeds(self, read: Callable[[dict[str, Any]], float]) -> Cell:
        """Returns mean and spread over seeds of what ``read`` finds in a summary."""
        return Cell.of([float(read(run.summary)) for run in self.runs])

    def test(self, metric: str, client: str) -> Cell:
        """Returns a client's test metric."""
        return self.over_seeds(lambda s: s["clients"][client][metric])

    def federation(self, metric: str, statistic: str) -> Cell:
        """Returns ``mean``, ``sd`` or ``worst`` over the clients."""
        return self.over_seeds(lambda s: s["federation"][metric][statistic])


@dataclass(frozen=True)
class Comparison:
    """Methods on the same clients.

    Attributes:
        methods: In the order in which their runs were given.
        clients: Names of the clients.
        metrics: The metrics of the table; pictures show the first.
        notes: What a reader must know to judge the numbers.
    """

    methods: tuple[Method, ...]
    clients: tuple[str, ...]
    metrics: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def metric(self) -> str:
        """The metric of the pictures."""
        return self.metrics[0]


def compare(folders: Sequence[Path], metric: str | None = None) -> Comparison:
    """Reads runs, checks that they can be compared, and pools seeds.

    Args:
        folders: Run folders.
        metric: The metric of the pictures; ``None`` takes the one that selected the rounds.

    Raises:
        CheckpointError: If a run is unfinished or runs are not on the same patients.
        ConfigError: If the metric is unknown.
    """
    runs = [read_run(folder) for folder in folders]
    check_same_patients(runs)
    runs, notes = without_repeats(runs)
    methods, more = pool(runs)
    first = methods[0].runs[0].summary
    clients = tuple(first["clients"])
    known = list(next(iter(first["clients"].values())))
    for method in methods:
        for run in method.runs:
            known = [n for n in known if n in next(iter(run.summary["clients"].values()))]
    if metric is not None and metric not in known:
        raise ConfigError(
            f"Unknown metric={metric}{did_you_mean(metric, known)}; the runs have "
            f"{', '.join(known)}."
        )
    wanted = [metric or first["selection"][0], first["selection"][0], "dice", "iou"]
    metrics = tuple(n for n in dict.fromkeys(wanted) if n in known)
    notes += [*more, step_note(methods, clients), *setting_notes(methods)]
    return Comparison(methods, clients, metrics, tuple(notes))


def pool(runs: Sequence[Run]) -> tuple[tuple[Method, ...], list[str]]:
    """Gathers the seeds of each method and names the methods.

    Raises:
        CheckpointError: If no seed was run with every method.
    """
    groups: list[list[Run]] = []
    for run in runs:
        for group in groups:
            if not differences(group[0], run):
                group.append(run)
                break
        else:
            groups.append([run])
    names = method_names([g[0] for g in groups])
    seeds = [{r.seed for r in g} for g in groups]
    common = set.intersection(*seeds)
    if not common:
        told = "; ".join(f"{n}: {_listed(sorted(s))}" for n, s in zip(names, seeds, strict=True))
        raise CheckpointError(f"No seed was run with every method (seeds of {told}).")
    notes = [
        f"Seeds {_listed(sorted(s - common))} of {n} are left out: not every method has them."
        for n, s in zip(names, seeds, strict=True)
        if s - common
    ]
    if len(common) > 1:
        notes.append(f"Mean ± standard deviation over the seeds {_listed(sorted(common))}.")
    pooled = [
        Method(n, tuple(sorted((r for r in g if r.seed in common), key=lambda r: r.seed)))
        for n, g in zip(names, groups, strict=True)
    ]
    return tuple(pooled), notes


def method_names(runs: Sequence[Run]) -> list[str]:
    """Names each run by its algorithm, and by its settings where others share the algorithm."""
    families: dict[str, list[Run]] = {}
    for run in runs:
        families.setdefault(str(run.summary["algorithm"]), []).append(run)
    differing = {
        n: sorted({k for r in family[1:] for k in differences(family[0], r)})
        for n, family in families.items()
    }
    names = []
    for run in runs:
        name = str(run.summary["algorithm"])
        keys = differing[name]
        settings = dict.fromkeys(_setting(run, key, keys) for key in keys if _has(run, key))
        names.append(" ".join([name, *settings]))
    return names


def step_note(methods: Sequence[Method], clients: Sequence[str]) -> str:
    """Says whether every method took the same gradient steps on every client."""
    steps = {m.name: [m.runs[0].summary["steps"][c] for c in clients] for m in methods}
    told = {n: f"{s[0]}" if len(set(s)) == 1 else f"{min(s)} to {max(s)}" for n, s in steps.items()}
    if all(a == b for a, b in pairwise(steps.values())):
        return f"Equal budgets: {next(iter(told.values()))} gradient steps per client."
    listed = ", ".join(f"{n} {t}" for n, t in told.items())
    return f"Gradient steps per client differ: {listed}."


def setting_notes(methods: Sequence[Method]) -> list[str]:
    """Names settings outside the algorithm in which methods differ."""
    one = methods[0].runs[0]
    keys = {k for m in methods for k in differences(one, m.runs[0])}
    outside = sorted(k for k in keys if not k.startswith("algorithm."))
    if not outside:
        return []
    return [f"Settings besides the algorithm differ between methods: {', '.join(outside)}."]


def _setting(run: Run, key: str, keys: Sequence[str]) -> str:
    """Writes a setting as ``strength=0.1``, with its parent where the last name is ambiguous."""
    *parents, leaf = key.split(".")
    value = OmegaConf.select(run.config, key)
    text = f"{value:g}" if isinstance(value, float) else str(value)
    if parents[-1:] == ["client_bits"]:
        return f"client_bits={text}"  # once, however many clients have them
    if leaf == "_target_":
        return f"{'.'.join(parents)}={text.split('.')[-1]}"
    rivals = [k for k in keys if k.split(".")[-1] == leaf]
    if any(OmegaConf.select(run.config, k) != value for k in rivals):
        leaf = ".".join([*parents[-1:], leaf])
    return f"{leaf}={text}"


def _has(run: Run, key: str) -> bool:
    """Whether a run has a setting at all: another codec has other keys."""
    parent, _, leaf = key.rpartition(".")
    section = OmegaConf.select(run.config, parent) if parent else run.config
    return isinstance(section, DictConfig) and leaf in section


def _listed(values: Sequence[object]) -> str:
    return ", ".join(str(v) for v in values)
