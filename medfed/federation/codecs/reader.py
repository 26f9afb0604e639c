"""Reading a payload from front to back without trusting a number in it."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class CodecError(ValueError):
    """Bytes that this codec did not write, or that are cut short."""


class Reader:
    r"""A payload and a place in it; whoever reads past the end gets a :class:`CodecError`.

    Args:
        payload: The bytes after the header.

    Example:
        >>> reader = Reader(memoryview(b"\x02\x00\x00\x80\x3f"))
        >>> reader.numbers("<B"), reader.array("<f4", 1)
        ((2,), array([1.], dtype=float32))
        >>> reader.finish()
    """

    def __init__(self, payload: memoryview) -> None:
        self._rest = payload

    @property
    def left(self) -> int:
        """The number of bytes not yet read."""
        return len(self._rest)

    def peek(self) -> Array:
        """Returns all that is left as bytes, without moving on."""
        return np.frombuffer(self._rest, np.uint8)

    def take(self, count: int) -> memoryview:
        """Returns the next ``count`` bytes, which are only allocated if they are there.

        Raises:
            CodecError: If fewer are left.
        """
        if not 0 <= count <= len(self._rest):
            raise CodecError(f"The message is cut short: {count} more bytes were announced.")
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken

    def numbers(self, layout: str) -> tuple[Any, ...]:
        """Returns the next numbers, laid out as in :mod:`struct`."""
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def array(self, dtype: str, count: int) -> Array:
        """Returns the next ``count`` numbers as a read-only array of a little-endian dtype."""
        kind = np.dtype(dtype)
        return np.frombuffer(self.take(kind.itemsize * count), kind)

    def finish(self) -> None:
        """Checks that nothing is left.

        Raises:
            CodecError: If there is.
        """
        if self.left:
            raise CodecError(f"The message has {self.left} bytes too many.")
