"""``medfed report``: one page about finished runs, which says only what their splits support.

Runs that differ in ``seed``, ``data.seed`` or ``data.fold`` alone are one method on several splits.
The files of a report are those of ``medfed benchmark``, too: tables for programs and papers, text,
pictures, and the page.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.console import Console

from medfed.common.console import in_latex, in_markdown, say, visible, wide_console
from medfed.common.figures import FORMATS, save_figures
from medfed.common.scores import label_of
from medfed.common.tables import Table, latex_cell
from medfed.federation.card import REFERENCES
from medfed.functional.statistics import Difference
from medfed.records.folder import RunFolder
from medfed.reports import tables
from medfed.reports.charts import COLOURS, Look, svg
from medfed.reports.coverage import COVERAGE, coverage_table
from medfed.reports.findings import Report, report_on
from medfed.reports.runs import common_folder, find_runs, folders_with
from medfed.reports.sentences import card, ends_of
from medfed.reports.task_pictures import (
    contours_of,
    dial_pictures,
    looks_of,
    models_of,
    pictures_of,
)
from medfed.reports.tasks import Task
from medfed.reports.verdicts import Gain, Harm, Verdict, Verdicts
from medfed.standalone.errors import ConfigError, few
from medfed.standalone.files import csv_text, filled, write_json, write_text, writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def report_runs(
    runs: str | Sequence[str],
    out: Path | None = None,
    metric: str | None = None,
    figures: bool = True,
) -> Report:
    """Judges finished runs, prints the table and writes the page and its files."""
    # Imported here, as the other questions draw nothing.
    from medfed.reports.comparison import add_findings

    folders = find_runs(runs)
    folder = common_folder(folders) / "report" if out is None else out.expanduser()
    report = report_on(folders, metric)
    add_findings(report)
    report.notes += _unfinished(runs, folders)
    _refuse_others_files(folder, report)
    with writing(folder, "choose another out=FOLDER"):
        write(folder, report, figures)
    print_tables(report)
    say(wide_console(), *report.sentences, f"Report: {folder / _PAGE}")
    return report


def _refuse_others_files(folder: Path, report: Report) -> None:
    """Lets a report replace the files of an earlier report, and no others."""
    html = folder / _PAGE
    if html.is_file() and GENERATOR.encode() in html.read_bytes()[:1000]:
        return
    for path in (folder / name for name in (_PAGE, *_FILES, *map("{}.csv".format, report.tables))):
        if path.exists():
            raise ConfigError(
                f"{path} is there and no report has written it; choose another out=FOLDER."
            )


def _unfinished(runs: str | Sequence[str], folders: Sequence[Path]) -> list[str]:
    """Names the runs below the folders that have not finished, which the report leaves out."""
    known = {folder.resolve() for folder in folders}
    lost = sorted(
        str(folder)
        for name in ([runs] if isinstance(runs, str) else runs)
        for folder in folders_with(RunFolder.config_yaml, Path(name).expanduser())
        if folder.resolve() not in known and RunFolder(folder).splits_json.is_file()
    )
    return [f"The report leaves out unfinished runs: {few(lost, 5)}."] if lost else []


TEMPLATES = Path(__file__).parent / "templates"
_PAGE = "report.html"
_FILES = ("table.csv", "clients.csv", "findings.json", "report.md", "tables.tex")


def _row(task: Task, name: str, v: Verdict) -> dict[str, object]:
    """The line of a method, by column; means are in the metric's direction."""
    row: dict[str, object] = {"suite": task.suite, "variant": task.variant, "method": name}
    row |= {"metric": task.metric, "splits": len(v.scores.values)}
    row |= dict(zip(("mean", "low", "high"), task.interval(v.mean), strict=True))
    row |= {"half_width": v.mean.half, "worst_client": task.raw(v.worst)}
    row["worst_decile"] = task.raw(v.decile)
    unknown = Difference(*[math.nan] * 6)
    for r in REFERENCES:
        a = v.against.get(r, Gain(unknown, ""))
        d = a.difference
        row |= {f"difference_{r}": d.mean, f"low_{r}": d.low, f"high_{r}": d.high}
        row |= {f"half_width_{r}": d.half, f"patients_low_{r}": a.patients[0]}
        row |= {f"patients_high_{r}": a.patients[1], f"p_holm_{r}": a.p}
        row |= {f"detectable_{r}": d.detectable, f"verdict_{r}": a.verdict}
    harm = v.harm or Harm(*unknown[:3])
    row |= {"harmed": harm.share, "harmed_low": harm.low, "harmed_high": harm.high}
    row |= {"harmed_clients": " ".join(harm.clients)}
    row |= {"surely_harmed_clients": " ".join(harm.surely)}
    up, down = v.scores.sent
    setting = " ".join(f"{key}={value:g}" for key, value in v.scores.setting.items())
    row |= {"bytes_up": up, "bytes_down": down, "passes": v.scores.passes}
    return row | {"failed_splits": v.scores.failed, "setting": setting}


def table_csv(report: Report) -> str:
    """Returns a line per suite, variant and method."""
    rows = [_row(task, name, v) for task, verdicts in report.tasks for name, v in verdicts.items()]
    return csv_text([*rows[0]] if rows else (), ([*map(_cell, row.values())] for row in rows))


