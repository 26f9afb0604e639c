"""The start of every command: help, one check of the command line, then Hydra.

It checks the folders that Hydra will make before Hydra makes any.
"""

from __future__ import annotations

import functools
import gc
import inspect
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from medfed.commands.help import print_help
from medfed.common.console import visible, without_remarks
from medfed.common.errors import (
    CheckpointError,
    CodecError,
    ConfigError,
    DataError,
    MedfedError,
    NonFiniteError,
    did_you_mean,
    first_line,
)
from medfed.common.processes import end_with_parent, ended_by_signals, is_first_process
from medfed.config.compose import CONFIG_DIR, Composition, as_typed, composed, source_of
from medfed.config.description import checked, describe
from medfed.config.spelling import spelled
from medfed.records.places import SWEEP, Before, Places, check_made, refuse_full

Main = Callable[..., None]
Run = Callable[[Any], Any]
Check = Callable[[Sequence[Any], bool], None]
Task = Callable[[DictConfig], Any]
FULL_ERROR = "HYDRA_FULL_ERROR"
_users: str | None = None  # the user's value of this variable
# The flags of Hydra that are allowed; the others could load code, pickles or configurations from
# anywhere.
FLAGS = ("-m", "--multirun", "--cfg", "--resolve", "--package", "-p", "-c", "--info")


def command(
    name: str, check: Check | None = None, runs: bool = False, folders: str = ""
) -> Callable[[Run], Main]:
    """Turns a function of a configuration into a command.

    Args:
        name: The name of the command and of its primary config.
        check: Further checks of the composed configurations; its second argument says whether the
            command is a sweep.
        runs: Whether the configuration describes a run. Then the function gets a
            :class:`~medfed.config.description.RunDescription`, otherwise the keys.
        folders: The key of arguments without a key, which are folders; empty: there are none.

    Returns:
        A decorator. The decorated function takes the command line without the program (by default
        that of this process), checks it, and starts Hydra.
    """

    def decorate(run: Run) -> Main:
        @functools.wraps(run)
        def main(arguments: Sequence[str] | None = None) -> None:
            end_with_parent()
            with ended_by_signals():
                _start(_Command(name, run, check, runs, folders), arguments)

        return main

    return decorate


@dataclass(frozen=True)
class _Command:
    name: str
    run: Run
    check: Check | None
    describes: bool
    folders: str

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


def _start(command: _Command, arguments: Sequence[str] | None) -> None:
    # Lightning starts the other ranks with the command's file and the same arguments.
    file = inspect.getfile(command.run)
    sys.argv = [file, *(sys.argv[1:] if arguments is None else arguments)]
    if {"-h", "--help"} & set(sys.argv):
        print_help(command.name, inspect.getmodule(inspect.unwrap(command.run)).__doc__ or "")
        return
    task: Task = lambda config: command.answer(  # noqa: E731
        command.read(source_of(config), as_typed(HydraConfig.get().overrides.task))
    )
    single: Composition | None = None
    with one_sentence(), loading():
        flags = checked_flags(sys.argv[1:])
        overrides = spelled(command.with_keys([a for a in sys.argv[1:] if a not in flags]))
        sys.argv[1:] = [*flags, *overrides]
        compositions = composed(overrides, command.name)
        if (several := compositions[0].sweep) and not several.startswith("hydra.mode"):
            _check_sweep(several, flags, overrides)
        if not {"--cfg", "-c", "--info"} & set(flags):  # --cfg may show missing values
            described = [command.read(each.source(), each.overrides) for each in compositions]
            if command.check is not None:
                command.check(described, bool({"-m", "--multirun"} & set(flags)))
        if not flags and not compositions[0].sweep:
            (single,), (asked,) = compositions, described
            task = lambda _: command.answer(asked)  # noqa: E731
    with without_remarks(), one_sentence(), hydra_raising(task) as raising:
        if single is not None:
            single.run(raising)
        else:
            folder = str(CONFIG_DIR)
            hydra.main(version_base="1.3", config_path=folder, config_name=command.name)(raising)()


