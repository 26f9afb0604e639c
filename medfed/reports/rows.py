"""The lines of a comparison: a cell per method, and what stands beside them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from medfed.common.console import size
from medfed.common.files import csv_text
from medfed.common.scores import interval, number, smaller_is_better
from medfed.reports.methods import Cell, Comparison

STATISTICS = ("mean", "sd", "worst")
_SPENT = ("steps", "gradient_passes", "forward_passes")


class Row(NamedTuple):
    """One line of the table: a cell per method.

    Attributes:
        metric: ``iou``, ``bytes up``, ``steps`` and the like.
        place: A client, or ``mean``, ``sd``, ``worst`` or ``total`` over the clients.
        cells: One per method.
        best: Which cells are the best of the line; empty where nothing is to be won.
        constants: One per constant predictor, of metrics.
        ends: The interval of each method that has one seed and knows it, else None.
        told: What stands in the cells instead of numbers.
    """

    metric: str
    place: str
    cells: tuple[Cell, ...]
    best: frozenset[int] = frozenset()
    constants: tuple[Cell, ...] = ()
    ends: tuple[tuple[float, float] | None, ...] = ()
    told: tuple[str, ...] = ()


def best_of(values: Sequence[float], smaller: bool = False) -> frozenset[int]:
    """Returns the positions of the best values, ties included; none where all are equal.

    Args:
        values: One per method; what is not finite never wins.
        smaller: Whether smaller is better.

    Example:
        >>> sorted(best_of([0.5, 0.9, 0.9])), sorted(best_of([1.0, 1.0]))
        ([1, 2], [])
        >>> sorted(best_of([0.5, math.inf, math.nan], smaller=True))
        [0]
    """
    known = [v for v in values if not math.isnan(v)]
    finite = [v for v in known if math.isfinite(v)]
    if not finite or min(known) == max(known):
        return frozenset()
    target = min(finite) if smaller else max(finite)
    return frozenset(i for i, v in enumerate(values) if v == target)


def rows(comparison: Comparison) -> Iterator[Row]:
    """Yields the table: per metric the clients and their mean, sd and worst; then what it cost."""
    methods = comparison.methods
    for metric in (*comparison.metrics, *comparison.others):
        for place in (*comparison.clients, *STATISTICS):
            cells = tuple(m.score(metric, place) for m in methods)
            best = best_of([c.value for c in cells], smaller_is_better(metric))
            constants = tuple(methods[0].constant(n, metric, place) for n in comparison.constants)
            ends = tuple(m.ends(metric, place) for m in methods)
            won = frozenset[int]() if place == "sd" else best
            yield Row(metric, place, cells, won, constants, ends)
    for way in ("up", "down"):
        cells = tuple(m.over_seeds(lambda s, w=way: s["bytes"][w]) for m in methods)  # type: ignore[misc]
        yield Row(f"bytes {way}", "total", cells)
    for name in _SPENT:
        for client in comparison.clients:
            cells = tuple(m.over_seeds(partial(_spent, name, (client,))) for m in methods)
            yield Row(name.replace("_", " "), client, cells)
    selected = tuple(m.over_seeds(lambda s: (s["selected_round"] or 0) + 1) for m in methods)
    yield Row("selected round", "total", selected)


def _spent(name: str, clients: Sequence[str], summary: Mapping[str, Any]) -> float:
    """Reads from a summary what clients spent, on average; unknown of older runs."""
    counts = summary.get(name, {})
    return math.fsum(counts.get(c, math.nan) for c in clients) / len(clients)


def to_csv(comparison: Comparison) -> str:
    """Returns the table as CSV, a line per metric, place and method, or constant predictor."""
    lines = []
    for row in rows(comparison):
        ends = row.ends or (None,) * len(row.cells)
        for i, (method, cell) in enumerate(zip(comparison.methods, row.cells, strict=True)):
            own = [method.name, len(method.runs), cell.value, cell.sd, int(i in row.best)]
            lines.append([*row[:2], *own, *(ends[i] or (None, None))])
        for name, cell in zip(comparison.constants, row.constants, strict=False):
            seeds = len(comparison.methods[0].runs)
            lines.append([*row[:2], name, seeds, cell.value, cell.sd, 0, None, None])
    head = ("metric", "place", "method", "seeds", "value", "sd_over_seeds", "best", "low", "high")
    return csv_text(head, lines)


def said(comparison: Comparison) -> list[str]:
    """Returns the verdict, as a report of the same runs has it, and what else must be known."""
    verdict = comparison.report.answers[comparison.report.tasks[0][0].name]
    return [
        *verdict,
        *no_better(comparison),
        comparison.report.remark,
        *comparison.report.notes,
    ]


def no_better(comparison: Comparison) -> list[str]:
    """Says which methods are no better than a constant prediction, by the mean over clients."""
    metric, methods = comparison.metric, comparison.methods
    sign = -1 if smaller_is_better(metric) else 1
    found = []
    for name in comparison.constants:
        level = methods[0].constant(name, metric).value
        low = [m.name for m in methods if sign * m.score(metric).value <= sign * level]
        if low:
            found.append(f"No better than {name} ({level:.4f}) by mean {metric}: {', '.join(low)}.")
    return found


def shown_rows(comparison: Comparison) -> Iterator[Row]:
    """Yields the rows for people.

    Clients are listed for the metrics that matter most; of the others, and of steps and passes,
    there is one line each. Below the mean of the first metric stand the intervals.
    """
    steps: tuple[Cell, ...] = ()
    for row in rows(comparison):
        name = row.metric.replace(" ", "_")
        if row.metric in comparison.others:
            if row.place == "mean" and "/" not in row.metric:
                yield row
        elif name not in _SPENT:
            yield row
            if row.place == "mean" and row.metric == comparison.metric and any(row.ends):
                told = tuple(interval(ends) for ends in row.ends)
                yield Row(row.metric, "95% interval", (), told=told)
        elif row.place == comparison.clients[0]:
            read = partial(_spent, name, comparison.clients)
            cells = tuple(m.over_seeds(read) for m in comparison.methods)
            if name == "steps":
                steps = cells
            if name == "steps" or any(
                c.value > 0 and c != s for c, s in zip(cells, steps, strict=True)
            ):  # passes where they are not the steps
                yield Row(f"{row.metric} per client", "total", cells)


def texts(row: Row) -> list[str]:
    """Writes the cells of a row in its unit, those of constant predictors last."""
    if row.told:
        return list(row.told)
    if row.metric.startswith("bytes"):
        return [size(round(value)) for value, _ in row.cells]
    if row.metric.startswith(("steps", "gradient", "forward", "selected")):
        found = (f"{value:.1f}".removesuffix(".0") for value, _ in row.cells)
        return ["–" if text == "nan" else text for text in found]
    cells = (*row.cells, *row.constants)
    several = any(sd is not None for _, sd in cells)
    spreads = (f" ± {number(math.nan if c.sd is None else c.sd)}" * several for c in cells)
    return [number(c.value) + spread for c, spread in zip(cells, spreads, strict=True)]
