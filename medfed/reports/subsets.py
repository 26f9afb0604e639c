"""Metrics on subsets of the channels: a table, a CSV file and a heat map.

How methods bear the loss of channels, of runs that ``medfed evaluate subsets=...`` measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from medfed.common.console import caption
from medfed.common.files import csv_text
from medfed.common.scores import label_of, number, smaller_is_better
from medfed.common.untrusted import read_rows, reading
from medfed.records.folder import Run
from medfed.reports.charts import Picture
from medfed.reports.methods import Cell, Comparison, Finding


def heat_map(
    values: NDArray[np.float64],
    rows: Sequence[str],
    subsets: Sequence[Sequence[str]],
    channels: Sequence[str],
    title: str,
    *,
    falls: bool = False,
    mean: bool = False,
) -> Figure:
    """Draws a metric per row and subset; dots below say which channels a subset has.

    Args:
        values: ``(rows, subsets)``, NaN where a client lacks a channel.
        rows: Names of the rows, of one line or several.
        subsets: The channels of each column.
        channels: All of them.
        title: The title.
        falls: Whether smaller is better; better values are brighter.
        mean: Whether a line stands above the last row.
    """
    most = max(1 + row.count("\n") for row in rows)
    heights = (max(0.34, 0.17 * most + 0.06) * len(rows), 0.28 * len(channels))
    figure = Figure(
        figsize=(2.9 + 0.62 * max(len(subsets), 3), 1.0 + sum(heights)), layout="constrained"
    )
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=heights)
    upper.set_facecolor("0.9")
    scale = "viridis_r" if falls else "viridis"
    image = upper.imshow(np.ma.masked_invalid(values), cmap=scale, aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        if known := bool(np.isfinite(value)):
            bright = (image.norm(value) < 0.4) if falls else (image.norm(value) > 0.6)
        colour = ("black" if bright else "white") if known else "0.5"
        text = f"{value:.2f}" if known else "–"
        upper.text(column, row, text, ha="center", va="center", fontsize=8, color=colour)
    if mean:
        upper.axhline(len(rows) - 1.5, color="white", lw=3)
    labels = ["\n".join(caption(line) for line in row.split("\n")) for row in rows]
    upper.set_yticks(range(len(rows)), labels)
    upper.set_title(title, fontsize=10)
    for column, subset in enumerate(subsets):
        for place, channel in enumerate(channels):
            there = channel in subset
            lower.scatter(column, place, color="0.15" if there else "0.85", s=42 if there else 26)
    lower.set_yticks(range(len(channels)), [caption(c) for c in channels])
    lower.set(ylim=(len(channels) - 0.4, -0.6), xlim=(-0.5, len(subsets) - 0.5))
    lower.spines[:].set_visible(False)
    for axes in (upper, lower):
        axes.tick_params(length=0, labelsize=9, labelbottom=False)
    figure.colorbar(image, ax=upper, fraction=0.03, pad=0.01)
    return figure


_CAPTION = (
    "Test metric on subsets of the channels: mean over the clients that have all channels of the "
    "subset, and over seeds."
)


class Line(NamedTuple):
    """What a client's model was worth on a subset.

    Attributes:
        channels: Those of the subset, joined by ``+``.
        lost: How many more the client has.
        value: The metric.
    """

    channels: str
    lost: int
    value: float


def find(comparison: Comparison) -> Finding:
    """Finds tables and a heat map of methods against subsets, where all runs were measured."""
    runs = [run for method in comparison.methods for run in method.runs]
    if not all((run.subsets_csv("test")).is_file() for run in runs):
        return Finding()
    tables = [read_rows(run.subsets_csv("test"), ("channels", "missing")) for run in runs]
    metrics = ("dice", *comparison.metrics, "loss")
    metric = next((m for m in metrics if all(t and m in t[0] for t in tables)), None)
    if metric is None:
        return Finding()
    lines = {m.name: [read_lines(run, metric) for run in m.runs] for m in comparison.methods}
    every = [line for seeds in lines.values() for seed in seeds for line in seed]
    channels = next(iter(runs[0].preprocessing.values()))["channels"]
    with reading(runs[0].subsets_csv("test")):
        places = {s: [channels.index(c) for c in s.split("+")] for s in {x.channels for x in every}}
        subsets = sorted(places, key=lambda s: (len(places[s]), places[s]))
    lost = sorted({x.lost for x in every})
    fields: dict[str, list[Any]] = {"lost": lost, "channels": subsets}
    pooled = {
        name: {m: [_pooled(s, name, v) for v in values] for m, s in lines.items()}
        for name, values in fields.items()
    }
    table = [
        [method, kind, name, metric, cell.value, cell.sd]
        for kind, cells in pooled.items()
        for method, row in cells.items()
        for name, cell in zip(fields[kind], row, strict=True)
    ]
    values = np.array([[cell.value for cell in row] for row in pooled["channels"].values()])
    names = [name.replace(" ", "\n") for name in pooled["channels"]]
    title = f"test {label_of(metric)} with some channels, mean over clients and seeds"
    sets, falls = [s.split("+") for s in subsets], smaller_is_better(metric)
    figure = heat_map(values, names, sets, channels, title, falls=falls)
    return Finding(
        [_sentence(method, lost, row, metric) for method, row in pooled["lost"].items()],
        {"missing_channels": csv_text(("method", "by", "name", "metric", "value", "sd"), table)},
        {"missing_channels": Picture(figure, _CAPTION)},
    )


def read_lines(run: Run, metric: str) -> list[Line]:
    """Reads the metric of a run on all subsets.

    Raises:
        CheckpointError: If the file is torn.
    """
    path = run.subsets_csv("test")
    rows = read_rows(path, ("channels", "missing", metric))
    with reading(path):
        return [Line(row["channels"], int(row["missing"]), float(row[metric])) for row in rows]


def _pooled(seeds: Sequence[Sequence[Line]], name: str, wanted: object) -> Cell:
    """Returns the mean over seeds of the mean over the lines of each with a value of a field."""
    values = [
        [x.value for x in s if getattr(x, name) == wanted and not math.isnan(x.value)]
        for s in seeds
    ]
    return Cell.of([math.fsum(v) / len(v) if v else math.nan for v in values])


def _sentence(method: str, lost: Sequence[int], row: Sequence[Cell], metric: str) -> str:
    texts = [
        f"{number(c.value)}{'' if c.sd is None else f' ± {number(c.sd)}'} "
        + (f"without {k}" if k else "with all")
        for k, c in zip(lost, row, strict=True)
    ]
    return f"Test {label_of(metric)} of {method} by its clients' channels: {', '.join(texts)}."
