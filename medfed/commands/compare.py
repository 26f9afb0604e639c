"""Compares finished runs: ``medfed compare runs=[DIR,DIR]`` or ``runs=SWEEP_DIR``."""

from __future__ import annotations

from pathlib import Path

from medfed.commands.command_line import Command
from medfed.config.sections import Section, listed


@Command("compare", folders="runs")
def main(config: Section) -> None:
    """Prints the table and writes CSV, Markdown and pictures."""
    # Imported here, so that --help and errors in the configuration appear at once.
    from medfed.reports.comparison import compare_runs

    out = None if config.out is None else Path(str(config.out))
    compare_runs([str(r) for r in listed(config.runs)], out, config.metric, config.pictures.format)
