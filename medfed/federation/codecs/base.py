"""The two halves of a codec in one class: a flat float tensor to bytes and back."""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod

from torch import Tensor

_HEADER = struct.Struct("<2sBBQ")
_MAGIC = b"mf"
VERSION = 1
HEADER_BYTES = _HEADER.size


class CodecError(ValueError):
    """Bytes that this codec did not write, or that are cut short."""


class Codec(ABC):
    """Turns a tensor of shape (d,) into bytes and back.

    Attributes:
        code: The codec's number in the header of every byte string.
        lossless: Whether ``decode(encode(t))`` equals ``t`` for its own dtype.
    """

    code: int
    lossless: bool

    @abstractmethod
    def encode(self, flat: Tensor) -> bytes:
        """Returns the bytes that travel, header included."""

    @abstractmethod
    def decode(self, data: bytes) -> Tensor:
        """Returns the tensor of shape (d,) that the receiver continues from.

        Raises:
            CodecError: If the bytes are foreign or truncated.
        """

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
