"""Compares finished runs: ``medfed report runs=[DIR,DIR]`` or ``runs=SWEEP_DIR``.

The page says which method is better, how sure that is, and which clients do better with local
training. It opens without a network. Tables and pictures for papers are files next to it.
"""

from __future__ import annotations

from pathlib import Path

from medfed.commands.command_line import Command
from medfed.config.sections import Section, listed


@Command("report", folders="runs")
def main(config: Section) -> None:
    """Writes the page, tables and pictures, and prints the table."""
    # Imported here, so that --help and errors in the configuration appear at once.
    from medfed.reports.report import report_runs

    out = None if config.out is None else Path(str(config.out))
    report_runs([str(r) for r in listed(config.runs)], out, config.metric, config.figures)
