"""Hostile command lines: each is answered by one sentence, or the run comes to its first gradient.

    python benchmarks/trust/hostile_lines.py                      # 500 lines
    python benchmarks/trust/hostile_lines.py --count 50 --seed 3  # others

Lines are drawn from keys and values by a seed and run in this process; nothing is trained. A line
fails if it ends in an unexpected error, a traceback, or not at all.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import resource
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from medfed.commands.main import main
from medfed.config.compose import load
from medfed.config.description import written
from medfed.config.spelling import is_path_key

SMALL = ("experiment=clinical_pfednet", "progress=false", "logger=none", "pictures.format=none")
VALUES = (
    *("null", "", "''", "true", "maybe", "0", "-1", "3", "1.5", "-0.5", "1e9", "1e400", "nan"),
    *("inf", "-inf", "10000000000000000000000", "0x10", "1_0", "../../x", "/dev/zero"),
    "/dev/null/such",  # nobody can make this folder, not even root
    *("[]", "[null]", "[1,2]", "[a,b]", "[[1],[2]]", "{}", "{a: 1}", "{a: {b: null}}", "{1: 2}"),
    *("word", "Größe", "数", "'two words'", "a.b.c", "os.system", "~", "~/x", "*", "${seed}"),
    *("${nothing}", "${oc.env:HOME}", "???", "range(3)", "1,2", "choice(1,2)", "glob(*)", "x=y"),
    *("\\", '"', "'", "[", "{", "x" * 3000, "'%s'", "'{0}'", "'[bold]'"),
    *("1e308", "-1e308", "1e39", "[" * 500 + "]" * 500, "{a: " * 200 + "1" + "}" * 200),
    *("[/nope]", "\x1b[31m", "a\nb", "\u202eb", "＝1", "a;=1", "\udcff", "{_target_: os.system}"),
    *("{_target_: torch.nn.Linear, in_features: 1, out_features: 1}", "${hydra:run.dir}"),
)
PATHS = (
    *("/dev/zero", "/dev/full", "/dev/stdin", "pipe", "socket", "circle", "circle/x", "file"),
    *("file/x", "folder", "x" * 300, "d/" * 300, "/proc/self", "/proc/self/mem", "/proc/x", ""),
    *("../" * 50 + "x", "\udcff", "[pipe,circle]", "a b", "~nobody/x", "."),
)
FORMS = ("{key}={value}",) * 12 + ("+{key}={value}", "++{key}={value}", "~{key}", "~{key}={value}")
COMMANDS = (
    *("evaluate", "export", "predict", "report", "prepare", "methods", "doctor"),
    *("benchmark", "advise", "site", "deploy", "help", "train"),
)
HYDRA = (
    *("run.dir", "sweep.dir", "sweep.subdir", "sweeper.params", "job.name", "job.chdir", "mode"),
    *(
        "output_subdir",
        "verbose",
        "launcher",
        "sweeper",
        "job_logging",
        "runtime.cwd",
        "hydra_logging",
    ),
)
OTHERS = (
    *("of", "resume", "init.weights", "kit", "provision", "dry_run", "patients", "plugins", "runs"),
    *("run", "runs", "client", "k", "onboard", "bundle", "input", "output", "out", "suite", "size"),
    *("shard", "methods", "folds", "split", "folder", "data", "data.path", "workers", "format"),
)


class FirstGradientError(BaseException):
    """The line was accepted: the run has come to its first gradient."""


def keys_of(node: Mapping[str, Any], place: str = "") -> Iterator[str]:
    """Lists all keys of a configuration, sections included.

    Example:
        >>> list(keys_of({"a": {"b": 1}}))
        ['a', 'a.b']
    """
    for key, value in node.items():
        yield f"{place}{key}"
        if isinstance(value, Mapping):
            yield from keys_of(value, f"{place}{key}.")


def lines(count: int, seed: int = 0) -> list[list[str]]:
    """Draws command lines; most are runs in which one or two keys have odd values.

    Of ten lines one names paths of all kinds, and one sets keys of Hydra.
    """
    chance = random.Random(seed)
    keys = [key for key in keys_of(written(load(SMALL))) if not key.startswith("hydra")]
    paths = [key for key in (*keys, *OTHERS) if is_path_key(key)]
    made = []
    for _ in range(count):
        kind = chance.random()
        if kind < 0.2:
            sets = [f"{chance.choice(paths)}={chance.choice(PATHS)}"]
            if kind < 0.1:
                sets = [f"hydra.{chance.choice(HYDRA)}={chance.choice((*VALUES, *PATHS))}"]
            command = chance.choice(("train", "train", *COMMANDS))
            made.append([command, *SMALL * (command == "train"), *sets])
            continue
        train = chance.random() < 0.8
        names = keys if train else OTHERS
        overrides = [
            chance.choice(FORMS).format(key=chance.choice(names), value=chance.choice(VALUES))
            for _ in range(chance.choice((1, 1, 1, 2)))
        ]
        line = ["train", *SMALL] if train else [chance.choice(COMMANDS)]
        made.append([*line, *overrides])
    return made


def outcome(line: list[str], seconds: int) -> tuple[str, str]:
    """Runs a line in this process; returns how it ended, and what it said or what went wrong.

    It ends with a ``sentence``, at its first ``gradient``, ``done``, or ``wrong``.
    """

    def too_long(*_: object) -> None:
        raise TimeoutError(f"no answer within {seconds} s")

    error = io.StringIO()
    if seconds:
        signal.signal(signal.SIGALRM, too_long)
        signal.alarm(seconds)
    try:
        with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
            main(line)
    except FirstGradientError:
        return "gradient", ""
    except SystemExit as ended:
        text = error.getvalue()
        if not ended.code:
            return "done", text
        plain = "please report" not in text and "Traceback" not in text and text.count("\n") == 1
        return "sentence" if plain and text.startswith("error: ") else "wrong", text
    except BaseException as unexpected:
        return "wrong", f"{type(unexpected).__name__}: {unexpected}"
    finally:
        if seconds:
            signal.alarm(0)
    return "done", error.getvalue()


@contextlib.contextmanager
def stage(folder: Path) -> Iterator[None]:
    """Runs lines in a folder, without training, and with 16 GB of address space.

    The folder gets a file, a folder, a pipe, a socket and links in a circle.
    """

    def stop(*_: object, **__: object) -> None:
        raise FirstGradientError

    here, limits = Path.cwd(), resource.getrlimit(resource.RLIMIT_AS)
    os.chdir(folder)
    if not Path("circle").is_symlink():
        os.mkfifo("pipe")
        os.symlink("loop", "circle")
        os.symlink("circle", "loop")
        Path("file").touch()
        Path("folder").mkdir()
        with socket.socket(socket.AF_UNIX) as there:
            there.bind("socket")
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, limits[1]))
    try:
        with mock.patch.object(torch.Tensor, "backward", stop):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        os.chdir(here)


def bad_lines(asked: list[list[str]], seconds: int = 60) -> tuple[Counter[str], dict[str, str]]:
    """Runs lines; returns how they ended, and what went wrong by line."""
    ends, wrong = Counter[str](), {}
    for line in asked:
        with tempfile.TemporaryDirectory() as folder, stage(Path(folder)):
            end, text = outcome(line, seconds)
        ends[end] += 1
        if end == "wrong":
            wrong[" ".join(line)[:300]] = text[:1000]
    return ends, wrong


def run() -> None:
    """Runs all lines and prints those that went wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    import_module("medfed.run.train")  # no line is to wait for libraries
    ends, begun = Counter[str](), time.process_time()
    for line in lines(options.count, options.seed):
        end, wrong = bad_lines([line])
        ends += end
        for text, why in wrong.items():
            print(f"{text!a}\n    {why!a}", flush=True)
    counts = ", ".join(f"{count:,} {end}" for end, count in sorted(ends.items()))
    print(f"{counts}; {time.process_time() - begun:.0f} s of CPU time")
    raise SystemExit(ends["wrong"] > 0)


if __name__ == "__main__":
    run()
