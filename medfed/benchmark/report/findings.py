"""The findings of a benchmark: sentences for people, and all numbers for programs.

The dials of suites: what is reached from hospitals alike to hospitals in conflict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from medfed.benchmark.report.charts import SERIES
from medfed.benchmark.report.claims import JudgedClaim, sentence
from medfed.benchmark.report.scores import Task, tasks_of
from medfed.benchmark.report.verdicts import (
    NOT_TOLD_APART,
    REFERENCES,
    Verdict,
    answer,
    ceiling_of,
    floor_of,
    judge,
    plain,
    ranks_of,
    short_of,
)
from medfed.benchmark.runner import Progress
from medfed.benchmark.suite import CEILINGS
from medfed.records.cells import libraries

Judged = tuple[Task, Mapping[str, Verdict]]


def crossings(
    dial: Sequence[float], first: Sequence[float], second: Sequence[float]
) -> list[float]:
    """Returns where two curves cross, between measured points along straight lines.

    Args:
        dial: Where they were measured, in growing order.
        first: One curve.
        second: The other.

    Example:
        >>> crossings([0, 1, 2], [0.9, 0.7, 0.5], [0.6, 0.6, 0.6])
        [1.5]
    """
    gaps = [a - b for a, b in zip(first, second, strict=True)]
    found = []
    for (x, a), (y, b) in zip(
        zip(dial, gaps, strict=True), list(zip(dial, gaps, strict=True))[1:], strict=False
    ):
        if a * b < 0:
            found.append(round(x + (y - x) * a / (a - b), 6))
    return found


def dials_of(progress: Sequence[Progress], tasks: Sequence[Judged]) -> dict[str, Any]:
    """By suite the means of methods over its dial, and where they cross the references."""
    found: dict[str, Any] = {}
    for suite in dict.fromkeys(task.suite for task, _ in tasks):
        settings = next(p.group.suite for p in progress if p.group.suite.name == suite)
        places = [
            (dial, task)
            for task, _ in tasks
            if task.suite == suite and (dial := settings.variants[task.variant].dial) is not None
        ]
        if len(places) < 2:
            continue
        places.sort(key=lambda place: place[0])
        at = [place for place, _ in places]
        names = [n for n in places[0][1].scores if all(n in t.scores for _, t in places)]
        curves = {n: [float(t.scores[n].means.mean()) for _, t in places] for n in names}
        pairs = [(n, r) for r in REFERENCES for n in names if r in names and n not in REFERENCES]
        pairs += [("fedavg", "local")] * ({*REFERENCES} <= {*names})
        crossed = {f"{n} × {r}": crossings(at, curves[n], curves[r]) for n, r in pairs}
        found[suite] = {
            "dial": settings.dial,
            "at": at,
            "curves": {n: [places[0][1].raw(v) for v in c] for n, c in curves.items()},
            "crossings": {pair: where for pair, where in crossed.items() if where},
            "crossed": {
                pair: [(x, places[0][1].raw(float(np.interp(x, at, curve)))) for x in where]
                for pair, where in crossed.items()
                if where and (curve := curves[pair.rpartition(" × ")[2]])
            },
        }
    return found


def colours_of(dials: Mapping[str, Any]) -> dict[str, str]:
    """Returns a colour for every method, the same on all dials, and unlike all others of a dial.

    Args:
        dials: By suite, with ``curves`` by method.

    Example:
        >>> found = colours_of({"x": {"curves": {"a": [], "b": []}}, "y": {"curves": {"c": []}}})
        >>> found["a"] != found["b"], found["a"] == found["c"]
        (True, True)
    """
    found: dict[str, str] = {}
    for name in dict.fromkeys(n for dial in dials.values() for n in dial["curves"]):
        drawn = [dial["curves"] for dial in dials.values() if name in dial["curves"]]
        beside = {found[other] for curves in drawn for other in curves if other in found}
        free = [colour for colour in SERIES if colour not in beside]
        found[name] = free[0] if free else SERIES[len(found) % len(SERIES)]
    return found


def sentences_of(dials: Mapping[str, Any]) -> list[str]:
    """Says where FedAvg and local training cross."""
    told = []
    for suite, dial in dials.items():
        if at := dial["crossings"].get("fedavg × local"):
            where = ", ".join(f"{x:.3g}" for x in at)
            told.append(
                f"{suite}: FedAvg and local training cross at {where} of the dial ({dial['dial']})."
            )
    return told


@dataclass
class Told:
    """What a benchmark, or a comparison of a user's own runs, found.

    Attributes:
        size: How much was computed.
        tasks: Each task with the verdicts of its methods.
        answers: By task: which method, and who would be harmed.
        notes: What else is to be said: what is left out, what crosses.
        dials: By suite the curves over its dial, and where they cross.
        ranks: See :func:`medfed.benchmark.report.verdicts.ranks_of`.
        claims: Those of which something was measured.
        commands: What repeats it.
        libraries: Versions, by name.
        title: What the page is of.
        remark: What holds for all that is said.
    """

    size: str = ""
    tasks: list[Judged] = field(default_factory=list)
    answers: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    dials: dict[str, Any] = field(default_factory=dict)
    ranks: dict[str, Any] = field(default_factory=dict)
    claims: list[JudgedClaim] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    libraries: Mapping[str, str] = field(default_factory=libraries)
    title: str = "Benchmark"
    remark: str = ""

    @property
    def sentences(self) -> list[str]:
        """What to read first, and what is to be noted."""
        told = [f"{name}: {' '.join(found)}" for name, found in self.answers.items()]
        told += [sentence(one) for one in self.claims]
        return [*([self.remark] * bool(self.remark)), *told, *self.notes]

    def plain(self) -> dict[str, Any]:
        """Returns all of it as JSON holds it."""
        return {
            "size": self.size,
            "libraries": dict(self.libraries),
            "commands": self.commands,
            "sentences": self.sentences,
            "tasks": {
                task.name: {
                    "title": task.title,
                    "metric": task.metric,
                    "smaller_is_better": task.falls,
                    "clients": list(task.clients),
                    "tested_patients": task.patients,
                    "splits": task.splits,
                    "overlap": task.overlap,
                    "floor": dict(zip(("name", "value"), _raw(task, floor_of(task)), strict=True)),
                    "ceiling": dict(
                        zip(("name", "value"), _raw(task, ceiling_of(task)), strict=True)
                    ),
                    "methods": {name: plain(v) for name, v in verdicts.items()},
                    "left_out": task.notes,
                }
                for task, verdicts in self.tasks
            },
            "dials": self.dials,
            "ranks": self.ranks,
            "claims": {one.claim.name: one.plain() for one in self.claims},
            "remark": "Means, intervals and differences are turned so that larger is better.",
        }


def _raw(task: Task, found: tuple[str, float]) -> tuple[str, float]:
    return found[0], task.raw(found[1])


def judged(tasks: Sequence[Task]) -> Told:
    """Judges tasks, one after the other.

    Args:
        tasks: What there is of them.

    Returns:
        Findings without dials, ranks and commands.
    """
    told = Told()
    for task in tasks:
        if not task.scores.keys() - {*CEILINGS}:
            told.notes += task.notes
            continue
        verdicts = judge(task)
        told.tasks.append((task, verdicts))
        told.answers[task.name] = answer(task, verdicts)
        compared = [a.verdict for v in verdicts.values() for a in v.against.values()]
        if len(compared) > 1 and set(compared) == {NOT_TOLD_APART}:
            told.notes.append(f"{task.name} tells no method from local training or FedAvg.")
        told.notes += short_of(task)
    return told


def findings(progress: Sequence[Progress], size: str, notes: Sequence[str] = ()) -> Told:
    """Judges all tasks of a benchmark.

    Args:
        progress: What there is of all methods on all suites.
        size: How much was computed.
        notes: What is left out altogether, and why.
    """
    told = judged(tasks_of(progress))
    told.size = size
    bases = {own.group.suite.name: own.group.variants[0] for own in progress}
    told.ranks = ranks_of([t for t, _ in told.tasks if bases[t.suite] == t.variant])
    told.dials = dials_of(progress, told.tasks)
    told.notes = [*sentences_of(told.dials), *told.notes, *notes]
    if size == "smoke":
        told.remark = "size=smoke only shows that all of it runs; its numbers say nothing."
    return told
