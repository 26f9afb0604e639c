"""What a run prints at its end: the metrics of its clients, and remarks on how sure they are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
from medfed.run.intervals import notes
from medfed.run.memberships import membership_line

_STATISTICS = ("mean", "sd", "worst")
_SHORT = {"balanced_accuracy": "balanced\naccuracy", "sensitivity": "sens.", "specificity": "spec."}
_LINES, _ENDS = 40, 10  # clients with a line each; of more clients, the best and the worst
_GROUPS = 4  # sentences on classes that clients lack


def print_summary(summary: dict[str, Any], folder: Path, console: Console | None = None) -> None:
    """Prints the metrics per client and for the federation, and the bytes sent.

    The metric that selected the round comes first, with its interval. Below the clients come their
    mean, the value for all cases together, and that of a constant prediction.
    """
    console = console or wide_console()
    console.print(metric_table(summary))
    of = summary["clients"], summary.get("split", "test")
    lines = [
        *notes(summary, summary["selection"][0]),
        *undefined_sentences(*of),
        *failure_sentences(*of),
        *absent_sentences(summary.get("absent", {}), of[1]),
        *constant_sentences(summary),
        *course_sentences(summary),
        *summary.get("remarks", ()),
        *passes_line(summary),
        sent_line(summary),
    ]
    if "memberships" in summary:
        lines.append(membership_line(summary["memberships"]))
    say(console, *lines, f"Results and pictures: {folder}")


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


def absent_sentences(absent: Mapping[str, Sequence[str]], split: str) -> list[str]:
    """Says which classes are missing in which means over classes.

    Args:
        absent: By client, the classes without a sample in its split.
        split: The split.

    Example:
        >>> absent_sentences({"a": ["3"], "b": ["3"]}, "test")
        ['The test data of a, b have no sample of 3, so their means over classes omit it.']
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for client, names in absent.items():
        groups.setdefault(tuple(names), []).append(shown(client))
    if len(groups) > _GROUPS:
        return [
            f"The {split} data of {len(absent)} clients lack classes, so their means over classes "
            "omit these (summary.json: absent)."
        ]
    return [
        f"The {split} data of {few(who)} have no sample of {', '.join(map(shown, names))}, so "
        f"their means over classes omit {'it' if len(names) == 1 else 'them'}."
        for names, who in groups.items()
    ]


def constant_sentences(summary: Mapping[str, Any]) -> list[str]:
    """Says if models are worse, on average, than a constant prediction.

    Example:
        >>> over = lambda mean: {"federation": {"rmse": {"mean": mean}}}
        >>> run = {"selection": ["rmse", "min"], "constant": {"mean": over(77.0)}, **over(156.0)}
        >>> constant_sentences(run)[0].split(":")[0]
        'The mean rmse (156.0000) is worse than that of a constant prediction (77.0000)'
        >>> constant_sentences({**run, **over(60.0)})
        []
    """
    metric = summary["selection"][0]
    mean = summary["federation"].get(metric, {}).get("mean", math.nan)
    sign = -1 if smaller_is_better(metric) else 1
    constants = [
        told["federation"].get(metric, {}).get("mean", math.nan)
        for told in summary.get("constant", {}).values()
    ]
    best = max(
        (c for c in constants if not math.isnan(c)), key=lambda c: sign * c, default=math.nan
    )
    if not sign * mean < sign * best:  # also if one of them is undefined
        return []
    return [
        f"The mean {metric} ({number(mean)}) is worse than that of a constant prediction "
        f"({number(best)}): the models are not useful yet. Try another learning rate or more "
        "rounds."
    ]


def course_sentences(summary: Mapping[str, Any]) -> list[str]:
    """Says if more rounds would perhaps help, and if the selected model is not yet fine-tuned.

    Example:
        >>> run = {"selection": ["auroc", "max"], "selected_round": 6, "rounds": 10}
        >>> course_sentences({**run, "improving": False, "first_local": 8})
        ['Round 7 was selected, before fine-tuning began in round 9: the tested models are not \
fine-tuned.']
        >>> course_sentences({**run, "improving": True, "first_local": None})
        ['Validation auroc was still improving when the run ended: set rounds to more than 10.']
    """
    selected, local = summary["selected_round"], summary.get("first_local")
    lines = []
    if local is not None and selected is not None and selected < local < summary["rounds"]:
        lines.append(
            f"Round {selected + 1} was selected, before fine-tuning began in round {local + 1}: "
            "the tested models are not fine-tuned."
        )
    if summary.get("improving"):
        lines.append(
            f"Validation {summary['selection'][0]} was still improving when the run ended: set "
            f"rounds to more than {summary['rounds']}."
        )
    return lines


def passes_line(summary: Mapping[str, Any]) -> list[str]:
    """Says how many steps a client took, and how many passes if these differ.

    Example:
        >>> spent = {"steps": {"a": 20}, "gradient_passes": {"a": 25}, "forward_passes": {"a": 8}}
        >>> passes_line(spent)
        ['Gradient passes per client: 25 for 20 steps; further forward passes: 8.']
        >>> passes_line({**spent, "gradient_passes": {"a": 20}, "forward_passes": {"a": 0}})
        ['Gradient steps per client: 20.']
    """
    steps, forward = summary["steps"], summary.get("forward_passes", {})
    gradient = summary.get("gradient_passes", steps)
    if gradient == steps and not any(forward.values()):
        return [f"Gradient steps per client: {span(steps.values())}."]
    alone = f"; further forward passes: {span(forward.values())}" * any(forward.values())
    spent = f"{span(gradient.values())} for {span(steps.values())} steps"
    return [f"Gradient passes per client: {spent}{alone}."]


def sent_line(summary: dict[str, Any]) -> str:
    """Says how many bytes were sent, and how many times fewer that is than in fp32.

    Example:
        >>> sent = {"bytes": {"up": 1_000_000, "down": 0}, "savings": {"up": 31.96, "down": 1.0}}
        >>> sent_line(sent)
        'Sent up 1.0 MB (32.0x less than fp32), down 0 B.'
    """
    parts = []
    for direction, count in summary["bytes"].items():
        factor = summary["savings"][direction]
        note = f" ({factor:.1f}x less than fp32)" if round(factor, 1) != 1 else ""
        parts.append(f"{direction} {size(count)}{note}")
    return f"Sent {', '.join(parts)}."
