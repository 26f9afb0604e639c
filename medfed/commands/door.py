"""The way into every command: help, one check of the command line, then Hydra."""

from __future__ import annotations

import functools
import gc
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import hydra
from omegaconf import DictConfig

from medfed.commands.help import print_help
from medfed.common.console import without_remarks
from medfed.common.errors import (
    CheckpointError,
    CodecError,
    ConfigError,
    MedfedError,
    NonFiniteError,
    did_you_mean,
)
from medfed.config.compose import CONFIG_DIR, check_overrides
from medfed.config.spelling import spelled

Main = Callable[..., None]
Run = Callable[[DictConfig], Any]
Check = Callable[[Sequence[DictConfig], bool], None]
# Hydra's own that are of use here; the others would load code, pickles or configurations from
# anywhere.
FLAGS = ("-m", "--multirun", "--cfg", "--resolve", "--package", "-p", "-c", "--info")


def command(name: str, check: Check | None = None) -> Callable[[Run], Main]:
    """Makes a command of a function that takes the composed configuration.

    Args:
        name: The command, and its primary config.
        check: What else can be wrong with what was composed; also told whether it is a sweep.

    Returns:
        A decorator; what it returns takes the command line without the program, by default this
        process's, checks it, and hands over to Hydra.
    """

    def decorate(run: Run) -> Main:
        @functools.wraps(run)
        def told(config: DictConfig) -> Any:
            with one_sentence():
                return run(config)

        @functools.wraps(run)
        def main(arguments: Sequence[str] | None = None) -> None:
            _start(name, told, inspect.getfile(run), arguments, check)

        return main

    return decorate


def _start(
    name: str, run: Run, file: str, arguments: Sequence[str] | None, check: Check | None
) -> None:
    # Ranks start anew with the file of the command and the same arguments.
    sys.argv = [file, *(sys.argv[1:] if arguments is None else arguments)]
    if {"-h", "--help"} & set(sys.argv):
        print_help(name, inspect.getmodule(inspect.unwrap(run)).__doc__ or "")
        return
    with one_sentence(), loading():
        flags = checked_flags(sys.argv[1:])
        sys.argv[1:] = [*flags, *spelled([a for a in sys.argv[1:] if a not in flags])]
        if not {"--cfg", "-c", "--info"} & set(flags):
            configs = check_overrides(sys.argv[1:], name)
            if check is not None:
                check(configs, bool({"-m", "--multirun"} & set(flags)))
    with without_remarks():
        hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name=name)(run)()


def checked_flags(arguments: Sequence[str]) -> list[str]:
    """Returns Hydra's flags with their values; what is left are overrides.

    Raises:
        ConfigError: If one is not for use here.

    Example:
        >>> checked_flags(["-m", "seed=0,1", "--cfg", "job"])
        ['-m', '--cfg', 'job']
        >>> checked_flags(["--multrun"])
        Traceback (most recent call last):
        ...
        medfed.common.errors.ConfigError: Unknown flag --multrun (did you mean --multirun?); the \
flags are -m, --multirun, --cfg, --resolve, --package, -p, -c, --info, and everything else is \
key=value.
    """
    flags, rest = [], list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("-"):
            continue
        flag = argument.split("=")[0]
        if flag not in FLAGS:
            raise ConfigError(
                f"Unknown flag {flag}{did_you_mean(flag, FLAGS)}; the flags are "
                f"{', '.join(FLAGS)}, and everything else is key=value."
            )
        flags.append(argument)
        takes = flag in ("--cfg", "-c", "--package", "-p", "--info") and "=" not in argument
        if takes and rest and "=" not in rest[0]:
            flags.append(rest.pop(0))
    return flags


@contextmanager
def loading() -> Iterator[None]:
    """Rests the garbage collector: modules stay, so looking through them again is lost time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def one_sentence() -> Iterator[None]:
    """Prints a user's error as one sentence on stderr and exits with status 1.

    ``HYDRA_FULL_ERROR=1`` shows the traceback instead. Of the errors that stop all ranks alike, the
    first rank speaks for all.
    """
    try:
        yield
    except MedfedError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        first = os.environ.get("LOCAL_RANK", "0") == os.environ.get("NODE_RANK", "0") == "0"
        if first or not isinstance(error, NonFiniteError | CodecError | CheckpointError):
            print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
