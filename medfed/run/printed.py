"""What a run prints at its end: the metrics of its clients, and remarks on how sure they are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from medfed.common.console import cell, say, shown, size, wide_console
from medfed.common.errors import few
from medfed.common.scores import (
    failure_sentences,
    interval,
    number,
    smaller_is_better,
    span,
    undefined_sentences,
)
from medfed.common.templates import filled
from medfed.run.intervals import doubts

_STATISTICS = ("mean", "sd", "worst")
_SHORT = {"balanced_accuracy": "balanced\naccuracy", "sensitivity": "sens.", "specificity": "spec."}
_LINES, _ENDS = 40, 10  # clients with a line each; of more clients, the best and the worst


def print_summary(summary: dict[str, Any], folder: Path, console: Console | None = None) -> None:
    """Prints the metrics per client and for the federation, and the bytes sent.

    The metric that selected the round comes first, with its interval. Below the clients come their
    mean, the value for all cases together, and that of a constant prediction.
    """
    console = console or wide_console()
    console.print(metric_table(summary))
    say(console, *remarks(summary), f"Results and pictures: {folder}")


def remarks(summary: Mapping[str, Any]) -> list[str]:
    """Says how sure the numbers of a run's table are, and what they cost.

    Args:
        summary: The summary of a run or of an evaluation.
    """
    metric, of = summary["selection"][0], (summary["clients"], summary.get("split", "test"))
    absent: dict[tuple[str, ...], list[str]] = {}
    for client, names in summary.get("absent", {}).items():
        absent.setdefault(tuple(map(shown, names)), []).append(shown(client))
    sign = -1 if smaller_is_better(metric) else 1
    means = [
        over["federation"].get(metric, {}).get("mean", math.nan)
        for over in (summary, *summary.get("constant", {}).values())
    ]
    known = [mean for mean in means[1:] if not math.isnan(mean)]
    best = max(known, key=lambda mean: sign * mean, default=math.nan)
    words = {
        **doubts(summary, metric),
        "summary": summary,
        "metric": metric,
        "split": of[1],
        "lost": [*undefined_sentences(*of), *failure_sentences(*of)],
        "absent": absent,
        "mean": means[0],
        "constant": best,
        "lacking": [shown(c) for c, p in summary.get("points", {}).items() if "pooled" in p],
        "useless": sign * means[0] < sign * best,  # not if one of them is undefined
        **{function.__name__: function for function in (few, interval, number, shown, size, span)},
    }
    text = filled(Path(__file__).parent / "templates" / "remarks.txt", **words)
    return text.strip().split("\n")


def metric_table(summary: Mapping[str, Any]) -> Table:
    """Returns the table of a run, which fits 100 characters with all metrics of a classification.

    Args:
        summary: The summary of a run or of an evaluation.
    """
    first = summary["selection"][0]
    names = [n for n in next(iter(summary["clients"].values())) if "/" not in n]
    names.sort(key=lambda name: name != first)
    intervals = summary.get("intervals", {"clients": {}, "mean": {}, "pooled": {}})
    shows = first in intervals["mean"] or any(
        first in ends for ends in intervals["clients"].values()
    )
    table = Table(
        title=f"{cell(summary['name'])}, {summary['algorithm']}: "
        f"{summary.get('split', 'test')} metrics of round {(summary['selected_round'] or 0) + 1} "
        f"of {summary['rounds']} (selected by validation {first})",
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
    )
    table.add_column("client", overflow="fold")
    for name in names:
        table.add_column(short(name), justify="right")
        if name == first and shows:
            table.add_column(f"{intervals['level']:.0%} interval", justify="right")

    def add(label: str, values: Mapping[str, float], ends: Mapping[str, Any]) -> None:
        texts = [number(values[n]) if n in values else "–" for n in names]
        table.add_row(label, texts[0], *([interval(ends.get(first))] * shows), *texts[1:])

    best, worst = ends_of(summary["clients"], *summary["selection"])
    for client in best:
        add(cell(client), summary["clients"][client], intervals["clients"].get(client, {}))
    if worst:
        left = len(summary["clients"]) - len(best) - len(worst)
        table.add_row(f"… {left:,} more, see metrics.csv", "…")
    for client in worst:
        add(cell(client), summary["clients"][client], intervals["clients"].get(client, {}))
    table.add_section()
    for row in _STATISTICS:
        values = {n: over[row] for n, over in summary["federation"].items()}
        add(row, values, intervals["mean"] if row == "mean" else {})
    if summary.get("pooled"):
        add("pooled", summary["pooled"], intervals["pooled"])
    table.add_section()
    for name, constant in summary.get("constant", {}).items():
        add(name, {n: over["mean"] for n, over in constant["federation"].items()}, {})
    return table


def ends_of(
    clients: Mapping[str, Mapping[str, float]], metric: str, mode: str = "max"
) -> tuple[list[str], list[str]]:
    """Returns the clients that a table shows: all, or of very many the best and the worst.

    Args:
        clients: The metrics of each client.
        metric: The metric that orders the clients; those without it are put in the middle.
        mode: ``max`` or ``min``.

    Returns:
        All clients in order and an empty list; or the best clients and the worst ones, the worst
        one last.

    Example:
        >>> best, worst = ends_of({f"c{i}": {"iou": i / 100} for i in range(100)}, "iou")
        >>> best[:2], worst[-2:], len(best + worst)
        (['c99', 'c98'], ['c1', 'c0'], 20)
    """
    if len(clients) <= _LINES:
        return [*clients], []
    sign = -1 if mode == "max" else 1
    known = [c for c, m in clients.items() if not math.isnan(m.get(metric, math.nan))]
    order = sorted(known or clients, key=lambda c: sign * clients[c].get(metric, 0.0))
    return order[:_ENDS], order[_ENDS:][-_ENDS:]


def short(metric: str) -> str:
    r"""Returns a metric's name for the head of a narrow column.

    Example:
        >>> short("balanced_accuracy"), short("auroc")
        ('balanced\naccuracy', 'auroc')
    """
    return _SHORT.get(metric, metric.replace("_", " "))
