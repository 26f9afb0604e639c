"""What a benchmark's cells say: all tasks judged, ranks, and the dials of suites.

A dial goes from hospitals that are alike to hospitals in conflict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from medfed.benchmark.measured import tasks_of
from medfed.benchmark.runner import Progress
from medfed.federation.card import REFERENCES
from medfed.records.cells import libraries
from medfed.reports.findings import Judged, Report, judged
from medfed.reports.sentences import between
from medfed.reports.verdicts import ranks_of


def crossings(
    dial: Sequence[float], first: Sequence[float], second: Sequence[float]
) -> list[tuple[float, float]]:
    """Returns between which measured points two curves cross.

    Where between them is not known: a dial such as a number of groups has no values there.

    Args:
        dial: Where they were measured, in growing order.
        first: One curve.
        second: The other.

    Example:
        >>> crossings([0, 1, 2], [0.9, 0.7, 0.5], [0.6, 0.6, 0.6])
        [(1, 2)]
    """
    gaps = [a - b for a, b in zip(first, second, strict=True)]
    return [ends for ends, (a, b) in zip(pairwise(dial), pairwise(gaps), strict=True) if a * b < 0]


def _met(
    dial: Sequence[float], first: Sequence[float], second: Sequence[float]
) -> list[tuple[float, float]]:
    """The places in a picture at which the lines of two curves meet."""
    places = []
    for left, right in crossings(dial, first, second):
        a, b = (_gap(dial, first, second, end) for end in (left, right))
        x = left + (right - left) * a / (a - b)
        places.append((x, float(np.interp(x, dial, second))))
    return places


def _gap(dial: Sequence[float], first: Sequence[float], second: Sequence[float], x: float) -> float:
    return float(np.interp(x, dial, first) - np.interp(x, dial, second))


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
                f"{n} × {r}": [(x, places[0][1].raw(y)) for x, y in met]
                for n, r in pairs
                if (met := _met(at, curves[n], curves[r]))
            },
        }
    return found


def sentences_of(dials: Mapping[str, Any]) -> list[str]:
    """Says where FedAvg and local training cross."""
    told = []
    for suite, dial in dials.items():
        if at := dial["crossings"].get("fedavg × local"):
            told.append(
                f"{suite}: FedAvg and local training cross {between(at)} of the dial "
                f"({dial['dial']})."
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
