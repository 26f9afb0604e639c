"""What an export says of its bundles: a table, warnings, and a picture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.table import Table
from torch import Tensor

from medfed.common.console import caption, cell, say, shown, size, wide_console
from medfed.common.files import csv_text, write_text
from medfed.common.scores import mean_of_known
from medfed.delivery.bundle.weights import Codebook
from medfed.delivery.export.finetuning import STAGES, falls

_LAYERS = 3
_TITLE = 32  # letters of a layer's name that fit above its panel
_BLUE = "#0072B2"
_BARS = (  # label, key of the sizes, colour
    ("single precision", "fp32", "0.75"),
    ("bundle", "packed", _BLUE),
    ("entropy bound", "entropy_bound", "#E69F00"),
)
_NAMES = {
    "trained": "trained",
    "kmeans": "k-means",
    "statistics": "statistics",
    "finetuned": "finetuned",
}
_TEST = ("trained", "bundle")


@dataclass(frozen=True)
class ExportRow:
    """One exported bundle.

    Attributes:
        facts: The part ``medfed`` of its metadata.
        weights: The weights as trained.
        books: Codebooks of the quantised ones.
    """

    facts: dict[str, Any]
    weights: Mapping[str, Tensor]
    books: Mapping[str, Codebook]


def print_export(rows: Sequence[ExportRow], metric: str, mode: str, tolerance: float) -> None:
    """Prints a line per bundle: bits, sizes, and the metric before and after.

    Args:
        rows: The bundles.
        metric: The run's selection metric.
        mode: ``max`` or ``min``.
        tolerance: See :func:`medfed.delivery.export.finetuning.falls`.
    """
    console = wide_console()
    table = Table(title="Exported bundles")
    for name in ("client", "bits", "model.pt", "fp32", "ratio", "entropy bound"):
        table.add_column(name, justify="left" if name == "client" else "right")
    stages = [
        s for s in STAGES if s != "statistics" or any(_scores(r)[s] is not None for r in rows)
    ]
    for name in stages:
        table.add_column(f"val {metric}\n{_NAMES[name]}", justify="right")
    for name in _TEST:
        table.add_column(f"test {metric}\n{name}", justify="right")
    for row in rows:
        sizes = row.facts["sizes"]
        table.add_row(
            cell(row.facts["client"]),
            bits_text(row.facts["bits"].values()),
            size(sizes["packed"]),
            size(sizes["fp32"]),
            f"{sizes['fp32'] / sizes['packed']:.2f}",
            size(sizes["entropy_bound"]),
            *(number(_scores(row)[n]) for n in stages),
            *(number(value) for value in tested(row.facts, metric)),
        )
    _add_means(table, rows, metric, mode, len(stages))
    console.print(table)
    _say_more(console, rows, metric, mode, tolerance)


def save_table(path: Path, rows: Sequence[ExportRow], metric: str) -> None:
    """Writes a CSV line per bundle: bits, bytes, and the metric at every stage.

    Args:
        path: The file.
        rows: The bundles.
        metric: The run's selection metric.
    """
    lines: list[list[Any]] = []
    for row in rows:
        facts, kept = row.facts, row.facts["quantization"]["kept"]
        scores = [_scores(row)[n] for n in STAGES]
        values = ["" if v is None else v for v in (*scores, *tested(facts, metric))]
        bits = bits_text(facts["bits"].values())
        lines.append([facts["client"], bits, facts["sizes"]["packed"], kept, metric, *values])
    head = ("client", "bits", "bytes", "kept", "metric")
    names = (*(f"val_{n}" for n in STAGES), *(f"test_{n}" for n in _TEST))
    write_text(path, csv_text((*head, *names), lines))


def tested(facts: Mapping[str, Any], metric: str) -> tuple[float | None, float | None]:
    """Returns the test metric of the model as trained, and of the bundle's weights.

    Example:
        >>> tested({"run_test_metrics": {"iou": 0.8}, "test_metrics": None}, "iou")
        (0.8, None)
    """
    return (facts["run_test_metrics"] or {}).get(metric), (facts["test_metrics"] or {}).get(metric)


def _scores(row: ExportRow) -> Mapping[str, float | None]:
    scores: Mapping[str, float | None] = row.facts["quantization"]["validation"]
    return scores


def number(value: float | None) -> str:
    """Writes a metric; what was not measured, or is undefined, is a dash."""
    return "-" if value is None else f"{value:.4f}"


def _add_means(
    table: Table, rows: Sequence[ExportRow], metric: str, mode: str, stages: int
) -> None:
    """Adds the mean and the worst client, for each width of several clients."""
    widths = dict.fromkeys(bits_text(r.facts["bits"].values()) for r in rows)
    for width in widths:
        same = [r for r in rows if bits_text(r.facts["bits"].values()) == width]
        if len(same) < 2:
            continue
        pairs = np.array([[_nan(v) for v in tested(r.facts, metric)] for r in same])
        worst = np.fmin.reduce(pairs) if mode == "max" else np.fmax.reduce(pairs)
        between = [""] * (4 + stages)
        table.add_section()
        for name, values in (("mean", mean_of_known(pairs, axis=0)), ("worst", worst)):
            known = [None if math.isnan(v) else float(v) for v in values]
            table.add_row(f"[italic]{name}[/]", width, *between, *map(number, known))


def _nan(value: float | None) -> float:
    return math.nan if value is None else value


def _say_more(
    console: Console, rows: Sequence[ExportRow], metric: str, mode: str, tolerance: float
) -> None:
    """Says where fine-tuning was not kept, and where the test metric fell."""

    def named(some: Iterable[ExportRow]) -> str:
        return ", ".join(
            f"{shown(r.facts['client'])} ({bits_text(r.facts['bits'].values())} bits)" for r in some
        )

    undone = [
        r
        for r in rows
        if _scores(r)["finetuned"] is not None and r.facts["quantization"]["kept"] != "finetuned"
    ]
    if undone:
        say(
            console,
            "Fine-tuning was undone, as validation is worse than by k-means and than as trained: "
            f"{named(undone)}.",
        )
    lost = [r for r in rows if falls(*tested(r.facts, metric), mode, tolerance)]
    if lost:
        each = ", ".join(
            f"{named([r])} {' to '.join(map(number, tested(r.facts, metric)))}" for r in lost
        )
        unit = f"{tolerance:g}" if mode == "max" else f"{tolerance:.0%}"
        say(
            console,
            f"warning: test {metric} is worse than as trained by more than tolerance={unit}: "
            f"{each}; use more bits, or layers= for the layers that need them.",
        )


def bits_text(bits: Any) -> str:
    """Names the bits per weight of the quantised tensors.

    Example:
        >>> bits_text([2, 2, 4]), bits_text([])
        ('2, 4', '32')
    """
    return ", ".join(map(str, sorted(set(bits)))) or "32"


def draw_export(rows: Sequence[ExportRow]) -> Figure:
    """Draws the sizes of all bundles, and of one of them some layers' weights with their centres.

    Args:
        rows: The bundles.

    Returns:
        A figure: sizes on the left; on the right, if anything is quantised, up to three layers.
    """
    first = next((r for r in rows if r.books), None)
    panels = 1 if first is None else 1 + min(_LAYERS, len(first.books))
    height = max(3.0, 1.2 + 0.5 * len(rows))
    figure = Figure(figsize=(4.4 + 2.6 * (panels - 1), height), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False, width_ratios=[1.5] + [1.0] * (panels - 1))[0]
    _draw_sizes(axes[0], rows)
    if first is not None:
        names = sorted(first.books, key=lambda n: -first.weights[n].numel())
        for panel, name in zip(axes[1:], names, strict=False):
            _draw_layer(panel, name, first.weights[name], first.books[name])
        axes[1].set_ylabel(f"weights of {caption(first.facts['client'])}, as trained")
    return figure


def _draw_sizes(axes: Axes, rows: Sequence[ExportRow]) -> None:
    heights = np.arange(len(rows))
    largest = max(r.facts["sizes"][key] for r in rows for _, key, _ in _BARS)
    unit, name = (1e6, "megabytes") if largest >= 1e5 else (1e3, "kilobytes")
    for i, (label, key, colour) in enumerate(_BARS):
        values = [r.facts["sizes"][key] / unit for r in rows]
        bars = axes.barh(heights + 0.27 * (i - 1), values, 0.25, label=label, color=colour)
        axes.bar_label(bars, fmt="%.3g", padding=2, fontsize=7)
    widths = [bits_text(r.facts["bits"].values()) for r in rows]
    several = len({*widths}) > 1
    suffixes = [f", {width} bits" if several else "" for width in widths]
    names = [f"{caption(r.facts['client'])}{o}" for r, o in zip(rows, suffixes, strict=True)]
    axes.set_yticks(heights, names)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel(name)
    axes.legend(fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)


def _draw_layer(axes: Axes, name: str, weights: Tensor, book: Codebook) -> None:
    values = weights.flatten().numpy()
    low, high = np.quantile(values, [0.001, 0.999])
    axes.hist(values, bins=60, range=(float(low), float(high)), color="0.75")
    for center in book.centers.tolist():
        axes.axvline(center, color=_BLUE, lw=1.0)
    short = name if len(name) <= _TITLE else f"…{name[1 - _TITLE :]}"
    axes.set_title(f"{short}\n{weights.numel():,} weights, {book.bits} bits", fontsize=7)
    axes.tick_params(labelsize=7)
    axes.set_yticks([])
    axes.set_xlabel("weight; lines: centres", fontsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(4))
