"""The files of a report: tables for programs and papers, text, pictures, and the page."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from medfed.common.console import cell as as_cell
from medfed.common.console import say, size, wide_console
from medfed.common.files import csv_text, replacing, write_json, write_text
from medfed.reports.charts import Canvas
from medfed.reports.claims import markdown as claims_lines
from medfed.reports.findings import Report
from medfed.reports.page import dial_pictures, page, place, ranks_picture
from medfed.reports.runs import REFERENCES
from medfed.reports.sentences import details
from medfed.reports.task_pictures import by_mean, pictures_of
from medfed.reports.verdicts import Verdict

COLUMNS = (
    *("suite", "variant", "method", "metric", "splits", "mean", "low", "high"),
    *("worst_client", "worst_decile"),
    *(
        f"{name}_{reference}"
        for reference in REFERENCES
        for name in (
            *("difference", "low", "high", "patients_low", "patients_high"),
            *("p_holm", "visible", "verdict"),
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
        *(raw(v.mean.mean), *ends, raw(v.worst), raw(v.decile)),
    ]
    for reference in REFERENCES:
        if (a := v.against.get(reference)) is None:
            cells += [""] * 8
            continue
        d = a.difference
        cells += [d.mean, d.low, d.high, *a.patients, a.p, d.visible, a.verdict]
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
    seen = set()
    for task, verdicts in report.tasks:
        if task.suite not in seen:
            seen.add(task.suite)
            for name, picture in pictures_of(task, verdicts).items():
                yield f"{place(task.name)}-{name}", picture.canvas
    for suite, picture in dial_pictures(report).items():
        yield f"{place(suite)}-dial", picture.canvas
    if report.ranks:
        yield "ranks", ranks_picture(report).canvas


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
    """Returns the report: verdicts in words first, then a table for each task.

    Args:
        report: What was found.
    """
    lines = [f"# {report.title}", "", *(f"- {s}" for s in report.sentences), ""]
    head = (
        *("method", "mean [95 %]", "worst client", "worst decile", "against local"),
        *("against FedAvg", "harmed", "sent"),
    )
    for task, verdicts in report.tasks:
        better = "smaller" if task.falls else "larger"
        lines += [f"## {task.name}", "", f"{task.metric}, {better} is better.", ""]
        lines += [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
        lines += [f"| {' | '.join(row)} |" for row in shown(task, verdicts)] + [""]
        lines += [f"- {s}" for s in (*details(task, verdicts), *task.notes)] + [""]
    lines += claims_lines(report.claims)
    return "\n".join(lines).rstrip() + "\n"


def shown(task: Any, verdicts: Mapping[str, Verdict]) -> list[tuple[str, ...]]:
    """The lines of a table for people, best first."""
    rows = []
    for name in by_mean(verdicts):
        v = verdicts[name]
        low, high = sorted((task.raw(v.mean.low), task.raw(v.mean.high)))
        gaps = []
        for reference in REFERENCES:
            a = v.against.get(reference)
            gaps.append("" if a is None else f"{a.difference.mean:+.4f} {a.verdict}")
        harm = "" if v.harm is None else f"{v.harm.share:.0%} [{v.harm.low:.0%}, {v.harm.high:.0%}]"
        rows.append(
            (
                name,
                f"{task.raw(v.mean.mean):.4f} [{low:.4f}, {high:.4f}]",
                f"{task.raw(v.worst):.4f}",
                f"{task.raw(v.decile):.4f}",
                *gaps,
                harm.replace("nan%", "–"),
                size(round(sum(v.scores.sent))),
            )
        )
    return rows


def latex(report: Report) -> str:
    r"""Returns a table for a paper, of booktabs: a line per method, best first, for each task.

    Args:
        report: What a benchmark found.
    """
    lines = []
    for task, verdicts in report.tasks:
        lines += [
            f"% {task.name}: {task.metric}",
            r"\begin{tabular}{lrrrrr}",
            r"\toprule",
            r"method & mean & worst & $-$ local & $-$ FedAvg & harmed \\",
            r"\midrule",
        ]
        for name, v in sorted(verdicts.items(), key=lambda item: -item[1].mean.mean):
            cells = [name.replace("_", r"\_"), f"{task.raw(v.mean.mean):.4f}"]
            cells.append(f"{task.raw(v.worst):.4f}")
            for reference in REFERENCES:
                a = v.against.get(reference)
                star = "" if a is None or a.verdict not in ("better", "worse") else "*"
                cells.append("" if a is None else f"${a.difference.mean:+.4f}${star}")
            cells.append("" if v.harm is None else f"{v.harm.share:.0%}".replace("%", r"\%"))
            lines.append(" & ".join(cells) + r" \\")
        lines += [r"\bottomrule", r"\end{tabular}", ""]
    return "\n".join(lines)


def print_tables(report: Report) -> None:
    """Prints a table for each task."""
    console = wide_console()
    for task, verdicts in report.tasks:
        table = Table(box=SIMPLE_HEAD, title=f"{task.name}: {task.metric}", title_justify="left")
        for column in (
            "method",
            "mean",
            "worst",
            "decile",
            "− local",
            "− FedAvg",
            "harmed",
            "sent",
        ):
            table.add_column(column, justify="left" if column == "method" else "right")
        for row in shown(task, verdicts):
            table.add_row(*(as_cell(text) if text else "" for text in row))
        console.print(table)
        say(console, *task.left_out.values())
