"""The start of every command: help, one check of the line and of the folders, then Hydra."""

from __future__ import annotations

import gc
import importlib
import inspect
import os
import shlex
import sys
import tempfile
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from medfed.commands.help import print_help
from medfed.commands.sentences import FULL_ERROR, one_sentence, sentence_of
from medfed.common import console, processes
from medfed.config.compose import as_typed, compose_all, source_of
from medfed.config.description import checked, describe
from medfed.config.sections import select
from medfed.config.spelling import WORKERS, literal, to_hydra_overrides, with_plugins, workers_of
from medfed.config.sweeps import RECORD, Job, Sweep
from medfed.records.places import check_made, refuse_full
from medfed.standalone import errors

Run = Callable[..., Any]
# The flags of Hydra that are allowed; the others could load code, pickles or configurations from
# anywhere.
FLAGS = ("-m", "--multirun", "--cfg", "-c", "--resolve")


def _is_folder(argument: str) -> bool:
    """Whether an argument has no key; folders may have = in their names, and keys no slash."""
    key, assigns, _ = argument.partition("=")
    removes = argument.startswith("~") and not argument.startswith("~/")
    return not (assigns or removes) or ("/" in key and os.path.exists(argument))


_COMMANDS: dict[str, Command] = {}


@dataclass
class Command:
    """A command that Hydra starts; as a decorator it makes one of a function."""

    name: str
    # Further checks of the configurations; its second argument says whether they are a sweep.
    check: Callable[[Sequence[Any], bool], None] | None = None
    runs: bool = False  # whether its function gets a RunDescription, otherwise the keys
    folders: str = ""  # the key of arguments without a key, which are folders; empty: none
    trains: bool = False  # whether it makes the folder of a run, which must be new or empty

    def __call__(self, run: Run) -> Callable[..., None]:
        """Returns the function of a command line."""
        self.run = run
        _COMMANDS[self.name] = self

        @wraps(run)
        def main(arguments: Sequence[str] | None = None) -> None:
            processes.end_with_parent()
            with processes.ended_by_signals():
                _start(self, arguments)

        return main

    def with_keys(self, arguments: Sequence[str]) -> list[str]:
        """Returns a command line in which folders have the key that they belong to."""
        plain = [a for a in arguments if self.folders and _is_folder(a)]
        if not plain:
            return list(arguments)
        listed = ",".join(map(literal, plain))
        value = listed if len(plain) == 1 else f"[{listed}]"
        return [*(a for a in arguments if a not in plain), f"{self.folders}={value}"]

    def read(self, source: dict[str, Any], overrides: Sequence[str]) -> Any:
        """Checks a configuration; returns it as the command's function takes it."""
        read = describe if self.runs else checked
        config: Any = read(source, tuple(overrides))
        check_made(config.values if self.runs else config)
        return config

    def folder(self, config: Any) -> Path | None:
        """Returns the run folder that a configuration names."""
        folder = config.folder if self.runs else config.get("run")
        return None if folder is None else Path(str(folder))


def _run_of_sweep(name: str, marked: bool, config: DictConfig) -> str:
    """Runs a command for one combination of a sweep, also in another process.

    Returns what went wrong, in one sentence, or nothing; this is printed, too. `marked`: whether
    its lines need its number, as other runs print theirs meanwhile.
    """
    importlib.import_module(f"medfed.commands.{name}")
    command, hydra, folder = _COMMANDS[name], HydraConfig.get(), None
    gc.collect()  # objects that refer to each other hold the data of the last one
    with console.without_remarks(), console.as_run(f"[{hydra.job.num}] " * marked):
        try:
            source = source_of(config)
            with_plugins([f"plugins={literal(name)}" for name in source.get("plugins") or ()])
            if marked and select(source, "trainer.accelerator") != "cpu":
                processes.take_gpu()
            checked_config = command.read(source, as_typed(hydra.overrides.task))
            folder = command.folder(checked_config)
            command.run(checked_config)
        except Exception as error:
            if os.environ.get(FULL_ERROR) == "1":
                traceback.print_exc()
            sentence = sentence_of(error, folder)
            print(f"error: {sentence}", file=sys.stderr)
            return sentence
    return ""


