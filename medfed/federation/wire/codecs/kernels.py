"""The compiled loops of the codecs: integer codes, and positions that a seed draws.

Prefix-free codes of non-negative integers: bits fill 64-bit little-endian words from the lowest up.
A unary q is q zeros and a one. A number x >= 0 is coded by ``kind``:

======  =====================================================================================
RICE    x >> b in unary, then the b low bits: the Golomb code of parameter 2^b
GAMMA   n = floor(log2(x + 1)) in unary, then the n low bits of x + 1 (Elias 1975)
DELTA   n itself in GAMMA, then the n low bits of x + 1
OMEGA   groups of growing width, each announced by a one and the last followed by a zero
======  =====================================================================================
"""

from __future__ import annotations

from typing import Any

import numpy as np

from medfed.common.compiling import compiled

Array = np.ndarray[Any, Any]

# The codes as small integers, which compiled code can branch on.
RICE, GAMMA, DELTA, OMEGA = 0, 1, 2, 3

_ONE = np.uint64(1)
_WIDEST = 62


@compiled()
def _log2(x: int) -> int:
    """floor(log2(x)) of x >= 1."""
    n = 0
    while x > 1:
        x >>= 1
        n += 1
    return n


@compiled()
def _put(words: Array, at: int, value: int, width: int) -> int:
    """Writes the ``width`` low bits of ``value``, which has no others."""
    word, shift = at >> 6, np.uint64(at & 63)
    bits = np.uint64(value)
    words[word] |= bits << shift
    if (at & 63) + width > 64:
        words[word + 1] |= bits >> (np.uint64(64) - shift)
    return at + width


@compiled()
def _put_unary(words: Array, at: int, count: int) -> int:
    """Writes ``count`` zeros, which are there already, and a one."""
    end: int = _put(words, at + count, 1, 1)
    return end


@compiled()
def _get(words: Array, at: int, width: int) -> int:
    """Reads ``width`` <= 62 bits; a word beyond the last bit must exist."""
    word, shift = at >> 6, np.uint64(at & 63)
    bits = words[word] >> shift
    if (at & 63) + width > 64:
        bits |= words[word + 1] << (np.uint64(64) - shift)
    value: int = np.int64(bits & ((_ONE << np.uint64(width)) - _ONE))  # type: ignore[assignment]
    return value


@compiled()
def _get_unary(words: Array, at: int, end: int) -> int:
    """Counts the zeros before the next one; -1 if none comes before ``end``."""
    start = at
    while at < end:
        rest = words[at >> 6] >> np.uint64(at & 63)
        if rest == 0:
            at = (at | 63) + 1
            continue
        while rest & np.uint64(255) == 0:
            rest >>= np.uint64(8)
            at += 8
        while rest & _ONE == 0:
            rest >>= _ONE
            at += 1
        return at - start if at < end else -1
    return -1


@compiled()
def count_bits(values: Array, kind: int, b: int) -> int:
    """The length in bits of all ``values`` in a code."""
    total = 0
    for i in range(values.shape[0]):
        if kind == RICE:
            total += (values[i] >> b) + 1 + b
            continue
        n = _log2(values[i] + 1)
        if kind == GAMMA:
            total += 2 * n + 1
        elif kind == DELTA:
            total += n + 2 * _log2(n + 1) + 1
        else:
            total += 1
            while n > 0:
                total += n + 1
                n = _log2(n)
    return total


@compiled()
def _put_omega(words: Array, at: int, x: int) -> int:
    """Writes x >= 1; the groups are found from the last to the first."""
    groups = np.empty(8, np.int64)
    count = 0
    while x > 1:
        groups[count] = x
        count += 1
        x = _log2(x)
    for i in range(count - 1, -1, -1):
        n = _log2(groups[i])
        at = _put(words, at, 1, 1)
        at = _put(words, at, groups[i] - (1 << n), n)
    return at + 1


@compiled()
def write(words: Array, values: Array, kind: int, b: int) -> None:
    """Writes all ``values`` >= 0 into words that are zero and long enough."""
    at = 0
    for i in range(values.shape[0]):
        if kind == RICE:
            high = values[i] >> b
            at = _put_unary(words, at, high)
            at = _put(words, at, values[i] - (high << b), b)
            continue
        x = values[i] + 1
        if kind == OMEGA:
            at = _put_omega(words, at, x)
            continue
        n = _log2(x)
        if kind == GAMMA:
            at = _put_unary(words, at, n)
        else:
            m = _log2(n + 1)
            at = _put_unary(words, at, m)
            at = _put(words, at, n + 1 - (1 << m), m)
        at = _put(words, at, x - (1 << n), n)


@compiled()
def _get_omega(words: Array, at: int, end: int) -> tuple[int, int]:
    """Reads x >= 1 and the place after it; (-1, 0) if it is torn or too large."""
    x = 1
    while at < end:
        announced = _get(words, at, 1)
        at += 1
        if announced == 0:
            return x, at
        if x >= _WIDEST or at + x > end:
            return -1, 0
        width = x
        x = (1 << width) + _get(words, at, width)
        at += width
    return -1, 0


@compiled()
def read(words: Array, end: int, out: Array, kind: int, b: int, limit: int) -> int:
    """Decodes numbers from the bits that :func:`write` made, until `out` is full.

    `end`: the number of bits that may be read. `out`: receives the numbers, int64. Returns the
    number of bits read, or -1 if the bits are torn or a number is too large.
    """
    at = 0
    for i in range(out.shape[0]):
        if kind == OMEGA:
            x, at = _get_omega(words, at, end)
            if x < 1 or x - 1 > limit:
                return -1
            out[i] = x - 1
            continue
        n = _get_unary(words, at, end)
        if n < 0:
            return -1
        at += n + 1
        high, width = 1, n
        if kind == RICE:
            if n > limit >> b:
                return -1
            high, width = n, b
        elif kind == DELTA:
            if n > 6 or at + n > end:
                return -1
            width = (1 << n) + _get(words, at, n) - 1
            at += n
        if width > _WIDEST or at + width > end:
            return -1
        x = (high << width) + _get(words, at, width)
        at += width
        if kind != RICE:
            x -= 1
        if x > limit:
            return -1
        out[i] = x
    return at


@compiled()
def draw_positions(d: int, k: int, state: Any) -> Array:
    """K of d positions as ``(d,)`` booleans, by Floyd's method from a SplitMix64 stream."""
    taken = np.zeros(d, np.bool_)
    for last in range(d - k, d):
        state += np.uint64(0x9E3779B97F4A7C15)
        z = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
        at = np.int64(np.float64(z >> np.uint64(11)) * 2.0**-53 * (last + 1))
        taken[last if taken[at] else at] = True
    return taken
