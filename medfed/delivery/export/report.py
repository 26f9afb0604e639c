"""What an export says of its bundles: a table, and warnings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from medfed.common.console import cell, say, shown, size, wide_console
from medfed.common.files import csv_text, write_text
from medfed.common.scores import mean_of_known
from medfed.delivery.export.finetuning import STAGES, falls

_NAMES = {
    "trained": "trained",
    "kmeans": "k-means",
    "statistics": "statistics",
    "finetuned": "finetuned",
}
_TEST = ("trained", "bundle")


Facts = Mapping[str, Any]
"""The part ``medfed`` of the metadata of one exported bundle."""


def print_export(rows: Sequence[Facts], metric: str, mode: str, tolerance: float) -> None:
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
        sizes = row["sizes"]
        table.add_row(
            cell(row["client"]),
            bits_text(row["bits"].values()),
            size(sizes["packed"]),
            size(sizes["fp32"]),
            f"{sizes['fp32'] / sizes['packed']:.2f}",
            size(sizes["entropy_bound"]),
            *(number(_scores(row)[n]) for n in stages),
            *(number(value) for value in tested(row, metric)),
        )
    _add_means(table, rows, metric, mode, len(stages))
    console.print(table)
    _say_more(console, rows, metric, mode, tolerance)


def save_table(path: Path, rows: Sequence[Facts], metric: str) -> None:
    """Writes a CSV line per bundle: bits, bytes, and the metric at every stage.

    Args:
        path: The file.
        rows: The bundles.
        metric: The run's selection metric.
    """
    lines: list[list[Any]] = []
    for row in rows:
        kept = row["quantization"]["kept"]
        scores = [_scores(row)[n] for n in STAGES]
        values = ["" if v is None else v for v in (*scores, *tested(row, metric))]
        bits = bits_text(row["bits"].values())
        lines.append([row["client"], bits, row["sizes"]["packed"], kept, metric, *values])
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


def _scores(row: Facts) -> Mapping[str, float | None]:
    scores: Mapping[str, float | None] = row["quantization"]["validation"]
    return scores


def number(value: float | None) -> str:
    """Writes a metric; what was not measured, or is undefined, is a dash."""
    return "-" if value is None else f"{value:.4f}"


def _add_means(table: Table, rows: Sequence[Facts], metric: str, mode: str, stages: int) -> None:
    """Adds the mean and the worst client, for each width of several clients."""
    widths = dict.fromkeys(bits_text(r["bits"].values()) for r in rows)
    for width in widths:
        same = [r for r in rows if bits_text(r["bits"].values()) == width]
        if len(same) < 2:
            continue
        pairs = np.array([[_nan(v) for v in tested(r, metric)] for r in same])
        worst = np.fmin.reduce(pairs) if mode == "max" else np.fmax.reduce(pairs)
        between = [""] * (4 + stages)
        table.add_section()
        for name, values in (("mean", mean_of_known(pairs, axis=0)), ("worst", worst)):
            known = [None if math.isnan(v) else float(v) for v in values]
            table.add_row(f"[italic]{name}[/]", width, *between, *map(number, known))


def _nan(value: float | None) -> float:
    return math.nan if value is None else value


def _say_more(
    console: Console, rows: Sequence[Facts], metric: str, mode: str, tolerance: float
) -> None:
    """Says where fine-tuning was not kept, and where the test metric fell."""

    def named(some: Iterable[Facts]) -> str:
        return ", ".join(
            f"{shown(r['client'])} ({bits_text(r['bits'].values())} bits)" for r in some
        )

    undone = [
        r
        for r in rows
        if _scores(r)["finetuned"] is not None and r["quantization"]["kept"] != "finetuned"
    ]
    if undone:
        say(
            console,
            "Fine-tuning was undone, as validation is worse than by k-means and than as trained: "
            f"{named(undone)}.",
        )
    lost = [r for r in rows if falls(*tested(r, metric), mode, tolerance)]
    if lost:
        each = ", ".join(
            f"{named([r])} {' to '.join(map(number, tested(r, metric)))}" for r in lost
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
