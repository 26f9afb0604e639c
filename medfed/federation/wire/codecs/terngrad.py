"""Ternary gradients.

Wen, Xu, Yan, Wu, Wang, Chen, Li: TernGrad. Advances in Neural Information Processing Systems 30
(2017), equations 3 to 5.

Deviations: one scale per message, as a codec sees one flat vector, where the paper has one per
layer; no gradient clipping, which would be a bias.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable

import numpy as np

from medfed.federation.wire.codecs import support
from medfed.federation.wire.codecs.base import Array, Buffer, Codec, Payload


class TernGrad(Codec):
    """s sign(v_i) with probability |v_i| / s and 0 otherwise; s is the largest magnitude.

    Unbiased, E||C(v) - v||^2 = s ||v||_1 - ||v||_2^2 <= omega ||v||^2 with
    omega = (sqrt(d) - 1) / 2.

    After the header: s (float32), then positions and signs as in :func:`pack_support`.

    Example:
        >>> import torch
        >>> codec = TernGrad()
        >>> codec.decode(codec.encode(torch.tensor([2.0, -2.0, 0.0])))
        tensor([ 2., -2.,  0.])
    """

    codes = (8,)
    random = True
    unbiased = True

    def error_bound(self, length: int) -> float:
        """Omega: the largest variance, as a multiple of the squared norm."""
        return (math.sqrt(length) - 1) / 2

    def _pack(self, values: Array, rng: np.random.Generator) -> Iterable[Buffer]:
        scale = float(np.abs(values).max()) if values.size else 0.0
        levels = support.round_randomly(values, np.array([scale]), max(values.size, 1), rng)
        indices = np.flatnonzero(levels)
        yield struct.pack("<f", scale)
        yield from support.pack_support(indices, values.size, values[indices] < 0)

    def _unpack(self, payload: Payload, length: int) -> Array:
        (scale,) = payload.magnitudes(1)
        indices, negative = support.unpack_support(payload, length, signed=True)
        return support.spread(np.where(negative, -scale, scale), indices, length)
