"""Whole numbers: random rounding to them; Golomb-Rice and Elias codes, described by one byte."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from medfed.common.errors import CodecError
from medfed.federation.wire.codecs.base import Array, Payload

KINDS = ("rice", "gamma", "delta", "omega")
_WORD = 64
_CHUNK = 2**16


@dataclass(frozen=True)
class IntegerCode:
    """A prefix-free code of the integers from 0 up; Elias codes are of the next integer.

    Args:
        kind: ``rice`` (Golomb with the parameter 2^b), or Elias ``gamma``, ``delta`` or ``omega``.
        b: The number of low bits that ``rice`` writes as they are.

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

        Args:
            payload: The payload; it is left at the first byte after the integers.
            count: How many there must be.
            limit: The largest value that makes sense.

        Returns:
            ``(count,)`` int64.

        Raises:
            CodecError: If the bytes are torn or a value lies above ``limit``.
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
    equation 17).

    Args:
        rate: p in [0, 1].

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
    come out too large on average.

    Args:
        values: ``(d,)`` float32.
        units: ``(ceil(d / bucket),)`` float64, one for each bucket; where it is zero, so are the
            magnitudes.
        bucket: Elements in a bucket.
        rng: Source of d uniform numbers.

    Returns:
        ``(d,)`` int64.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> round_randomly(np.float32([2.0, -4.0, 3.0]), np.array([1.0, 2.0]), 2, rng)[:2]
        array([2, 4])
    """
    # Imported on first use: compiled code has no business in `import medfed`.
    from medfed.federation.wire.codecs.kernels import round_part

    levels = np.empty(values.size, np.int64)
    uniforms = np.empty(min(_CHUNK, values.size))
    for start in range(0, values.size, _CHUNK):
        stop = min(start + _CHUNK, values.size)
        rng.random(out=uniforms[: stop - start])
        round_part(values, units, bucket, start, uniforms[: stop - start], levels)
    return levels
