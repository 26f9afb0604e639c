"""Dense codecs: fp32, the reference for all savings, and half-precision types."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from medfed.federation.wire.codecs.base import Array, Buffer, Codec, Payload
from medfed.standalone.checks import checked
from medfed.standalone.errors import CodecError

_CODES = {"float32": 1, "float64": 2, "float16": 3, "bfloat16": 4}
_FP16_EXPONENT = 15


class Dense(Codec):
    """Little-endian IEEE numbers, 4 bytes each by default.

    ``float16`` is sent with one power of two per message (2 bytes), which puts the largest
    magnitude between 2^14 and 2^15: nothing overflows, gradients of 1e-6 keep their precision, and
    numbers that float16 holds come back exact unless the message spans its whole range. Elements
    above 2^-28 of the largest have a relative error of at most 2^-11, smaller ones an absolute
    error of 2^-39 of the largest. ``bfloat16`` has the range of float32 and a relative error of
    2^-8 at most (of normal numbers); above its largest number it saturates. Both round to nearest:
    neither is unbiased, both are contractions with 1 - delta <= 2^-16, so that no feedback is asked
    for. `dtype` is ``float32``, ``float16``, ``bfloat16``, or ``float64`` for runs in double
    precision.

    Example:
        >>> codec = Dense()
        >>> data = codec.encode(torch.tensor([1.0, 2.0]))
        >>> len(data), codec.decode(data)
        (20, tensor([1., 2.]))
    """

    codes = tuple(_CODES.values())
    self_describing = False
    cast = True

    @checked("codec")
    def __init__(
        self, dtype: Literal["float32", "float64", "float16", "bfloat16"] = "float32"
    ) -> None:
        super().__init__()
        self.wire = dtype
        self.code = _CODES[dtype]
        self.dtype = torch.float64 if dtype == "float64" else torch.float32
        self.lossless = dtype in ("float32", "float64")

    def error_bound(self, length: int) -> float:
        """As the docstring of the class says, of numbers that are normal in bfloat16."""
        return 0.0 if self.lossless else 2**-16

    def _pack(self, values: Array, rng: np.random.Generator) -> Iterable[Buffer]:
        if self.wire == "float16":
            return pack_half(values)
        if self.wire == "bfloat16":
            return (_to_bfloat16(values).data,)
        return (values.data,)

    def _unpack(self, payload: Payload, length: int) -> Array:
        if self.wire == "float16":
            return unpack_half(payload, length)
        if self.wire == "bfloat16":
            return _of_bits(payload, length, torch.bfloat16).float().numpy()
        return payload.array(f"<f{self.dtype.itemsize}", length).copy()


def pack_half(values: Array) -> tuple[bytes, memoryview]:
    """Returns the exponent and the float16 numbers of finite float32 values of shape (d,).

    Example:
        >>> exponent, numbers = pack_half(np.float32([1e6, -1.0]))
        >>> len(exponent), len(numbers.tobytes())
        (2, 4)
    """
    tensor = torch.from_numpy(values)
    largest = float(torch.stack(tensor.aminmax()).abs().max()) if len(values) else 0.0
    shift = _FP16_EXPONENT - math.frexp(largest)[1] if largest else 0
    return struct.pack("<h", shift), _shifted(tensor, shift).half().numpy().data


def unpack_half(payload: Payload, length: int) -> Array:
    """Returns what :func:`pack_half` packed, as float32 of shape (d,)."""
    (shift,) = payload.numbers("<h")
    if not -_FP16_EXPONENT - 128 <= shift <= _FP16_EXPONENT + 150:
        raise CodecError(f"The exponent {shift} of a float16 message is out of range.")
    numbers: Array = _shifted(_of_bits(payload, length, torch.float16), -shift).numpy()
    return numbers


def _shifted(values: Tensor, shift: int) -> Tensor:
    """``values * 2^shift`` in float32, in two steps because a power of two may overflow."""
    first = shift // 2
    return values.float().mul(2.0**first).mul_(2.0 ** (shift - first))


def _of_bits(payload: Payload, length: int, dtype: torch.dtype) -> Tensor:
    # A copy, as PyTorch reads no array that cannot be written.
    return torch.from_numpy(payload.array("<i2", length).copy()).view(dtype)


def _to_bfloat16(values: Array) -> Array:
    # PyTorch rounds; NumPy has no such type. The largest float32 numbers would round to infinity.
    limit = torch.finfo(torch.bfloat16).max
    rounded = torch.from_numpy(values).clamp(-limit, limit).to(torch.bfloat16)
    return rounded.view(torch.int16).numpy()
