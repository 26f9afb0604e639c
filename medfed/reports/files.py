"""The files of a report: tables for programs and papers, text, pictures, and the page."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from medfed.common.console import say, wide_console
from medfed.common.files import csv_text, replacing, write_json, write_text
from medfed.federation.card import REFERENCES
from medfed.reports.charts import Canvas
from medfed.reports.decisions import card
from medfed.reports.findings import Report
from medfed.reports.page import page, place
from medfed.reports.sentences import details
from medfed.reports.tables import BRIEF, PAPER, methods_table
from medfed.reports.task_pictures import (
    Picture,
    dial_pictures,
    looks_of,
    pictures_of,
    ranks_picture,
)
from medfed.reports.tasks import Task
from medfed.reports.verdicts import Verdict

COLUMNS = (
    *("suite", "variant", "method", "metric", "splits", "mean", "low", "high", "half_width"),
    *("worst_client", "worst_decile"),
    *(
        f"{name}_{reference}"
        for reference in REFERENCES
        for name in (
            *("difference", "low", "high", "half_width", "patients_low", "patients_high"),
            *("p_holm", "detectable", "verdict"),
        )
    ),
    *("harmed", "harmed_low", "harmed_high", "harmed_clients", "surely_harmed_clients"),
    *("bytes_up", "bytes_down", "passes", "failed_splits", "setting"),
)


def _row(report: Report, task: Any, name: str, v: Verdict) -> list[object]:
    raw = task.raw
    ends = sorted((raw(v.mean.low), raw(v.mean.high)))
    cells: list[object] = [
        *(task.suite, task.variant, name, task.metric, len(v.scores.values)),
        *(raw(v.mean.mean), *ends, v.mean.half, raw(v.worst), raw(v.decile)),
    ]
    for reference in REFERENCES:
        if (a := v.against.get(reference)) is None:
            cells += [""] * 9
            continue
        d = a.difference
        cells += [d.mean, d.low, d.high, d.half, *a.patients, a.p, d.detectable, a.verdict]
    if v.harm is None:
        cells += [""] * 5
    else:
        cells += [v.harm.share, v.harm.low, v.harm.high]
        cells += [" ".join(v.harm.clients), " ".join(v.harm.surely)]
    setting = " ".join(f"{key}={value:g}" for key, value in v.scores.setting.items())
    return [*cells, *v.scores.sent, v.scores.passes, v.scores.failed, setting]


def write(folder: Path, report: Report, figures: bool = True) -> None:
    """Writes all files of a report.

    Args:
        folder: Made where it is not there.
        report: What was found.
        figures: Whether to write pictures as vectors, too.
    """
    rows = [
        [_cell(value) for value in _row(report, task, name, v)]
        for task, verdicts in report.tasks
        for name, v in verdicts.items()
    ]
    write_text(folder / "table.csv", csv_text(COLUMNS, rows))
    clients = [
        [task.suite, task.variant, name, split, client, _cell(task.raw(float(value)))]
        for task, verdicts in report.tasks
        for name, v in verdicts.items()
        for split, values in enumerate(v.scores.values)
        for client, value in zip(task.clients, values, strict=True)
    ]
    head = ("suite", "variant", "method", "split", "client", "value")
    write_text(folder / "clients.csv", csv_text(head, clients))
    write_json(folder / "findings.json", report.plain())
    write_text(folder / "report.md", markdown(report))
    write_text(folder / "tables.tex", latex(report))
    write_text(folder / "report.html", page(report))
    if figures:
        for name, canvas in _canvases(report):
            _save(folder / "figures" / name, canvas)


def _canvases(report: Report) -> Iterator[tuple[str, Canvas]]:
    """The pictures that papers show: of each suite's first task, of dials, of ranks."""
    pictures: dict[str, Picture] = {}
    looks = looks_of(report)
    suites: dict[str, Task] = {}
    for task, verdicts in report.tasks:
        if suites.setdefault(task.suite, task) is task:
            drawn = pictures_of(task, verdicts, looks)
            pictures |= {f"{place(task.name)}-{name}": one for name, one in drawn.items()}
    pictures |= {f"{place(n)}-dial": one for n, one in dial_pictures(report, looks).items()}
    if report.ranks:
        pictures["ranks"] = ranks_picture(report, looks)
    return ((name, one.canvas) for name, one in pictures.items() if one.canvas is not None)


def _save(path: Path, canvas: Canvas) -> None:
    from matplotlib import rc_context

    logging.getLogger("fontTools").setLevel(logging.WARNING)  # it tells of every glyph of a PDF
    figure = canvas.figure()
    style = {"svg.hashsalt": path.name, "svg.fonttype": "none", "pdf.fonttype": 42}
    for ending, kept in (("svg", {"Date": None}), ("pdf", {"CreationDate": None})):
        with replacing(path.with_name(f"{path.name}.{ending}")) as partial, rc_context(style):
            figure.savefig(partial, format=ending, metadata=kept)


def _cell(value: object) -> object:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return value


def markdown(report: Report) -> str:
    """Returns the report: the decision card, verdicts in words, then a table for each task.

    Args:
        report: The report.
    """
    lines = [f"# {report.title}", "", *card(report.tasks).markdown(), ""]
    lines += [*(f"- {s}" for s in report.sentences), ""]
    for task, verdicts in report.tasks:
        better = "smaller" if task.falls else "larger"
        lines += [f"## {task.name}", "", f"{task.metric}, {better} is better.", ""]
        lines += [*methods_table(task, verdicts).only(BRIEF).markdown(), ""]
        lines += [f"- {s}" for s in (*details(task, verdicts), *task.notes)] + [""]
    lines += ["## Claims", ""] if report.claims else []
    for one in report.claims:
        lines += [f"**{one.claim}** {one.verdict.capitalize()}. ({one.source})", ""]
        lines += [*one.table().markdown(), ""]
    return "\n".join(lines).rstrip() + "\n"


def latex(report: Report) -> str:
    r"""Returns a table for a paper, of booktabs: a line per method, best first, for each task.

    Args:
        report: The report.
    """
    lines = []
    for task, verdicts in report.tasks:
        splits = "1 split" if task.single else f"{task.splits} splits"
        note = f"{task.metric}, {splits}; 95% intervals; bold: a difference with Holm's p < 0.05."
        lines.append(f"% {task.name}")
        lines += [*methods_table(task, verdicts).only(PAPER, note).latex(), ""]
    return "\n".join(lines)


def print_tables(report: Report) -> None:
    """Prints a table for each task."""
    console = wide_console()
    for task, verdicts in report.tasks:
        table = methods_table(task, verdicts).only(BRIEF)
        console.print(table.printed(f"{task.name}: {task.metric}"))
        say(console, *task.left_out.values())
