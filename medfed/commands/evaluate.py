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


@Command("evaluate", folders="run")
def main(config: Section) -> None:
    """Evaluates the run and prints the table of its clients, or of hospitals that join it."""
    folder, split = Path(str(config.run)), str(config.split)
    kinds = ("onboard", "subsets", "across", "by")
    chosen = [name for name in kinds if config[name] not in (None, False, [])]
    if len(chosen) > 1:
        raise ConfigError(
            f"{' and '.join(chosen[:2])} are separate evaluations; set one of them to null."
        )
    # Imported here, so that --help and errors in the configuration appear at once.
    from medfed.run import evaluation, onboarding, results

    match chosen:
        case ["onboard"]:
            of = str(config.onboard), listed(config.k), config.onboard_steps
            onboarding.show_onboarding(onboarding.onboard(folder, *of), folder)
        case ["subsets"]:
            names = config.subsets
            wanted = [str(s) for s in names] if isinstance(names, list) else str(names)
            evaluation.show_subsets(evaluation.measure_subsets(folder, wanted, split), folder)
        case ["across"]:
            evaluation.show_across(evaluation.measure_across(folder, split), folder, split)
        case ["by"]:
            source = None if config.patients is None else Path(str(config.patients)).expanduser()
            how = source, listed(config.bands), int(config.least)
            for column in map(str, listed(config.by)):
                groups = evaluation.measure_subgroups(folder, split, column, *how)
                evaluation.show_subgroups(groups, folder)
        case _:
            results.print_summary(evaluation.evaluate_run(folder, split), folder)
