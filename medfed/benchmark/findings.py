"""What a benchmark's cells say: all tasks judged, ranks, and the dials of suites.

A dial goes from hospitals that are alike to hospitals in conflict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from medfed.benchmark.measured import tasks_of
from medfed.benchmark.runner import Progress
from medfed.federation.card import REFERENCES
from medfed.records.cells import libraries
from medfed.reports.findings import Judged, Report, judged
from medfed.reports.verdicts import ranks_of


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


def findings(progress: Sequence[Progress], size: str, notes: Sequence[str] = ()) -> Report:
    """Judges all tasks of a benchmark.

    Args:
        progress: What there is of all methods on all suites.
        size: How much was computed.
        notes: What is left out altogether, and why.
    """
    report = judged(tasks_of(progress))
    report.size, report.libraries = size, libraries()
    bases = {own.group.suite.name: own.group.variants[0] for own in progress}
    report.ranks = ranks_of([t for t, _ in report.tasks if bases[t.suite] == t.variant])
    report.dials = dials_of(progress, report.tasks)
    report.notes = [*sentences_of(report.dials), *report.notes, *notes]
    if size == "smoke":
        report.remark = "size=smoke only shows that all of it runs; its numbers say nothing."
    return report
