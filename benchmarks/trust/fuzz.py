"""Hostile bytes: what every reader of bytes does with inputs that were mutated or made up.

Valid inputs (messages of every configured codec, links with memory, packets, ledgers, bundles,
images, tables) get bits flipped, ends cut off, pieces repeated, moved or taken from another input,
numbers of any width replaced by extreme ones, numbers in text by nonsense; some inputs are random.
Each is accepted or refused by one of the package's own errors; anything else is a crash, and the
table must say 0. The decoded numbers of what is accepted must be finite.

Every family runs in a process of its own, so that one that dies is counted, too. Time is CPU time
of one input; memory is what the largest resident size of the family's process grew by after it had
read the valid inputs. Input n of a family depends on the seed and n alone.

Run with ``python benchmarks/trust/fuzz.py``; ``--inputs 1000000 --seconds 3600`` is a thorough run,
``--keep FOLDER`` keeps an input for each kind of crash.
"""

from __future__ import annotations

import argparse
import gc
import math
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fuzz_inputs import Family, families  # type: ignore[import-not-found]  # beside this file
from fuzz_mutations import mutated  # type: ignore[import-not-found]

from medfed.standalone.errors import MedfedError

PATIENCE = 60
"""Seconds of wall time after which an input that does not end counts as a crash."""
MEMORY = 6 * 2**30
"""Bytes of address space that a family may take beyond what it starts with."""


@dataclass
class Outcome:
    """What became of a family's inputs."""

    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    not_finite: int = 0
    slowest: float = 0.0
    growth: float = 0.0
    crashes: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Options:
    """Which inputs a family gets, until when, and where those worth keeping go."""

    inputs: int
    seed: int
    end: float
    keep: Path | None

    def input(self, family: Family, number: int, rng: random.Random) -> bytes:
        """Returns an input by its number."""
        rng.seed(f"{self.seed}/{family.name}/{number}")
        data: bytes = mutated(rng, family.seeds, family.keep)
        return data

    def save(self, name: str, data: bytes) -> None:
        """Keeps an input."""
        if self.keep is not None:
            self.keep.mkdir(parents=True, exist_ok=True)
            (self.keep / name).write_bytes(data)


def attack(family: Family, options: Options, counts: Any, sender: Connection) -> None:
    """Hands a family its inputs, one after the other, until they or the seconds are spent.

    ``counts`` is shared memory for the numbers of `Outcome`; ``sender`` takes the kind of each
    crash, and None at the end.
    """
    for valid in family.seeds:
        if not all(map(_finite, family.read(valid))):
            raise AssertionError(f"{family.name}: a valid input is not finite.")
    # MetaImage writes what it thinks of an input on stderr, past Python.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    gc.collect()
    rng, before, known = random.Random(), _peak(), set()
    for number in range(int(counts[0]), options.inputs):
        if number % 64 == 0:
            signal.alarm(PATIENCE)
            if time.monotonic() > options.end:
                break
        data = options.input(family, number, rng)
        counts[0] += 1
        start = time.process_time()
        try:
            read = list(family.read(data))
        except MedfedError:
            counts[2] += 1
        except Exception as error:
            kind = _kind(error)
            if kind not in known:
                options.save(f"{family.name}-{number}", data)
            known.add(kind)
            sender.send(kind)
        else:
            counts[1] += 1
            counts[3] += not all(map(_finite, read))
        spent = time.process_time() - start
        if spent > 1:
            options.save(f"{family.name}-{number}-slow", data)
        counts[4] = max(counts[4], spent)
        counts[5] = max(counts[5], _peak() - before)
    signal.alarm(0)
    sender.send(None)


def _finite(values: Any) -> bool:
    return bool((torch.isfinite if isinstance(values, torch.Tensor) else np.isfinite)(values).all())


def _peak() -> float:
    """The largest resident size of this process so far, in MB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def _kind(error: Exception) -> str:
    """The error's type, and the last line of the package that it came through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "medfed" in f.filename]
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "elsewhere"
    return f"{type(error).__name__} at {place}"


def _child(family: Family, options: Options, counts: Any, sender: Connection) -> None:
    pages = Path("/proc/self/statm").read_text().split()[0]
    limit = int(pages) * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    attack(family, options, counts, sender)


def isolated(family: Family, options: Options) -> Outcome:
    """Attacks in a process of its own; where one dies, another goes on after the last input."""
    context = multiprocessing.get_context("fork")
    counts, crashes = context.RawArray("d", 6), Counter[str]()
    ended = False
    while not ended:
        receiver, sender = context.Pipe(duplex=False)
        began = counts[0]
        process = context.Process(target=_child, args=(family, options, counts, sender))
        process.start()
        sender.close()
        try:
            while (kind := receiver.recv()) is not None:
                crashes[kind] += 1
            ended = True
        except EOFError:
            process.join()
            if counts[0] == began:
                raise RuntimeError(f"{family.name} cannot begin; see above.") from None
            crashes[f"the process died of signal {-(process.exitcode or 0)}"] += 1
            number = int(counts[0]) - 1
            data = options.input(family, number, random.Random())
            options.save(f"{family.name}-{number}-died", data)
        process.join()
    inputs, accepted, refused, not_finite = map(int, counts[:4])
    return Outcome(inputs, accepted, refused, not_finite, counts[4], counts[5], crashes)


def report(rows: Iterable[tuple[str, Outcome]]) -> int:
    """Prints the table row by row, and its sum; returns the number of crashes."""
    columns = ("inputs", "accepted", "refused", "crashes", "not finite", "slowest, s", "MB")
    print(f"{'family':24}", *(f"{c:>10}" for c in columns), flush=True)
    whole = Outcome()
    for name, o in rows:
        _row(name, o)
        for name_of in ("inputs", "accepted", "refused", "not_finite"):
            setattr(whole, name_of, getattr(whole, name_of) + getattr(o, name_of))
        whole.slowest = max(whole.slowest, o.slowest)
        whole.growth = max(whole.growth, o.growth)
        whole.crashes.update({f"{name}: {kind}": n for kind, n in o.crashes.items()})
    _row("all", whole)
    for kind, count in whole.crashes.most_common():
        print(f"crash: {kind}, {count} times")
    return whole.crashes.total()


def _row(name: str, o: Outcome) -> None:
    counts = (o.inputs, o.accepted, o.refused, o.crashes.total(), o.not_finite)
    print(
        f"{name:24}",
        *(f"{n:>10}" for n in counts),
        f"{o.slowest:>10.3f} {o.growth:>10.1f}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=20_000, help="of all families together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=300, help="after which no input is begun")
    parser.add_argument("--families", default="*", help="pattern of their names")
    parser.add_argument("--messages", action="store_true", help="only what travels, no files")
    parser.add_argument("--keep", type=Path, help="folder for an input of each kind of crash")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        found = families(Path(folder), not options.messages)
        chosen = [f for f in found if fnmatchcase(f.name, options.families)]
        shares = sum(f.share for f in chosen)
        gc.freeze()  # else each family's process looks through all that was imported

        end = time.monotonic()

        def rows() -> Iterable[tuple[str, Outcome]]:
            nonlocal end
            for family in chosen:
                part = family.share / shares
                end += options.seconds * part  # what one leaves over goes to the next
                inputs = math.ceil(options.inputs * part)
                given = Options(inputs, options.seed, end, options.keep)
                yield family.name, isolated(family, given)

        return 1 if report(rows()) else 0


if __name__ == "__main__":
    sys.exit(main())
