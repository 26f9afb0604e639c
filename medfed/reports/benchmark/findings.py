"""The findings of a benchmark: sentences for people, and all numbers for programs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from medfed.reports.benchmark.scores import Task, group_of, tasks_of
from medfed.reports.benchmark.verdicts import (
    NOT_TOLD_APART,
    Verdict,
    ceiling_of,
    crossings,
    floor_of,
    judge,
    plain,
    ranks_of,
)
from medfed.run.benchmark.cells import libraries
from medfed.run.benchmark.methods import CEILINGS
from medfed.run.benchmark.runner import Progress

Judged = tuple[Task, Mapping[str, Verdict]]


@dataclass
class Told:
    """What a benchmark found.

    Attributes:
        size: How much was computed.
        tasks: Each task with the verdicts of its methods.
        sentences: What to read first.
        dials: By suite the curves over its dial, and where they cross.
        ranks: See :func:`medfed.reports.benchmark.verdicts.ranks_of`.
    """

    size: str
    tasks: list[Judged] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)
    dials: dict[str, Any] = field(default_factory=dict)
    ranks: dict[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """Returns all of it as JSON holds it."""
        return {
            "size": self.size,
            "libraries": libraries(),
            "sentences": self.sentences,
            "tasks": {
                task.name: {
                    "metric": task.metric,
                    "smaller_is_better": task.falls,
                    "clients": list(task.clients),
                    "tested_patients": task.patients,
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
            "remark": "Means, intervals and differences are turned so that larger is better.",
        }


def _raw(task: Task, found: tuple[str, float]) -> tuple[str, float]:
    return found[0], task.raw(found[1])


def findings(progress: Sequence[Progress], size: str, notes: Sequence[str] = ()) -> Told:
    """Judges all tasks.

    Args:
        progress: What there is of all methods on all suites.
        size: How much was computed.
        notes: What is left out altogether, and why.
    """
    told = Told(size)
    for task in tasks_of(progress):
        if not task.scores:
            told.sentences += task.notes
            continue
        same = group_of(progress, task.suite).suite.splits != "seed"
        told.tasks.append((task, judge(task, same)))
    for task, verdicts in told.tasks:
        told.sentences += _of_task(task, verdicts)
    told.sentences += [note for task, _ in told.tasks for note in task.notes]
    bases = {own.group.suite.name: own.group.variants[0] for own in progress}
    told.ranks = ranks_of([t for t, _ in told.tasks if bases[t.suite] == t.variant])
    told.dials = _dials(progress, told.tasks)
    told.sentences += _of_dials(told.dials)
    told.sentences += notes
    if size == "smoke":
        told.sentences.append("size=smoke only shows that all of it runs; its numbers say nothing.")
    return told


def _of_task(task: Task, verdicts: Mapping[str, Verdict]) -> list[str]:
    """The verdict of a task in words, the ceiling and floor, and who is harmed."""
    name, floor = _raw(task, floor_of(task))
    best, ceiling = _raw(task, ceiling_of(task))
    ends = f"between {floor:.4f} (constant: {name}) and {ceiling:.4f} ({best})"
    known = not (math.isnan(floor) or math.isnan(ceiling))
    told = [f"{task.name}: {task.metric} lies {ends}."] if known else []
    for reference, label in (("local", "local training"), ("fedavg", "FedAvg")):
        against = {n: v.against[reference] for n, v in verdicts.items() if reference in v.against}
        if not against:
            continue
        groups = {
            word: [n for n, a in against.items() if a.verdict == word]
            for word in ("better", "worse", NOT_TOLD_APART)
        }
        visible = [a.difference.visible for a in against.values()]
        visible = [v for v in visible if not math.isnan(v)]
        parts = [
            f"{word}{' than' if word in ('better', 'worse') else ' from'} {label}: {', '.join(who)}"
            for word, who in groups.items()
            if who
        ]
        seen = ""
        if visible:
            least, most = f"{min(visible):.4f}", f"{max(visible):.4f}"
            span = least if least == most else f"{least} to {most}, by method,"
            seen = f" (differences from {span} could have been seen)"
        told.append(f"{task.name}: {'; '.join(parts)}{seen}.")
    compared = [a.verdict for v in verdicts.values() for a in v.against.values()]
    if compared and set(compared) == {NOT_TOLD_APART}:
        told.append(f"{task.name} tells no method from local training or FedAvg.")
    for method, v in verdicts.items():
        if method not in CEILINGS and v.harm is not None and v.harm.surely:
            told.append(
                f"{task.name}: with {method} worse off than alone, surely: "
                f"{', '.join(v.harm.surely)}."
            )
    return told


def _dials(progress: Sequence[Progress], tasks: Sequence[Judged]) -> dict[str, Any]:
    """By suite the means of methods over its dial, and where they cross the references."""
    found: dict[str, Any] = {}
    for suite in dict.fromkeys(task.suite for task, _ in tasks):
        settings = group_of(progress, suite).suite
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
        pairs = [(n, r) for r in ("local", "fedavg") for n in names if r in names and n != r]
        crossed = {f"{n} × {r}": crossings(at, curves[n], curves[r]) for n, r in pairs}
        found[suite] = {
            "dial": settings.dial,
            "at": at,
            "curves": {n: [places[0][1].raw(v) for v in c] for n, c in curves.items()},
            "crossings": {pair: where for pair, where in crossed.items() if where},
        }
    return found


def _of_dials(dials: Mapping[str, Any]) -> list[str]:
    told = []
    for suite, dial in dials.items():
        if at := dial["crossings"].get("fedavg × local"):
            told.append(
                f"{suite}: FedAvg and local training cross at {', '.join(f'{x:g}' for x in at)} of "
                f"the dial ({dial['dial']})."
            )
    return told
