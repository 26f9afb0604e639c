"""The page of ``medfed look`` and ``look.json``; ``templates/look.html`` has the tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypedDict

import numpy as np

from medfed.common.console import say, short, wide_console
from medfed.common.scores import mean_of_known
from medfed.common.tables import Cell, Table
from medfed.common.untrusted import read_json
from medfed.reports.charts import Picture, hospitals, looks_in_order
from medfed.reports.report import rendered
from medfed.standalone.errors import ConfigError, few
from medfed.standalone.files import write_json, write_text, writing

Cells = dict[str, float | None]
LABELS, MISSING, MEANS, DEVIATIONS = "Labels", "Missing", "Means", "Standard deviations"


class Description(TypedDict):
    """A hospital's numbers; None stands for a number that is withheld."""

    hospital: str  # its name
    least: int  # the fewest patients behind a number; 0: nothing is withheld
    tables: dict[str, Cells]  # by title, then by name


class LookFile(TypedDict):
    """The content of ``look.json``."""

    hospitals: list[Description]


_MOST = 40  # names in a picture
_CAPTIONS = {
    MEANS: "Each hospital's mean, with one of its standard deviations to both sides, less the mean "
    "of the hospitals, in their standard deviations.",
}


def read_descriptions(paths: Sequence[Path]) -> list[Description]:
    """Reads the hospitals of several ``look.json``."""
    every = [one for path in paths for one in read_json(path, LookFile)["hospitals"]]
    names = [one["hospital"] for one in every]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ConfigError(f"The files of 'of' describe {few(twice)} twice; name each file once.")
    return every


def write_look(descriptions: Sequence[Description], folder: Path) -> None:
    """Writes ``look.html`` and ``look.json``, and prints the tables."""
    by_title, least = tables(descriptions), {d["hospital"]: d["least"] for d in descriptions}
    content = {"tables": by_title, "pictures": pictures(descriptions, by_title), "least": least}
    with writing(folder, "choose another folder by folder=FOLDER"):
        write_json(folder / "look.json", LookFile(hospitals=list(descriptions)))
        write_text(folder / "look.html", rendered("look.html", **content))
    for title, table in by_title.items():
        wide_console().print(table.printed(title))
    say(wide_console(), f"Page: {folder / 'look.html'}")


Grid = list[list[float | None]]


def _grid(descriptions: Sequence[Description], title: str) -> tuple[list[str], list[str], Grid]:
    """Hospitals, names, and the cells of both; NaN where a hospital has none."""
    by_hospital = {d["hospital"]: d["tables"][title] for d in descriptions if title in d["tables"]}
    names = list(dict.fromkeys(name for cells in by_hospital.values() for name in cells))
    grid = [[cells.get(name, math.nan) for name in names] for cells in by_hospital.values()]
    return list(by_hospital), names, grid


def tables(descriptions: Sequence[Description]) -> dict[str, Table]:
    """Returns a table by title; the longer of hospitals and names runs downwards."""
    made = {}
    for title in dict.fromkeys(title for d in descriptions for title in d["tables"]):
        hospitals, names, grid = _grid(descriptions, title)
        rows = [
            [Cell(short(name)), *map(_cell, line)]
            for name, line in zip(hospitals, grid, strict=True)
        ]
        made[title] = Table(["name", *map(short, names)], rows, prose=(0,)).upright("name")
    return made


def _cell(value: float | None) -> Cell:
    if value is None:
        return Cell("withheld")
    return Cell() if math.isnan(value) else Cell(f"{value:.4g}", value=value)


def pictures(descriptions: Sequence[Description], titles: Iterable[str]) -> dict[str, Picture]:
    """Returns a picture by title, where there is more to see than to read."""
    looks = looks_in_order(d["hospital"] for d in descriptions)
    made = {}
    for title in titles:
        at, names, grid = _grid(descriptions, title)
        values = np.array(grid, dtype=float)  # None becomes NaN
        same = len(np.unique(values[~np.isnan(values)])) < 2
        if same or title in ("Patients", DEVIATIONS):
            continue
        spread, label = np.full_like(values, math.nan), "share of patients"
        if title == MEANS:
            beside = {d["hospital"]: d["tables"].get(DEVIATIONS, {}) for d in descriptions}
            spread = np.array([[beside[h].get(n) for n in names] for h in at], dtype=float)
            unit, label = np.sqrt(mean_of_known(spread**2, 0)), "standard deviations"
            unit[~(unit > 0)] = 1.0
            values, spread = (values - mean_of_known(values, 0)) / unit, spread / unit
        ends = np.stack([values, values - spread, values + spread], -1)[:, :_MOST].tolist()
        series = dict(zip(at, ends, strict=True))
        figure = hospitals(names[:_MOST], series, label, looks, zero=title == MEANS)
        made[title] = Picture(figure, _CAPTIONS.get(title, "Shares of patients, by hospital."))
    return made
