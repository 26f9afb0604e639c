"""What is left of a command that is killed (SIGKILL) at a random moment and then run again.

Every kind of command is first run undisturbed. Then it is started again and again from nothing,
killed at a random moment between the first file that it writes and its end as the undisturbed one
took it, and run again: training by ``resume=FOLDER`` (or as at first, where the kill came before
there was anything to resume), everything else as it was. What lies there in the end must be what
the undisturbed one left, byte for byte:

- *train*: state hashes, metrics, ledger, summary, models, predictions, pictures, splits; the names
  of the checkpoints. On several ranks every second kill hits the first rank alone, which the others
  must not outlive by more than five seconds.
- *prepare*: the arrays and manifest of the cache; by one and by two workers in turn.
- *export*: the bundles and the picture.
- *compare*: tables, report and pictures.
- *benchmark*: the report, and the cells but for the CPU seconds that they took.

Anything beyond that is counted as left over: partial and hidden files, files in the folder for
temporary files, processes. Not compared are the contents of checkpoints, which count the batches of
their own process, and what tells of the processes themselves: ``log``, ``.hydra``, ``*.log``,
``lock`` and ``lock.pid``.

A command that ends before its kill is started anew. ``--kills`` is the number of each kind.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import medfed.run.train  # noqa: F401  # forks have it

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from tests.processes import Started  # noqa: E402

PROCESS_FILES = ("log", "lock", "lock.pid", ".lock", ".lock.pid")
WAIT = 5.0  # seconds in which the other ranks must have ended
CLINICAL = ("train", "experiment=clinical_pfednet", "rounds=4", "progress=false")
DIGITS = ("rounds=3", "local.steps=2", "progress=false")
LOSSY = (
    *("algorithm=fedavg", "codec.up=stc", "codec.down=qsgd", "local.optimizer_state=kept"),
    *("optimizer.momentum=0.9", "cohort.fraction=0.6"),
)

SUITE = """
title: Four hospitals of breast-cancer patients
experiment: clinical_pfednet
overrides: ["model.selection=[auroc,max]", partition.num_clients=4]
lr: [0.01, 1.0]
splits: folds
dial: δ
variants:
  one: {dial: 1, overrides: [partition.delta=1]}
  four: {dial: 4, overrides: [partition.delta=4]}
sizes:
  smoke: {splits: 1, trials: 2, overrides: [rounds=1, local.steps=2]}
  small: {splits: 3, trials: 3, overrides: [rounds=3, local.steps=5]}
  full: {splits: 3, trials: 3, overrides: [rounds=3, local.steps=5]}
"""


@dataclass(frozen=True)
class Kind:
    """A command that is killed."""

    command: tuple[str, ...]
    folder: str = "hydra.run.dir"
    ranks: bool = False
    reads: tuple[tuple[str, ...], ...] = ()


KINDS = {
    "train": Kind(CLINICAL),
    "train, 2 ranks": Kind((*CLINICAL, "trainer.devices=2"), ranks=True),
    "train, lossy": Kind((*CLINICAL, *LOSSY)),
    "train, lossy, 2 ranks": Kind((*CLINICAL, *LOSSY, "trainer.devices=2"), ranks=True),
    "train, PPFL": Kind(("train", "experiment=digits_ppfl", *DIGITS, "partition.num_clients=8")),
    "train, QuPeL": Kind(("train", "experiment=qupel_digits", *DIGITS, "partition.num_clients=6")),
    "prepare": Kind(
        (
            *("prepare", "data=luna16", "data.root={shared}", "data.generated.hospitals=3"),
            *("data.generated.patients=8", "data.generated.shape=[96,96,48]", "workers={workers}"),
        ),
        "data.cache",
    ),
    "export": Kind(
        ("export", "run={shared}/run0", "bits=2", "finetune_steps=5"), "out", reads=(CLINICAL,)
    ),
    "report": Kind(
        ("report", "runs=[{shared}/run0,{shared}/run1]"),
        "out",
        reads=(CLINICAL, (*CLINICAL, "algorithm=fedavg")),
    ),
    "benchmark": Kind(
        (
            *("benchmark", "suite=four", "plugins={shared}", "methods=[ditto,fedprox]"),
            *("variants=all", "size=small", "workers={workers}"),
        ),
        "out",
    ),
}
SEVERAL = ("prepare", "benchmark")  # kinds of one and of two workers


@dataclass
class Place:
    """Where a kind works: the folder that it writes, what it reads, and its temporary files."""

    kind: Kind
    root: Path

    @property
    def out(self) -> Path:
        """What it writes."""
        return self.root / "out"

    @property
    def temporary(self) -> Path:
        """Its folder for temporary files."""
        return self.root / "temporary"

    def clear(self) -> None:
        """Takes away what a command has written."""
        for folder in (self.out, self.temporary):
            shutil.rmtree(folder, ignore_errors=True)
        self.temporary.mkdir()

    def start(self, command: tuple[str, ...], folder: str, workers: int = 1) -> Started:
        """Starts a command in a process group of its own."""
        name, *words = (w.format(shared=self.root / "shared", workers=workers) for w in command)
        return Started(
            ROOT / "scripts" / f"{name}.py",
            *(*words, folder),
            cwd=self.root,
            together=True,
            env={"TMPDIR": str(self.temporary)},
            context=multiprocessing.get_context("fork"),
        )

    def begin(self, workers: int = 1) -> Started:
        """Starts the command from nothing; returns when it has written a file."""
        process = self.start(self.kind.command, f"{self.kind.folder}={self.out}", workers)
        while process.poll() is None and not any(self.written()):
            time.sleep(0.002)
        return process

    def written(self) -> Iterator[Path]:
        """The files in its folder that are not of the process."""
        for path in self.out.rglob("*"):
            own = set(path.relative_to(self.out).parts) & set(PROCESS_FILES)
            if path.is_file() and not own and path.suffix != ".log":
                yield path

    def left(self) -> dict[str, str]:
        """What it has written and left in the folder for temporary files: names and hashes."""
        found = {
            str(path.relative_to(self.root)): hashlib.sha256(lasting(path)).hexdigest()
            for path in self.written()
        }
        if self.kind.command[0] != "benchmark":  # the next one removes what is a minute old
            found |= {str(p.relative_to(self.root)): "" for p in self.temporary.rglob("*")}
        return {n: "" if "/checkpoints/" in n else sha for n, sha in found.items()}


def lasting(path: Path) -> bytes:
    """Returns what a file holds; of a benchmark's cell what does not depend on the clock."""
    if "cells" not in path.parts or path.suffix != ".json":
        return path.read_bytes()
    content = json.loads(path.read_text("utf-8"))
    content.pop("sha256")  # of the result with its seconds
    content["result"].pop("cpu_seconds")
    return json.dumps(content, sort_keys=True).encode()


