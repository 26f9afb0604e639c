"""Measures a finished run again: ``medfed evaluate run=DIR split=val``.

Hospitals that join it later: ``medfed evaluate run=DIR onboard=all k=1,5,20``.
"""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, ListConfig

from medfed.commands.door import command


def onboard(config: DictConfig, folder: Path) -> None:
    """Lets hospitals join the run, writes what was measured and prints the table."""
    from medfed.reports.onboarding import print_onboarding, write_onboarding
    from medfed.run.onboarding import onboard as measured

    counts = list(config.k) if isinstance(config.k, ListConfig) else [config.k]
    found = measured(folder, str(config.onboard), counts, config.onboard_steps)
    write_onboarding(found, folder)
    print_onboarding(found, folder)


@command("evaluate")
def main(config: DictConfig) -> None:
    """Evaluates the run and prints the table of its clients, or of hospitals that join it."""
    folder = Path(str(config.run))
    if config.onboard is not None:
        onboard(config, folder)
        return
    # Imported late, so that --help and mistakes in the configuration answer at once.
    from medfed.run.evaluation import evaluate_run
    from medfed.run.results import print_summary

    print_summary(evaluate_run(folder, str(config.split)), folder)


if __name__ == "__main__":
    main()
