"""Says what this machine has, which optional packages are there, and what is wrong.

The command does not use the network. Its last line says whether something is wrong; if so, the
command exits with status 1.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from medfed.commands.help import print_usage
from medfed.commands.sentences import without_hydra
from medfed.common.console import say, wide_console
from medfed.common.processes import loading
from medfed.standalone.errors import ConfigError


@without_hydra(partial(print_usage, "medfed doctor"))
def main(words: Sequence[str]) -> None:
    """Runs the command."""
    if words:
        raise ConfigError(f"medfed doctor takes no arguments; leave {words[0]!r} out.")
    with loading():
        from medfed.run import doctor

    console, here = wide_console(), Path.cwd()
    parts = {"This machine": doctor.machine(here), "Optional packages": doctor.extras()}
    for title, rows in parts.items():
        say(console, title, *(f" {what:<20} {answer}" for what, answer in rows), "")
    wrong = list(doctor.mistakes(here))
    say(console, *(f"wrong: {sentence}" for sentence in wrong))
    print("Something is wrong." if wrong else "Nothing is wrong.")
    if wrong:
        sys.exit(1)
