"""The way into every command: help, one check of the command line, then Hydra.

Looks at where Hydra will make folders, before it makes any.
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
from medfed.common.files import SWEEP, Before, refuse_full
from medfed.common.processes import end_with_parent, ended_by_signals, is_first_process
from medfed.config.compose import CONFIG_DIR, Composition, composed, source_of
from medfed.config.description import checked, describe
from medfed.config.spelling import spelled

Main = Callable[..., None]
Run = Callable[[Any], Any]
Check = Callable[[Sequence[Any], bool], None]
Task = Callable[[DictConfig], Any]
# Hydra's own that are of use here; the others would load code, pickles or configurations from
# anywhere.
FULL_ERROR = "HYDRA_FULL_ERROR"
_users: str | None = None  # what the user has set it to
FLAGS = ("-m", "--multirun", "--cfg", "--resolve", "--package", "-p", "-c", "--info")


def command(name: str, check: Check | None = None, runs: bool = False) -> Callable[[Run], Main]:
    """Makes a command of a function that takes what the command line asks for.

    Args:
        name: The command, and its primary config.
        check: What else can be wrong with what was composed; also told whether it is a sweep.
        runs: Whether the configuration describes a run, which the function then gets as a
            :class:`~medfed.config.description.RunDescription`; else it gets the keys.

    Returns:
        A decorator; what it returns takes the command line without the program, by default this
        process's, checks it, and hands over to Hydra.
    """

    def decorate(run: Run) -> Main:
        @functools.wraps(run)
        def main(arguments: Sequence[str] | None = None) -> None:
            end_with_parent()
            with ended_by_signals():
                _start(_Command(name, run, check, runs), arguments)

        return main

    return decorate


@dataclass(frozen=True)
class _Command:
    name: str
    run: Run
    check: Check | None
    describes: bool

    def read(self, source: dict[str, Any], overrides: Sequence[str]) -> Any:
        """Checks a configuration."""
        return describe(source, tuple(overrides)) if self.describes else checked(source)

    def answer(self, asked: Any) -> Any:
        """Carries it out; within Hydra, whose log is still open then."""
        folder = asked.folder if self.describes else asked.get("run")
        with one_sentence(None if folder is None else Path(str(folder))):
            return self.run(asked)


def _start(command: _Command, arguments: Sequence[str] | None) -> None:
    # Ranks start anew with the file of the command and the same arguments.
    file = inspect.getfile(command.run)
    sys.argv = [file, *(sys.argv[1:] if arguments is None else arguments)]
    if {"-h", "--help"} & set(sys.argv):
        print_help(command.name, inspect.getmodule(inspect.unwrap(command.run)).__doc__ or "")
        return
    task: Task = lambda config: command.answer(  # noqa: E731
        command.read(source_of(config), HydraConfig.get().overrides.task)
    )
    single: Composition | None = None
    with one_sentence(), loading():
        flags = checked_flags(sys.argv[1:])
        overrides = spelled([a for a in sys.argv[1:] if a not in flags])
        sys.argv[1:] = [*flags, *overrides]
        compositions = composed(overrides, command.name)
        if not {"--cfg", "-c", "--info"} & set(flags):  # what is unfinished may be shown
            described = [command.read(each.source(), each.overrides) for each in compositions]
            if command.check is not None:
                command.check(described, bool({"-m", "--multirun"} & set(flags)))
        if not flags and not compositions[0].sweeps:
            (single,), (asked,) = compositions, described
            task = lambda _: command.answer(asked)  # noqa: E731
    with without_remarks(), one_sentence(), hydra_raising(task) as raising:
        if single is not None:
            single.run(raising)
        else:
            folder = str(CONFIG_DIR)
            hydra.main(version_base="1.3", config_path=folder, config_name=command.name)(raising)()


@contextmanager
def hydra_raising(run: Task) -> Iterator[Task]:
    """Has Hydra raise its own errors, such as a folder that cannot be made, instead of printing.

    It does so under the variable with which users ask for tracebacks; the run itself, and the ranks
    that it starts, see the user's.

    Args:
        run: What Hydra will call.

    Yields:
        The same for Hydra.
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
            f"Cannot write {error.filename or 'the folder of the run'} "
            f"({error.strerror or error}); choose another folder by hydra.run.dir=FOLDER."
        ) from error
    finally:
        _put(_users)


@contextmanager
def as_the_user_asked() -> Iterator[None]:
    """Shows tracebacks, within Hydra, only if the user has asked for them."""
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
def one_sentence(folder: Path | None = None) -> Iterator[None]:
    """Prints an error as one sentence on stderr and exits with status 1.

    ``HYDRA_FULL_ERROR=1`` shows the traceback instead. Of the errors that stop all ranks alike, the
    first rank speaks for all. The traceback of an error that is no user's goes to a file.

    Args:
        folder: The run folder, if there will be one.
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
    """Writes the traceback, in the folder of a run that has begun if possible, and says where."""
    text = "".join(traceback.format_exception(error))
    places = [tempfile.gettempdir()]
    if folder is not None and (folder / "config.yaml").is_file():
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
    """Refuses a folder that is not empty, and keeps what was there before.

    Hydra itself only makes the run folder and writes the record of a sweep; whatever else a run
    folder holds is written once the run has claimed it.
    """

    seen: ClassVar[Before | None] = None

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Looks at the folder of a single run."""
        with _answered(), _resolving(config):
            folder = Path(str(OmegaConf.select(config, "hydra.run.dir")))
            if config.resume is None and is_first_process():
                refuse_full(folder)
            Watch.seen = Before.of(folder)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Looks at the folder of a sweep, which an earlier sweep may have left."""
        with _answered(), _resolving(config):
            folder = Path(str(OmegaConf.select(config, "hydra.sweep.dir")))
            refuse_full(folder, known_by=SWEEP)
            Watch.seen = Before.of(folder)


@contextmanager
def _answered() -> Iterator[None]:
    """Ends the program at a mistake, which Hydra would only warn of."""
    try:
        with as_the_user_asked(), one_sentence():
            yield
    except MedfedError:  # HYDRA_FULL_ERROR=1
        traceback.print_exc()
        sys.exit(1)


@contextmanager
def _resolving(config: DictConfig) -> Iterator[None]:
    """Lets ``${hydra:…}`` find its values already now."""
    hydra = HydraConfig.instance()
    before = hydra.cfg
    hydra.set_config(config)
    try:
        yield
    finally:
        hydra.cfg = before