def write(folder: Path, report: Report, figures: bool = True) -> None:
    """Writes all files of a report."""
    # The page comes first: by it a report that was killed is known when it is repeated.
    write_text(folder / _PAGE, page(report))
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
    write_text(folder / "report.md", markdown(report, figures))
    write_text(folder / "tables.tex", latex(report))
    for name, text in report.tables.items():
        write_text(folder / f"{name}.csv", text)
    if figures:
        save_figures(folder / "figures", _figures(report), *FORMATS)


def _figures(report: Report) -> dict[str, Figure | None]:
    """The pictures that papers show: of each suite's first task, of dials, of finished runs."""
    pictures = dict(report.pictures)
    looks = looks_of(report)
    suites: dict[str, Task] = {}
    for task, verdicts in report.tasks:
        if suites.setdefault(task.suite, task) is task:
            of_task = pictures_of(task, verdicts, looks)
            pictures |= {f"{place(task.name)}-{name}": one for name, one in of_task.items()}
    pictures |= {f"{place(n)}-dial": one for n, one in dial_pictures(report, looks).items()}
    figures = {name: one.figure for name, one in pictures.items()}
    if report.runs:
        task, verdicts = report.tasks[0]
        figures["contours"] = contours_of(task, verdicts, len(task.clients))
    return figures


def _cell(value: object) -> object:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return value


def _over_tasks(report: Report) -> dict[str, Table | None]:
    """The decision card and, where the report is on runs, means of all metrics and coverage."""
    means = tables.means_table(report.tasks[0][0], report.runs) if report.runs else None
    covered = coverage_table({n: [r.summary for r in of] for n, of in report.runs.items()})
    return {"card": card(report.tasks), "means": means, "coverage": covered}


def markdown(report: Report, figures: bool = False) -> str:
    """Returns the report: the decision card, verdicts in words, then the tables of each task."""
    tasks = [(task, tables.of_task(task, v), task.notes) for task, v in report.tasks]
    words: dict[str, Any] = {"report": report, "tasks": tasks, "markdown": in_markdown}
    words |= {"about_coverage": COVERAGE, "figures": figures}
    return filled(TEMPLATES / "report.md", **words, **_over_tasks(report)).rstrip() + "\n"


def latex(report: Report) -> str:
    """Returns a table for a paper, of booktabs: a line per method, best first, for each task."""
    judged = [(task, tables.methods_table(task, v).only(tables.PAPER)) for task, v in report.tasks]
    words = {"tables": judged, "text": in_latex, "cell": latex_cell}
    return filled(TEMPLATES / "tables.tex", **words)


def print_tables(report: Report, console: Console | None = None) -> None:
    """Prints the tables of each task: its methods, its hospitals where they are few, means."""
    console = console or wide_console()
    for task, verdicts in report.tasks:
        for title, table in tables.of_task(task, verdicts).items():
            console.print(table.printed(title))
        say(console, *task.left_out.values())
    means = "Means of the test metrics, over hospitals and seeds"
    over_tasks = _over_tasks(report)
    for kind, title in (("means", means), ("coverage", "Sets and intervals")):
        if (whole := over_tasks[kind]) is not None:
            console.print(whole.printed(title))


GENERATOR = '<meta name="generator" content="medfed">'


def page(report: Report) -> str:
    """Returns the page."""
    suites: dict[str, list[dict[str, Any]]] = {}
    looks = looks_of(report)
    for task, verdicts in report.tasks:
        suites.setdefault(task.suite, []).append(_view(task, verdicts, looks))
    words: dict[str, Any] = {"suites": suites, "dials": dial_pictures(report, looks)}
    words |= {"settings": tables.settings_table(report.tasks), "about_coverage": COVERAGE}
    return rendered("report.html", report=report, **words, **_over_tasks(report))


def rendered(template: str, **content: Any) -> str:
    """Returns a page of a template in ``templates``, which escapes all content."""
    how: dict[str, Any] = {"autoescape": True, "undefined": StrictUndefined, "finalize": _printable}
    environment = Environment(loader=PackageLoader("medfed.reports"), **how)
    environment.filters |= {"place": place, "svg": svg}
    environment.globals["colours"] = COLOURS
    return environment.get_template(template).render(generator=GENERATOR, **content)


def _printable(value: object) -> object:
    """Returns what a page shows: of a text without markup, every character can be seen."""
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return "\n".join(map(visible, value.split("\n")))
    return value


def place(name: str) -> str:
    """Returns the anchor of a section."""
    return re.sub(r"[^\w.-]+", "-", name)


def _view(task: Task, verdicts: Verdicts, looks: Mapping[str, Look]) -> dict[str, Any]:
    """The content of the section on a task."""
    better = "smaller" if task.falls else "larger"
    count = "1 split" if task.single else f"{task.splits} splits"
    tested = f"{task.patients} patients" if task.patients else "patients that only sites know"
    facts = (
        f"{label_of(task.metric)}, {better} is better; {count}, {len(task.clients)} hospitals, "
        f"{tested} tested, summed over splits. {ends_of(task, verdicts)}"
    )
    return {
        "task": task,
        "facts": f"{task.title}. {facts}" if task.title else facts,
        "pictures": [*pictures_of(task, verdicts, looks).values(), *models_of(task, verdicts)],
        "methods": tables.methods_table(task, verdicts),
        "hospitals": tables.hospitals_table(task, verdicts),
    }
