"""Says what this machine has, which optional packages are there, and what is wrong.

The command does not use the network. Its last line says whether something is wrong; if so, the
command exits with status 1.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from medfed.commands.command_line import plain
from medfed.commands.help import print_usage
from medfed.common.console import say, wide_console
from medfed.common.processes import loading
from medfed.standalone.errors import ConfigError


@plain(partial(print_usage, "medfed doctor"))
def main(words: Sequence[str]) -> None:
    """Runs the command."""
    if words:
        raise ConfigError(f"medfed doctor takes no arguments; leave {words[0]!r} out.")
    with loading():
        from medfed.run import doctor

    console = wide_console()
    _print(console, "This machine", doctor.machine(Path.cwd()))
    _print(console, "Optional packages", doctor.extras())
    wrong = list(doctor.mistakes(Path.cwd()))
    say(console, *(f"wrong: {sentence}" for sentence in wrong))
    print("Something is wrong." if wrong else "Nothing is wrong.")
    if wrong:
        sys.exit(1)


def _print(console: Console, title: str, rows: Iterable[tuple[str, str]]) -> None:
    table = Table(title=title, title_justify="left", box=None, show_header=False, padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for what, answer in rows:
        table.add_row(what, answer)
    console.print(table)
    console.print()
