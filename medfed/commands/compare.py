"""Compares finished runs: ``medfed compare runs=[DIR,DIR]`` or ``runs=SWEEP_DIR``."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, ListConfig

from medfed.commands.door import command


@command("compare")
def main(config: DictConfig) -> None:
    """Prints the table and writes CSV, Markdown and pictures."""
    # Imported late, so that --help and mistakes in the configuration answer at once.
    from medfed.reports.comparison import compare_runs

    runs = config.runs if isinstance(config.runs, ListConfig) else [config.runs]
    compare_runs(
        [str(r) for r in runs], None if config.out is None else Path(str(config.out)), config.metric
    )


if __name__ == "__main__":
    main()
