"""Which elements are sent; where they are, and their signs: as gaps or runs, the shorter ones.

Whole numbers: random rounding to them; Golomb-Rice and Elias codes, described by one byte.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from medfed.federation.wire.codecs.base import Array, Payload
from medfed.standalone.checks import within
from medfed.standalone.errors import CodecError

KINDS = ("rice", "gamma", "delta", "omega")
Share = Annotated[float, within("(0, 1]")]  # of the elements
_WORD = 64
_CHUNK = 2**16


@dataclass(frozen=True)
class IntegerCode:
    """A prefix-free code of the integers from 0 up; Elias codes are of the next integer.

    `kind` is ``rice`` (Golomb with the parameter 2^b), or Elias ``gamma``, ``delta`` or ``omega``.
    `b`: the number of low bits that ``rice`` writes as they are.

    Example:
        >>> code = IntegerCode("rice", 2)
        >>> data = code.pack(np.array([3, 0, 9]))
        >>> code.bits(np.array([3, 0, 9])), len(data)
        (11, 2)
        >>> code.unpack(Payload(memoryview(data)), count=3, limit=100)
        array([3, 0, 9])
    """

    kind: str = "rice"
    b: int = 0

    @classmethod
    def from_byte(cls, byte: int) -> IntegerCode:
        """Returns the code that :meth:`to_byte` described."""
        return cls(KINDS[byte >> 6], byte & 63)

    def to_byte(self) -> int:
        """Returns kind and parameter in one byte."""
        return KINDS.index(self.kind) << 6 | self.b

    def bits(self, values: Array) -> int:
        """Returns the exact number of bits of ``(n,)`` integers >= 0."""
        # Imported on first use: compiled code has no business in `import medfed`.
        from medfed.federation.wire.codecs import kernels

        return int(kernels.count_bits(values.astype(np.int64, copy=False), *self._arguments))

    def pack(self, values: Array) -> bytes:
        """Returns ``(n,)`` integers from 0 to 2^61 as whole bytes."""
        from medfed.federation.wire.codecs import kernels

        values = values.astype(np.int64, copy=False)
        bits = self.bits(values)
        words = np.zeros(bits // _WORD + 2, np.uint64)
        kernels.write(words, values, *self._arguments)
        return words.tobytes()[: (bits + 7) // 8]

    def unpack(self, payload: Payload, count: int, limit: int) -> Array:
        """Returns the next ``count`` integers of a payload.

        `payload`: the payload; it is left at the first byte after the integers. The result is
        ``(count,)`` int64.
        """
        from medfed.federation.wire.codecs import kernels

        end = 8 * payload.left
        # Every value takes a bit at least, so that a wrong count allocates no more than 64 times
        # what was received.
        if count * (1 + self.b) > end or self.b >= _WORD - 2:
            raise CodecError(f"{payload.left} bytes cannot hold {count} numbers.")
        words = np.zeros(payload.left // 8 + 2, np.uint64)
        words.view(np.uint8)[: payload.left] = payload.peek()
        values = np.empty(count, np.int64)
        used = int(kernels.read(words, end, values, *self._arguments, limit))
        if used < 0:
            raise CodecError("A stream of integers is cut short or damaged.")
        payload.take((used + 7) // 8)
        return values

    @property
    def _arguments(self) -> tuple[int, int]:
        return KINDS.index(self.kind), self.b


def golomb_code(rate: float) -> IntegerCode:
    """The code of the gaps between positions that are each taken with probability ``rate``.

    b* = 1 + floor(log2(ln(phi - 1) / ln(1 - p))), phi = (sqrt(5) + 1) / 2 (Sattler et al. 2019,
    equation 17). `rate`: p in [0, 1].

    Example:
        >>> [golomb_code(p).b for p in (1.0, 0.1, 0.01, 0.001)]
        [0, 3, 6, 9]
    """
    if rate >= 1:
        return IntegerCode("rice", 0)
    if rate <= 0:
        return IntegerCode("rice", 61)
    golden = (math.sqrt(5) - 1) / 2
    b = 1 + math.floor(math.log2(math.log(golden) / math.log1p(-rate)))
    return IntegerCode("rice", min(max(b, 0), 61))


def best_rice(values: Array) -> IntegerCode:
    """The Golomb-Rice code in which ``(n,)`` integers >= 0 are shortest.

    Example:
        >>> best_rice(np.array([0, 0, 1, 0])), best_rice(np.array([200, 255, 300])).b
        (IntegerCode(kind='rice', b=0), 7)
    """
    mean = float(values.mean()) if values.size else 0.0
    # The best b is within one of log2 of the mean (Kiely 2004), from either side.
    middle = math.frexp(max(mean, 1.0))[1] - 1
    codes = [IntegerCode("rice", b) for b in range(max(0, middle - 2), middle + 2)]
    return min(codes, key=lambda code: code.bits(values))


def round_randomly(values: Array, units: Array, bucket: int, rng: np.random.Generator) -> Array:
    """Returns |v| / unit, rounded up with the probability of its fraction and down otherwise.

    The uniform numbers have 53 bits: with the 24 of float32, magnitudes below 2^-24 of a unit would
    come out too large on average. `values` is ``(d,)`` float32. `units` is ``(ceil(d / bucket),)``
    float64, one for each bucket; where it is zero, so are the magnitudes. The result is ``(d,)``
    int64.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> round_randomly(np.float32([2.0, -4.0, 3.0]), np.array([1.0, 2.0]), 2, rng)[:2]
        array([2, 4])
    """
    levels = np.empty(values.size, np.int64)
    for start in range(0, values.size, _CHUNK):
        part = values[start : start + _CHUNK].astype(np.float64)
        unit = units[np.arange(start, start + part.size) // bucket]
        exact = np.divide(np.abs(part), unit, out=np.zeros(part.size), where=unit > 0)
        low = exact.astype(np.int64)
        levels[start : start + _CHUNK] = low + (rng.random(part.size) < exact - low)
    return levels


_GAPS = 0xFF  # in the place of the code of run lengths: there are no runs


def pack_support(
    indices: Array, length: int, negative: Array | None = None, runs: bool = True
) -> Iterable[bytes]:
    """Returns positions and signs in as few bits as gaps or runs allow.

    Two bytes name the codes; then the count (4 bytes), the gaps, the lengths of the runs, and the
    signs, one bit for each position or run. A run is a stretch of neighbours of one sign. `indices`
    is ``(n,)`` increasing positions. `negative` is ``(n,)`` booleans; None where no sign is sent.

    Example:
        >>> parts = pack_support(np.array([3, 4, 5, 6]), 10, np.array([True] * 4))
        >>> [len(part) for part in parts]
        [6, 1, 1, 1]
    """
    gaps = np.diff(indices, prepend=-1) - 1
    code = golomb_code(indices.size / max(length, 1))
    signs = 0 if negative is None else 1
    starts = _run_starts(gaps, negative)
    lengths = np.diff(starts, append=indices.size) - 1
    run_gaps = gaps[starts]
    if runs and starts.size < indices.size:
        run_code, length_code = best_rice(run_gaps), best_rice(lengths)
        run_bits = run_code.bits(run_gaps) + length_code.bits(lengths) + signs * starts.size
        if run_bits < code.bits(gaps) + signs * indices.size:
            codes = run_code.to_byte(), length_code.to_byte()
            yield struct.pack(_prefix(length), *codes, starts.size)
            yield run_code.pack(run_gaps)
            yield length_code.pack(lengths)
            yield b"" if negative is None else np.packbits(negative[starts]).tobytes()
            return
    yield struct.pack(_prefix(length), code.to_byte(), _GAPS, indices.size)
    yield code.pack(gaps)
    yield b"" if negative is None else np.packbits(negative).tobytes()


def unpack_support(payload: Payload, length: int, signed: bool) -> tuple[Array, Array]:
    """Returns what :func:`pack_support` packed.

    The result is ``(n,)`` increasing positions below d and ``(n,)`` booleans, all False without
    signs.
    """
    first, second, count = payload.numbers(_prefix(length))
    if count > length:
        raise CodecError(f"{count} positions were announced among {length}.")
    gaps = IntegerCode.from_byte(first).unpack(payload, count, limit=length)
    if second == _GAPS:
        indices = np.cumsum(gaps + 1) - 1
    else:
        lengths = IntegerCode.from_byte(second).unpack(payload, count, limit=length) + 1
        indices = _expand(gaps, lengths, length)
    if indices.size and indices[-1] >= length:
        raise CodecError(f"A position lies outside of {length} elements.")
    if not signed:
        return indices, np.zeros(indices.size, np.bool_)
    negative = unpack_bits(payload, count)
    return indices, negative if second == _GAPS else np.repeat(negative, lengths)


def spread(sent: Array, indices: Array, length: int) -> Array:
    """Returns a float32 vector that is zero where nothing was sent.

    `sent` is ``(n,)`` numbers. `indices` is ``(n,)`` their positions, below d.

    Example:
        >>> spread(np.array([2.0]), np.array([1]), 3)
        array([0., 2., 0.], dtype=float32)
    """
    values = np.zeros(length, np.float32)
    values[indices] = sent
    return values


def unpack_bits(payload: Payload, count: int) -> Array:
    """Returns the next ``count`` bits, which fill whole bytes, as ``(count,)`` booleans."""
    packed = payload.array("u1", (count + 7) // 8)
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


def _prefix(length: int) -> str:
    """The layout of two bytes for the codes and the count."""
    return "<BBI" if length < 2**32 else "<BBQ"


def count_of(share: float, length: int) -> int:
    """The number of elements that a share is, rounded up.

    Example:
        >>> count_of(0.01, 7_000_000), count_of(0.01, 1), count_of(0.01, 0)
        (70000, 1, 0)
        >>> count_of(0.07, 100)
        7
    """
    # 0.07 * 100 is a little more than 7 in floating point, which would keep one more.
    return min(length, math.ceil(share * length * (1 - 1e-12)))


def largest(values: Array, k: int) -> Array:
    """Returns the positions of the ``k`` largest magnitudes, increasing.

    Of equal magnitudes those at lower positions are taken; zeros never are, so there may be fewer
    than ``k``. `values` is ``(d,)`` finite float32. The result is ``(min(k, number of
    non-zeros),)`` int64.

    Example:
        >>> largest(np.float32([1, -3, 0, 3, 2]), 2)
        array([1, 3])
        >>> largest(np.float32([0, 5, 0]), 3)
        array([1])
    """
    k = min(k, values.size)
    if k <= 0:
        return np.empty(0, np.int64)
    # The order of the magnitudes is that of their bits without the sign.
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32) & np.uint32(0x7FFFFFFF)
    least = max(np.partition(bits, values.size - k)[values.size - k], 1)
    taken = bits > least
    taken[np.flatnonzero(bits == least)[: k - np.count_nonzero(taken)]] = True
    return np.flatnonzero(taken)
