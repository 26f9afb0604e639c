"""The two halves of a codec in one class: a flat float tensor to bytes and back."""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medfed.federation.codecs.reader import CodecError, Reader
from medfed.federation.seeding import derive_seed

Array = np.ndarray[Any, Any]
Buffer = bytes | memoryview

_HEADER = struct.Struct("<2sBBQ")
_MAGIC = b"mf"
VERSION = 1
HEADER_BYTES = _HEADER.size
MAX_UNCHECKED = 2**27
"""Elements that a few bytes may claim where the receiver does not say what it expects."""


class Codec(ABC):
    """Turns a tensor of shape (d,) into bytes and back.

    A codec keeps nothing from one message to the next but the state of its own generator, which is
    only used where the caller passes none. The bytes describe themselves: the receiver needs the
    class of the codec, not its arguments.

    Args:
        seed: Seed of the codec's own generator.

    Attributes:
        code: The codec's number in the header of every byte string.
        dtype: Type of the decoded tensor.
        lossless: Whether ``decode(encode(t))`` equals ``t`` for its own dtype.
        unbiased: Whether E[C(v)] = v over the draws of the generator.
        feedback: Whether a channel should add what was lost to the next message by default. Codecs
            that are contractions, E||v - C(v)||^2 <= (1 - delta) ||v||^2 with delta > 0, need it.
    """

    code: int
    dtype: torch.dtype = torch.float32
    lossless: bool = False
    unbiased: bool = False
    feedback: bool = False

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(derive_seed(seed, "codec"))

    def encode(self, flat: Tensor, rng: np.random.Generator | None = None) -> bytes:
        """Returns the bytes that travel, header included.

        Args:
            flat: ``(d,)`` floats on any device, rounded to ``dtype`` first.
            rng: Source of all random choices; the codec's own, which advances, by default.

        Raises:
            ValueError: If the tensor is not one-dimensional, or if it holds NaN or infinity (also
                after rounding).
        """
        if flat.dim() != 1:
            raise ValueError(f"A codec takes a tensor of shape (d,), not {tuple(flat.shape)}.")
        rounded = flat.detach().to("cpu", self.dtype).contiguous()
        if not _finite(rounded):
            at = int(torch.nonzero(~torch.isfinite(rounded))[0])
            raise ValueError(f"Element {at} is {float(flat[at])}, which cannot be sent.")
        values = rounded.numpy()
        payload = self._pack(values, self._rng if rng is None else rng)
        return b"".join((self.header(values.size), *payload))

    def decode(self, data: bytes, length: int | None = None) -> Tensor:
        """Returns the tensor of shape (d,) that the receiver continues from.

        Args:
            data: What :meth:`encode` of the same class returned.
            length: The d that the receiver expects. Without it, bytes that claim more than
                ``MAX_UNCHECKED`` elements and could not hold a bit of each are refused.

        Raises:
            CodecError: If the bytes are foreign, truncated or too many, state another length than
                the expected one, or decode to NaN or infinity.
        """
        stated = self.read_header(data)
        if length is not None and stated != length:
            raise CodecError(f"The message holds {stated} elements, but {length} are expected.")
        if length is None and stated > max(MAX_UNCHECKED, 8 * len(data)):
            raise CodecError(f"{len(data)} bytes claim {stated} elements; that was not expected.")
        reader = Reader(memoryview(data)[HEADER_BYTES:])
        # Damaged numbers may overflow; what comes of it is refused below.
        with np.errstate(all="ignore"):
            values = torch.from_numpy(self._unpack(reader, stated))
        reader.finish()
        if not _finite(values):
            raise CodecError("The message decodes to NaN or infinity, which no codec sends.")
        return values

    @abstractmethod
    def _pack(self, values: Array, rng: np.random.Generator) -> Iterable[Buffer]:
        """Returns the payload of finite ``(d,)`` values of ``dtype``, in pieces."""

    @abstractmethod
    def _unpack(self, reader: Reader, length: int) -> Array:
        """Returns the ``(d,)`` values as an array of its own; the reader refuses what is torn."""

    def header(self, length: int) -> bytes:
        """Returns the 12 bytes before every payload: magic, version, codec, length d."""
        return _HEADER.pack(_MAGIC, VERSION, self.code, length)

    def read_header(self, data: bytes) -> int:
        """Returns the length d that the header states.

        Raises:
            CodecError: If the bytes were not written by this codec and version.
        """
        if len(data) < HEADER_BYTES:
            raise CodecError(f"{len(data)} bytes are too few to hold a codec header.")
        magic, version, code, length = _HEADER.unpack_from(data)
        if (magic, version, code) != (_MAGIC, VERSION, self.code):
            raise CodecError(
                f"These bytes were not written by {type(self).__name__} version {VERSION}."
            )
        return int(length)


def _finite(values: Tensor) -> bool:
    """Whether all are finite; the sum, which may overflow, settles most cases in one read."""
    return math.isfinite(float(values.sum())) or bool(torch.isfinite(values).all())
