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
import tempfile
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

SMALL = ("experiment=clinical_pfednet", "progress=false", "logger=none", "pictures.format=none")
VALUES = (
    *("null", "", "''", "true", "maybe", "0", "-1", "3", "1.5", "-0.5", "1e9", "1e400", "nan"),
    *("inf", "-inf", "10000000000000000000000", "0x10", "1_0", "../../x", "/dev/zero"),
    "/dev/null/such",  # nobody can make this folder, not even root
    *("[]", "[null]", "[1,2]", "[a,b]", "[[1],[2]]", "{}", "{a: 1}", "{a: {b: null}}", "{1: 2}"),
    *("word", "Größe", "数", "'two words'", "a.b.c", "os.system", "~", "~/x", "*", "${seed}"),
    *("${nothing}", "${oc.env:HOME}", "???", "range(3)", "1,2", "choice(1,2)", "glob(*)", "x=y"),
    *("\\", '"', "'", "[", "{", "x" * 3000, "'%s'", "'{0}'", "'[bold]'"),
)
FORMS = ("{key}={value}",) * 12 + ("+{key}={value}", "++{key}={value}", "~{key}", "~{key}={value}")
COMMANDS = (
    *("evaluate", "export", "predict", "report", "compare", "prepare", "methods", "doctor"),
    *("benchmark", "advise", "site", "deploy", "help", "train"),
)
OTHERS = (
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
    """Draws command lines; most are runs in which one or two keys have odd values."""
    chance = random.Random(seed)
    keys = [key for key in keys_of(written(load(SMALL))) if not key.startswith("hydra")]
    made = []
    for _ in range(count):
        train = chance.random() < 0.8
        names = keys if train else OTHERS
        overrides = [
            chance.choice(FORMS).format(key=chance.choice(names), value=chance.choice(VALUES))
            for _ in range(chance.choice((1, 1, 1, 2)))
        ]
        command = ["train", *SMALL] if train else [chance.choice(COMMANDS)]
        made.append([*command, *overrides])
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
    """Runs lines in a folder, without training, and with 16 GB of address space."""

    def stop(*_: object, **__: object) -> None:
        raise FirstGradientError

    here, limits = Path.cwd(), resource.getrlimit(resource.RLIMIT_AS)
    os.chdir(folder)
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
    ends, wrong = bad_lines(lines(options.count, options.seed))
    for line, end in wrong.items():
        print(f"{line}\n    {end}")
    print(", ".join(f"{count} {end}" for end, count in sorted(ends.items())))
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    run()
