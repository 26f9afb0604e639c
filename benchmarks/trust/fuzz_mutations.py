"""What ``fuzz.py`` does to valid inputs."""

from __future__ import annotations

import math
import random
import re
import struct
from collections.abc import Callable

_INTEGERS = (
    *(0, 1, 2, 127, 128, 255, 2**15, 2**16 - 1, 2**20, 2**31 - 1, 2**31, 2**32 - 1),
    *(2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1),
)
_FLOATS = (math.nan, math.inf, -math.inf, 3e38, -3e38, 1e-45, -1.0, 0.0)
_TEXTS = (
    *(b"-1", b"0", b"1e400", b"NaN", b"-Infinity", b"1" * 30, b"1" * 5000, b"281474976710656"),
    *(b"null", b"true", b'""', b'"x"', b"[]", b"{}", b"[" * 3000, b"3.5", b"\xff", b"\xd9\xa3"),
)
_NUMBER = re.compile(rb"-?\d+(\.\d+)?")


def mutated(rng: random.Random, seeds: list[bytes], keep: int) -> bytes:
    """Returns one input: mostly a valid one with a few mutations."""
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


def _flip(rng: random.Random, data: bytearray, at: int, _: list[bytes]) -> None:
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
    number = rng.choice(_INTEGERS) % 2 ** (8 * width)
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
