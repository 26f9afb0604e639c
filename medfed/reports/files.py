"""The files of a report: tables for programs and papers, text, pictures, and the page."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from medfed.common.console import in_markdown, say, wide_console
from medfed.common.figures import save_figures
from medfed.common.files import csv_text, write_json, write_text
from medfed.common.templates import filled
from medfed.federation.card import REFERENCES
from medfed.functional.statistics import Difference
from medfed.reports.charts import Picture
from medfed.reports.decisions import card
from medfed.reports.findings import Report
from medfed.reports.page import page, place
from medfed.reports.sentences import details
from medfed.reports.tables import BRIEF, PAPER, latex_cell, latex_text, methods_table
from medfed.reports.task_pictures import (
    dial_pictures,
    looks_of,
    pictures_of,
)
from medfed.reports.tasks import Task
from medfed.reports.verdicts import Against, Harm, Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPLATES = Path(__file__).parent / "templates"


def _row(task: Task, name: str, v: Verdict) -> dict[str, object]:
    """The line of a method, by column; means are in the metric's direction."""
    raw = task.raw
    low, high = sorted((raw(v.mean.low), raw(v.mean.high)))
    row: dict[str, object] = {"suite": task.suite, "variant": task.variant, "method": name}
    row |= {"metric": task.metric, "splits": len(v.scores.values), "mean": raw(v.mean.mean)}
    row |= {"low": low, "high": high, "half_width": v.mean.half}
    row |= {"worst_client": raw(v.worst), "worst_decile": raw(v.decile)}
    unknown = Difference(*[math.nan] * 6)
    for r in REFERENCES:
        a = v.against.get(r, Against(r, unknown, unknown[:2], math.nan, ""))
        d = a.difference
        row |= {f"difference_{r}": d.mean, f"low_{r}": d.low, f"high_{r}": d.high}
        row |= {f"half_width_{r}": d.half, f"patients_low_{r}": a.patients[0]}
        row |= {f"patients_high_{r}": a.patients[1], f"p_holm_{r}": a.p}
        row |= {f"detectable_{r}": d.detectable, f"verdict_{r}": a.verdict}
    harm = v.harm or Harm(*unknown[:3])
    row |= {"harmed": harm.share, "harmed_low": harm.low, "harmed_high": harm.high}
    row |= {
        "harmed_clients": " ".join(harm.clients),
        "surely_harmed_clients": " ".join(harm.surely),
    }
    up, down = v.scores.sent
    setting = " ".join(f"{key}={value:g}" for key, value in v.scores.setting.items())
    row |= {"bytes_up": up, "bytes_down": down, "passes": v.scores.passes}
    return row | {"failed_splits": v.scores.failed, "setting": setting}


def table_csv(report: Report) -> str:
    """Returns a line per suite, variant and method.

    Args:
        report: The report.
    """
    rows = [_row(task, name, v) for task, verdicts in report.tasks for name, v in verdicts.items()]
    lines = [[_cell(value) for value in row.values()] for row in rows]
    return csv_text([*rows[0]] if rows else (), lines)


def write(folder: Path, report: Report, figures: bool = True) -> None:
    """Writes all files of a report.

    Args:
        folder: Made where it is not there.
        report: What was found.
        figures: Whether to write pictures as vectors, too.
    """
    write_text(folder / "table.csv", table_csv(report))
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
        save_figures(folder / "figures", _figures(report), endings=("svg", "pdf"))


def _figures(report: Report) -> dict[str, Figure | None]:
    """The pictures that papers show: of each suite's first task, and of dials."""
    pictures: dict[str, Picture] = {}
    looks = looks_of(report)
    suites: dict[str, Task] = {}
    for task, verdicts in report.tasks:
        if suites.setdefault(task.suite, task) is task:
            of_task = pictures_of(task, verdicts, looks)
            pictures |= {f"{place(task.name)}-{name}": one for name, one in of_task.items()}
    pictures |= {f"{place(n)}-dial": one for n, one in dial_pictures(report, looks).items()}
    return {name: one.figure for name, one in pictures.items()}


def _cell(value: object) -> object:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return value


def markdown(report: Report) -> str:
    """Returns the report: the decision card, verdicts in words, then a table for each task.

    Args:
        report: The report.
    """
    tasks = [
        (task, methods_table(task, v).only(BRIEF), [*details(task, v), *task.notes])
        for task, v in report.tasks
    ]
    words = {"report": report, "card": card(report.tasks), "tasks": tasks, "markdown": in_markdown}
    return filled(TEMPLATES / "report.md", **words).rstrip() + "\n"


def latex(report: Report) -> str:
    r"""Returns a table for a paper, of booktabs: a line per method, best first, for each task.

    Args:
        report: The report.
    """
    tables = [(task, methods_table(task, verdicts).only(PAPER)) for task, verdicts in report.tasks]
    words = {"tables": tables, "text": latex_text, "cell": latex_cell}
    return filled(TEMPLATES / "tables.tex", **words)


def print_tables(report: Report, console: Console | None = None) -> None:
    """Prints a table for each task."""
    console = console or wide_console()
    for task, verdicts in report.tasks:
        table = methods_table(task, verdicts).only(BRIEF)
        console.print(table.printed(f"{task.name}: {task.metric}"))
        say(console, *task.left_out.values())
