"""Runs of equal neighbours, for vectors that are piecewise constant, such as those after CER."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Annotated

import numpy as np
import torch

from medfed.federation.wire.codecs.base import Array, Buffer, Codec, Payload
from medfed.federation.wire.codecs.support import IntegerCode, best_rice, unpack_bits
from medfed.functional.kmeans import kmeans
from medfed.functional.quantize import assign
from medfed.standalone.checks import checked, within
from medfed.standalone.errors import CodecError

_RUNS, _BOOK, _RANKED = 1, 2, 4
_HEAD = struct.Struct("<BQ")
_MAX_BITS = 8


class RunLength(Codec):
    """(value, run) pairs; the lengths are Golomb- or Elias-coded: the shorter one.

    Without a codebook it is lossless. With one, every value is replaced by the nearest of 2^b
    numbers, the k-means centres of the message, and neighbours that became equal share a run. A
    contraction, ||v - C(v)||^2 <= ||v - mean(v)||^2, not unbiased.

    Where runs do not pay, elements go one by one (4 bytes, or the codebook and at most b bits);
    where the codebook does not pay, values go as they are. The codebook begins with its most
    frequent number, so that the places in it are small integers, and a Golomb or Elias code of them
    is often shorter than b bits.

    After the header: the kind (1 byte: 1 for runs, 2 for a codebook, 4 for coded places), the
    number of values (8); the code (1) and the lengths less one; the size of the codebook (2) and
    its entries (float32); the values as float32, or their places: b bits each, or the code (1) and
    the integers. `codebook_bits`: b from 1 to 8, or 0 for no codebook.

    Example:
        >>> import torch
        >>> codec = RunLength()
        >>> data = codec.encode(torch.tensor([0.5] * 1000 + [1.5] * 2000))
        >>> len(data), codec.decode(data)[[0, 999, 1000]]
        (33, tensor([0.5000, 0.5000, 1.5000]))
    """

    codes = (11,)

    @checked("codec")
    def __init__(self, codebook_bits: Annotated[int, within(f"[0, {_MAX_BITS}]")] = 0) -> None:
        super().__init__()
        self.codebook_bits = codebook_bits
        self.lossless = codebook_bits == 0
        self.feedback = codebook_bits > 0

    @classmethod
    def examples(cls) -> Sequence[Codec]:
        """The smallest codebook, and larger ones."""
        return tuple(cls(codebook_bits=b) for b in (1, 3, 8))

    def _pack(self, values: Array, rng: np.random.Generator) -> Iterable[Buffer]:
        # Zeros of both signs are different numbers: bits are compared, so that nothing is lost.
        starts = _run_starts(values.view(np.uint32))
        runs, d = values[starts], values.size
        shortest = _pack_runs(runs, np.diff(starts, append=d))
        if self.codebook_bits and d:
            book = np.unique(kmeans(values, 2**self.codebook_bits).astype(np.float32))
            codes = assign(*map(torch.from_numpy, (runs, book))).numpy().astype(np.uint8)
            merged = _run_starts(codes)
            lengths = np.diff(starts[merged], append=d)
            shortest = min(shortest, _pack_runs(codes[merged], lengths, book), key=len)
        return (shortest,)

    def _unpack(self, payload: Payload, length: int) -> Array:
        flags, count = payload.numbers(_HEAD.format)
        if flags & ~(_RUNS | _BOOK | _RANKED) or count > length:
            raise CodecError(f"{count} values of kind {flags} do not make {length} elements.")
        lengths = np.ones(1, np.int64)
        total = count
        if flags & _RUNS:
            lengths = _unpack_integers(payload, count, limit=length) + 1
            total = int(lengths.sum())
        if total != length:
            raise CodecError(f"Runs of {total} elements do not make {length}.")
        if flags & _BOOK:
            values = _unpack_coded(payload, count, ranked=bool(flags & _RANKED))
        else:
            values = payload.array("<f4", count)
        return np.repeat(values, lengths)


def _run_starts(values: Array) -> Array:
    """Where the runs of equal neighbours begin, ``(n,)``."""
    begins = np.ones(values.size, np.bool_)
    np.not_equal(values[1:], values[:-1], out=begins[1:])
    return np.flatnonzero(begins)


def _pack_runs(values: Array, lengths: Array, book: Array | None = None) -> bytes:
    """Values, or their codes in a book, as runs or one by one: the shorter one."""
    code = _shortest(lengths - 1)
    width = 32 if book is None else _width(book.size)
    runs = code.bits(lengths - 1) + width * values.size < width * int(lengths.sum())
    flags = (_RUNS if runs else 0) | (0 if book is None else _BOOK)
    parts: list[Buffer] = []
    if runs:
        parts += [bytes((code.to_byte(),)), code.pack(lengths - 1)]
    else:
        values = np.repeat(values, lengths)
    if book is None:
        parts.append(values.data)
    else:
        order = np.argsort(-np.bincount(values, minlength=book.size), kind="stable")
        places = np.argsort(order)[values]
        parts += [struct.pack("<H", book.size), book[order].data]
        code = _shortest(places)
        if 8 + code.bits(places) < width * places.size:
            flags |= _RANKED
            parts += [bytes((code.to_byte(),)), code.pack(places)]
        else:
            column = places.astype(np.uint8)[:, None]
            bits = np.unpackbits(column, axis=1, count=width, bitorder="little")
            parts.append(np.packbits(bits).data)
    return b"".join((_HEAD.pack(flags, values.size), *parts))


def _shortest(values: Array) -> IntegerCode:
    """The code in which ``(n,)`` integers >= 0 are shortest."""
    codes = [best_rice(values), *(IntegerCode(kind) for kind in ("gamma", "delta", "omega"))]
    return min(codes, key=lambda code: code.bits(values))


def _unpack_integers(payload: Payload, count: int, limit: int) -> Array:
    """Reads a code and ``count`` integers up to ``limit``."""
    (byte,) = payload.numbers("<B")
    return IntegerCode.from_byte(byte).unpack(payload, count, limit=limit)


def _unpack_coded(payload: Payload, count: int, ranked: bool) -> Array:
    """Reads the book and the places of ``count`` values, and looks them up."""
    (entries,) = payload.numbers("<H")
    if not 0 < entries <= 2**_MAX_BITS:
        raise CodecError(f"A codebook of {entries} entries is none.")
    book = payload.array("<f4", entries)
    if ranked:
        places = _unpack_integers(payload, count, limit=entries - 1)
    else:
        width = _width(entries)
        bits = unpack_bits(payload, count * width).reshape(count, width)
        places = np.packbits(bits, axis=1, bitorder="little")[:, 0]
    if count and places.max() >= entries:
        raise CodecError(f"A code lies outside of a codebook of {entries} entries.")
    values: Array = book[places]
    return values


def _width(entries: int) -> int:
    """Bits of a code in a book."""
    return max(1, (entries - 1).bit_length())
