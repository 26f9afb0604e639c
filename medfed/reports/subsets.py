"""Metrics on subsets of the channels: a table, a CSV file and a heat map.

How methods bear the loss of channels, of runs that ``medfed evaluate subsets=...`` measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from medfed.common.console import caption
from medfed.common.scores import label_of, mean_of_known, number, over_seeds, smaller_is_better
from medfed.common.untrusted import read_rows, reading
from medfed.records.folder import Run
from medfed.reports.charts import Picture
from medfed.reports.findings import Report
from medfed.standalone.files import csv_text


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
    """Draws a metric per row and subset; dots below say which channels a subset has."""
    # `values` is ``(rows, subsets)``, NaN where a client lacks a channel. `falls`: whether
    # smaller is better; better values are brighter.
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


def find(report: Report) -> None:
    """Adds tables and a heat map of methods against subsets, where all runs were measured."""
    runs = [run for of in report.runs.values() for run in of]
    if not all(run.subsets_csv("test").is_file() for run in runs):
        return
    every = [read_rows(run.subsets_csv("test"), ("channels", "missing")) for run in runs]
    metrics = ("dice", report.tasks[0][0].metric, "loss")
    metric = next((m for m in metrics if all(rows and m in rows[0] for rows in every)), None)
    if metric is None:
        return
    channels = next(iter(runs[0].preprocessing.values()))["channels"]
    by_method = {n: [means_of(run, metric) for run in of] for n, of in report.runs.items()}
    keys = {key for seeds in by_method.values() for seed in seeds for key in seed}
    with reading(runs[0].subsets_csv("test")):
        places = {k: [channels.index(c) for c in k.split("+")] for k in keys if isinstance(k, str)}
    subsets = sorted(places, key=lambda s: (len(places[s]), places[s]))
    lost = sorted(key for key in keys if isinstance(key, int))
    pooled = {
        method: {key: over_seeds([seed.get(key, math.nan) for seed in seeds]) for key in keys}
        for method, seeds in by_method.items()
    }
    table = [
        [method, kind, key, metric, *cells[key]]
        for kind, of in (("lost", lost), ("channels", subsets))
        for method, cells in pooled.items()
        for key in of
    ]
    values = np.array([[cells[key][0] for key in subsets] for cells in pooled.values()])
    title = f"test {label_of(metric)} with some channels, mean over clients and seeds"
    names, sets = [n.replace(" ", "\n") for n in pooled], [s.split("+") for s in subsets]
    figure = heat_map(values, names, sets, channels, title, falls=smaller_is_better(metric))
    report.notes += [
        _sentence(method, [(k, *cells[k]) for k in lost], metric)
        for method, cells in pooled.items()
    ]
    head = ("method", "by", "name", "metric", "value", "sd")
    report.tables["missing_channels"] = csv_text(head, table)
    report.pictures["missing_channels"] = Picture(figure, _CAPTION)


def means_of(run: Run, metric: str) -> dict[int | str, float]:
    """Returns means over clients, by the number of channels that they lack and by subset."""
    path = run.subsets_csv("test")
    rows, values = read_rows(path, ("channels", "missing", metric)), dict[int | str, list[float]]()
    with reading(path):
        for row in rows:
            for key in (int(row["missing"]), row["channels"]):
                values.setdefault(key, []).append(float(row[metric]))
    return {key: float(mean_of_known(np.array(of), axis=0)) for key, of in values.items()}


def _sentence(method: str, lost: Sequence[tuple[object, float, float | None]], metric: str) -> str:
    texts = [
        f"{number(mean)}{'' if sd is None else f' ± {number(sd)}'} "
        + (f"without {channels} of them" if channels else "with all")
        for channels, mean, sd in lost
    ]
    return f"Test {label_of(metric)} of {method} by its clients' channels: {', '.join(texts)}."
