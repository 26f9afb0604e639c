"""One direction of a channel: transform, codec and byte stage, and what both ends remember.

Four ways of sending a vector x of shape (d,), with C the transform and the codec together:

=========  ==============================  ========================  =======================
mode       what is coded                   what is received          what is remembered
=========  ==============================  ========================  =======================
plain      x                               C(x)                      nothing
residual   v = x + r                       C(v)                      r <- v - C(v), sender
reference  v = x - y                       y + C(v)                  y <- y + C(v), both ends
shift      v = x - h                       h + C(v)                  h <- h + a C(v), both ends
=========  ==============================  ========================  =======================

An ``update`` (gradient, displacement) goes plain; with error feedback (Seide et al. 2014; Sattler
et al. 2019) by its residual; or shifted (DIANA: Mishchenko, Gorbunov, Takac, Richtarik 2019). Of a
``state`` (weights) a lossy link codes the difference from what the receiver last decoded; the first
transfer is dense fp32. A reference needs no residual beside it: what was not sent is still in the
next difference, and a residual would count it twice. Dense codecs of any width, without transform,
send states as they are and remember nothing: rounding weights to 8 or 11 bits once is harmless,
because nothing adds up from one transfer to the next.

An unbiased codec may well lengthen a vector: E||C(v)||^2 = (1 + omega) ||v||^2. Fed back, or added
to a reference, such errors would grow without bound once omega > 1. There C(v) is scaled by the
number a = <v, C(v)> / ||C(v)||^2 that brings it closest to v, which makes any codec a contraction;
a estimates 1 / (1 + omega) and travels in 4 bytes. ``shift=auto`` takes the same number as step.
It is kept within +-1024, and refused by a receiver beyond: CER can make C(v) as small as one likes.

The optional last stage: bytes to fewer bytes, without loss (Zstandard, RFC 8878).

CER, the communication-efficient regulariser: what is sent, drawn together along its length.

pFedNet (the first of the project's source papers), its communication-efficient regulariser, in the
corrected and exact form of :mod:`medfed.functional`: a vector g that is about to be
coded becomes the w that minimises ||w - g||^2 / 2 + gamma (sum_i |w_i - w_{i+1}| + |w_d|). Equal
neighbours are what run-length codes save on; see :class:`medfed.federation.wire.link.Link` for its
place after the residual and before the codec.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from medfed.common.errors import CodecError, ConfigError, first_line
from medfed.common.tensors import Layout, flatten, numel
from medfed.federation.wire.codecs.base import Codec, all_finite
from medfed.federation.wire.codecs.dense import Dense
from medfed.federation.wire.message import Kind
from medfed.functional.fused_lasso import fused_lasso, fused_lasso_blocks

LEVELS = range(1, 23)


def compress(data: bytes, level: int = 3) -> bytes:
    """Returns one Zstandard frame that states the length of ``data``.

    Args:
        data: Any bytes.
        level: From 1 (fastest) to 22 (smallest).

    Raises:
        ConfigError: If the level is outside, or the package ``zstandard`` is not installed.

    Example:
        >>> len(compress(bytes(10_000))) < 40
        True
    """
    if level not in LEVELS:
        raise ConfigError(f"zstd level={level} must be from {LEVELS[0]} to {LEVELS[-1]}.")
    frame: bytes = library().ZstdCompressor(level=level).compress(data)
    return frame


def decompress(data: bytes, limit: int) -> bytes:
    """Returns what :func:`compress` was given.

    Args:
        data: One frame.
        limit: The most bytes that are accepted; a frame that states more, or nothing, is refused
            before anything is allocated.

    Raises:
        CodecError: If the frame is foreign, torn, damaged or larger than ``limit``.
        ConfigError: If the package ``zstandard`` is not installed.

    Example:
        >>> decompress(compress(b"abc"), limit=3)
        b'abc'
    """
    zstd = library()
    try:
        stated = zstd.get_frame_parameters(data).content_size
        if stated > limit:
            raise CodecError(f"A compressed message of {stated} bytes exceeds {limit} bytes.")
        whole: bytes = zstd.ZstdDecompressor().decompress(
            data, max_output_size=limit, allow_extra_data=False
        )
    except (zstd.ZstdError, MemoryError) as error:
        why = first_line(error)
        raise CodecError(f"A compressed message cannot be read ({why}).") from error
    if len(whole) != stated:
        raise CodecError(f"A compressed message of {stated} bytes holds {len(whole)}.")
    return whole


def library() -> Any:
    """Returns the package ``zstandard``.

    Raises:
        ConfigError: If it is not installed, with the command that installs it.
    """
    try:
        import zstandard
    except ImportError as error:
        raise ConfigError(
            "The zstd stage needs the package zstandard: pip install zstandard."
        ) from error
    return zstandard


Mode = Literal["plain", "residual", "reference", "shift"]
_FACTOR = struct.Struct("<f")
_LARGEST_FACTOR = 1024.0
_DENSE = Dense()


class Transform(Protocol):
    """Changes a vector before it is coded, such as CER."""

    @property
    def active(self) -> bool:
        """Whether it changes anything."""

    def __call__(self, flat: Tensor, layout: Layout) -> Tensor:
        """Returns the vector of shape (d,) that is coded in place of ``flat``."""


class Received(NamedTuple):
    """What the receiver of a part ends with.

    Attributes:
        values: ``(d,)``, what it continues from; the entries that always travel dense left out.
        memory: ``(d,)``, what it remembers of them; ``None`` where nothing need be remembered.
    """

    values: Tensor
    memory: Tensor | None


class Coded(NamedTuple):
    """A vector as bytes.

    Attributes:
        data: What travels.
        received: What the receiver ends with, where the sender had to find out.
        memory: What the sender remembers, of shape (d,).
    """

    data: bytes
    received: Received | None
    memory: Tensor | None


class Link:
    """What happens to vectors that go in one direction.

    Args:
        codec: Turns a vector into bytes; dense fp32 by default.
        cer: Changes it before, e.g. :class:`~medfed.federation.wire.link.CER`; ``None``: nothing.
        feedback: Whether updates carry over what the codec lost; ``None``: as the codec wishes.
        shift: The step a of DIANA in (0, 1], ``auto``, or ``None`` for no shift.
        zstd: Level of a last lossless stage, 1 to 22; ``None``: there is none.
        parts: Patterns of the parts that the codec gets, as ``PART`` or ``PHASE/PART``; others
            travel as fp32. ``None``: all.
        place: The configuration's key of this link, for errors.

    Raises:
        ConfigError: If a value is out of range or two exclude each other.
    """

    def __init__(
        self,
        codec: Codec | None = None,
        cer: Transform | None = None,
        feedback: bool | None = None,
        shift: float | str | None = None,
        zstd: int | None = None,
        parts: Sequence[str] | None = None,
        place: str = "channel",
    ) -> None:
        self.codec = codec or Dense()
        self.transform = cer if cer is not None and cer.active else None
        step = isinstance(shift, int | float) and 0 < shift <= 1
        if shift is not None and shift != "auto" and not step:
            raise ConfigError(f"{place}.shift must be auto, a step in (0, 1] or null, not {shift}.")
        if shift is not None and feedback:
            raise ConfigError(
                f"{place}.feedback=true and {place}.shift={shift} exclude each other: both carry "
                "over what a message lacked; set one of them to null."
            )
        if zstd is not None and zstd not in LEVELS:
            raise ConfigError(f"{place}.zstd must be a level from 1 to 22 or null, not {zstd}.")
        if zstd is not None:
            library()  # a package that is missing is named before the run
        if parts is not None and (isinstance(parts, str) or not parts):
            raise ConfigError(
                f"{place}.parts must be a list of patterns such as [shared] or null, not {parts!r}."
            )
        self.parts, self.shift, self.zstd = parts, shift, zstd
        self.direct = self.codec.cast and self.transform is None
        wanted = self.codec.feedback if feedback is None else feedback
        self.feedback = wanted and shift is None and not (self.direct and self.codec.lossless)

    def compresses(self, phase: str, part: str) -> bool:
        """Returns whether a part goes through the codec.

        Example:
            >>> link = Link(parts=["shared", "fit/personal"])
            >>> [link.compresses(*p) for p in (("fit", "shared"), ("z", "personal"))]
            [True, False]
        """
        if self.parts is None:
            return True
        return any(fnmatchcase(f"{phase}/{part}" if "/" in p else part, p) for p in self.parts)

    def mode(self, kind: Kind) -> Mode:
        """Returns how a vector of this kind is sent.

        Example:
            >>> Link().mode("state"), Link(shift=0.5).mode("update")
            ('plain', 'shift')
        """
        if kind == "state":
            return "plain" if self.direct else "reference"
        if self.shift is not None:
            return "shift"
        return "residual" if self.feedback else "plain"

    def encode(
        self,
        flat: Tensor,
        layout: Layout,
        kind: Kind,
        memory: Tensor | None = None,
        rng: np.random.Generator | None = None,
    ) -> Coded:
        """Turns a vector into bytes.

        Args:
            flat: ``(d,)`` finite floats.
            layout: The tensors that it consists of.
            kind: Weights or an update.
            memory: What the sender remembers, ``(d,)``; ``None`` before the first transfer.
            rng: Source of the codec's random choices.

        Raises:
            ValueError: If a number leaves its type's range, be it remembered or received.
        """
        mode, flat = self.mode(kind), flat.to(working_dtype(layout))
        if mode == "plain":
            return Coded(self.codec.encode(self._transformed(flat, layout), rng), None, None)
        if mode == "reference" and memory is None:
            data = _DENSE.encode(flat)
            values = _DENSE.decode(data).to(flat)
            return Coded(data, Received(values, values), values)
        if memory is None:
            memory = torch.zeros_like(flat)
        vector = flat + memory if mode == "residual" else flat - memory
        data = self.codec.encode(self._transformed(vector, layout), rng)
        decoded = self.codec.decode(data, flat.numel()).to(vector)
        factor = 1.0
        if self._travels(mode):
            factor = closest_factor(vector, decoded)
            data = _FACTOR.pack(factor) + data
        received = self._advance(mode, memory, decoded, factor)
        kept = received.memory
        if mode == "residual":
            kept = _checked(vector.sub_(received.values), "The residual")
        return Coded(data, received, kept)

    def decode(
        self, data: bytes, layout: Layout, kind: Kind, memory: Tensor | None, device: torch.device
    ) -> Received:
        """Turns the bytes back into what the receiver continues from.

        Args:
            data: What :meth:`encode` returned.
            layout: The tensors that the vector consists of.
            kind: Weights or an update.
            memory: What the receiver remembers, ``(d,)``; ``None`` before the first transfer.
            device: Where the result is put.

        Raises:
            CodecError: If the bytes are foreign, truncated, of another length or not finite.
        """
        mode, length = self.mode(kind), numel(layout)
        if mode == "plain":
            return Received(self.codec.decode(data, length).to(device), None)
        dtype = working_dtype(layout)
        if mode == "reference" and memory is None:
            values = _DENSE.decode(data, length).to(device, dtype)
            return Received(values, values)
        factor = 1.0
        if self._travels(mode):
            if len(data) < _FACTOR.size:
                raise CodecError(f"{len(data)} bytes are too few to hold a factor.")
            (factor,) = _FACTOR.unpack_from(data)
            if not abs(factor) <= _LARGEST_FACTOR:
                raise CodecError(f"A factor of {factor:g} is none that is sent.")
            data = data[_FACTOR.size :]
        decoded = self.codec.decode(data, length).to(device, dtype)
        return self._advance(mode, memory, decoded, factor)

    def _transformed(self, flat: Tensor, layout: Layout) -> Tensor:
        return flat if self.transform is None else self.transform(flat, layout)

    def _travels(self, mode: Mode) -> bool:
        """Whether the factor by which a decoded vector is scaled goes with it."""
        if mode == "shift":
            return self.shift == "auto"
        return self.codec.unbiased and not self.codec.lossless

    def _advance(
        self, mode: Mode, memory: Tensor | None, decoded: Tensor, factor: float
    ) -> Received:
        """What is received and remembered after C(v): the same arithmetic at both ends."""
        if mode == "residual":
            # A codec returns finite numbers only; what is done with them may overflow.
            values = decoded if factor == 1 else _checked(decoded.mul_(factor), "A scaled message")
            return Received(values, None)
        if memory is None:
            memory = torch.zeros_like(decoded)
        if mode == "reference":
            values = _checked(memory.add(decoded, alpha=factor), "A reference and its difference")
            return Received(values, values)
        values = _checked(memory + decoded, "A shift and its message")
        step = factor if self.shift == "auto" else float(self.shift or 0)
        return Received(values, _checked(memory.add(decoded, alpha=step), "The next shift"))


def _checked(values: Tensor, what: str) -> Tensor:
    if not all_finite(values):
        raise CodecError(f"{what} would hold NaN or infinity.")
    return values


def working_dtype(layout: Layout) -> torch.dtype:
    """Returns the type in which both ends compute and remember: float64 if any tensor has it.

    Example:
        >>> working_dtype((("w", (2, 3), "float32"),))
        torch.float32
    """
    double = any(dtype == "float64" for _, _, dtype in layout)
    return torch.float64 if double else torch.float32


def closest_factor(vector: Tensor, decoded: Tensor) -> float:
    """Returns a = <v, c> / ||c||^2, which minimises ||v - a c|| of (d,) vectors, as float32.

    It is cut off at 1024 in magnitude: any a between 0 and the best brings c closer to v than 0.

    Example:
        >>> closest_factor(torch.tensor([1.0, 1.0]), torch.tensor([4.0, 0.0]))
        0.25
        >>> closest_factor(torch.ones(2), torch.zeros(2))
        0.0
    """
    v, c = vector.double(), decoded.double()
    energy = float(c.dot(c))
    factor = float(v.dot(c)) / energy if energy > 0 else 0.0
    return float(np.float32(min(max(factor, -_LARGEST_FACTOR), _LARGEST_FACTOR)))


@dataclass(frozen=True)
class CER:
    """Replaces a vector by the solution of the fused lasso.

    Attributes:
        gamma: How strongly neighbours are drawn together; 0: not at all, infinity: to zero.
        relative: Whether gamma is multiplied by the mean magnitude of the vector, so that it means
            the same in every round; otherwise it is absolute.
        per_tensor: Whether each parameter tensor is a vector of its own; they are solved in
            parallel. Otherwise the whole part is one vector, as in the paper.

    Raises:
        ConfigError: If gamma is negative.

    Example:
        >>> import torch
        >>> cer = CER(gamma=0.5, relative=False)
        >>> cer(torch.tensor([4.0, 1.0, 2.0]), (("w", (3,), "float32"),))
        tensor([3.5000, 1.5000, 1.5000])
    """

    gamma: float = 0.0
    relative: bool = True
    per_tensor: bool = False

    def __post_init__(self) -> None:
        if not self.gamma >= 0:
            raise ConfigError(f"cer.gamma must be 0 or more, not {self.gamma}.")

    @property
    def active(self) -> bool:
        """Whether it changes anything."""
        return self.gamma > 0

    def __call__(self, flat: Tensor, layout: Layout) -> Tensor:
        """Returns the vector of shape (d,) that is coded in place of ``flat``.

        Args:
            flat: ``(d,)`` finite floats.
            layout: The tensors that it consists of.
        """
        if not self.per_tensor:
            return fused_lasso(flat, self._strength(flat))
        blocks = flat.split([math.prod(shape) for _, shape, _ in layout])
        solved = fused_lasso_blocks(blocks, [self._strength(block) for block in blocks])
        return flatten({row[0]: block for row, block in zip(layout, solved, strict=True)})

    def _strength(self, vector: Tensor) -> float:
        if not self.relative or vector.numel() == 0:
            return self.gamma
        mean = float(vector.double().abs().mean())
        # Infinity times zero is not a number, but the zero vector is its own solution.
        return self.gamma * mean if mean else 0.0
