"""What a study writes: a page, tables for papers and spreadsheets, ``study.json`` and its plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import yaml  # type: ignore[import-untyped]

from medfed.common.console import file_names, in_latex, say, wide_console
from medfed.reports.charts import Picture, Row, curves, forest, looks_in_order
from medfed.reports.report import TEMPLATES, rendered
from medfed.reports.tables import Cell
from medfed.reports.tables import Table as Shown
from medfed.standalone.files import csv_text, filled, write_json, write_text, writing
from medfed.studies.parts import Table, Word
from medfed.studies.plan import Plan

_HARM = "Who would be harmed"


def write_study(plan: Plan, tables: Sequence[Table], remarks: Sequence[str], folder: Path) -> None:
    """Writes the results and prints them.

    Args:
        plan: What was asked.
        tables: The results.
        remarks: What hospitals would refuse, leave out or clip.
        folder: A new or empty folder.
    """
    columns = [table for table in tables if table.title in plan.columns]
    whole = [table for table in tables if table not in columns]
    whole = [table_one(columns), *whole] if columns else whole
    shown = {table.title: Shown(table.head, _rows(table), prose=_words(table)) for table in whole}
    drawn = pictures(whole)
    each = [{"title": t.title, "head": t.head, "lines": t.lines} for t in tables]
    with writing(folder, "choose another folder by folder=FOLDER"):
        text = yaml.safe_dump(msgspec.to_builtins(plan), allow_unicode=True, sort_keys=False)
        write_text(folder / "plan.yaml", text)
        write_json(folder / "study.json", {"tables": each, "remarks": [*remarks]})
        for name, table in zip(file_names(shown).values(), whole, strict=True):
            write_text(folder / "tables" / f"{name}.csv", csv_text(table.head, table.lines))
        latex = filled(TEMPLATES / "study.tex", tables=shown, text=in_latex)
        write_text(folder / "tables.tex", latex)
        page = rendered("study.html", tables=shown, pictures=drawn, remarks=remarks)
        write_text(folder / "study.html", page)
    for title, one in shown.items():
        # The page has every hospital; the terminal those that are harmed or left out.
        if title == _HARM or "why" in one.head or "hospital" not in one.head[:2]:
            wide_console().print(one.printed(title))
    say(wide_console(), *remarks, style="yellow")
    say(wide_console(), f"Page: {folder / 'study.html'}")


def table_one(columns: Sequence[Table]) -> Table:
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
    if any(cell != "0 (0 %)" for cell in missing):
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
            names = [*dict.fromkeys(str(line[0]) for line in table.lines)]
            lines = {name: [(0.0, 1.0)] for name in names}
            for name, end, _, share, _ in table.lines:
                lines[str(name)].append((float(end), float(share)))
            figure = curves(lines, "time", "survival", looks_in_order(names))
            made[table.title] = Picture(figure, "Share of patients without the event, by time.")
        elif table.title.startswith("Calibration of") and table.lines:
            points = [(float(predicted), float(seen)) for _, predicted, seen, *_ in table.lines]
            lines = {"patients": points, "perfect": [(0.0, 0.0), (1.0, 1.0)]}
            figure = curves(lines, "predicted", "observed", looks_in_order(lines))
            made[table.title] = Picture(figure, "Share of events, by predicted probability.")
        elif table.intervals:
            none = {} if table.label in ("AUROC", "Dice") else {"none": 0.0}
            figure = forest([Row(*one) for one in table.intervals], none, table.label)
            made[table.title] = Picture(figure, f"{table.label}, with 95 % intervals.")
    return made
