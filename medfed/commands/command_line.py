"""The start of every command: help, one check of the command line, then Hydra.

It checks the folders that Hydra will make before Hydra makes any.
"""

from __future__ import annotations

import gc
import inspect
import os
import sys
import tempfile
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from medfed.commands.help import print_help
from medfed.common import console, errors, processes
from medfed.config.compose import SWEEP, as_typed, composed, run_sweep, show, source_of
from medfed.config.description import checked, describe
from medfed.config.spelling import spelled
from medfed.records.places import Places, check_made, refuse_full

Main = Callable[..., None]
Run = Callable[..., Any]
Check = Callable[[Sequence[Any], bool], None]
FULL_ERROR = "HYDRA_FULL_ERROR"
# The flags of Hydra that are allowed; the others could load code, pickles or configurations from
# anywhere.
FLAGS = ("-m", "--multirun", "--cfg", "--resolve", "--package", "-p", "-c", "--info")


def command(
    name: str,
    check: Check | None = None,
    runs: bool = False,
    folders: str = "",
    trains: bool = False,
) -> Callable[[Run], Main]:
    """Turns a function of a configuration into a command.

    Args:
        name: The name of the command and of its primary config.
        check: Further checks of the composed configurations; its second argument says whether the
            command is a sweep.
        runs: Whether the configuration describes a run. Then the function gets a
            :class:`~medfed.config.description.RunDescription`, otherwise the keys.
        folders: The key of arguments without a key, which are folders; empty: there are none.
        trains: Whether the command makes the folder of a run, which must be new or empty.

    Returns:
        A decorator. The decorated function takes the command line without the program (by default
        that of this process), checks it, and starts Hydra.
    """

    def decorate(run: Run) -> Main:
        @wraps(run)
        def main(arguments: Sequence[str] | None = None) -> None:
            processes.end_with_parent()
            with processes.ended_by_signals():
                _start(_Command(name, run, check, runs, folders, trains), arguments)

        return main

    return decorate


def plain(
    help_of: Callable[[str], None], needs_words: bool = False
) -> Callable[[Callable[[list[str]], Any]], Main]:
    """Turns a function of the words of a command line into a command that Hydra does not start.

    Args:
        help_of: Prints the help, given the docstring of the command's module.
        needs_words: Whether the help is the answer to no words.

    Returns:
        A decorator. The decorated function takes the command line without the program (by default
        that of this process), and prints an error as one sentence.
    """

    def decorate(run: Callable[[list[str]], Any]) -> Main:
        @wraps(run)
        def main(arguments: Sequence[str] | None = None) -> None:
            given = list(sys.argv[1:] if arguments is None else arguments)
            if {"-h", "--help"} & set(given) or (needs_words and not given):
                help_of(inspect.getmodule(run).__doc__ or "")
                return
            with one_sentence():
                run(given)

        return main

    return decorate


@dataclass(frozen=True)
class _Command:
    name: str
    run: Run
    check: Check | None
    describes: bool
    folders: str
    trains: bool

    def with_keys(self, arguments: Sequence[str]) -> list[str]:
        """Returns a command line in which folders have the key that they belong to."""
        plain = [a for a in arguments if self.folders and "=" not in a and not a.startswith("~")]
        if not plain:
            return list(arguments)
        listed = ",".join('"' + folder.replace('"', '\\"') + '"' for folder in plain)
        value = listed if len(plain) == 1 else f"[{listed}]"
        return [*(a for a in arguments if a not in plain), f"{self.folders}={value}"]

    def read(self, source: dict[str, Any], overrides: Sequence[str]) -> Any:
        """Checks a configuration."""
        asked: Any = describe(source, tuple(overrides)) if self.describes else checked(source)
        check_made(asked.values if self.describes else asked)
        return asked

    def answer(self, asked: Any) -> Any:
        """Runs the command within Hydra, while Hydra's log is still open."""
        folder = asked.folder if self.describes else asked.get("run")
        with one_sentence(None if folder is None else Path(str(folder))):
            return self.run(asked)

    def answer_one(self, config: DictConfig) -> Any:
        """Runs the command for one combination of a sweep."""
        gc.collect()  # objects that refer to each other hold the data of the last one
        overrides = as_typed(HydraConfig.get().overrides.task)
        return self.answer(self.read(source_of(config), overrides))


