"""A share of the elements as they are: the largest ones, or random ones.

Stich, Cordonnier, Jaggi: Sparsified SGD with memory. Advances in Neural Information Processing
Systems 31 (2018), Definitions 2.1 and 2.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from medfed.federation.wire.codecs import support
from medfed.federation.wire.codecs.base import Array, Buffer, Codec, Payload
from medfed.federation.wire.codecs.dense import pack_half, unpack_half
from medfed.federation.wire.codecs.support import Share
from medfed.standalone.checks import checked
from medfed.standalone.errors import CodecError

Values = Literal["float32", "float16"]
_VALUES = ("float32", "float16")


class TopK(Codec):
    """The k = ceil(fraction d) largest magnitudes and their positions.

    Ties are broken by position, the lower first; zeros are never sent. Not unbiased; a contraction
    with delta >= k/d (in float16 times 1 - 2^-22).

    After the header: positions as in :func:`pack_support`, the type (1 byte), the values.
    `fraction`: share of the elements that is kept, in (0, 1]. `values` is ``float32`` or
    ``float16``, in which they are sent.

    Example:
        >>> import torch
        >>> codec = TopK(fraction=0.5)
        >>> codec.decode(codec.encode(torch.tensor([0.1, -3.0, 1.0, 0.2])))
        tensor([ 0., -3.,  1.,  0.])
    """

    codes = (6,)
    feedback = True

    @checked("codec")
    def __init__(self, fraction: Share = 0.01, values: Values = "float32") -> None:
        super().__init__()
        self.fraction, self.values = fraction, values

    def error_bound(self, length: int) -> float:
        """1 - delta: the largest share of the squared norm that is lost."""
        return 1 - support.count_of(self.fraction, length) / length * (1 - 2**-22)

    @classmethod
    def examples(cls) -> Sequence[Codec]:
        """More elements, in half precision."""
        return (cls(0.3, "float16"),)

    def _pack(self, values: Array, rng: np.random.Generator) -> Iterable[Buffer]:
        indices = support.largest(values, support.count_of(self.fraction, values.size))
        yield from support.pack_support(indices, values.size)
        yield from _pack_values(values[indices], self.values)

    def _unpack(self, payload: Payload, length: int) -> Array:
        indices, _ = support.unpack_support(payload, length, signed=False)
        return support.spread(_unpack_values(payload, indices.size), indices, length)


class RandomK(Codec):
    """k = ceil(fraction d) random elements; the positions travel as a seed of 8 bytes.

    Scaled by d/k it is unbiased with E||C(v) - v||^2 = omega ||v||^2, omega = d/k - 1. Unscaled it
    is a contraction with delta = k/d in expectation, and asks for error feedback.

    After the header: seed and k (8 bytes each), the type (1 byte), the values by position.
    `fraction`: share of the elements that is kept, in (0, 1]. `values` is ``float32`` or
    ``float16``, in which they are sent; ``float16`` rounds to nearest, a bias of 2^-11 of each
    element at most, and is not called unbiased.

    Example:
        >>> import torch
        >>> codec = RandomK(fraction=0.5)
        >>> sorted(codec.decode(codec.encode(torch.ones(4))).tolist())
        [0.0, 0.0, 2.0, 2.0]
    """

    codes = (7,)
    random = True

    @checked("codec")
    def __init__(
        self, fraction: Share = 0.01, scaled: bool = True, values: Values = "float32", seed: int = 0
    ) -> None:
        super().__init__(seed)
        self.fraction, self.scaled, self.values = fraction, scaled, values
        self.unbiased = scaled and values == "float32"
        self.feedback = not scaled

    def error_bound(self, length: int) -> float:
        """Omega, or 1 - delta; in float16 nearly so."""
        share = support.count_of(self.fraction, length) / length
        whole = 1 / share - 1 if self.scaled else 1 - share
        return whole if self.values == "float32" else whole * (1 + 2**-10) + 2**-22 / share

    @classmethod
    def examples(cls) -> Sequence[Codec]:
        """More elements, and fewer as they are, in half precision."""
        return (cls(0.4), cls(0.3, scaled=False, values="float16"))

    def _pack(self, values: Array, rng: np.random.Generator) -> Iterable[Buffer]:
        d, k = values.size, support.count_of(self.fraction, values.size)
        seed = int(rng.integers(2**63))
        sent = values[random_positions(d, k, seed)].astype(np.float64)
        sent *= d / max(k, 1) if self.scaled else 1.0
        if sent.size and np.abs(sent).max() > np.finfo(np.float32).max:
            raise ValueError("An element is too large for float32 when it is scaled by d/k.")
        yield seed.to_bytes(8, "little") + k.to_bytes(8, "little")
        yield from _pack_values(sent.astype(np.float32), self.values)

    def _unpack(self, payload: Payload, length: int) -> Array:
        seed, k = payload.numbers("<QQ")
        if k > length:
            raise CodecError(f"{k} elements were announced among {length}.")
        sent = _unpack_values(payload, k)
        return support.spread(sent, random_positions(length, k, seed), length)


def random_positions(d: int, k: int, seed: int) -> Array:
    """Returns ``k`` of ``d`` positions, all subsets with equal probability (Floyd's method).

    The stream (SplitMix64) is written out here because both ends must draw the same positions,
    whatever their versions of NumPy. `seed`: from 0 to 2^64 - 1. The result is ``(k,)`` int64,
    increasing.

    Example:
        >>> random_positions(10, 3, 1), random_positions(3, 3, 5)
        (array([4, 6, 9]), array([0, 1, 2]))
    """
    from medfed.federation.wire.codecs.kernels import draw_positions

    taken: Array = draw_positions(d, k, np.uint64(seed))
    return np.flatnonzero(taken)


def _pack_values(values: Array, kind: str) -> Iterable[Buffer]:
    yield bytes((_VALUES.index(kind),))
    if kind == "float16":
        yield from pack_half(values)
    else:
        yield values.data


def _unpack_values(payload: Payload, count: int) -> Array:
    (kind,) = payload.numbers("<B")
    if kind >= len(_VALUES):
        raise CodecError(f"Values of type {kind} are unknown.")
    return unpack_half(payload, count) if kind else payload.array("<f4", count)