def _check_sweep(several: str, flags: Sequence[str], overrides: Sequence[str]) -> None:
    """Refuses several values where Hydra is not asked for a run of each."""
    asked = {"-m", "--multirun"} & set(flags) or any(o.startswith("hydra.mode=") for o in overrides)
    if not asked:
        raise ConfigError(f"{several} is a sweep; add -m for a run of each, or write one value.")


@contextmanager
def hydra_raising(run: Task) -> Iterator[Task]:
    """Makes Hydra raise its errors, such as a folder that cannot be made, instead of printing them.

    Hydra does so if the variable is set with which users ask for tracebacks. The run and the ranks
    that it starts see the user's value of that variable.

    Args:
        run: The function that Hydra will call.

    Yields:
        The function to pass to Hydra.
    """
    global _users
    _users = os.environ.get(FULL_ERROR)

    @functools.wraps(run)
    def under_users(config: DictConfig) -> Any:
        with as_the_user_asked():
            return run(config)

    _put("1")
    try:
        yield under_users
    except OSError as error:
        if _users == "1":
            raise
        _put(_users)
        raise DataError(
            f"Cannot write {error.filename or 'the run folder'} "
            f"({error.strerror or error}); choose another folder by hydra.run.dir=FOLDER."
        ) from error
    finally:
        _put(_users)


@contextmanager
def as_the_user_asked() -> Iterator[None]:
    """Shows tracebacks within Hydra only if the user asked for them."""
    _put(_users)
    try:
        yield
    finally:
        _put("1")


def _put(value: str | None) -> None:
    if value is None:
        os.environ.pop(FULL_ERROR, None)
    else:
        os.environ[FULL_ERROR] = value


def checked_flags(arguments: Sequence[str]) -> list[str]:
    """Returns Hydra's flags with their values, without the overrides.

    Raises:
        ConfigError: If a flag is not allowed.

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
        if flag == "--resolve" and not {"--cfg", "-c"} & {a.split("=")[0] for a in arguments}:
            raise ConfigError(
                "--resolve has a meaning with --cfg alone; write --cfg job --resolve."
            )
        flags.append(argument)
        takes = flag in ("--cfg", "-c", "--package", "-p", "--info") and "=" not in argument
        if takes and rest and "=" not in rest[0]:
            flags.append(rest.pop(0))
    return flags


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
        if not isinstance(error, MedfedError):
            what = f"unexpected {type(error).__name__}: {first_line(error)}"
            print(f"error: {visible(what)}; {_logged(error, folder)}", file=sys.stderr)
        elif is_first_process() or not isinstance(
            error, NonFiniteError | CodecError | CheckpointError
        ):
            print(f"error: {visible(str(error))}", file=sys.stderr)
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


class Watch(Callback):
    """Refuses a run folder that is not empty, and keeps the files that were there before.

    Hydra only makes the run folder and writes the record of a sweep. The run writes everything else
    after it has claimed the folder.
    """

    seen: ClassVar[Before | None] = None

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Checks the folder of a single run."""
        with _answered(), _resolving(config):
            folder = Path(str(OmegaConf.select(config, "hydra.run.dir")))
            if config.resume is None and is_first_process():
                refuse_full(folder)
            Watch.seen = Before.of(folder)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Checks the folder of a sweep, which an earlier sweep may have left."""
        with _answered(), _resolving(config):
            folder = Path(str(OmegaConf.select(config, "hydra.sweep.dir")))
            refuse_full(folder, known_by=SWEEP)
            Watch.seen = Before.of(folder)


@contextmanager
def _answered() -> Iterator[None]:
    """Stops the program at a mistake of which Hydra would only warn."""
    try:
        with as_the_user_asked(), one_sentence():
            yield
    except MedfedError:  # HYDRA_FULL_ERROR=1
        traceback.print_exc()
        sys.exit(1)


@contextmanager
def _resolving(config: DictConfig) -> Iterator[None]:
    """Gives ``${hydra:…}`` its values before Hydra runs."""
    hydra = HydraConfig.instance()
    before = hydra.cfg
    hydra.set_config(config)
    try:
        yield
    finally:
        hydra.cfg = before
