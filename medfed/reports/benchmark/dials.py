"""The dials of suites: what is reached from hospitals alike to hospitals in conflict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from medfed.reports.benchmark.canvas import SERIES
from medfed.reports.benchmark.scores import Task
from medfed.reports.benchmark.verdicts import REFERENCES, Verdict
from medfed.run.benchmark.runner import Progress

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
