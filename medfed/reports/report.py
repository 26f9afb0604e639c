"""``medfed report``: one page about finished runs, which says only what their splits support.

Runs that differ in ``seed``, ``data.seed`` or ``data.fold`` alone are one method on several splits.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from medfed.common.console import say, wide_console
from medfed.common.errors import ConfigError, few
from medfed.common.files import writing
from medfed.records.folder import Run, RunFolder
from medfed.reports.files import print_tables, write
from medfed.reports.findings import Report, report_on
from medfed.reports.page import GENERATOR
from medfed.reports.runs import (
    check_same_patients,
    chosen_metric,
    common_folder,
    find_runs,
    folders_with,
    pool,
    without_repeats,
)


def own_report(folders: Sequence[Path], metric: str | None = None) -> Report:
    """Judges finished runs.

    Args:
        folders: Run folders.
        metric: The metric of the verdicts; None: the one that selected the rounds.

    Raises:
        CheckpointError: If a run is unfinished, or runs are of other patients, data, metrics or
            clients than others; one is named.
        ConfigError: If the metric is unknown.
    """
    runs, notes = without_repeats([Run(folder) for folder in folders])
    check_same_patients(runs, data=True)
    methods, more = pool(runs)
    report = report_on(methods, chosen_metric(runs, metric), pictures=True)
    report.notes += [
        *more,
        *notes,
        "The settings are those of the runs; the report cannot know whether all methods were "
        "tuned alike.",
    ]
    report.commands = [
        c for of_method in methods.values() for run in of_method if (c := _command(run))
    ]
    versions = runs[0].versions
    report.libraries = {n: str(v) for n, v in versions.items() if n not in ("commit", "plugins")}
    return report


def _command(run: Run) -> str:
    """The command that started a run, where it is known."""
    return shlex.join(["medfed", "train", *run.overrides]) if run.overrides else ""


def report_runs(
    runs: str | Sequence[str],
    out: Path | None = None,
    metric: str | None = None,
    figures: bool = True,
    quiet: bool = False,
) -> Report:
    """Judges finished runs, prints the table and writes the page and its files.

    Args:
        runs: Run folders, or folders that hold runs.
        out: Where to write; None takes ``report`` in the folder that holds all runs.
        metric: The metric of the verdicts; None: the one that selected the rounds.
        figures: Whether to write the pictures as vector files, too.
        quiet: Whether to print nothing.

    Returns:
        The report.

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
    report = own_report(folders, metric)
    report.notes += _unfinished(runs, folders)
    with writing(folder, "choose another out=FOLDER"):
        write(folder, report, figures)
    if not quiet:
        print_tables(report)
        say(wide_console(), *report.sentences, f"Report: {page}")
    return report


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
