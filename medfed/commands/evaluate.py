"""Evaluates a finished run: ``medfed evaluate run=DIR split=val``.

``medfed evaluate run=DIR onboard=all k=1,5,20`` lets hospitals join the run.
``medfed evaluate run=DIR subsets=all`` evaluates it with only some of the channels.
``medfed evaluate run=DIR across=true`` evaluates each model on all hospitals' patients.
``medfed evaluate run=DIR by=sex`` evaluates it by subgroup of patients.
"""

from __future__ import annotations

from pathlib import Path

from medfed.commands.command_line import Command
from medfed.config.sections import Section, listed
from medfed.standalone.errors import ConfigError


def onboard(config: Section, folder: Path) -> None:
    """Lets hospitals join the run, writes their scores and prints the table."""
    from medfed.run import onboarding

    of = str(config.onboard), listed(config.k), config.onboard_steps
    onboarding.show_onboarding(onboarding.onboard(folder, *of), folder)


def subsets(config: Section, folder: Path) -> None:
    """Evaluates the run on subsets of the channels, writes the scores and prints the tables."""
    from medfed.run.evaluation import measure_subsets, show_subsets

    names = config.subsets
    wanted = [str(s) for s in names] if isinstance(names, list) else str(names)
    show_subsets(measure_subsets(folder, wanted, str(config.split)), folder)


def by(config: Section, folder: Path) -> None:
    """Evaluates the run by subgroups of each column, writes the scores and prints the table."""
    from medfed.run.evaluation import measure_subgroups, show_subgroups

    source = None if config.patients is None else Path(str(config.patients)).expanduser()
    split, bands, least = str(config.split), listed(config.bands), int(config.least)
    for column in map(str, listed(config.by)):
        show_subgroups(measure_subgroups(folder, split, column, source, bands, least), folder)


def across(config: Section, folder: Path) -> None:
    """Evaluates each model on all hospitals' patients, writes the scores and prints the table."""
    from medfed.run.evaluation import measure_across, show_across

    show_across(measure_across(folder, str(config.split)), folder, str(config.split))


@Command("evaluate", folders="run")
def main(config: Section) -> None:
    """Evaluates the run and prints the table of its clients, or of hospitals that join it."""
    folder = Path(str(config.run))
    kinds = {"onboard": onboard, "subsets": subsets, "across": across, "by": by}
    chosen = [name for name in kinds if config[name] not in (None, False, [])]
    if len(chosen) > 1:
        raise ConfigError(
            f"{' and '.join(chosen[:2])} are separate evaluations; set one of them to null."
        )
    if chosen:
        kinds[chosen[0]](config, folder)
        return
    # Imported here, so that --help and errors in the configuration appear at once.
    from medfed.run.evaluation import evaluate_run
    from medfed.run.results import print_summary

    print_summary(evaluate_run(folder, str(config.split)), folder)
