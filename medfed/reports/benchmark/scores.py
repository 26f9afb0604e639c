"""The scores of methods on a task, read from cells; what cannot stand in a table is named."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medfed.common.errors import CheckpointError
from medfed.common.scores import federation_statistics, mean_of_known, worst_value
from medfed.run.benchmark.plan import Group
from medfed.run.benchmark.runner import Progress

Floats = NDArray[np.float64]
Result = Mapping[str, Any]


@dataclass(frozen=True)
class Scores:
    """A method on a task.

    Attributes:
        method: Its name.
        values: (S, C) the metric of every split and client, turned so that larger is better; NaN
            where a client's patients leave it undefined.
        drawn: (S, W, C) the same of patients drawn anew; W is 0 where there are none.
        sent: Bytes of a run, up and down, mean over splits.
        passes: Gradient passes of the client that took most, as a share of the budget.
        failed: Splits in which its model has failed, which count as the worst possible.
        setting: What was changed of its defaults.
    """

    method: str
    values: Floats
    drawn: Floats
    sent: tuple[float, float]
    passes: float
    failed: int
    setting: Mapping[str, float]

    @property
    def means(self) -> Floats:
        """(S,) means over the clients."""
        return mean_of_known(self.values, axis=1)

    def over_clients(self, name: str) -> float:
        """Returns a statistic over clients, mean over splits: ``worst`` or ``worst_decile``."""
        found = [federation_statistics([*row])[name] for row in self.values]
        return float(np.mean([v for v in found if not math.isnan(v)] or [math.nan]))


@dataclass
class Task:
    """A variant of a suite, with the methods that can be compared on it.

    Attributes:
        suite: The suite.
        variant: The variant.
        metric: The metric.
        falls: Whether smaller is better.
        clients: Their names.
        scores: By method.
        floor: By constant predictor the (S, C) scores, turned so that larger is better.
        overlap: Test patients per training patient, where splits are of the same patients.
        notes: What is left out, and why.
        patients: Test patients of all splits and clients together.
    """

    suite: str
    variant: str
    metric: str = ""
    falls: bool = False
    clients: tuple[str, ...] = ()
    scores: dict[str, Scores] = field(default_factory=dict)
    floor: dict[str, Floats] = field(default_factory=dict)
    overlap: float = 0.0
    notes: list[str] = field(default_factory=list)
    patients: int = 0

    @property
    def name(self) -> str:
        """The suite and the variant."""
        return f"{self.suite}/{self.variant}"

    def raw(self, value: float) -> float:
        """Returns a score as the metric has it."""
        return -value if self.falls else value


def task_of(progress: Sequence[Progress], variant: str) -> Task:
    """Reads a task.

    Args:
        progress: What there is of every method on the suite.
        variant: The task.

    Raises:
        CheckpointError: If cells of one split are not of the same patients; one is named.
    """
    task = Task(progress[0].group.suite.name, variant)
    data: dict[int, tuple[str, str]] = {}
    missing: list[str] = []
    for own in progress:
        cells = [c for c in own.wanted if c.variant == variant and c.stage == "final"]
        results = [own.final.get(c.place) for c in cells]
        found = [r for r in results if r is not None]
        if wrong := next((str(r["error"]) for r in found if "error" in r), None):
            task.notes.append(f"{own.group.method.name} cannot be used on {task.name}: {wrong}")
            continue
        if len(found) < own.group.size.splits:
            missing.append(own.group.method.name)
            continue
        for cell, result in zip(cells, found, strict=True):
            if "data" not in result:
                continue
            first = data.setdefault(cell.split, (cell.place, result["data"]))
            if first[1] != result["data"]:
                raise CheckpointError(
                    f"{cell.place} and {first[0]} are not of the same patients, so that they "
                    "cannot stand in one table; remove the one whose data are not the suite's."
                )
        _add(task, own, found)
    if missing:
        task.notes.append(
            f"Left out of {task.name}, as not all of their splits are there: {', '.join(missing)}."
        )
    return task


def _add(task: Task, own: Progress, results: Sequence[Result]) -> None:
    """Adds a method's scores, unless it has failed everywhere or exceeded its budget."""
    name, group = own.group.method.name, own.group
    whole = [r for r in results if "clients" in r]
    if not whole:
        task.notes.append(f"{name} is left out of {task.name}: {results[0].get('failed', '')}")
        return
    metric, mode = whole[0]["metric"]
    if not task.clients:
        task.metric, task.falls = metric, mode == "min"
        task.clients = tuple(whole[0]["clients"])
        counts = [r["patients"] for r in whole]
        tested = [sum(c["test"] for c in own.values()) for own in counts]
        trained = [sum(c["train"] + c["val"] for c in own.values()) for own in counts]
        task.patients = sum(tested)
        if group.suite.splits == "folds":
            task.overlap = float(np.mean(np.divide(tested, trained)))
    sign = -1 if task.falls else 1
    spent = max(max(r["passes"].values()) for r in whole) / group.budget
    if not group.is_ceiling and spent > group.suite.passes:
        task.notes.append(
            f"{name} is left out of {task.name}: it cannot keep the budget of {group.budget} "
            f"gradient passes, of which it took {spent:.2f} times as many."
        )
        return
    up, down = (float(np.mean([r["bytes"][way] for r in whole])) for way in ("up", "down"))
    limit, fedavg = group.suite.bytes, task.scores.get("fedavg")
    if not group.is_ceiling and limit is not None and fedavg and sum(fedavg.sent):
        times = (up + down) / sum(fedavg.sent)
        if times > limit:
            task.notes.append(
                f"{name} is left out of {task.name}: it cannot keep the budget of {limit:g} times "
                f"FedAvg's bytes, of which it sent {times:.2f} times as many."
            )
            return
    worst = worst_value(metric)
    rows = [
        [_number(r["clients"][c][metric]) if "clients" in r else worst for c in task.clients]
        for r in results
    ]
    task.scores[name] = Scores(
        name,
        sign * np.array(rows, dtype=float),
        sign * _drawn(results, task.clients, worst),
        (up, down),
        spent,
        len(results) - len(whole),
        group.settings[own.trial or 0],
    )
    for constant in whole[0].get("constant", {}) if name == "local" else ():
        values = [[_number(r["constant"][constant].get(c)) for c in task.clients] for r in whole]
        task.floor[constant] = sign * np.array(values, dtype=float)


def _drawn(results: Sequence[Result], clients: Sequence[str], worst: float) -> Floats:
    """(S, W, C) scores of patients drawn anew."""
    count = {len(v) for r in results for v in r.get("resampled", {}).values()}
    width = min(count, default=0)
    return np.array(
        [
            [
                [_number(v) for v in r["resampled"][c][:width]]
                if c in r.get("resampled", {})
                else [worst if "clients" not in r else math.nan] * width
                for c in clients
            ]
            for r in results
        ],
        dtype=float,
    ).transpose(0, 2, 1)


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def tasks_of(progress: Sequence[Progress]) -> list[Task]:
    """Reads all tasks, in the order of suites and variants."""
    by_suite: dict[str, list[Progress]] = {}
    for own in progress:
        by_suite.setdefault(own.group.suite.name, []).append(own)
    return [
        task_of(members, variant)
        for members in by_suite.values()
        for variant in members[0].group.variants
    ]


def group_of(progress: Sequence[Progress], suite: str) -> Group:
    """Returns a group of a suite, for what they have in common."""
    return next(own.group for own in progress if own.group.suite.name == suite)
