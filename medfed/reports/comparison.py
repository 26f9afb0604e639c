"""``medfed compare``: finished runs in one table, with the verdicts and pictures of a report.

A method is a column and a metric of a client a line. `FINDINGS` names the modules that add
sentences, tables and pictures about how the runs differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from medfed.common.console import in_markdown, say, shown, size, wide_console
from medfed.common.errors import ConfigError
from medfed.common.figures import FORMATS, save_figures
from medfed.common.files import csv_text, filled, write_text, writing
from medfed.common.scores import interval, number, smaller_is_better
from medfed.reports import subsets, sweeps, task_pictures
from medfed.reports.methods import Cell, Comparison, Finding, compare
from medfed.reports.report import TEMPLATES, print_tables
from medfed.reports.runs import common_folder, find_runs
from medfed.reports.tables import Table

# Modules with a function ``find`` from the comparison to a Finding, in the order of the report.
FINDINGS = (task_pictures, sweeps, subsets)
STATISTICS = ("mean", "sd", "worst")
WITHOUT_SMALL = "mean without small"
"""The mean of the hospitals that decide."""
_HEAD = "# Comparison"  # the first line of a report
_COLUMNS = 6  # methods that fit into the width of a terminal
_SPENT = ("steps", "gradient_passes", "forward_passes")
_TITLE = "Test metrics of the rounds that validation selected (* best number of a line)"


class Row(NamedTuple):
    """One line of the table: a cell per method.

    Attributes:
        metric: ``iou``, ``bytes up``, ``steps`` and the like.
        place: A client, or ``mean``, ``sd``, ``worst`` or ``total`` over the clients.
        cells: One per method, then one per constant predictor.
        best: The positions of the best cells; empty where no cell is better than another.
        ends: The interval of each method with one seed; None where it is unknown.
        brackets: Whether people see the intervals instead of the numbers.
    """

    metric: str
    place: str
    cells: tuple[Cell, ...]
    best: frozenset[int] = frozenset()
    ends: tuple[tuple[float, float] | None, ...] = ()
    brackets: bool = False

    def texts(self, best: str) -> list[str]:
        """Returns the cells in their unit; `best` is the format of the best ones."""
        values = [value for value, _ in self.cells]
        if self.brackets:
            texts = [interval(ends) for ends in self.ends]
        elif self.metric.startswith("bytes"):
            texts = [size(round(value)) for value in values]
        elif self.metric.startswith(("steps", "gradient", "forward", "selected")):
            texts = ["–" if math.isnan(v) else f"{v:.1f}".removesuffix(".0") for v in values]
        else:
            several = any(sd is not None for _, sd in self.cells)
            spreads = [number(math.nan if sd is None else sd) for _, sd in self.cells]
            pairs = zip(values, spreads, strict=True)
            texts = [number(value) + f" ± {spread}" * several for value, spread in pairs]
        return [best.format(text) if i in self.best else text for i, text in enumerate(texts)]


def best_of(values: Sequence[float], smaller: bool = False) -> frozenset[int]:
    """Returns the positions of the best values, ties included; none where all are equal.

    Args:
        values: One per method; a value that is not finite is never the best.
        smaller: Whether smaller is better.

    Example:
        >>> sorted(best_of([0.5, 0.9, 0.9])), sorted(best_of([1.0, 1.0]))
        ([1, 2], [])
        >>> sorted(best_of([0.5, math.inf, math.nan], smaller=True))
        [0]
    """
    known = [v for v in values if not math.isnan(v)]
    finite = [v for v in known if math.isfinite(v)]
    if not finite or min(known) == max(known):
        return frozenset()
    target = min(finite) if smaller else max(finite)
    return frozenset(i for i, v in enumerate(values) if v == target)


def rows(comparison: Comparison) -> Iterator[Row]:
    """Yields the table: metrics of clients, mean, sd and worst; then bytes, steps and passes."""
    methods = comparison.methods
    for metric in (*comparison.metrics, *comparison.others):
        for place in (*comparison.clients, *STATISTICS):
            cells = tuple(m.score(metric, place) for m in methods)
            best = best_of([c.value for c in cells], smaller_is_better(metric))
            constants = tuple(methods[0].constant(n, metric, place) for n in comparison.constants)
            ends = tuple(m.ends(metric, place) for m in methods)
            best = frozenset[int]() if place == "sd" else best
            yield Row(metric, place, cells + constants, best, ends)
            if place == "mean" and len(comparison.deciding) < len(comparison.clients):
                cells = tuple(m.mean_of(metric, comparison.deciding) for m in methods)
                best = best_of([c.value for c in cells], smaller_is_better(metric))
                yield Row(metric, WITHOUT_SMALL, cells, best)
    for way in ("up", "down"):
        cells = tuple(m.over_seeds(lambda s, w=way: s["bytes"][w]) for m in methods)  # type: ignore[misc]
        yield Row(f"bytes {way}", "total", cells)
    for name in _SPENT:
        for client in comparison.clients:
            cells = tuple(m.over_seeds(partial(_spent, name, (client,))) for m in methods)
            yield Row(name.replace("_", " "), client, cells)
    selected = tuple(m.over_seeds(lambda s: (s["selected_round"] or 0) + 1) for m in methods)
    yield Row("selected round", "total", selected)


def _spent(name: str, clients: Sequence[str], summary: Mapping[str, Any]) -> float:
    """Returns the mean over clients."""
    return math.fsum(summary[name][c] for c in clients) / len(clients)


def to_csv(comparison: Comparison) -> str:
    """Returns the table as CSV, a line per metric, place and method or constant predictor."""
    seeds = len(comparison.methods[0].runs)
    names = _names(comparison)
    lines = []
    for row in rows(comparison):
        ends = (*row.ends, *(None for _ in row.cells))
        for i, (name, (value, sd)) in enumerate(zip(names, row.cells, strict=False)):
            best = int(i in row.best)
            lines.append([*row[:2], name, seeds, value, sd, best, *(ends[i] or (None, None))])
    head = ("metric", "place", "method", "seeds", "value", "sd_over_seeds", "best", "low", "high")
    return csv_text(head, lines)


def _names(comparison: Comparison) -> list[str]:
    return [*(m.name for m in comparison.methods), *comparison.constants]


def shown_rows(comparison: Comparison) -> Iterator[Row]:
    """Yields the rows for people.

    They list the clients for the most important metrics only; the other metrics, steps and passes
    get one line each. The intervals follow the mean of the first metric.
    """
    mean: tuple[Cell, ...] = ()
    steps: tuple[Cell, ...] = ()
    for row in rows(comparison):
        name = row.metric.replace(" ", "_")
        if row.metric in comparison.others:
            whole = "/" not in row.metric or row.metric.endswith("/calibrated")
            if row.place in ("mean", WITHOUT_SMALL) and whole:
                if row.cells[: len(comparison.methods)] != mean:
                    yield row
                mean = row.cells[: len(comparison.methods)]
        elif name not in _SPENT:
            yield row
            if row.place == "mean" and row.metric == comparison.metric and any(row.ends):
                yield row._replace(place="95% interval", best=frozenset(), brackets=True)
        elif row.place == comparison.clients[0]:
            read = partial(_spent, name, comparison.clients)
            cells = tuple(m.over_seeds(read) for m in comparison.methods)
            steps = cells if name == "steps" else steps
            if name == "steps" or any(
                c.value > 0 and c != s for c, s in zip(cells, steps, strict=True)
            ):  # passes where they are not the steps
                yield Row(f"{row.metric} per client", "total", cells)


def said(comparison: Comparison) -> list[str]:
    """Returns the verdict, as a report on the same runs has it, and the notes on it."""
    report, metric, methods = comparison.report, comparison.metric, comparison.methods
    sentences = [sentence for answer in report.answers.values() for sentence in answer]
    sign = -1 if smaller_is_better(metric) else 1
    for name in comparison.constants:
        level = methods[0].constant(name, metric).value
        low = [m.name for m in methods if sign * m.score(metric).value <= sign * level]
        if low:
            sentences.append(
                f"No better than {name} ({level:.4f}) by mean {metric}: {', '.join(low)}."
            )
    return [*sentences, report.remark, *report.notes]


def print_table(comparison: Comparison, console: Console | None = None) -> None:
    """Prints the table, with a mark at the best number of each line, and the verdict.

    Of many methods it prints the table of a report, with a line for each; the files have all.
    """
    console = console or wide_console()
    if len(comparison.methods) > _COLUMNS:
        print_tables(comparison.report, console)
    else:
        console.print(_table(comparison, "* {}").printed(_TITLE))
    say(console, *said(comparison))


def _table(comparison: Comparison, best: str) -> Table:
    """A column per method and constant; `best` is the format of the best number of a line."""
    names, lines = _names(comparison), []
    for row in shown_rows(comparison):
        texts = row.texts(best)
        place = "" if row.place == "total" else shown(row.place)
        lines.append([row.metric, place, *texts, *[""] * (len(names) - len(texts))])
    return Table.of(("metric", "client", *names), lines, prose=(0, 1))


def to_markdown(comparison: Comparison, finding: Finding) -> str:
    """Returns the report; the pictures are files in the same folder.

    Args:
        comparison: The methods and their numbers.
        finding: The content that findings add.
    """
    captions = {name: in_markdown(p.caption) for name, p in finding.pictures.items()}
    words: dict[str, Any] = {"head": _HEAD, "comparison": comparison, "captions": captions}
    words |= {"table": _table(comparison, "**{}**").markdown(), "markdown": in_markdown}
    words |= {"said": in_markdown(said(comparison)), "sentences": in_markdown(finding.sentences)}
    return filled(TEMPLATES / "comparison.md", **words)


def compare_runs(
    runs: str | Sequence[str], out: Path | None = None, metric: str | None = None, kind: str = "png"
) -> Comparison:
    """Compares runs, prints the table and writes ``comparison.csv``, ``.md`` and pictures.

    Args:
        runs: Run folders, or folders that hold runs.
        out: The folder for the files; ``None`` takes the folder that holds all runs.
        metric: The metric of verdicts and pictures; ``None`` takes the one that selected rounds.
        kind: The format of pictures; see :func:`medfed.common.figures.save_figures`.

    Returns:
        The comparison.

    Raises:
        MedfedError: If the runs cannot be read or compared, or ``out`` cannot be written, or holds
            files of these names that no comparison wrote.
    """
    folders = find_runs(runs)
    comparison = compare(folders, metric, pictures=kind != "none")
    folder = common_folder(folders) if out is None else out.expanduser()
    finding = Finding(tables={"comparison": to_csv(comparison)})
    for module in FINDINGS:
        finding += module.find(comparison)
    if kind == "none":
        finding = replace(finding, pictures={})
    _refuse_others_files(folder, (*finding.tables, *finding.pictures, "comparison"))
    with writing(folder, "choose another out=FOLDER"):
        # The report comes first: it identifies the folder when a killed comparison is repeated.
        write_text(folder / "comparison.md", to_markdown(comparison, finding))
        for name, text in finding.tables.items():
            write_text(folder / f"{name}.csv", text)
        save_figures(folder, {n: p.figure for n, p in finding.pictures.items()}, kind)
    console = wide_console()
    print_table(comparison, console)
    say(console, *finding.sentences, f"Report and pictures: {folder}")
    return comparison


def _refuse_others_files(folder: Path, names: Iterable[str]) -> None:
    """Lets a comparison replace the files of an earlier comparison, and no others."""
    report = folder / "comparison.md"
    if report.is_file():
        with report.open("rb") as file:
            if file.read(len(_HEAD) + 1) == f"{_HEAD}\n".encode():
                return
    for name in names:
        for path in (folder / f"{name}.{ending}" for ending in ("md", "csv", *FORMATS)):
            if path.exists():
                raise ConfigError(
                    f"{path} is there and no comparison has written it; choose another out=FOLDER."
                )
