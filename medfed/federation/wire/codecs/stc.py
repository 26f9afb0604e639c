"""Sparse ternary compression.

Sattler, Wiedemann, Mueller, Samek: Robust and communication-efficient federated learning from
non-i.i.d. data. IEEE Transactions on Neural Networks and Learning Systems 31 (2019), Algorithms 1,
3 and 4, equation 17.

p       sparsity
k       ceil(p d), the number of elements that are kept
mu      the mean magnitude of those

Deviations: the error feedback is the channel's. The Golomb parameter follows the share of elements
that is really sent. Positions go as runs of equal signs where that is shorter than gaps, which the
message says; random positions never are, those of piecewise constant vectors may be.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import numpy as np

from medfed.federation.wire.codecs import support
from medfed.federation.wire.codecs.base import Array, Buffer, Codec, Payload
from medfed.federation.wire.codecs.support import Share
from medfed.standalone.checks import checked


class STC(Codec):
    """The k largest magnitudes, replaced by their sign times their mean.

    Ties are broken by position, the lower first; zeros are never sent, so that mu is the mean of
    what is sent. A contraction with delta = ||v_S||_1^2 / (k ||v||_2^2), S the elements sent, which
    is 1/d at least; not unbiased.

    After the header: mu (float32), then positions and signs as in :func:`pack_support`. `sparsity`:
    p, the share of elements that is kept, in (0, 1]. `runs`: whether positions may go as runs;
    false: as gaps only, as published.

    Example:
        >>> import torch
        >>> codec = STC(sparsity=0.5)
        >>> codec.decode(codec.encode(torch.tensor([0.1, -3.0, 1.0, 0.2])))
        tensor([ 0., -2.,  2.,  0.])
    """

    codes = (5,)
    feedback = True

    @checked("codec")
    def __init__(self, sparsity: Share = 0.01, runs: bool = True) -> None:
        super().__init__()
        self.sparsity, self.runs = sparsity, runs

    @classmethod
    def examples(cls) -> Sequence[Codec]:
        """More elements, and all."""
        return (cls(0.5), cls(1))

    def _pack(self, values: Array, rng: np.random.Generator) -> Iterable[Buffer]:
        indices = support.largest(values, support.count_of(self.sparsity, values.size))
        entries = values[indices]
        mu = float(np.abs(entries).mean(dtype=np.float64)) if entries.size else 0.0
        return struct.pack("<f", mu), *support.pack_support(
            indices, values.size, entries < 0, self.runs
        )

    def _unpack(self, payload: Payload, length: int) -> Array:
        (mu,) = payload.magnitudes(1)
        indices, negative = support.unpack_support(payload, length, signed=True)
        return support.spread(np.where(negative, -mu, mu), indices, length)
