"""``medfed report``: the page of a user's own finished runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from medfed.common.console import say, wide_console
from medfed.common.errors import ConfigError
from medfed.common.files import writing
from medfed.common.names import few
from medfed.reports.benchmark.files import write
from medfed.reports.benchmark.findings import Told
from medfed.reports.benchmark.own import own_findings
from medfed.reports.benchmark.page import GENERATOR
from medfed.reports.benchmark.report import print_tables
from medfed.reports.runs import common_folder, find_runs


def report_runs(
    runs: str | Sequence[str],
    out: Path | None = None,
    metric: str | None = None,
    figures: bool = True,
    quiet: bool = False,
) -> Told:
    """Judges finished runs, prints the table and writes the page with all that lies beside it.

    Args:
        runs: Run folders, or folders that hold runs.
        out: Where to write; None takes ``report`` in the folder that holds all runs.
        metric: What they are judged by; None: what selected the rounds.
        figures: Whether to write the pictures as files of vectors, too.
        quiet: Whether to print nothing.

    Returns:
        What was found.

    Raises:
        MedfedError: If the runs cannot be read or do not belong together, or ``out`` cannot be
            written, or holds a page that no report wrote.
    """
    folders = find_runs(runs)
    folder = common_folder(folders) / "report" if out is None else out.expanduser()
    page = folder / "report.html"
    if page.is_file() and GENERATOR.encode() not in page.read_bytes()[:1000]:
        raise ConfigError(
            f"{page} is there and no report has written it; choose another out=FOLDER."
        )
    told = own_findings(folders, metric)
    told.notes += _unfinished(runs, folders)
    with writing(folder, "choose another out=FOLDER"):
        write(folder, told, figures)
    if not quiet:
        print_tables(told)
        say(wide_console(), *told.sentences, f"Report: {page}")
    return told


def _unfinished(runs: str | Sequence[str], folders: Sequence[Path]) -> list[str]:
    """Names the runs below the folders that have not finished, which the report has not."""
    known = {folder.resolve() for folder in folders}
    lost = sorted(
        str(path.parent)
        for name in ([runs] if isinstance(runs, str) else runs)
        for path in Path(name).expanduser().rglob("config.yaml")
        if path.parent.resolve() not in known and (path.parent / "splits.json").is_file()
    )
    return [f"Not finished, and left out: {few(lost, 5)}."] if lost else []
