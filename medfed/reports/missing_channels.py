"""How methods bear the loss of channels, of runs that ``medfed evaluate subsets=...`` measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from graphlib import TopologicalSorter
from typing import NamedTuple

import numpy as np

from medfed.common.files import csv_text
from medfed.common.scores import number, smaller_is_better
from medfed.common.untrusted import read_rows, reading
from medfed.reports.methods import Cell, Comparison, Finding
from medfed.reports.scores import label_of
from medfed.reports.subsets import heat_map
from medfed.run.finished import Run

FILE = "subsets_test.csv"
_CAPTION = (
    "Test metric on subsets of the channels: mean over the clients that have all channels of the "
    "subset, and over seeds."
)


class Line(NamedTuple):
    """What a client's model was worth on a subset.

    Attributes:
        subset: The channels, joined by ``+``.
        lost: How many more the client has.
        value: The metric.
    """

    subset: str
    lost: int
    value: float


def find(comparison: Comparison) -> Finding:
    """Finds tables and a heat map of methods against subsets, where all runs were measured."""
    runs = [run for method in comparison.methods for run in method.runs]
    if not all((run.folder / FILE).is_file() for run in runs):
        return Finding()
    tables = [read_rows(run.folder / FILE, ("channels", "missing")) for run in runs]
    metrics = ("dice", *comparison.metrics, "loss")
    metric = next((m for m in metrics if all(t and m in t[0] for t in tables)), None)
    if metric is None:
        return Finding()
    lines = {m.name: [read_lines(run, metric) for run in m.runs] for m in comparison.methods}
    every = [line for seeds in lines.values() for seed in seeds for line in seed]
    with reading(runs[0].folder / FILE):
        channels = in_order({x.subset for x in every})
    subsets = sorted({x.subset for x in every}, key=lambda s: _rank(s, channels))
    lost = sorted({x.lost for x in every})
    by_subset = {
        m: [_pooled(seeds, lambda x, s=s: x.subset == s) for s in subsets]  # type: ignore[misc]
        for m, seeds in lines.items()
    }
    by_loss = {
        m: [_pooled(seeds, lambda x, k=k: x.lost == k) for k in lost]  # type: ignore[misc]
        for m, seeds in lines.items()
    }
    table = [
        [method, kind, name, metric, cell.value, cell.sd]
        for kind, names, cells in (("lost", lost, by_loss), ("channels", subsets, by_subset))
        for method, row in cells.items()
        for name, cell in zip(names, row, strict=True)
    ]
    values = np.array([[cell.value for cell in row] for row in by_subset.values()])
    figure = heat_map(
        values,
        [name.replace(" ", "\n") for name in by_subset],
        [s.split("+") for s in subsets],
        channels,
        f"test {label_of(metric)} with some channels, mean over clients and seeds",
        falls=smaller_is_better(metric),
    )
    return Finding(
        [_sentence(method, lost, row, metric) for method, row in by_loss.items()],
        {"missing_channels": csv_text(("method", "by", "name", "metric", "value", "sd"), table)},
        {"missing_channels": figure},
        {"missing_channels": _CAPTION},
    )


def in_order(subsets: Iterable[str]) -> list[str]:
    """Returns all channels in the order of the data, which every subset keeps.

    Example:
        >>> in_order(["T1w+T2w", "FLAIR+T2w", "FLAIR+T1w"])
        ['FLAIR', 'T1w', 'T2w']

    Raises:
        ValueError: If there is none.
    """
    order: TopologicalSorter[str] = TopologicalSorter()
    for subset in sorted(subsets):
        names = subset.split("+")
        for place, channel in enumerate(names):
            order.add(channel, *names[:place])
    return list(order.static_order())


def _rank(subset: str, channels: Sequence[str]) -> tuple[int, list[int]]:
    places = [channels.index(c) for c in subset.split("+")]
    return len(places), places


def read_lines(run: Run, metric: str) -> list[Line]:
    """Reads what was measured of a run.

    Raises:
        CheckpointError: If the file is torn.
    """
    path = run.folder / FILE
    rows = read_rows(path, ("channels", "missing", metric))
    with reading(path):
        return [Line(row["channels"], int(row["missing"]), float(row[metric])) for row in rows]


def _pooled(seeds: Sequence[Sequence[Line]], wanted: Callable[[Line], bool]) -> Cell:
    """Returns the mean over seeds of the mean over the lines of each."""
    values = [[x.value for x in s if wanted(x) and not math.isnan(x.value)] for s in seeds]
    return Cell.of([math.fsum(v) / len(v) if v else math.nan for v in values])


def _sentence(method: str, lost: Sequence[int], row: Sequence[Cell], metric: str) -> str:
    texts = [
        f"{number(c.value)}{'' if c.sd is None else f' ± {number(c.sd)}'} "
        + (f"without {k}" if k else "with all")
        for k, c in zip(lost, row, strict=True)
    ]
    return f"Test {label_of(metric)} of {method} by its clients' channels: {', '.join(texts)}."
