"""One bit per element: the sign, times the mean magnitude.

Seide, Fu, Droppo, Li, Yu: 1-bit stochastic gradient descent. Interspeech 2014.
Karimireddy, Rebjock, Stich, Jaggi: Error feedback fixes signSGD. ICML 2019, Algorithm 1 (the scaled
sign).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import numpy as np

from medfed.federation.wire.codecs.base import Array, Buffer, Codec, Payload
from medfed.federation.wire.codecs.support import unpack_bits


class SignSGD(Codec):
    """The sign of every element times the mean magnitude ||v||_1 / d; zero counts as positive.

    Not unbiased; a contraction with delta = ||v||_1^2 / (d ||v||_2^2), which is 1/d at least and
    2/pi for Gaussian elements.

    After the header: the scale (float32), then one bit per element, 1 for minus.

    Example:
        >>> import torch
        >>> codec = SignSGD()
        >>> codec.decode(codec.encode(torch.tensor([1.0, -3.0])))
        tensor([ 2., -2.])
    """

    codes = (9,)
    feedback = True

    def __init__(self) -> None:
        super().__init__()

    def _pack(self, values: Array, rng: np.random.Generator) -> Iterable[Buffer]:
        scale = float(np.abs(values).mean(dtype=np.float64)) if values.size else 0.0
        return struct.pack("<f", scale), np.packbits(values < 0).data

    def _unpack(self, payload: Payload, length: int) -> Array:
        (scale,) = payload.magnitudes(1)
        values: Array = np.where(unpack_bits(payload, length), -scale, scale)
        return values
