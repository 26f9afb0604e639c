"""What a comparison of runs leaves behind: tables, a report, pictures, and what else it finds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from medfed.common.console import cell, say, shown, wide_console
from medfed.common.errors import ConfigError
from medfed.common.figures import FORMATS, save_figures
from medfed.common.files import write_text, writing
from medfed.reports.methods import Comparison, Finding, compare
from medfed.reports.rows import STATISTICS, Row, said, shown_rows, texts, to_csv
from medfed.reports.runs import common_folder, find_runs

# What a comparison looks for, in the order of the report: modules of this folder with a function
# ``find``, from the comparison to a Finding.
FINDINGS = ("lambda_path", "scores", "sweeps", "communication", "subsets")
_HEAD = "# Comparison"  # the first line of a report
_COLUMNS = 6  # methods that fit side by side
_TITLE = "Test metrics of the rounds that validation selected (* best number of a line)"


def print_table(comparison: Comparison, console: Console | None = None) -> None:
    """Prints the table, the best number of each line marked, and the verdict.

    Of many methods it prints a line each, without their clients; the files have all.
    """
    console = console or wide_console()
    many = len(comparison.methods) > _COLUMNS
    console.print(_line_per_method(comparison) if many else _column_per_method(comparison))
    say(console, *said(comparison))


def _column_per_method(comparison: Comparison) -> Table:
    table = Table(title=_TITLE)
    table.add_column("metric")
    table.add_column("client")
    for name in (*(m.name for m in comparison.methods), *comparison.constants):
        table.add_column(escape(name), justify="right")
    previous = ""
    for row in shown_rows(comparison):
        group = "cost" if row.place == "total" else row.metric
        alone = row.metric in comparison.others
        group = "others" if alone else group
        if previous and (group != previous or (row.place == "mean" and not alone)):
            table.add_section()
        label = row.metric if group in ("cost", "others") or group != previous else ""
        table.add_row(label, "" if group == "cost" else cell(row.place), *_bold(row))
        previous = group
    return table


def _line_per_method(comparison: Comparison) -> Table:
    wanted = [
        row
        for row in shown_rows(comparison)
        if row.place in (*STATISTICS, "total") and row.metric not in comparison.others
    ]
    table = Table(title=_TITLE)
    table.add_column("method")
    for row in wanted:
        title = row.metric if row.place == "total" else f"{row.metric} {row.place}"
        table.add_column(title.replace("_", " "), justify="right")
    columns = [_bold(row) for row in wanted]
    names = [*(m.name for m in comparison.methods), *comparison.constants]
    for i, name in enumerate(names):
        table.add_row(escape(name), *(column[i] if i < len(column) else "" for column in columns))
    return table


def to_markdown(comparison: Comparison, found: Finding) -> str:
    """Returns the report; pictures lie beside it.

    Args:
        comparison: The methods and their numbers.
        found: What else the comparison found.
    """
    names = [*(m.name for m in comparison.methods), *comparison.constants]
    lines = [
        _HEAD,
        "",
        f"Test metrics of the rounds that validation selected, {len(comparison.clients)} clients; "
        "the best number of each line is **bold**, which is no verdict; that stands below.",
        "",
        "| metric | client | " + " | ".join(names) + " |",
        "|---|---|" + "---:|" * len(names),
    ]
    for row in shown_rows(comparison):
        cells = [f"**{t}**" if i in row.best else t for i, t in enumerate(texts(row))]
        cells += [""] * (len(names) - len(cells))
        place = "" if row.place == "total" else shown(row.place).replace("|", r"\|")
        lines.append(f"| {row.metric} | {place} | " + " | ".join(cells) + " |")
    lines += ["", *(f"- {sentence}" for sentence in said(comparison)), ""]
    lines += [line for sentence in found.sentences for line in (sentence, "")]
    for name in found.pictures:
        caption = found.captions[name]
        lines += [f"![{caption}]({name}.png)", "", caption, ""]
    lines += ["Runs:", ""]
    for method in comparison.methods:
        folders = ", ".join(f"`{r.folder}` (seed {r.seed})" for r in method.runs)
        lines.append(f"- {method.name}: {folders}")
    return "\n".join(lines) + "\n"


def _bold(row: Row) -> list[str]:
    found = enumerate(texts(row))
    return [f"[bold]{text} *[/bold]" if i in row.best else f"{text}  " for i, text in found]


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
    if kind == "none":
        found = replace(found, pictures={})
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
