"""What a study writes: a page, tables for papers and spreadsheets, ``study.json`` and its plan."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import yaml  # type: ignore[import-untyped]

from medfed.common.console import file_names, in_latex, say, wide_console
from medfed.common.tables import Cell
from medfed.common.tables import Table as Shown
from medfed.reports.charts import Look, Picture, Row, curves, forest, looks_in_order
from medfed.reports.report import TEMPLATES, rendered
from medfed.standalone.files import csv_text, filled, write_json, write_text, writing
from medfed.studies.parts import COEFFICIENT, Table, Word
from medfed.studies.plan import Plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HARM = "Who would be harmed"
_TICKS, _ROW = 6, 13  # of a curve's axis; points of a row below it
_BELOW: Any = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "ha": "center"}


def write_study(plan: Plan, tables: Sequence[Table], remarks: Sequence[str], folder: Path) -> None:
    """Writes the results and prints them."""
    remarks = [*dict.fromkeys([*remarks, *(line for table in tables for line in table.remarks)])]
    columns = [table for table in tables if table.title in plan.columns]
    whole = [table for table in tables if table not in columns]
    whole = [_table_one(columns), *whole] if columns else whole
    titles = _distinct(table.title for table in whole)
    whole = [table._replace(title=title) for table, title in zip(whole, titles, strict=True)]
    views = {table.title: Shown(table.head, _rows(table), prose=_words(table)) for table in whole}
    plots = pictures(whole)
    each = [{"title": t.title, "head": t.head, "lines": t.lines} for t in tables]
    with writing(folder, "choose another folder by folder=FOLDER"):
        text = yaml.safe_dump(msgspec.to_builtins(plan), allow_unicode=True, sort_keys=False)
        write_text(folder / "plan.yaml", text)
        write_json(folder / "study.json", {"tables": each, "remarks": remarks})
        for name, table in zip(file_names(views).values(), whole, strict=True):
            write_text(folder / "tables" / f"{name}.csv", csv_text(table.head, table.lines))
        latex = filled(TEMPLATES / "study.tex", tables=views, text=in_latex)
        write_text(folder / "tables.tex", latex)
        page = rendered("study.html", tables=views, pictures=plots, remarks=remarks)
        write_text(folder / "study.html", page)
    for title, one in views.items():
        # The page has every hospital; the terminal those that are harmed or left out.
        if title == _HARM or "why" in one.head or "hospital" not in one.head[:2]:
            wide_console().print(one.printed(title))
    say(wide_console(), *remarks, style="yellow")
    say(wide_console(), f"Page: {folder / 'study.html'}")


def _distinct(titles: Iterable[str]) -> list[str]:
    """Numbers equal titles, as of two models of one outcome."""
    counts, distinct = Counter[str](), list[str]()
    for title in titles:
        counts[title] += 1
        distinct.append(f"{title} ({counts[title]})" if counts[title] > 1 else title)
    return distinct


def _table_one(columns: Sequence[Table]) -> Table:
    """Joins the tables of columns: means with deviations, quartiles, shares, p and differences."""
    head = max((table.head for table in columns), key=len, default=["column", "all"])
    lines = [list[Word](line) for table in columns for line in _of_column(table)]
    first = next((table.lines[0] for table in columns if table.head == head), ["patients"])
    if len(head) == 2:  # no groups, so nothing to compare
        return Table("Table 1", head, [first, *([line[0], *line[3:]] for line in lines)])
    width = len(head)
    whole = [[line[0], *line[3:], *[""] * (width + 2 - len(line)), *line[1:3]] for line in lines]
    return Table("Table 1", [*head, "p", "difference"], [first, *whole])


def _of_column(table: Table) -> Iterator[list[str]]:
    """Yields name, p, difference and the numbers of each line."""
    has = {str(line[0]): [_cell(word).text for word in line[1:]] for line in table.lines}

    def once(name: str) -> str:
        return has.pop(name, [""])[0]

    name, apart, missing = table.title, once("standardised difference"), has.pop("missing")
    has.pop("patients")
    if "mean" in has:
        means = zip(has["mean"], has["standard deviation"], strict=True)
        yield [f"{name}, mean (SD)", once("p (Welch)"), apart, *(f"{m} ({s})" for m, s in means)]
        quartiles = zip(has["median"], has["lower quartile"], has["upper quartile"], strict=True)
        written = (f"{m} [{low}, {high}]" for m, low, high in quartiles)
        yield [f"{name}, median [quartiles]", once("p (Kruskal–Wallis)"), "", *written]
    else:
        p = once("p (χ²)")
        for category, cells in has.items():
            yield [f"{name}: {category}", p, apart, *cells]
            p = apart = ""
    if any(cell not in ("0", "0 (0 %)") for cell in missing):
        yield [f"{name}, missing", "", "", *missing]


def _words(table: Table) -> list[int]:
    """The columns of words."""
    texts = ("number", "hospital", "verdict", "why")
    return [0, *(n for n, title in enumerate(table.head) if n and title in texts)]


def _rows(table: Table) -> list[list[Cell]]:
    """The cells, which every line of a page has as many of."""
    gaps = [Cell()] * len(table.head)
    return [[*map(_cell, line), *gaps[len(line) :]] for line in table.lines]


def _cell(word: Word) -> Cell:
    if isinstance(word, str):
        return Cell(word)
    if isinstance(word, float):
        return Cell("–" if math.isnan(word) else f"{word:.4g}", value=word)
    return Cell(str(word), value=float(word))


def pictures(tables: Sequence[Table]) -> Mapping[str, Picture]:
    """Returns the curves of survival, and the estimates of hospitals, by the table's title."""
    made = {}
    for table in tables:
        if table.title == "Survival":
            made[table.title] = Picture(
                _survival(table),
                "Share of patients without the event, by time. The numbers below the axis are the "
                "patients at risk, in the colours of the groups.",
            )
        elif table.title.startswith("Calibration of") and table.lines:
            points = [(float(predicted), float(share)) for _, predicted, share, *_ in table.lines]
            lines = {"patients": points, "perfect": [(0.0, 0.0), (1.0, 1.0)]}
            figure = curves(lines, "predicted", "observed", {"patients": Look("c0")})
            for (x, _), line in zip(points, table.lines, strict=True):
                ends = [float(end) for end in line[3:5]]
                figure.axes[0].plot([x, x], ends, color=Look("c0").paper, lw=1.2, clip_on=False)
            made[table.title] = Picture(
                figure, "Share of events with 95 % intervals, by predicted probability."
            )
        elif table.title.startswith("FROC of"):
            points = sorted((float(line[3]), float(line[2])) for line in table.lines)
            name = str(table.lines[0][0])
            figure = curves({name: points}, table.head[3], table.head[2], {name: Look("c0")})
            made[table.title] = Picture(figure, "Share of lesions found, by false alarms per scan.")
        elif table.intervals:
            is_difference = "−" in table.label or table.label == COEFFICIENT
            none = {"none": 0.0} if is_difference else {}
            figure = forest([Row(*one) for one in table.intervals], none, table.label)
            label = table.label[0].upper() + table.label[1:]
            made[table.title] = Picture(figure, f"{label}, with 95 % intervals.")
    return made


