"""What a comparison of runs leaves behind: tables, a report, pictures, and what else it finds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from medfed.common.console import say, size, wide_console
from medfed.common.errors import ConfigError
from medfed.common.figures import FORMATS, save_figures
from medfed.common.files import csv_text, write_text, writing
from medfed.common.names import cell, shown
from medfed.common.scores import number, smaller_is_better
from medfed.reports.methods import Cell, Comparison, Finding, compare
from medfed.reports.runs import common_folder, find_runs

# What a comparison looks for, in the order of the report: modules of this folder with a function
# ``find``, from the comparison to a Finding.
FINDINGS = ("lambda_path", "scores", "sweeps", "communication", "missing_channels")
_STATISTICS = ("mean", "sd", "worst")
_SPENT = ("steps", "gradient_passes", "forward_passes")
_HEAD = "# Comparison"  # the first line of a report
_COLUMNS = 6  # methods that fit side by side
_TITLE = "Test metrics of the rounds that validation selected (* best)"


class Row(NamedTuple):
    """One line of the table: a cell per method.

    Attributes:
        metric: ``iou``, ``bytes up``, ``steps`` and the like.
        place: A client, or ``mean``, ``sd``, ``worst`` or ``total`` over the clients.
        cells: One per method.
        best: Which cells are the best of the line; empty where nothing is to be won.
    """

    metric: str
    place: str
    cells: tuple[Cell, ...]
    best: frozenset[int] = frozenset()


def best_of(values: Sequence[float], smaller: bool = False) -> frozenset[int]:
    """Returns the positions of the best values, ties included; none where all are equal.

    Args:
        values: One per method; what is not finite never wins.
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
    """Yields the table: per metric the clients and their mean, sd and worst; then what it cost."""
    methods = comparison.methods
    for metric in comparison.metrics:
        for place in (*comparison.clients, *_STATISTICS):
            cells = tuple(m.score(metric, place) for m in methods)
            best = best_of([c.value for c in cells], smaller_is_better(metric))
            yield Row(metric, place, cells, frozenset() if place == "sd" else best)
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
    """Reads from a summary what clients spent, on average; unknown of older runs."""
    counts = summary.get(name, {})
    return math.fsum(counts.get(c, math.nan) for c in clients) / len(clients)


def to_csv(comparison: Comparison) -> str:
    """Returns the table as CSV, a line per metric, place and method."""
    lines = [
        [*row[:2], method.name, len(method.runs), cell.value, cell.sd, int(i in row.best)]
        for row in rows(comparison)
        for i, (method, cell) in enumerate(zip(comparison.methods, row.cells, strict=True))
    ]
    head = ("metric", "place", "method", "seeds", "value", "sd_over_seeds", "best")
    return csv_text(head, lines)


def print_table(comparison: Comparison, console: Console | None = None) -> None:
    """Prints the table, the best method of each line marked, and the notes.

    Of many methods it prints a line each, without their clients; the files have all.
    """
    console = console or wide_console()
    many = len(comparison.methods) > _COLUMNS
    console.print(_line_per_method(comparison) if many else _column_per_method(comparison))
    say(console, winner(comparison), *comparison.notes)


def winner(comparison: Comparison) -> str:
    """Says which method has the best mean over the clients."""
    metric = comparison.metric
    cells = [m.score(metric) for m in comparison.methods]
    best = sorted(best_of([c.value for c in cells], smaller_is_better(metric)))
    if not best:
        return f"No method is best by mean {metric}."
    names = " and ".join(comparison.methods[i].name for i in best)
    return f"Best by mean {metric}: {names} ({cells[best[0]].value:.4f})."


def _column_per_method(comparison: Comparison) -> Table:
    table = Table(title=_TITLE)
    table.add_column("metric")
    table.add_column("client")
    for method in comparison.methods:
        table.add_column(escape(method.name), justify="right")
    previous = ""
    for row in _shown(comparison):
        group = "cost" if row.place == "total" else row.metric
        if previous and (group != previous or row.place == "mean"):
            table.add_section()
        label = row.metric if group == "cost" or group != previous else ""
        table.add_row(label, "" if group == "cost" else cell(row.place), *_bold(row))
        previous = group
    return table


def _line_per_method(comparison: Comparison) -> Table:
    wanted = [r for r in _shown(comparison) if r.place in (*_STATISTICS, "total")]
    table = Table(title=_TITLE)
    table.add_column("method")
    for row in wanted:
        title = row.metric if row.place == "total" else f"{row.metric} {row.place}"
        table.add_column(title.replace("_", " "), justify="right")
    columns = [_bold(row) for row in wanted]
    for i, method in enumerate(comparison.methods):
        table.add_row(escape(method.name), *(column[i] for column in columns))
    return table


