"""Says what this machine has, which optional packages are there, and what is wrong.

The command does not use the network. Its last line says whether something is wrong; if so, the
command exits with status 1.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from medfed.commands.command_line import loading, one_sentence
from medfed.commands.help import print_usage
from medfed.common.console import wide_console
from medfed.common.errors import ConfigError

USAGE = "medfed doctor"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command.

    Args:
        arguments: The command line without the program; ``None``: this process's.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(given):
        print_usage(USAGE, __doc__ or "")
        return
    with one_sentence():
        if given:
            raise ConfigError(f"medfed doctor takes no arguments; leave {given[0]!r} out.")
        with loading():
            from medfed.run import doctor

        console = wide_console()
        _print(console, "This machine", doctor.machine(Path.cwd()))
        _print(console, "Optional packages", [("W&B", doctor.wandb_login()), *doctor.extras()])
        wrong = list(doctor.mistakes(Path.cwd()))
    for sentence in wrong:
        print(f"wrong: {sentence}")
    print("Something is wrong." if wrong else "Nothing is wrong.")
    if wrong:
        sys.exit(1)


def _print(console: Console, title: str, rows: Iterable[tuple[str, str]]) -> None:
    table = Table(title=title, title_justify="left", box=None, show_header=False, padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for what, answer in rows:
        table.add_row(what.replace("[", r"\["), answer.replace("[", r"\["))
    console.print(table)
    console.print()
