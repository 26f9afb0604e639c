"""What the cells of a benchmark say: the scores of each task, verdicts, and the dials of suites.

A dial goes from hospitals that are alike to hospitals in conflict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from medfed.benchmark.runner import Progress
from medfed.federation.card import REFERENCES
from medfed.records.cells import libraries
from medfed.reports.findings import Judged, Report, judged
from medfed.reports.sentences import between
from medfed.reports.tasks import Result, Task, overlap_of, rise_of
from medfed.standalone.errors import CheckpointError, few


def task_of(progress: Sequence[Progress], variant: str) -> Task:
    """Reads a task."""
    suite = progress[0].group.suite
    situation = str(suite.variants[variant].situation or suite.situation)
    task = Task(suite.name, variant, title=suite.title, situation=situation)
    task.data = suite.data or ("real" if suite.splits == "folds" else "generated")
    task.same = suite.splits != "seed"
    data: dict[int, tuple[str, str]] = {}
    missing: list[str] = []
    tested: list[Result] = []
    for one in progress:
        cells = one.finals(variant)
        known = [r for _, r in cells if r is not None]
        name = one.group.method.name
        if wrong := next((str(r["error"]) for r in known if "error" in r), None):
            task.left_out[name] = f"{name} cannot be used on {task.name}: {wrong}"
            continue
        if len(known) < one.group.size.splits:
            missing.append(name)
            continue
        for cell, result in cells:
            if result is None or "data" not in result:
                continue
            first = data.setdefault(cell.split, (cell.place, result["data"]))
            if first[1] != result["data"]:
                raise CheckpointError(
                    f"{cell.place} and {first[0]} have other patients and do not fit into one "
                    "table; remove the cell whose data are not those of the suite."
                )
        if why := _add(task, one, known, tuple(cell.key for cell, _ in cells)):
            task.left_out[name] = f"{name} is left out of {task.name}: {why}"
        tested = tested or [r for r in known if "clients" in r]
    if task.same:
        task.leave_out_small({client: fewest_of(tested, client) for client in task.clients})
    if len(missing) == len(progress):
        task.unfinished = f"{task.name} is not finished with any method: there is no table of it."
    elif missing:
        task.unfinished = (
            f"{task.name} has {len(progress) - len(missing)} of {len(progress)} methods; of "
            f"{few(missing, 8)} not all splits are there."
        )
    return task


def _add(task: Task, one: Progress, results: Sequence[Result], keys: tuple[str, ...]) -> str:
    """Adds a method's scores, or says why not: it failed everywhere, or exceeded its budget."""
    name, group = one.group.method.name, one.group
    whole = [r for r in results if "clients" in r]
    if not whole:
        return str(results[0].get("failed", ""))
    if not task.clients:
        task.metric, mode = whole[0]["metric"]
        task.falls = mode == "min"
        task.begin(whole)
        task.overlap = overlap_of(whole) if group.suite.splits == "folds" else 0.0
    spent = max(max(r["passes"].values()) for r in whole) / group.budget
    if not group.is_ceiling and spent > group.suite.passes:
        return (
            f"it cannot keep the budget of {group.budget} gradient passes, of which it took "
            f"{spent:.2f} times as many."
        )
    courses = [
        [math.nan if m["score"] is None else m["score"] for m in r.get("course", ())] for r in whole
    ]
    task.add(
        name,
        [[result] for result in results],
        group.budget,
        setting=group.settings[one.trial or 0],
        keys=keys,
        rise=rise_of(courses, task.overlap),
        trials=_trials(one) if task.variant == group.suite.base else (),
    )
    if name == "local":
        task.add_constants(whole)
    return ""


