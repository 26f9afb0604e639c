"""Random quantisation to a few levels of a norm, Elias-coded.

Alistarh, Grubic, Li, Tomioka, Vojnovic: QSGD. Advances in Neural Information Processing Systems 30
(2017), Section 3.1 (levels, norm), 3.2 (Elias code) and 4 (buckets, the maximum norm).

s       levels
q       norm
n       elements in a bucket

Deviations: positions of non-zeros go as Golomb-coded gaps, which are shorter than Elias-coded ones
wherever each element is sent with the same probability; the Elias code of the levels is the
shortest of the three unless one is asked for.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

import numpy as np

from medfed.federation.wire.codecs import support
from medfed.federation.wire.codecs.base import Array, Buffer, Codec, Payload
from medfed.standalone.checks import check_not_negative, checked, within
from medfed.standalone.errors import CodecError, ConfigError

_ELIAS = ("gamma", "delta", "omega")
_HEAD = struct.Struct("<IQ")
_MAX_LEVELS = 2**24


class QSGD(Codec):
    """||v||_q sign(v_i) l_i / s with whole l_i, random such that the expectation is v_i.

    Unbiased, E||C(v) - v||^2 <= omega ||v||^2 with omega = min(n / (4 s^2), sqrt(n) / s) for
    q >= 2. For 1 <= q < 2 the norm is larger by up to r = n^(1/q - 1/2), and
    omega = min(n r^2 / (4 s^2), sqrt(n) r / s).

    After the header: s (4 bytes), n (8), the norms (float32), positions and signs of what is not
    zero as in :func:`pack_support`, the code (1 byte), the levels less one. `norm`: q >= 1; ``inf``
    is the largest magnitude. `bucket`: n, how many neighbours share a norm of 4 bytes; 0 for the
    whole vector.

    Example:
        >>> import torch
        >>> codec = QSGD(levels=2, norm=math.inf)
        >>> codec.decode(codec.encode(torch.tensor([1.0, -2.0, 0.0])))
        tensor([ 1., -2.,  0.])
    """

    codes = (10,)
    random = True
    unbiased = True

    @checked("codec")
    def __init__(
        self,
        levels: Annotated[int, within(f"[1, {_MAX_LEVELS}]")] = 16,
        norm: float | str = 2,
        bucket: Annotated[int, check_not_negative] = 512,
        elias: Literal["gamma", "delta", "omega", "shortest"] = "shortest",
        seed: int = 0,
    ) -> None:
        super().__init__(seed)
        self.levels, self.bucket, self.norm = levels, bucket, _check_norm(norm)
        self._level_codes = [
            support.IntegerCode(kind) for kind in _ELIAS if elias in (kind, "shortest")
        ]

    def error_bound(self, length: int) -> float:
        """Omega; a maximum norm is at most what it would be with q = 2."""
        n = min(self.bucket or length, length)
        r = max(1.0, n ** (1 / self.norm - 0.5))
        return float(min(n * r**2 / (4 * self.levels**2), math.sqrt(n) * r / self.levels))

    @classmethod
    def examples(cls) -> Sequence[Codec]:
        """Other norms, codes and buckets, few levels and many."""
        return (
            cls(4, norm="inf", bucket=100, elias="gamma"),
            cls(1, norm=1, bucket=0, elias="omega"),
            cls(1000, norm=3.0, bucket=7, elias="delta"),
            cls(100, norm="inf", bucket=0, elias="omega"),
        )

    def _pack(self, values: Array, rng: np.random.Generator) -> Iterable[Buffer]:
        bucket = self.bucket or max(values.size, 1)
        norms = bucket_norms(values, bucket, self.norm)
        levels = support.round_randomly(values, _units(norms, self.levels), bucket, rng)
        indices = np.flatnonzero(levels)
        levels = levels[indices] - 1  # those of all elements are twice the vector
        code = min(self._level_codes, key=lambda c: c.bits(levels))
        yield _HEAD.pack(self.levels, bucket)
        yield norms.data
        yield from support.pack_support(indices, values.size, values[indices] < 0)
        yield bytes((code.to_byte(),))
        yield code.pack(levels)

    def _unpack(self, payload: Payload, length: int) -> Array:
        steps, bucket = payload.numbers(_HEAD.format)
        if not 1 <= steps <= _MAX_LEVELS or bucket < 1:
            raise CodecError(f"{steps} levels in buckets of {bucket} make no sense.")
        bucket = min(bucket, max(length, 1))
        norms = payload.magnitudes(-(-length // bucket))
        indices, negative = support.unpack_support(payload, length, signed=True)
        (byte,) = payload.numbers("<B")
        # A norm that was rounded down to float32 may leave its largest element a level higher.
        levels = support.IntegerCode.from_byte(byte).unpack(payload, indices.size, limit=steps) + 1
        sent = levels * _units(norms, steps)[indices // bucket]
        return support.spread(np.where(negative, -sent, sent), indices, length)


def bucket_norms(values: Array, bucket: int, norm: float) -> Array:
    """Returns the q-norm of each bucket.

    `values` is ``(d,)`` float32. `bucket`: n, elements in a bucket; the last one may have fewer.
    The result is ``(ceil(d / n),)`` float32.

    Example:
        >>> bucket_norms(np.float32([3, -4, 5]), 2, 2.0), bucket_norms(np.float32([3, -4]), 2, 1.0)
        (array([5., 5.], dtype=float32), array([7.], dtype=float32))
    """
    if not values.size:
        return np.empty(0, np.float32)
    starts = np.arange(0, values.size, bucket)
    magnitudes = np.abs(values)
    largest: Array = np.maximum.reduceat(magnitudes, starts)
    if math.isinf(norm):
        return largest
    scale = np.where(largest > 0, largest, 1).astype(np.float64)
    ratios = magnitudes / np.repeat(scale, np.diff(starts, append=values.size))
    sums = np.add.reduceat(np.power(ratios, norm, out=ratios), starts)
    norms = largest * np.power(sums, 1 / norm)
    if norms.max() > np.finfo(np.float32).max:
        raise ValueError(f"The {norm:g}-norm of a bucket is beyond float32; use norm=inf.")
    rounded: Array = norms.astype(np.float32)
    return rounded


def _units(norms: Array, levels: int) -> Array:
    return norms.astype(np.float64) / levels


def _check_norm(norm: float | str) -> float:
    try:
        value = float(norm)
    except ValueError:
        value = math.nan
    if not value >= 1:
        raise ConfigError(f"codec norm={norm!r} must be a number from 1 up, or inf.")
    return value
