"""Runs a pilot, and says what it speaks for: on the terminal, as Markdown and as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from medfed.common.console import say, wide_console
from medfed.common.errors import MedfedError
from medfed.common.files import digest, write_json, write_text, writing
from medfed.common.names import file_names
from medfed.reports.advice.choice import ALONE, Advice, choose
from medfed.reports.advice.words import markdown, print_advice
from medfed.run.benchmark.runner import found_groups, run_groups
from medfed.run.pilot import Pilot, Question, pilots, question


def advise(
    overrides: Sequence[str],
    methods: Sequence[str],
    *,
    folds: int = 5,
    repeats: int = 2,
    rounds: int | None = None,
    out: Path = Path("outputs/advice"),
    workers: int = 1,
    quiet: bool = False,
) -> tuple[Advice, Path]:
    """Runs the pilot's cells that are missing, then writes and prints the advice.

    Args:
        overrides: What the user would train with, without a method.
        methods: Those that are compared; training alone is always among them.
        folds: Parts of the patients that are tested in turn.
        repeats: How often the patients are dealt anew.
        rounds: Rounds of a run of the pilot; None: as many as the user's.
        out: Where cells are kept; advice goes to a folder within it, which is that of the question.
        workers: Processes; 0 computes in this one.
        quiet: Whether to print nothing.

    Returns:
        The advice, and its folder.

    Raises:
        MedfedError: If something is unknown or does not fit, or a cell cannot be trusted.
    """
    asked = question(overrides, folds, repeats)
    out = out.expanduser()
    with writing(out, "choose another out=FOLDER"):
        groups = pilots(asked, [ALONE, *(m for m in methods if m != ALONE)], out, rounds)
        folder = out / _name(asked, groups)
        console = wide_console()
        if not quiet:
            say(console, _begins(asked, groups))
        broken = run_groups(groups, out, workers, quiet)
    if broken:
        place, why = next(iter(broken.items()))
        raise MedfedError(
            f"{len(broken)} runs of the pilot could not be computed, the first of them {place} "
            f"({why}); what was finished is kept."
        )
    found = choose(asked, found_groups(groups, out))
    with writing(folder, "choose another out=FOLDER"):
        write_json(folder / "advice.json", found.plain())
        write_text(folder / "advice.md", markdown(found, _command(asked, found)))
    if not quiet:
        print_advice(found, _command(asked, found))
        say(console, f"Advice: {folder / 'advice.md'}")
    return found, folder


def _name(asked: Question, groups: Sequence[Pilot]) -> str:
    """Of all that the cells depend on, so that no advice is written over another one."""
    keys = [
        cell.key for own in groups for cell in own.final(0)
    ]  # the content of the divisions among them
    return f"{file_names([asked.name])[asked.name]}-{digest(keys)[:8]}"


def _begins(asked: Question, groups: Sequence[Pilot]) -> str:
    rounds = groups[0].config(groups[0].variants[0]).rounds
    count, splits = len(groups), len(asked.divisions)
    return (
        f"A pilot of {count} methods and {splits} repetitions, {count * splits} runs of {rounds} "
        f"rounds, on the {sum(map(len, asked.patients.values())):,} training and validation "
        f"patients of {len(asked.patients)} hospitals; {asked.kept_out:,} test patients stay out."
    )


def _command(asked: Question, found: Advice) -> str:
    method = found.use or ALONE
    return shlex.join(["medfed", "train", *asked.overrides, f"algorithm={method}"])
