"""Reports: tasks with the verdicts of their methods, and the sentences about them.

One chain leads to what ``medfed report`` and ``medfed benchmark`` say: scores
(:mod:`medfed.reports.tasks`), intervals, verdicts, sentences, and then tables and the page.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from medfed.federation.card import CEILINGS
from medfed.records.folder import Run
from medfed.reports import runs, sentences
from medfed.reports.charts import Picture
from medfed.reports.runs import Runs
from medfed.reports.tasks import Task, splits_of, task_of_runs
from medfed.reports.verdicts import Verdicts, judge, plain

Judged = tuple[Task, Verdicts]
_ENDS = ("name", "value", "low", "high")
_FACTS = ("title", "situation", "data", "same", "metric", "clients", "small", "splits", "overlap")


@dataclass
class Report:
    """What a benchmark, or a report on finished runs, says."""

    size: str = ""  # the size of the benchmark
    tasks: list[Judged] = field(default_factory=list)  # each task with the verdicts of its methods
    # By task: which method to use, and whom it harms.
    answers: dict[str, list[str]] = field(default_factory=dict)
    # Further sentences: the methods that are left out, the curves that cross.
    notes: list[str] = field(default_factory=list)
    # By suite the curves over its dial, and where they cross.
    dials: dict[str, Any] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)  # the commands that repeat it
    libraries: Mapping[str, str] = field(default_factory=dict)  # versions, by name
    title: str = "Benchmark"  # the title of the page
    remark: str = ""  # a sentence that holds for all others
    runs: Runs = field(default_factory=dict)  # the runs of each method; empty for a benchmark
    # Of finished runs: further CSV texts and pictures, by the names of their files.
    tables: dict[str, str] = field(default_factory=dict)
    pictures: dict[str, Picture] = field(default_factory=dict)

    @property
    def sentences(self) -> list[str]:
        """The answers and the notes."""
        answers = [f"{name}: {' '.join(answer)}" for name, answer in self.answers.items()]
        return [*([self.remark] * bool(self.remark)), *answers, *self.notes]

    def plain(self) -> dict[str, Any]:
        """Returns all of it as JSON holds it."""
        return {
            "size": self.size,
            "libraries": dict(self.libraries),
            "commands": self.commands,
            "sentences": self.sentences,
            "tasks": {
                task.name: {
                    **{name: getattr(task, name) for name in _FACTS},
                    "smaller_is_better": task.falls,
                    "tested_patients": task.patients,
                    "floor": {"name": constant, "value": task.raw(level)},
                    "in_one_place": dict(zip(_ENDS, (pooled, *task.interval(score)), strict=True)),
                    "methods": {name: plain(v) for name, v in verdicts.items()},
                    "left_out": task.notes,
                }
                for task, verdicts in self.tasks
                for constant, level in (task.best_constant,)
                for pooled, score in (verdicts.in_one_place,)
            },
            "dials": self.dials,
            "remark": "Means, intervals and differences have the sign by which larger is better.",
        }


def judged(tasks: Sequence[Task], target: float | None = None) -> Report:
    """Judges tasks, one after the other."""
    report = Report()
    for task in tasks:
        if not task.scores.keys() - {*CEILINGS}:
            report.notes += task.notes
            continue
        task.target = target
        verdicts = judge(task)
        report.tasks.append((task, verdicts))
        report.answers[task.name] = sentences.answer(task, verdicts)
        report.notes += sentences.notes_on(task, verdicts)
    return report


def report_on(folders: Sequence[Path], metric: str | None = None) -> Report:
    """Judges finished runs."""
    newest, repeated = runs.without_repeats([Run(folder) for folder in folders])
    runs.check_same_patients(newest)
    methods, left_out = runs.pool(newest)
    named, references = runs.with_references(methods)
    task = task_of_runs(named, runs.chosen_metric(newest, metric))
    report = judged([task])
    report.title, report.runs = f"Runs of {task.suite}", named
    splits = splits_of(next(iter(named.values())))
    runs_of_one = sum(map(len, splits))
    remarks = sentences.lines_of("remark.txt", task=task, splits=splits, runs=runs_of_one)
    report.remark = " ".join(remarks)
    report.notes = sentences.lines_of(
        "notes_on_runs.txt",
        task=task,
        ceilings=CEILINGS,
        methods=named,
        references=references,
        **runs.facts_of(methods, newest[0].clients),
        of_task=report.notes,
        left_out=left_out,
        repeated=repeated,
        is_counted="small" in newest[0].summary,
    )
    ones = (run.overrides for of_method in methods.values() for run in of_method)
    report.commands = [shlex.join(["medfed", "train", *typed]) for typed in ones if typed]
    versions = newest[0].versions
    report.libraries = {n: str(v) for n, v in versions.items() if n not in ("commit", "plugins")}
    return report
