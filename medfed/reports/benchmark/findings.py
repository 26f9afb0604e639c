"""The findings of a benchmark: sentences for people, and all numbers for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from medfed.reports.benchmark.claims import JudgedClaim, sentence
from medfed.reports.benchmark.dials import Judged, dials_of, sentences_of
from medfed.reports.benchmark.scores import Task, tasks_of
from medfed.reports.benchmark.verdicts import (
    NOT_TOLD_APART,
    ceiling_of,
    floor_of,
    judge,
    plain,
    ranks_of,
)
from medfed.reports.benchmark.words import answer, short_of
from medfed.run.benchmark.cells import libraries
from medfed.run.benchmark.methods import CEILINGS
from medfed.run.benchmark.runner import Progress


@dataclass
class Told:
    """What a benchmark, or a comparison of a user's own runs, found.

    Attributes:
        size: How much was computed.
        tasks: Each task with the verdicts of its methods.
        answers: By task: which method, and who would be harmed.
        notes: What else is to be said: what is left out, what crosses.
        dials: By suite the curves over its dial, and where they cross.
        ranks: See :func:`medfed.reports.benchmark.verdicts.ranks_of`.
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