def _start(command: _Command, arguments: Sequence[str] | None) -> None:
    # Lightning starts the other ranks with the command's file and the same arguments.
    file = inspect.getfile(command.run)
    sys.argv = [file, *(sys.argv[1:] if arguments is None else arguments)]
    if {"-h", "--help"} & set(sys.argv):
        print_help(command.name, inspect.getmodule(inspect.unwrap(command.run)).__doc__ or "")
        return
    with one_sentence(), loading():
        flags = parsed(sys.argv[1:])
        overrides = spelled(command.with_keys(flags.overrides))
        sys.argv[1:] = ["-m"] * flags.multirun + overrides
        compositions = composed(overrides, command.name)
        sweeps = flags.multirun or "hydra.mode=MULTIRUN" in overrides
        if (several := compositions[0].sweep) and not sweeps:
            raise errors.ConfigError(
                f"{several} is a sweep; add -m for a run of each, or write one value."
            )
        if show(flags, overrides, command.name):  # also where values are missing
            return
        described = [command.read(each.source(), each.overrides) for each in compositions]
        if command.check is not None:
            command.check(described, sweeps)
    with console.without_remarks(), one_sentence():
        if sweeps:
            begin = partial(refuse_full, known_by=SWEEP) if command.trains else None
            run_sweep(overrides, command.name, command.answer_one, begin)
            return
        (asked,) = described
        if command.trains and asked.resume is None and processes.is_first_process():
            refuse_full(Path(asked.folder))
        compositions[0].run(lambda _: command.answer(asked))


def parsed(arguments: Sequence[str]) -> Namespace:
    """Divides a command line into Hydra's flags and the overrides.

    Raises:
        ConfigError: If a flag is not allowed.

    Example:
        >>> asked = parsed(["-m", "seed=0,1", "--cfg", "job"])
        >>> asked.multirun, asked.cfg, asked.overrides
        (True, 'job', ['seed=0,1'])
        >>> parsed(["--multrun"])
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.ConfigError: Unknown flag --multrun (did you mean --multirun?); \
the flags are -m, --multirun, --cfg, --resolve, --package, -p, -c, --info, and everything else is \
key=value.
    """
    flags = [argument.split("=")[0] for argument in arguments if argument.startswith("-")]
    if flag := next((flag for flag in flags if flag not in FLAGS), None):
        raise errors.ConfigError(
            f"Unknown flag {flag}{errors.did_you_mean(flag, FLAGS)}; the flags are "
            f"{', '.join(FLAGS)}, and everything else is key=value."
        )
    asked: Namespace = get_args_parser().parse_intermixed_args(list(arguments))
    if asked.resolve and asked.cfg is None:
        raise errors.ConfigError(
            "--resolve has a meaning with --cfg alone; write --cfg job --resolve."
        )
    return asked


@contextmanager
def loading() -> Iterator[None]:
    """Pauses the garbage collector: imported modules stay, so scanning them again wastes time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def one_sentence(folder: Path | None = None) -> Iterator[None]:
    """Prints an error as one sentence on stderr and exits with status 1.

    ``HYDRA_FULL_ERROR=1`` shows the traceback instead. If an error stops all ranks alike, only the
    first rank prints it. The traceback of an unexpected error goes to a file.

    Args:
        folder: The run folder, if the command has one.
    """
    try:
        yield
    except Exception as error:
        if os.environ.get(FULL_ERROR) == "1":
            raise
        if not isinstance(error, errors.MedfedError):
            what = f"unexpected {type(error).__name__}: {errors.first_line(error)}"
            print(f"error: {console.visible(what)}; {_logged(error, folder)}", file=sys.stderr)
        elif processes.is_first_process() or not isinstance(
            error, errors.NonFiniteError | errors.CodecError | errors.CheckpointError
        ):
            print(f"error: {console.visible(str(error))}", file=sys.stderr)
        sys.exit(1)


def _logged(error: Exception, folder: Path | None) -> str:
    """Writes the traceback, if possible to the folder of a run that began, and says where."""
    text = "".join(traceback.format_exception(error))
    places = [tempfile.gettempdir()]
    if folder is not None and (folder / Places.config_yaml).is_file():
        places.insert(0, str(folder))
    for place in places:
        try:
            handle, name = tempfile.mkstemp(".log", "medfed-error-", place)
            with open(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
        except OSError:
            continue
        return f"the traceback is in {name}; please report it."
    return "HYDRA_FULL_ERROR=1 shows the traceback; please report it."
