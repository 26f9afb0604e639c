"""The table and the picture of an export."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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

from medfed.delivery.codebook import Codebook
from medfed.reports.results import size, wide_console

_LAYERS = 3
_TITLE = 32  # letters of a layer's name that fit above its panel
_COLOURS = {"single precision": "0.75", "bundle": "#0072B2", "entropy bound": "#E69F00"}


@dataclass(frozen=True)
class ExportRow:
    """One exported bundle.

    Attributes:
        client: The client.
        folder: The bundle.
        facts: The part ``medfed`` of its metadata.
        weights: The weights as trained.
        books: Codebooks of the quantised ones.
    """

    client: str
    folder: Path
    facts: dict[str, Any]
    weights: Mapping[str, Tensor]
    books: Mapping[str, Codebook]


def print_export(rows: Sequence[ExportRow], metric: str, console: Console | None = None) -> None:
    """Prints a line per bundle: bits, sizes, and the validation metric before and after."""
    console = console or wide_console()
    table = Table(title="Exported bundles")
    for name in ("client", "bits", "model.pt", "fp32", "ratio", "entropy bound"):
        table.add_column(name, justify="left" if name == "client" else "right")
    for name in ("trained", "k-means", "finetuned"):
        table.add_column(f"val {metric}\n{name}", justify="right")
    for row in rows:
        sizes, scores = row.facts["sizes"], row.facts["quantization"]["validation"]
        table.add_row(
            row.client,
            bits_text(row.facts["bits"].values()),
            size(sizes["packed"]),
            size(sizes["fp32"]),
            f"{sizes['fp32'] / sizes['packed']:.2f}",
            size(sizes["entropy_bound"]),
            *(_number(scores[n]) for n in ("trained", "kmeans", "finetuned")),
        )
    console.print(table)
    kept = [r.client for r in rows if _kept_untuned(r)]
    if kept:
        console.print(f"Validation got worse by fine-tuning, which was undone: {', '.join(kept)}.")


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
        axes[1].set_ylabel(f"weights of {first.client}, as trained")
    return figure


def _draw_sizes(axes: Axes, rows: Sequence[ExportRow]) -> None:
    keys = {"single precision": "fp32", "bundle": "packed", "entropy bound": "entropy_bound"}
    places = np.arange(len(rows))
    for i, (label, key) in enumerate(keys.items()):
        values = [r.facts["sizes"][key] / 1e6 for r in rows]
        bars = axes.barh(places + 0.27 * (i - 1), values, 0.25, label=label, color=_COLOURS[label])
        axes.bar_label(bars, fmt="%.3g", padding=2, fontsize=7)
    axes.set_yticks(places, [r.client for r in rows])
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel("megabytes")
    axes.legend(fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)


def _draw_layer(axes: Axes, name: str, weights: Tensor, book: Codebook) -> None:
    values = weights.flatten().numpy()
    low, high = np.quantile(values, [0.001, 0.999])
    axes.hist(values, bins=60, range=(float(low), float(high)), color="0.75")
    for center in book.centers.tolist():
        axes.axvline(center, color=_COLOURS["bundle"], lw=1.0)
    short = name if len(name) <= _TITLE else f"…{name[1 - _TITLE :]}"
    axes.set_title(f"{short}\n{weights.numel():,} weights, {book.bits} bits", fontsize=7)
    axes.tick_params(labelsize=7)
    axes.set_yticks([])
    axes.set_xlabel("weight; lines: centres", fontsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(4))


def _number(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.4f}"


def _kept_untuned(row: ExportRow) -> bool:
    done = row.facts["quantization"]
    return done["validation"]["finetuned"] is not None and not done["finetune_steps"]
