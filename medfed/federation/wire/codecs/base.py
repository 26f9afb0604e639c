"""The two halves of a codec in one class: a flat float tensor to bytes and back."""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from medfed.common.seeding import derive_seed
from medfed.standalone.errors import CodecError, first_line

Array = np.ndarray[Any, Any]
Buffer = bytes | memoryview

_HEADER = struct.Struct("<2sBBQ")
_MAGIC = b"mf"
_OURS = 1, 127  # the numbers of this package's codecs
VERSION = 1
HEADER_BYTES = _HEADER.size
# Elements that a few bytes may claim where the receiver does not say what it expects.
MAX_UNCHECKED = 2**23


class Payload:
    r"""The bytes after a header, read from front to back without trusting a number in them.

    Example:
        >>> payload = Payload(memoryview(b"\x02\x00\x00\x80\x3f"))
        >>> payload.numbers("<B"), payload.array("<f4", 1)
        ((2,), array([1.], dtype=float32))
        >>> payload.finish()
    """

    def __init__(self, data: memoryview) -> None:
        self._rest = data

    @property
    def left(self) -> int:
        """The number of bytes not yet read."""
        return len(self._rest)

    def peek(self) -> Array:
        """Returns all that is left as bytes, without moving on."""
        return np.frombuffer(self._rest, np.uint8)

    def take(self, count: int) -> memoryview:
        """Returns the next ``count`` bytes, which are only allocated if they are there."""
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

    def magnitudes(self, count: int) -> Array:
        """Returns the next ``count`` float32 numbers, which say how large something is."""
        values = self.array("<f4", count)
        if not bool(((values >= 0) & (values < np.inf)).all()):
            raise CodecError("A magnitude in the message is negative, NaN or infinite.")
        return values

    def finish(self) -> None:
        """Checks that nothing is left."""
        if self.left:
            raise CodecError(f"The message has {self.left} bytes too many.")


class Codec(ABC):
    """Turns a tensor of shape (d,) into bytes and back.

    A codec keeps no state between messages except its random generator, which is only used if the
    caller passes none. The bytes describe themselves: the receiver needs the class of the codec,
    not its arguments.

    The tests of all codecs check these attributes, :meth:`error_bound` and :meth:`examples`.

    Args:
        seed: Seed of the codec's generator.

    Attributes:
        codes: The numbers that stand for the codec in the header of its byte strings, one unless
            bytes of several kinds exclude each other: from 1 to 127 in this package, from 128 to
            255 in others. No two codecs share one.
        code: The number that this instance writes.
        random: Whether the bytes depend on the generator.
        self_describing: Whether an instance made without arguments decodes what any other wrote.
        cast: Whether it rounds each element so finely that weights can be sent directly in every
            transfer, without memory.
        dtype: Type of the decoded tensor.
        lossless: Whether ``decode(encode(t))`` equals ``t`` for its own dtype.
        unbiased: Whether E[C(v)] = v over the draws of the generator.
        feedback: Whether a channel should add the losses to the next message by default. Codecs
            that are contractions, E||v - C(v)||^2 <= (1 - delta) ||v||^2 with delta > 0, need it.

    Raises:
        TypeError: Where a class is defined, if one of its numbers is taken or out of range.
    """

    codes: ClassVar[tuple[int, ...]] = ()
    random: ClassVar[bool] = False
    self_describing: ClassVar[bool] = True
    cast: ClassVar[bool] = False
    dtype: torch.dtype = torch.float32
    lossless: bool = False
    unbiased: bool = False
    feedback: bool = False

    def __init_subclass__(cls) -> None:
        low, high = _OURS if cls.__module__.startswith("medfed.") else (_OURS[1] + 1, 255)
        # A class that is defined again, as in a notebook, keeps its place.
        taken = {n: c for n, c in _REGISTER.items() if _full_name(c) != _full_name(cls)}
        if not cls.codes or any(n in taken or not low <= n <= high for n in cls.codes):
            others = ", ".join(f"{n} ({c.__name__})" for n, c in sorted(taken.items()))
            raise TypeError(
                f"{cls.__name__}.codes={cls.codes} must be numbers that no other codec has, from "
                f"{low} to {high}; taken are {others}."
            )
        _REGISTER.update(dict.fromkeys(cls.codes, cls))

    def __init__(self, seed: int = 0) -> None:
        self.code = self.codes[0]
        self._rng = np.random.default_rng(derive_seed(seed, "codec"))

    def __str__(self) -> str:
        """The name of its class, for errors."""
        return type(self).__name__

    def error_bound(self, length: int) -> float:
        """Returns b such that E||v - C(v)||^2 <= b ||v||^2 for all v of a length, 1 or more.

        It is 1 - delta of a contraction and omega of an unbiased codec.
        """
        return 0.0 if self.lossless else 1 - 1 / length

    @classmethod
    def examples(cls) -> Sequence[Codec]:
        """Returns further instances for the tests, in addition to the configured ones."""
        return ()

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
        if not all_finite(rounded):
            at = int(torch.nonzero(~torch.isfinite(rounded))[0])
            raise ValueError(f"Element {at} is {float(flat[at])}, which cannot be sent.")
        values = rounded.numpy()
        if self.code > _OURS[1]:
            values = values.copy()  # they are the sender's, and another's codec may change them
        payload = self._pack(values, self._rng if rng is None else rng)
        try:
            return b"".join((self.header(flat.numel()), *payload))
        except TypeError as error:
            raise CodecError(f"{self}._pack must return a list of pieces of bytes.") from error

    def decode(self, data: bytes, length: int | None = None) -> Tensor:
        """Returns the receiver's tensor of shape (d,).

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
        payload = Payload(memoryview(data)[HEADER_BYTES:])
        try:
            # Damaged numbers may overflow; the result is refused below.
            with np.errstate(all="ignore"):
                values = torch.from_numpy(self._unpack(payload, stated))
        except CodecError:
            raise
        except Exception as error:  # any error of a decoder is the fault of the bytes
            raise CodecError(f"The message cannot be read ({first_line(error)}).") from error
        payload.finish()
        if values.shape != (stated,):
            raise CodecError(f"The message decodes to {tuple(values.shape)}, not to ({stated},).")
        if not all_finite(values):
            raise CodecError("The message decodes to NaN or infinity, which no codec sends.")
        return values

    @abstractmethod
    def _pack(self, values: Array, rng: np.random.Generator) -> Iterable[Buffer]:
        """Returns the payload of finite ``(d,)`` values of ``dtype``, in pieces."""

    @abstractmethod
    def _unpack(self, payload: Payload, length: int) -> Array:
        """Returns the ``(d,)`` values as a new array; the payload refuses torn bytes."""

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


_REGISTER: dict[int, type[Codec]] = {}  # every codec by its numbers on the wire


def _full_name(codec: type[Codec]) -> str:
    return f"{codec.__module__}.{codec.__qualname__}"


def all_finite(values: Tensor) -> bool:
    """Whether all are finite; the sum, which may overflow, settles most cases in one read.

    Example:
        >>> all_finite(torch.tensor([3e38, 3e38])), all_finite(torch.tensor([float("nan")]))
        (True, False)
    """
    return math.isfinite(float(values.sum())) or bool(torch.isfinite(values).all())