def to_markdown(comparison: Comparison, found: Finding) -> str:
    """Returns the report; pictures lie beside it.

    Args:
        comparison: The methods and their numbers.
        found: What else the comparison found.
    """
    names = [m.name for m in comparison.methods]
    lines = [
        _HEAD,
        "",
        f"Test metrics of the rounds that validation selected, {len(comparison.clients)} clients; "
        "the best method of each line is **bold**.",
        "",
        "| metric | client | " + " | ".join(names) + " |",
        "|---|---|" + "---:|" * len(names),
    ]
    for row in _shown(comparison):
        cells = [f"**{t}**" if i in row.best else t for i, t in enumerate(_texts(row))]
        place = "" if row.place == "total" else shown(row.place).replace("|", r"\|")
        lines.append(f"| {row.metric} | {place} | " + " | ".join(cells) + " |")
    lines += ["", *(f"- {note}" for note in (winner(comparison), *comparison.notes)), ""]
    lines += [line for sentence in found.sentences for line in (sentence, "")]
    for name in found.pictures:
        caption = found.captions[name]
        lines += [f"![{caption}]({name}.png)", "", caption, ""]
    lines += ["Runs:", ""]
    for method in comparison.methods:
        folders = ", ".join(f"`{r.folder}` (seed {r.seed})" for r in method.runs)
        lines.append(f"- {method.name}: {folders}")
    return "\n".join(lines) + "\n"


def _shown(comparison: Comparison) -> Iterator[Row]:
    """The rows for people: one line each for the mean steps and passes of a client."""
    steps: tuple[Cell, ...] = ()
    for row in rows(comparison):
        name = row.metric.replace(" ", "_")
        if name not in _SPENT:
            yield row
        elif row.place == comparison.clients[0]:
            read = partial(_spent, name, comparison.clients)
            cells = tuple(m.over_seeds(read) for m in comparison.methods)
            if name == "steps":
                steps = cells
            if name == "steps" or any(
                c.value > 0 and c != s for c, s in zip(cells, steps, strict=True)
            ):  # passes where they are not the steps
                yield Row(f"{row.metric} per client", "total", cells)


def _texts(row: Row) -> list[str]:
    """Writes the cells of a row in its unit."""
    if row.metric.startswith("bytes"):
        return [size(round(value)) for value, _ in row.cells]
    if row.metric.startswith(("steps", "gradient", "forward", "selected")):
        texts = (f"{value:.1f}".removesuffix(".0") for value, _ in row.cells)
        return ["–" if text == "nan" else text for text in texts]
    several = any(sd is not None for _, sd in row.cells)
    spreads = (f" ± {number(math.nan if c.sd is None else c.sd)}" * several for c in row.cells)
    return [number(c.value) + spread for c, spread in zip(row.cells, spreads, strict=True)]


def _bold(row: Row) -> list[str]:
    texts = enumerate(_texts(row))
    return [f"[bold]{text} *[/bold]" if i in row.best else f"{text}  " for i, text in texts]


def compare_runs(
    runs: str | Sequence[str],
    out: Path | None = None,
    metric: str | None = None,
    kind: str = "png",
) -> Comparison:
    """Compares runs, prints the table and writes ``comparison.csv``, ``.md`` and pictures.

    Args:
        runs: Run folders, or folders that hold runs.
        out: Where to write; ``None`` takes the folder that holds all runs.
        metric: The metric of the pictures; ``None`` takes the one that selected the rounds.
        kind: Of pictures; see :func:`medfed.common.figures.save_figures`.

    Returns:
        The comparison.

    Raises:
        MedfedError: If the runs cannot be read or compared, or ``out`` cannot be written, or holds
            files of these names that no comparison wrote.
    """
    folders = find_runs(runs)
    comparison = compare(folders, metric)
    folder = common_folder(folders) if out is None else out.expanduser()
    found = Finding(tables={"comparison": to_csv(comparison)})
    for name in FINDINGS:
        found += import_module(f"medfed.reports.{name}").find(comparison)
    _refuse_others_files(folder, (*found.tables, *found.pictures, "comparison"))
    with writing(folder, "choose another out=FOLDER"):
        # First: by it, a comparison that was killed is known when it is repeated.
        write_text(folder / "comparison.md", to_markdown(comparison, found))
        for name, text in found.tables.items():
            write_text(folder / f"{name}.csv", text)
        save_figures(folder, found.pictures, kind)
    console = wide_console()
    print_table(comparison, console)
    say(console, *found.sentences, f"Report and pictures: {folder}")
    return comparison


def _refuse_others_files(folder: Path, names: Iterable[str]) -> None:
    """Lets a comparison replace what an earlier one wrote, and nothing else."""
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
