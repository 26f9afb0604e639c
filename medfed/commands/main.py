"""``medfed``: finds the command and passes the rest of the line to it."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from medfed import __version__
from medfed.commands.help import GONE, NAMES, OVERVIEW
from medfed.common.console import escape_unknown, output_refused
from medfed.common.processes import ended_by_signals
from medfed.standalone.errors import did_you_mean


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command."""
    escape_unknown()
    if wrong := _wrong_here():
        print(f"error: {wrong}", file=sys.stderr)
        sys.exit(1)
    try:
        try:
            _answer(list(sys.argv[1:] if arguments is None else arguments))
            why = output_refused()
        except OSError as error:  # commands catch their own: this one is of what help prints
            if not (why := output_refused(error)):
                raise
        if why:
            print(f"error: {why}", file=sys.stderr)
            sys.exit(1)
    finally:
        if output_refused():  # which Python would print when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _answer(words: list[str]) -> None:
    if not words or words[0] in ("-h", "--help", "help"):
        print(OVERVIEW.format(version=__version__), end="")
    elif words[0] == "--version":
        print(__version__)
    elif words[0] not in NAMES:
        new = GONE.get(words[0])
        hint = f" (it is medfed {new} now)" if new else did_you_mean(words[0], NAMES)
        known = f"the commands are {', '.join(NAMES)}."
        print(f"error: Unknown command {words[0]!r}{hint}; {known}", file=sys.stderr)
        sys.exit(2)
    else:
        with ended_by_signals():
            importlib.import_module(f"medfed.commands.{words[0]}").main(words[1:])


def _wrong_here() -> str:
    """Says why no command can work here."""
    if (encoding := sys.getfilesystemencoding()) != "utf-8":
        return f"Python writes the names of files in {encoding} here; set PYTHONUTF8=1."
    try:
        os.getcwd()
    except OSError:
        return "The folder from which you call medfed is gone; go to another."
    return ""
