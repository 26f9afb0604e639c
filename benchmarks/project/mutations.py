"""One-line mutations: does a test fail when a line of a method is wrong?

    python benchmarks/project/mutations.py                       # every family
    python benchmarks/project/mutations.py one_model --only 3    # the third mutation of one of them

A family is a file in ``mutations``: its tests, and a row ``[file, was, now]`` for each mutation,
where ``was`` occurs once in the file. Each is applied alone, to a copy of the tree in a
temporary folder, and the family's tests run there until one fails. A mutation that survives, or
that fits no line any more, makes the exit status 1.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before PyTorch starts its threads, which no fork has

import pytest
import torchmetrics  # noqa: F401  for the forks
import yaml  # type: ignore[import-untyped]

sys.dont_write_bytecode = True  # nothing stale of another mutation

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = Path(__file__).parent / "mutations"
COPIED = ("medfed", "configs", "tests", "pyproject.toml")


def main() -> int:
    names = sorted(p.stem for p in FAMILIES.glob("*.yaml"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("families", nargs="*", help=f"of {', '.join(names)}; all by default")
    parser.add_argument("--only", type=int, help="the number of one mutation, from 1; 0: none")
    options = parser.parse_args()
    survived = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(
                    ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__")
                )
            else:
                shutil.copy(ROOT / name, tree)
        for family in options.families or names:
            survived += run_family(tree, family, options.only)
    return int(survived > 0)


def run_family(tree: Path, family: str, only: int | None) -> int:
    """Applies a family's mutations one after the other and returns how many survive."""
    listed: dict[str, Any] = yaml.safe_load((FAMILIES / f"{family}.yaml").read_text("utf-8"))
    failure = failing_test(tree, listed["tests"])
    if failure:
        print(f"{family}: the tests fail without any mutation: {failure}")
        return 1
    killed, survived = 0, 0
    for number, (file, was, now) in enumerate(listed["mutations"], start=1):
        if only not in (None, number):
            continue
        path = tree / file
        text = path.read_text("utf-8")
        if text.count(was) != 1:
            print(f"{family} {number:2}: {was!r} occurs {text.count(was)} times in {file}")
            survived += 1
            continue
        path.write_text(text.replace(was, now), "utf-8")
        failure = failing_test(tree, listed["tests"])
        path.write_text(text, "utf-8")
        verdict = f"killed by {failure}" if failure else "SURVIVED"
        print(f"{family} {number:2}: {verdict}: {was.strip()} -> {now.strip()}", flush=True)
        killed, survived = killed + bool(failure), survived + (not failure)
    print(f"{family}: {killed} killed, {survived} survived", flush=True)
    return survived


def failing_test(tree: Path, tests: list[str]) -> str:
    """Returns the first test that fails in a tree; empty where all pass.

    In a fork of this process, which has imported the libraries, but nothing of the package.
    """
    reader, writer = os.pipe()
    if child := os.fork():
        os.close(writer)
        with os.fdopen(reader) as pipe:
            code, _, test = pipe.read().partition(" ")
        os.waitpid(child, 0)
        if code not in ("0", "1", "2"):
            raise SystemExit(f"pytest ended with {code or 'a crash'} in {tree}")
        return "" if code == "0" else test.rsplit("/", 1)[-1] or "collection"
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    first = FirstFailure()
    ended = int(pytest.main(["-x", "-q", "-n0", "-p", "no:cacheprovider", *tests], [first]))
    os.write(writer, f"{ended} {first.test}".encode())
    os._exit(0)


class FirstFailure:
    """Remembers which test failed first."""

    test = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Is called by pytest after each phase of a test."""
        if report.failed:
            self.test = self.test or report.nodeid


if __name__ == "__main__":
    sys.exit(main())