def _survival(table: Table) -> Figure:
    """Curves of groups, and below the axis how many patients of each are at risk."""
    lines: dict[str, list[tuple[float, float]]] = {}
    at_risk: dict[str, dict[float, str]] = {}
    for name, end, n, share, _ in table.lines:
        curve = lines.setdefault(str(name), [(0.0, 1.0)])
        at_risk.setdefault(str(name), {})[curve[-1][0]] = str(n)
        curve.append((float(end), float(share)))
    looks = looks_in_order(lines)
    figure = curves(lines, "time", "survival", looks)
    axes, starts = figure.axes[0], sorted({t for of in at_risk.values() for t in of})
    wanted = np.linspace(0, max(starts, default=0), _TICKS).tolist() if starts else []
    ticks = sorted({min(starts, key=lambda start: abs(start - time)) for time in wanted})
    axes.set_xticks(ticks)
    for row, (name, of) in enumerate(at_risk.items()):
        for time in ticks:
            below = (0, -_ROW * (row + 2))
            axes.annotate(of.get(time, "–"), (time, 0), below, color=looks[name].paper, **_BELOW)
    axes.xaxis.labelpad = _ROW * len(at_risk) + 8
    figure.set_figheight(figure.get_figheight() + _ROW * len(at_risk) / 72)
    return figure
