"""The report as one page that opens without a network: on a phone, in the dark, and in print.

``templates/report.html`` has the sections in order, and escapes all content.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from medfed.common.scores import label_of
from medfed.reports.charts import COLOURS, Look, svg
from medfed.reports.decisions import card, undecided
from medfed.reports.findings import Report
from medfed.reports.sentences import details, ends_of
from medfed.reports.tables import harmed_table, hospitals_table, methods_table, settings_table
from medfed.reports.task_pictures import (
    dial_pictures,
    looks_of,
    models_of,
    pictures_of,
)
from medfed.reports.tasks import Task
from medfed.reports.verdicts import Verdict

GENERATOR = '<meta name="generator" content="medfed">'


def page(report: Report) -> str:
    """Returns the page.

    Args:
        report: The report.

    Returns:
        HTML that fetches nothing.
    """
    suites: dict[str, list[dict[str, Any]]] = {}
    looks = looks_of(report)
    for task, verdicts in report.tasks:
        suites.setdefault(task.suite, []).append(_view(task, verdicts, looks))
    return rendered(
        "report.html",
        report=report,
        suites=suites,
        card=card(report.tasks),
        undecided=undecided(report.tasks),
        dials=dial_pictures(report, looks),
        settings=settings_table(report.tasks),
    )


def rendered(template: str, **content: Any) -> str:
    """Returns a page of a template in ``templates``, which escapes all content."""
    loader = PackageLoader("medfed.reports")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    environment.filters |= {"place": place, "svg": svg}
    environment.globals["colours"] = COLOURS
    return environment.get_template(template).render(generator=GENERATOR, **content)


def place(name: str) -> str:
    """Returns the anchor of a section.

    Example:
        >>> place("brats/lack_flair")
        'brats-lack_flair'
    """
    return re.sub(r"[^\w.-]+", "-", name)


def _view(task: Task, verdicts: Mapping[str, Verdict], looks: Mapping[str, Look]) -> dict[str, Any]:
    """The content of the section on a task."""
    better = "smaller" if task.falls else "larger"
    count = "1 split" if task.single else f"{task.splits} splits"
    tested = f"{task.patients} patients" if task.patients else "patients that only sites know"
    facts = (
        f"{label_of(task.metric)}, {better} is better; {count}, "
        f"{len(task.clients)} hospitals, {tested} tested over all splits. "
        f"{ends_of(task, verdicts)}"
    )
    return {
        "task": task,
        "facts": f"{task.title}. {facts}" if task.title else facts,
        "details": [*details(task, verdicts), *task.notes],
        "pictures": [*pictures_of(task, verdicts, looks).values(), *models_of(task, verdicts)],
        "methods": methods_table(task, verdicts),
        "harmed": harmed_table(task, verdicts),
        "hospitals": hospitals_table(task, verdicts),
    }