def fewest_of(results: Sequence[Result], client: str) -> tuple[int, str]:
    """Returns on how few patients the scores of a hospital rest over all splits, and on which.

    Example:
        >>> patients = {"A": {"train": 6, "val": 0, "test": 2}}
        >>> split = {"patients": patients, "fewest": {"A": [1, "test patients of a class"]}}
        >>> fewest_of([split] * 4, "A") == fewest_of([split] * 8, "A")
        True
    """
    each = [r["patients"][client] for r in results]
    tested = sum(of["test"] for of in each)
    stated = (r.get("fewest", {}).get(client) for r in results)
    known = [s or (of["test"], "test patients") for s, of in zip(stated, each, strict=True)]
    # Splits beyond those that test everybody test them again.
    again = max(1.0, tested / max(1, sum(each[0].values())))
    return int(sum(count for count, _ in known) / again), known[0][1]


def _trials(one: Progress) -> tuple[tuple[Mapping[str, float], float | None], ...]:
    pairs = zip(one.group.settings, one.tuning, strict=False)  # none where only the default is
    scores = ((setting, result.get("score")) for setting, result in pairs)
    return tuple((s, v if v is not None and math.isfinite(v) else None) for s, v in scores)


def _tasks_of(progress: Sequence[Progress]) -> list[Task]:
    """Reads all tasks, in the order of suites and variants."""
    by_suite: dict[str, list[Progress]] = {}
    for one in progress:
        by_suite.setdefault(one.group.suite.name, []).append(one)
    return [
        task_of([one for one in members if variant in one.group.variants], variant)
        for members in by_suite.values()
        for variant in max((one.group.variants for one in members), key=len)
    ]


def crossings(
    dial: Sequence[float], first: Sequence[float], second: Sequence[float]
) -> list[tuple[float, float]]:
    """Returns between which measured points two curves cross.

    Example:
        >>> crossings([0, 1, 2], [0.9, 0.7, 0.5], [0.6, 0.6, 0.6])
        [(1, 2)]
    """
    # Where between them is not known: a dial such as a number of groups has no values there.
    gaps = [a - b for a, b in zip(first, second, strict=True)]
    return [ends for ends, (a, b) in zip(pairwise(dial), pairwise(gaps), strict=True) if a * b < 0]


def _dials_of(progress: Sequence[Progress], tasks: Sequence[Judged]) -> dict[str, Any]:
    """By suite the means of methods over its dial, and where they cross the references."""
    dials: dict[str, Any] = {}
    for suite in dict.fromkeys(task.suite for task, _ in tasks):
        settings = next(p.group.suite for p in progress if p.group.suite.name == suite)
        every = [(settings.variants[t.variant].dial, t) for t, _ in tasks if t.suite == suite]
        places = [(dial, task) for dial, task in every if dial is not None]
        if len(places) < 2:
            continue
        places.sort(key=lambda place: place[0])
        at = [place for place, _ in places]
        names = [n for n in places[0][1].scores if all(n in t.scores for _, t in places)]
        curves = {n: [float(t.scores[n].means.mean()) for _, t in places] for n in names}
        pairs = [(n, r) for r in REFERENCES for n in names if r in names and n not in REFERENCES]
        pairs += [("fedavg", "local")] * ({*REFERENCES} <= {*names})
        crossed = {f"{n} × {r}": crossings(at, curves[n], curves[r]) for n, r in pairs}
        dials[suite] = {
            "dial": settings.dial,
            "at": at,
            "curves": {n: [places[0][1].raw(v) for v in c] for n, c in curves.items()},
            "crossings": {pair: where for pair, where in crossed.items() if where},
        }
    return dials


def sentences_of(dials: Mapping[str, Any]) -> list[str]:
    """Says where FedAvg and local training cross."""
    return [
        f"{suite}: FedAvg and local training cross {between(at)} of the dial ({dial['dial']})."
        for suite, dial in dials.items()
        if (at := dial["crossings"].get("fedavg × local"))
    ]


def findings(
    progress: Sequence[Progress], size: str, notes: Sequence[str] = (), target: float | None = None
) -> Report:
    """Judges all tasks of a benchmark."""
    report = judged(_tasks_of(progress), target)
    report.size, report.libraries = size, libraries()
    report.dials = _dials_of(progress, report.tasks)
    report.notes = [*sentences_of(report.dials), *report.notes, *notes]
    if size == "smoke":
        report.remark = "size=smoke only shows that the benchmark runs; its numbers mean nothing."
    return report