def finish(process: Started) -> None:
    """Waits for a command that must succeed."""
    text, _ = process.communicate(timeout=600)
    if process.returncode:
        raise RuntimeError(f"{' '.join(map(str, process.args))} failed:\n{text}")


def running(group: int) -> list[int]:
    """The processes of a group that have not ended."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] not in "ZX":
            found.append(int(status.parent.name))
    return found


def outlived(group: int) -> int:
    """Waits until a group has ended; counts, and ends, those that have not within the time."""
    deadline = time.monotonic() + WAIT
    while running(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = running(group)
    if left:
        os.killpg(group, signal.SIGKILL)
    return len(left)


def again(place: Place, workers: int) -> None:
    """Runs a killed command again."""
    kind, folder = place.kind, f"{place.kind.folder}={place.out}"
    opened = (place.out / "config.yaml").is_file()  # else there is nothing to go on from
    if kind.command[0] == "train" and opened:
        folder = f"resume={place.out}"
    finish(place.start(kind.command, folder, workers))


def measure(name: str, root: Path, kills: int, seed: int) -> tuple[int, int, int]:
    """Kills a kind of command; returns how many came to an equal end, and what was left over."""
    place, draw = Place(KINDS[name], root), random.Random(f"{seed}/{name}")
    (root / "shared" / "suites").mkdir(parents=True)
    (root / "shared" / "suites" / "four.yaml").write_text(SUITE, "utf-8")
    place.clear()
    for number, command in enumerate(place.kind.reads):
        finish(place.start(command, f"hydra.run.dir={root / 'shared' / f'run{number}'}"))
    expected, spans = {}, []
    for workers in (1, 2) if name in SEVERAL else (1,):
        place.clear()
        process = place.begin(workers)
        began = time.monotonic()
        finish(process)
        spans.append(time.monotonic() - began)
        expected = place.left()
    equal = left_over = done = 0
    while done < kills:
        place.clear()
        workers = 1 + done % len(spans)
        process = place.begin(workers)
        time.sleep(draw.uniform(0, spans[workers - 1]))
        if process.poll() is not None:
            continue
        if place.kind.ranks and done % 2:
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        extra = outlived(process.pid)
        again(place, workers)
        found = place.left()
        more = sorted(found.keys() - expected.keys())
        differ = sorted(n for n, sha in expected.items() if found.get(n) != sha)
        for what, names in (("left over", more), ("differs or is missing", differ)):
            if names:
                print(f"{name}, kill {done + 1}: {what}: {', '.join(names)}", file=sys.stderr)
        equal += not differ
        left_over += len(more) + extra
        done += 1
    return done, equal, left_over


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=2, help="of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    args = parser.parse_args()
    print(f"{'':24}{'kills':>6}{'equal':>7}{'left over':>11}")
    totals = [0, 0, 0]
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(args.kinds):
            counts = measure(name, Path(folder) / str(number), args.kills, args.seed)
            totals = [a + b for a, b in zip(totals, counts, strict=True)]
            print(f"{name:24}{counts[0]:6}{counts[1]:7}{counts[2]:11}", flush=True)
    print(f"{'all':24}{totals[0]:6}{totals[1]:7}{totals[2]:11}")
    if totals[1] < totals[0] or totals[2]:
        sys.exit(1)


if __name__ == "__main__":
    main()
