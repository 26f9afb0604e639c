"""Hostile bytes: what every reader of bytes does with inputs that were mutated or made up.

Valid inputs (messages of every configured codec, links with memory, packets, ledgers, bundles,
images, tables) get bits flipped, ends cut off, pieces repeated, moved or taken from another input,
numbers of any width replaced by extreme ones, numbers in text by nonsense; some inputs are random.
Each is accepted or refused by one of the package's own errors; anything else is a crash, and the
table must say 0. The decoded numbers of what is accepted must be finite.

Every family runs in a process of its own, so that one that dies is counted, too. Time is CPU time
of one input; memory is what the largest resident size of the family's process grew by after it had
read the valid inputs. Input n of a family depends on the seed and n alone.

Run with ``python benchmarks/fuzz.py``; ``--inputs 1000000 --seconds 3600`` is a thorough run,
``--keep FOLDER`` keeps an input for each kind of crash.
"""

from __future__ import annotations

import argparse
import gc
import math
import multiprocessing
import os
import random
import re
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fuzz_inputs import Family, families

from medfed.common.errors import MedfedError

PATIENCE = 60
"""Seconds of wall time after which an input that does not end counts as a crash."""
MEMORY = 6 * 2**30
"""Bytes of address space that a family may take beyond what it starts with."""

