"""Writes one page on finished runs: ``medfed report runs=SWEEP_DIR``.

Which method is better, how surely, and who would be better off alone; with intervals that the runs
can bear, in a page that opens without a network, and tables and vector pictures for papers.
"""

from __future__ import annotations

from pathlib import Path

from medfed.commands.command_line import command
from medfed.config.sections import Section


@command("report")
def main(config: Section) -> None:
    """Writes the page, tables and pictures, and prints the table."""
    # Imported late, so that --help and mistakes in the configuration answer at once.
    from medfed.reports.report import report_runs

    runs = config.runs if isinstance(config.runs, list) else [config.runs]
    out = None if config.out is None else Path(str(config.out))
    report_runs([str(r) for r in runs], out, config.metric, config.figures)


if __name__ == "__main__":
    main()
