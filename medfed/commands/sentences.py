"""Every error of a command is one sentence; commands that need no Hydra."""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any

from medfed.common import console, processes
from medfed.config.allowed import line_of_plugin
from medfed.records.places import Places
from medfed.standalone import errors

FULL_ERROR = "HYDRA_FULL_ERROR"


def without_hydra(
    help_of: Callable[[str], None], needs_words: bool = False
) -> Callable[[Callable[[list[str]], Any]], Callable[..., None]]:
    """Turns a function of the words of a command line into a command that needs no Hydra."""

    def decorate(run: Callable[[list[str]], Any]) -> Callable[..., None]:
        @wraps(run)
        def main(arguments: Sequence[str] | None = None) -> None:
            words = list(sys.argv[1:] if arguments is None else arguments)
            if {"-h", "--help"} & set(words) or (needs_words and not words):
                help_of(inspect.getmodule(run).__doc__ or "")
                return
            with one_sentence():
                run(words)

        return main

    return decorate


@contextmanager
def one_sentence(folder: Path | None = None) -> Iterator[None]:
    """Prints an error as one sentence on stderr and exits with status 1.

    ``HYDRA_FULL_ERROR=1`` shows the traceback instead; that of an unexpected error goes to a file.
    """
    try:
        yield
    except Exception as error:
        if os.environ.get(FULL_ERROR) == "1":
            raise
        sentence = sentence_of(error, folder)
        # What stops all ranks alike, only the first one says.
        alike = errors.NonFiniteError | errors.CodecError | errors.CheckpointError
        if processes.is_first_process() or not isinstance(error, alike):
            print(f"error: {sentence}", file=sys.stderr)
        sys.exit(1)


def sentence_of(error: Exception, folder: Path | None) -> str:
    """Returns what went wrong, in one sentence; of what is unexpected it keeps the traceback."""
    if processes.interruptions:
        raise processes.interruptions[0]
    place = line_of_plugin(error)
    if isinstance(error, errors.MedfedError):
        # What a plugin raises itself is for its users, who need no line of it.
        last = traceback.extract_tb(error.__traceback__)[-1:]
        if place and isinstance(error, errors.ConfigError) and last[0].filename not in place:
            return console.visible(f"{place}: {error}")
        return console.visible(str(error))
    if isinstance(error, OSError) and (refused := console.output_refused(error)):
        return refused
    logged = _logged(error, folder)
    if isinstance(error, OSError) and error.strerror:  # a disk, a right or a link, but no mistake
        what = f"The system refuses {error.filename or 'to go on'} ({error.strerror}); check that "
        return f"{console.visible(what)}it is there, may be used and has room; {logged}."
    if isinstance(error, RecursionError):
        return f"A value is nested too deeply; write it with fewer levels; {logged}."
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return f"The memory of this machine is too small; train with smaller batches; {logged}."
    what = f"{type(error).__name__}: {errors.first_line(error)}"
    if place:
        return f"{console.visible(f'{place}: {what}')}; {logged}."
    return f"{console.visible(f'unexpected {what}')}; {logged}; please report it."


def _logged(error: Exception, folder: Path | None) -> str:
    """Writes the traceback, if possible to the folder of a run that began, and says where."""
    begun = folder is not None and (folder / Places.config_yaml).is_file()
    for place in [str(folder)] * begun + [None]:  # at last the system's folder for temporary files
        with suppress(OSError):
            handle, name = tempfile.mkstemp(".log", "medfed-error-", place)
            with open(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.writelines(traceback.format_exception(error))
            return f"the traceback is in {name}"
    return "HYDRA_FULL_ERROR=1 shows the traceback"