_INTEGERS = (0, 1, 2, 127, 128, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1)
_LONG = (2**20, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
_FLOATS = (math.nan, math.inf, -math.inf, 3e38, -3e38, 1e-45, -1.0, 0.0)
_TEXTS = (
    *(b"-1", b"0", b"1e400", b"NaN", b"-Infinity", b"1" * 30, b"1" * 5000, b"281474976710656"),
    *(b"null", b"true", b'""', b'"x"', b"[]", b"{}", b"[" * 3000, b"3.5", b"\xff", b"\xd9\xa3"),
)
_NUMBER = re.compile(rb"-?\d+(\.\d+)?")


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


def mutated(rng: random.Random, seeds: list[bytes], keep: int) -> bytes:
    """Returns one input: mostly a valid one with a few mutations.

    Args:
        rng: Source of all choices.
        seeds: Valid inputs.
        keep: Bytes at the front that half of the inputs keep, so that more get past them.
    """
    if rng.random() < 0.05:
        return seeds[0][: rng.choice((0, keep))] + rng.randbytes(rng.randrange(200))
    data = bytearray(rng.choice(seeds))
    start = keep if rng.random() < 0.5 else 0
    for _ in range(rng.choice((1, 1, 2, 4))):
        if len(data) <= start:
            break
        at = rng.randrange(start, len(data))
        rng.choice(_MUTATIONS)(rng, data, at, seeds)
    return bytes(data)


def _flip(rng: random.Random, data: bytearray, at: int, seeds: list[bytes]) -> None:
    data[at] ^= 1 << rng.randrange(8)


def _cut(rng: random.Random, data: bytearray, at: int, seeds: list[bytes]) -> None:
    del data[at:]


def _lengthen(rng: random.Random, data: bytearray, at: int, seeds: list[bytes]) -> None:
    data += rng.choice((b"\0", b"\xff", rng.randbytes(4), bytes(data[at:]))) * rng.choice((1, 9))


def _splice(rng: random.Random, data: bytearray, at: int, seeds: list[bytes]) -> None:
    other = rng.choice(seeds)
    data[at:] = other[rng.randrange(len(other)) if other else 0 :]


def _move(rng: random.Random, data: bytearray, at: int, seeds: list[bytes]) -> None:
    piece = bytes(data[at : at + rng.randrange(1, 40)])
    if rng.random() < 0.5:
        del data[at : at + len(piece)]
    to = rng.randrange(len(data) + 1)
    data[to:to] = piece


def _integer(rng: random.Random, data: bytearray, at: int, seeds: list[bytes]) -> None:
    width = rng.choice((1, 2, 4, 8))
    number = rng.choice((*_INTEGERS, *_LONG)) % 2 ** (8 * width)
    data[at : at + width] = number.to_bytes(width, rng.choice(("little", "little", "big")))  # type: ignore[arg-type]


def _float(rng: random.Random, data: bytearray, at: int, seeds: list[bytes]) -> None:
    number = rng.choice(_FLOATS)
    code = rng.choice(("<f", "<d", "<e") if abs(number) < 6e4 or not abs(number) < 1e39 else "fd")
    raw = struct.pack(code, number)
    data[at : at + len(raw)] = raw


def _text(rng: random.Random, data: bytearray, at: int, seeds: list[bytes]) -> None:
    if found := _NUMBER.search(data, at) or _NUMBER.search(data):
        data[found.start() : found.end()] = rng.choice(_TEXTS)


_MUTATIONS: tuple[Callable[[random.Random, bytearray, int, list[bytes]], None], ...] = (
    *(_flip, _flip, _cut, _lengthen, _splice, _move, _integer, _integer, _float, _text),
)


def attack(family: Family, inputs: int, seed: int, seconds: float, keep: Path | None) -> Outcome:
    """Hands a family its inputs, one after the other, until they or the seconds are spent."""
    for valid in family.seeds:
        if not all(map(_finite, family.read(valid))):
            raise AssertionError(f"{family.name}: a valid input is not finite.")
    # MetaImage writes what it thinks of an input on stderr, past Python.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    gc.collect()
    outcome, rng, before = Outcome(), random.Random(), _peak()
    end = time.monotonic() + seconds
    for number in range(inputs):
        if number % 64 == 0:
            signal.alarm(PATIENCE)
            if time.monotonic() > end:
                break
        rng.seed(f"{seed}/{family.name}/{number}")
        data = mutated(rng, family.seeds, family.keep)
        outcome.inputs += 1
        start = time.process_time()
        try:
            read = list(family.read(data))
        except MedfedError:
            outcome.refused += 1
        except Exception as error:
            kind = _kind(error)
            if keep is not None and kind not in outcome.crashes:
                keep.mkdir(parents=True, exist_ok=True)
                (keep / f"{family.name}-{number}").write_bytes(data)
            outcome.crashes[kind] += 1
        else:
            outcome.accepted += 1
            outcome.not_finite += not all(map(_finite, read))
        spent = time.process_time() - start
        if spent > 1 and keep is not None:
            (keep / f"{family.name}-{number}-slow").write_bytes(data)
        outcome.slowest = max(outcome.slowest, spent)
    signal.alarm(0)
    outcome.growth = _peak() - before
    return outcome


def _finite(values: Any) -> bool:
    if isinstance(values, torch.Tensor):
        return bool(torch.isfinite(values).all())
    return bool(np.isfinite(values).all())


def _peak() -> float:
    """The largest resident size of this process so far, in MB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def _kind(error: Exception) -> str:
    """The error's type and message, and the last line of the package that it came through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "medfed" in f.filename]
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "elsewhere"
    return f"{type(error).__name__} at {place}"


def _child(sender: Connection, *arguments: Any) -> None:
    limit = _address_space() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    sender.send(attack(*arguments))


def _address_space() -> int:
    pages = Path("/proc/self/statm").read_text().split()[0]
    return int(pages) * resource.getpagesize()


def isolated(*arguments: Any) -> Outcome:
    """Attacks in a process of its own; if that dies, this is its only outcome."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, *arguments))
    process.start()
    sender.close()
    try:
        found: Outcome = receiver.recv()
    except EOFError:
        process.join()
        found = Outcome(1, crashes=Counter({f"the process died ({process.exitcode})": 1}))
    process.join()
    return found


def report(rows: Iterable[tuple[str, Outcome]]) -> int:
    """Prints the table row by row, and its sum; returns the number of crashes."""
    columns = ("inputs", "accepted", "refused", "crashes", "not finite", "slowest, s", "MB")
    print(f"{'family':24}", *(f"{c:>10}" for c in columns), flush=True)
    whole = Outcome()
    for name, o in rows:
        _row(name, o)
        whole.inputs, whole.accepted = whole.inputs + o.inputs, whole.accepted + o.accepted
        whole.refused, whole.not_finite = whole.refused + o.refused, whole.not_finite + o.not_finite
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
    parser.add_argument("--keep", type=Path, help="folder for an input of each kind of crash")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        chosen = [f for f in families(Path(folder)) if fnmatchcase(f.name, options.families)]
        shares = sum(f.share for f in chosen)

        def rows() -> Iterable[tuple[str, Outcome]]:
            for family in chosen:
                part = family.share / shares
                inputs, seconds = math.ceil(options.inputs * part), options.seconds * part
                yield family.name, isolated(family, inputs, options.seed, seconds, options.keep)

        return 1 if report(rows()) else 0


if __name__ == "__main__":
    sys.exit(main())