def _sweep(command: Command, overrides: Sequence[str], workers: int) -> None:
    """Runs all combinations; the failure of one ends no other."""
    failed: list[tuple[Job, str]] = []
    done, run = 0, partial(_run_of_sweep, command.name, workers > 0)
    with ExitStack() as stack:
        sweep = stack.enter_context(Sweep(overrides, command.name, workers))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="medfed-said-"))
        os.environ[console.PRINTED] = folder
        stack.callback(os.environ.pop, console.PRINTED)
        if command.trains:
            refuse_full(sweep.folder, known_by=RECORD)
        if workers:
            print(f"{len(sweep.jobs)} runs by {WORKERS}={workers}, in {sweep.folder}", flush=True)
        try:
            for job, why in sweep.outcomes(run):
                done += 1
                if why:
                    failed.append((job, why))
                if command.trains:
                    sweep.record()
        except KeyboardInterrupt as error:
            how = f"{done - len(failed)} of the {len(sweep.jobs)} runs of the sweep are finished"
            where = f", in {sweep.folder}" if command.trains else ""
            error.args = ("; ".join(filter(None, (how + where, str(error)))),)
            raise
    finished = len(sweep.jobs) - len(failed)
    for job, why in failed:
        which = f"Run {job.number} of the sweep ({' '.join(job.values)})"
        print(f"error: {console.visible(which)} failed: {why}", file=sys.stderr)
    if command.trains:
        line = shlex.join(["medfed", "report", f"runs={sweep.folder}"])
        after = f"; compare them: {line}" if finished else ""
        print("Sentences that several runs say are printed once, with the numbers of the first.")
        print(f"{finished} of {len(sweep.jobs)} runs are finished{after}")
    if failed:
        sys.exit(1)


def _start(command: Command, arguments: Sequence[str] | None) -> None:
    # Lightning starts the other ranks with the command's file and the same arguments.
    file = inspect.getfile(command.run)
    sys.argv = [file, *(sys.argv[1:] if arguments is None else arguments)]
    if {"-h", "--help"} & set(sys.argv):
        print_help(command.name, inspect.getmodule(inspect.unwrap(command.run)).__doc__ or "")
        return
    with one_sentence(), processes.loading():
        flags = parsed(sys.argv[1:])
        workers, words = workers_of(flags.overrides)
        sweeps = flags.multirun or "hydra.mode=MULTIRUN" in words
        if workers and not sweeps:
            named = f"{WORKERS}={workers}"
            raise errors.ConfigError(f"{named} is for a sweep; add -m, or leave {named} out.")
        overrides = to_hydra_overrides(command.with_keys(words), sweeps)
        sys.argv[1:] = ["-m"] * flags.multirun + overrides
        compositions = compose_all(overrides, command.name)
        if (several := compositions[0].sweep) and not sweeps:
            raise errors.ConfigError(
                f"{several} is a sweep; add -m for a run of each, or write one value."
            )
        if flags.cfg is not None:  # also where values are missing
            print(compositions[0].yaml(flags.cfg, flags.resolve), end="")
            return
        described = [command.read(each.source(), each.overrides) for each in compositions]
        if command.check is not None:
            command.check(described, sweeps)
    with console.without_remarks(), one_sentence():
        if sweeps:
            _sweep(command, overrides, workers)
            return
        (config,) = described
        if command.trains and config.resume is None and processes.is_first_process():
            refuse_full(Path(config.folder))
        with one_sentence(command.folder(config)):
            compositions[0].run(lambda _: command.run(config))


def parsed(arguments: Sequence[str]) -> Namespace:
    """Divides a command line into Hydra's flags and the overrides."""
    signs = [argument.split("=")[0] for argument in arguments if argument.startswith("-")]
    if flag := next((sign for sign in signs if sign not in FLAGS), None):
        raise errors.ConfigError(
            f"Unknown flag {flag}{errors.did_you_mean(flag, FLAGS)}; the flags are "
            f"{', '.join(FLAGS)}, and everything else is key=value."
        )
    flags: Namespace = get_args_parser().parse_intermixed_args(list(arguments))
    if flags.resolve and flags.cfg is None:
        raise errors.ConfigError(
            "--resolve has a meaning with --cfg alone; write --cfg job --resolve."
        )
    return flags
