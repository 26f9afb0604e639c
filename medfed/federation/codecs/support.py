"""Where the sent elements are, and their signs: as gaps or as runs, whichever is shorter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from medfed.federation.codecs.integers import IntegerCode, best_rice, golomb_code
from medfed.federation.codecs.reader import CodecError, Reader

Array = np.ndarray[Any, Any]

_GAPS = 0xFF
"""In the place of the code of run lengths: there are no runs."""


def pack_support(
    indices: Array, length: int, negative: Array | None = None, runs: bool = True
) -> Iterable[bytes]:
    """Returns positions and signs in as few bits as gaps or runs allow.

    Two bytes name the codes; then the count (4 bytes), the gaps, the lengths of the runs, and the
    signs, one bit for each position or run. A run is a stretch of neighbours of one sign.

    Args:
        indices: ``(n,)`` increasing positions.
        length: d, above all of them.
        negative: ``(n,)`` booleans; None where no sign is sent.
        runs: Whether runs are tried.

    Example:
        >>> parts = pack_support(np.array([3, 4, 5, 6]), 10, np.array([True] * 4))
        >>> [len(part) for part in parts]
        [6, 1, 1, 1]
    """
    gaps = np.diff(indices, prepend=-1) - 1
    code = golomb_code(indices.size / max(length, 1))
    signs = 0 if negative is None else 1
    starts = _run_starts(gaps, negative)
    lengths = np.diff(starts, append=indices.size)
    run_gaps = gaps[starts]
    if runs and starts.size < indices.size:
        run_code, length_code = best_rice(run_gaps), best_rice(lengths - 1)
        run_bits = run_code.bits(run_gaps) + length_code.bits(lengths - 1) + signs * starts.size
        if run_bits < code.bits(gaps) + signs * indices.size:
            yield _prefix(run_code.to_byte(), length_code.to_byte(), starts.size, length)
            yield run_code.pack(run_gaps)
            yield length_code.pack(lengths - 1)
            yield b"" if negative is None else np.packbits(negative[starts]).tobytes()
            return
    yield _prefix(code.to_byte(), _GAPS, indices.size, length)
    yield code.pack(gaps)
    yield b"" if negative is None else np.packbits(negative).tobytes()


def unpack_support(reader: Reader, length: int, signed: bool) -> tuple[Array, Array]:
    """Returns what :func:`pack_support` packed.

    Args:
        reader: The payload.
        length: d.
        signed: Whether signs were sent.

    Returns:
        ``(n,)`` increasing positions below d and ``(n,)`` booleans, all False without signs.

    Raises:
        CodecError: If the bytes are torn or a position lies outside.
    """
    first, second = reader.numbers("<BB")
    (count,) = reader.numbers(_count_layout(length))
    if count > length:
        raise CodecError(f"{count} positions were announced among {length}.")
    gaps = IntegerCode.from_byte(first).unpack(reader, count, limit=length)
    if second == _GAPS:
        indices = np.cumsum(gaps + 1) - 1
    else:
        lengths = IntegerCode.from_byte(second).unpack(reader, count, limit=length) + 1
        indices = _expand(gaps, lengths, length)
    if indices.size and indices[-1] >= length:
        raise CodecError(f"A position lies outside of {length} elements.")
    if not signed:
        return indices, np.zeros(indices.size, np.bool_)
    negative = unpack_bits(reader, count)
    return indices, negative if second == _GAPS else np.repeat(negative, lengths)


def unpack_bits(reader: Reader, count: int) -> Array:
    """Returns the next ``count`` bits, which fill whole bytes, as ``(count,)`` booleans."""
    packed = reader.array("u1", (count + 7) // 8)
    return np.unpackbits(packed, count=count).view(np.bool_)


def _run_starts(gaps: Array, negative: Array | None) -> Array:
    """Which of the n positions begin a run, as indices of them."""
    begins = gaps > 0
    begins[:1] = True
    if negative is not None:
        begins[1:] |= negative[1:] != negative[:-1]
    return np.flatnonzero(begins)


def _expand(gaps: Array, lengths: Array, length: int) -> Array:
    """The positions of all runs, which must fit before they are written out."""
    total = int(lengths.sum())
    if total > length:
        raise CodecError(f"Runs of {total} elements do not fit in {length}.")
    # A run begins its gap after the end of the one before: within it the step is 1.
    steps = np.ones(total, np.int64)
    ends = np.cumsum(lengths)
    steps[ends - lengths] += gaps
    indices: Array = np.cumsum(steps) - 1
    return indices


def _count_layout(length: int) -> str:
    return "<I" if length < 2**32 else "<Q"


def _prefix(first: int, second: int, count: int, length: int) -> bytes:
    size = 4 if length < 2**32 else 8
    return bytes((first, second)) + count.to_bytes(size, "little")
