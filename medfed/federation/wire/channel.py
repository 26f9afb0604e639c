"""The channel around every message: encodes tensors as bytes and decodes them.

Training continues from the decoded result, so a codec's losses affect the run. Names and shapes
come with the model and do not travel; everything else is counted.

A link is one direction of a channel: transform, codec and byte stage. It has four ways of sending a
vector x of shape (d,), with C the transform and the codec together:

=========  ==============================  ========================  =======================
mode       encoded                         received                  remembered
=========  ==============================  ========================  =======================
plain      x                               C(x)                      nothing
residual   v = x + r                       C(v)                      r <- v - C(v), sender
reference  v = x - y                       y + C(v)                  y <- y + C(v), both ends
shift      v = x - h                       h + C(v)                  h <- h + a C(v), both ends
=========  ==============================  ========================  =======================

An ``update`` (gradient, displacement) is sent plain, with error feedback by its residual (Seide et
al. 2014; Sattler et al. 2019), or shifted (DIANA: Mishchenko, Gorbunov, Takac, Richtarik 2019). For
a ``state`` (weights) a lossy link encodes the difference from the receiver's last decoded value;
the first transfer is dense fp32. A reference needs no residual: the next difference still contains
the unsent part, which a residual would count twice. Dense codecs of any width, without transform,
send states as they are and remember nothing: rounding weights to 8 or 11 bits once is harmless,
because nothing adds up from one transfer to the next.

An unbiased codec may lengthen a vector: E||C(v)||^2 = (1 + omega) ||v||^2. With feedback, or added
to a reference, such errors would grow without bound if omega > 1. There C(v) is scaled by the
number a = <v, C(v)> / ||C(v)||^2 that brings it closest to v, which makes any codec a contraction;
a estimates 1 / (1 + omega) and travels in 4 bytes. ``shift=auto`` takes the same number as step. It
is limited to +-1024, and a receiver refuses larger values: CER can make C(v) arbitrarily small.

Each end has a memory: a flat dictionary from ``mode/part/layout`` to a vector. The channel itself
keeps no state that affects results: the caller passes the memory of the client at this end,
receives a new one, and decides whether to keep it. An evaluation does not keep it, and a message
that cannot be encoded changes nothing.
"""

from __future__ import annotations

import hashlib
import logging
import math
import struct
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from medfed.common.console import short
from medfed.common.seeding import derive_seed
from medfed.common.tensors import (
    Layout,
    Tensors,
    cut,
    first_non_finite,
    flatten,
    layout_of,
    numel,
    select,
)
from medfed.federation.wire.codecs.base import Codec, all_finite
from medfed.federation.wire.codecs.dense import Dense
from medfed.federation.wire.fixed_point import FixedPoint
from medfed.federation.wire.ledger import Direction
from medfed.federation.wire.packet import (
    KINDS,
    EncodedPart,
    Kind,
    Message,
    Packet,
    Received,
    dense_bytes,
)
from medfed.functional.prox import fused_lasso
from medfed.standalone.errors import (
    CodecError,
    ConfigError,
    MachineError,
    NonFiniteError,
    first_line,
)

Memory = Tensors
LEVELS = range(1, 23)  # of Zstandard
Mode = Literal["plain", "residual", "reference", "shift"]
_log = logging.getLogger(__name__)
_FACTOR = struct.Struct("<f")
_LARGEST_FACTOR = 1024.0
_BLOCK = 2**20
_DENSE = Dense()


class Link:
    """The encoding of vectors in one direction.

    Args:
        codec: Turns a vector into bytes; dense fp32 by default.
        cer: A transform before the codec; ``None``: none.
        feedback: Whether updates carry over the codec's losses; ``None``: the codec's default.
        shift: The step a of DIANA in (0, 1], ``auto``, or ``None`` for no shift.
        zstd: Level of a final lossless stage, 1 to 22; ``None``: no such stage.
        parts: Patterns of the parts to encode, as ``PART`` or ``PHASE/PART``; others travel as
            fp32. ``None``: all.
        place: The configuration's key of this link, for errors.

    Raises:
        ConfigError: If a value is out of range or two exclude each other.
    """

    def __init__(
        self,
        codec: Codec | None = None,
        cer: CER | None = None,
        feedback: bool | None = None,
        shift: float | str | None = None,
        zstd: int | None = None,
        parts: Sequence[str] | None = None,
        place: str = "channel",
    ) -> None:
        self.codec = codec or _DENSE
        self.transform = cer if cer is not None and cer.gamma > 0 else None
        step = isinstance(shift, int | float) and 0 < shift <= 1
        if shift is not None and shift != "auto" and not step:
            raise ConfigError(f"{place}.shift must be auto, a step in (0, 1] or null, not {shift}.")
        if shift is not None and feedback:
            raise ConfigError(
                f"{place}.feedback=true and {place}.shift={shift} exclude each other: both carry "
                "over the losses of a message; set one of them to null."
            )
        if zstd is not None and zstd not in LEVELS:
            raise ConfigError(f"{place}.zstd must be a level from 1 to 22 or null, not {zstd}.")
        if zstd is not None:
            library()  # reports a missing package before the run
        listed = isinstance(parts, list | tuple) and all(isinstance(part, str) for part in parts)
        if parts is not None and not (listed and parts):
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

    def unchanged(self, kind: Kind, dtype: torch.dtype) -> bool:
        """Returns whether vectors of a type travel as they are, and nothing is remembered.

        Example:
            >>> Link().unchanged("state", torch.float32), Link().unchanged("state", torch.float64)
            (True, False)
        """
        codec = self.codec  # a subclass of Dense may do anything else
        same = type(codec) is Dense and codec.lossless and codec.dtype == dtype
        return same and self.direct and self.zstd is None and self.mode(kind) == "plain"

    def encode(
        self,
        flat: Tensor,
        layout: Layout,
        kind: Kind,
        memory: Tensor | None = None,
        rng: np.random.Generator | None = None,
        round: int = -1,
        reuse: bool = False,
    ) -> tuple[bytes, Received | None, Tensor | None]:
        """Turns a vector into bytes.

        Args:
            flat: ``(d,)`` finite floats.
            layout: The tensors that it consists of.
            kind: Weights or an update.
            memory: What the sender remembers, ``(d,)``; ``None`` before the first transfer.
            rng: Source of the codec's random choices.
            round: The round's number; -1 outside of rounds.
            reuse: Whether ``flat`` may change, so that it need not be copied.

        Returns:
            The bytes, the receiver's result if the sender had to compute it, and the sender's
            memory, ``(d,)``.

        Raises:
            ValueError: If a number leaves its type's range, be it remembered or received.
        """
        mode, flat = self.mode(kind), flat.to(working_dtype(layout))
        if mode == "plain":
            return self.codec.encode(self._transformed(flat, round), rng), None, None
        if mode == "reference" and memory is None:
            data = _DENSE.encode(flat)
            values = _DENSE.decode(data).to(flat)
            return data, Received(values, values), values
        if memory is None:
            memory = torch.zeros_like(flat)
        # Adds the losses; a reference or a shift is already at the other end.
        copy = flat if reuse else flat.clone()
        vector = copy.add_(memory, alpha=1 if mode == "residual" else -1)
        data = self.codec.encode(self._transformed(vector, round), rng)
        decoded = self.codec.decode(data, flat.numel()).to(vector)
        factor = 1.0
        if self._travels(mode):
            factor = closest_factor(vector, decoded)
            data = _FACTOR.pack(factor) + data
        received = self._advance(mode, memory, decoded, factor)
        before = received.memory
        if mode == "residual":
            # Minus the received vector, so that the transform's losses come back, too.
            before = _checked(vector.sub_(received.values), "The residual")
        return data, received, before

    def decode(
        self, data: bytes, layout: Layout, kind: Kind, memory: Tensor | None, device: torch.device
    ) -> Received:
        """Turns the bytes back into the receiver's vector.

        Args:
            data: The bytes from :meth:`encode`.
            layout: The tensors that the vector consists of.
            kind: Weights or an update.
            memory: What the receiver remembers, ``(d,)``; ``None`` before the first transfer.
            device: Where the result is put.

        Raises:
            CodecError: If the bytes are foreign, truncated, of another length or not finite.
        """
        mode, elements = self.mode(kind), numel(layout)
        if mode == "plain":
            return Received(self.codec.decode(data, elements).to(device), None)
        dtype = working_dtype(layout)
        if mode == "reference" and memory is None:
            values = _DENSE.decode(data, elements).to(device, dtype)
            return Received(values, values)
        factor = 1.0
        if self._travels(mode):
            if len(data) < _FACTOR.size:
                raise CodecError(f"{len(data)} bytes are too few to hold a factor.")
            (factor,) = _FACTOR.unpack_from(data)
            if not abs(factor) <= _LARGEST_FACTOR:
                raise CodecError(f"A factor of {factor:g} is none that is sent.")
            data = data[_FACTOR.size :]
        decoded = self.codec.decode(data, elements).to(device, dtype)
        return self._advance(mode, memory, decoded, factor)

    def _transformed(self, flat: Tensor, round: int) -> Tensor:
        return flat if self.transform is None else self.transform(flat, round)

    def _travels(self, mode: Mode) -> bool:
        """Whether the factor that scales a decoded vector travels with it."""
        if mode == "shift":
            return self.shift == "auto"
        return self.codec.unbiased and not self.codec.lossless

    def _advance(
        self, mode: Mode, memory: Tensor | None, decoded: Tensor, factor: float
    ) -> Received:
        """The received and remembered vectors after C(v): the same arithmetic at both ends."""
        if mode == "residual":
            # A codec returns finite numbers only; what is done with them may overflow.
            values = decoded if factor == 1 else _checked(decoded.mul_(factor), "A scaled message")
            return Received(values, None)
        if memory is None:
            memory = torch.zeros_like(decoded)
        if mode == "reference":
            # In the memory of C(v); a sum with a factor is rounded once.
            values = decoded.add_(memory) if factor == 1 else memory.add(decoded, alpha=factor)
            values = _checked(values, "A reference and its difference")
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
    return torch.float64 if "float64" in {dtype for _, _, dtype in layout} else torch.float32


def closest_factor(vector: Tensor, decoded: Tensor) -> float:
    """Returns a = <v, c> / ||c||^2, which minimises ||v - a c|| of (d,) vectors, as float32.

    It is cut off at 1024 in magnitude: any a between 0 and the best brings c closer to v than 0.

    Example:
        >>> closest_factor(torch.tensor([1.0, 1.0]), torch.tensor([4.0, 0.0]))
        0.25
        >>> closest_factor(torch.ones(2), torch.zeros(2))
        0.0
    """
    energy = along = 0.0
    for v, c in zip(vector.split(_BLOCK), decoded.split(_BLOCK), strict=True):
        wide = c.double()  # of a large model, all doubles would be four of its sizes
        energy += float(wide.dot(wide))
        along += float(wide.dot(v.double()))
    factor = along / energy if energy > 0 else 0.0
    return float(np.float32(min(max(factor, -_LARGEST_FACTOR), _LARGEST_FACTOR)))


class MessageContext(NamedTuple):
    """The place of a message, which determines a codec's random choices."""

    client: str = ""  # the client at the other end
    round: int = -1  # the round's number; -1 for deliveries outside of rounds
    phase: int = 0  # position of the phase within the round
    share: float | None = None  # the client's weight among all, where its message is part of a sum


NOWHERE = MessageContext()


@contextmanager
def naming(client: str, round: int, phase: str) -> Iterator[None]:
    """Adds client, round and phase to any error in its body."""
    try:
        yield
    except (NonFiniteError, CodecError) as error:
        where = f"Client {client}, round {round + 1}, phase {phase}"
        named = type(error)(f"{where}: {str(error).rstrip('.')}.")
        named.client = client
        raise named from error
    except Exception as error:
        error.add_note(f"(client {client}, round {round + 1}, phase {phase})")
        raise


# Kind, memory (by identity) and draw: who is sent a part under the same gets the same bytes.
_Alike = tuple[Kind, int | None, int | None]


@dataclass(frozen=True)
class _Sent:
    """A part that was sent down, and its memory, which must keep its identity."""

    before: Tensor | None
    encoded: EncodedPart
    after: Tensor | None


class Channel:
    """Both directions between the server and its clients.

    Args:
        up: A link or a codec for the clients' messages; dense fp32 by default.
        down: The same for the server's messages.
        device: Where decoded tensors are put.
        seed: Seed of the run.
        buffers: Names of tensors that no lossy codec may change (BatchNorm statistics).
        sums: The parts that the server receives only as a sum over clients; ``None``: none.
    """

    def __init__(
        self,
        up: Link | Codec | None = None,
        down: Link | Codec | None = None,
        device: str = "cpu",
        seed: int = 0,
        buffers: Collection[str] = (),
        sums: FixedPoint | None = None,
    ) -> None:
        for name, way in (("up", up), ("down", down)):
            if not isinstance(way, Link | Codec | None):
                what = f"not {way!r:.60}; make an object of its class, as in Channel(up=STC())"
                raise ConfigError(f"Channel({name}=) takes a codec or a Link, {what}.")
        self.sums = sums
        self._clipped: set[tuple[str, str]] = set()
        up, down = (way if isinstance(way, Link) else Link(way) for way in (up, down))
        self.links: dict[Direction, Link] = {"up": up, "down": down}
        self._others = {d: Link(zstd=link.zstd) for d, link in self.links.items()}
        self.device = torch.device(device)
        self.seed = seed
        self.buffers = frozenset(buffers)
        # A part that is broadcast is one object in many messages: it is encoded once, and its
        # decoded tensors are one object at all clients, so memory grows with personal parts only.
        self._encoded: dict[str, tuple[Tensors, dict[_Alike, _Sent]]] = {}
        self._decoded: dict[str, tuple[EncodedPart, Tensors]] = {}

    def forget(self) -> None:
        """Drops what was broadcast last."""
        self._encoded, self._decoded = {}, {}

    def encode(
        self,
        message: Message,
        direction: Direction,
        place: MessageContext = NOWHERE,
        memory: Memory | None = None,
    ) -> tuple[Packet, Memory]:
        """Turns a message into the bytes that travel.

        Args:
            message: The message.
            direction: Its direction.
            place: Its place in the run.
            memory: What the sender remembers of this client and direction.

        Returns:
            The packet, and the sender's new memory if it is sent.

        Raises:
            NonFiniteError: If a tensor or scalar holds NaN or infinity, or numbers that a lossy
                codec cannot hold; it is named.
            CodecError: If a tensor is of whole numbers.
            ConfigError: If a part that is only summed would be sent outside of a round.
            ValueError: If a kind is unknown, or of a part that the message lacks.
        """
        after = dict(memory or {})
        for part, declared in message.kinds.items():
            if declared not in KINDS or part not in message.parts:
                raise ConfigError(
                    f"kinds={{{part!r}: {declared!r}}} needs a part sent and one of {KINDS}."
                )
        parts = {p: self._coded(p, message, direction, place, after) for p in message.parts}
        for name, value in message.scalars.items():
            if not math.isfinite(value):
                raise NonFiniteError(f"the scalar {name} is {value}")
        return Packet(message.phase, message.scalars, parts), after

    def decode(
        self, packet: Packet, direction: Direction, memory: Memory | None = None
    ) -> tuple[Message, Memory]:
        """Turns the bytes back into the message that the receiver continues from.

        Args:
            packet: The packet from :meth:`encode`.
            direction: Its direction.
            memory: What the receiver remembers of this client and direction.

        Returns:
            The message without the parts that are summed, and the receiver's new memory.

        Raises:
            CodecError: If bytes are foreign or truncated, or decode to NaN or infinity, also
                together with what is remembered; part and codec are named.
        """
        parts, after = {}, dict(memory or {})
        for part, encoded in packet.parts.items():
            if not self._summed(part, direction):
                link = self._link(direction, packet.phase, part)
                parts[part] = self._received(part, encoded, link, direction, after)
        kinds = {part: e.kind for part, e in packet.parts.items()}
        return Message(packet.phase, parts, packet.scalars, kinds), after

    def _summed(self, part: str, direction: Direction) -> bool:
        return self.sums is not None and direction == "up" and part in self.sums.parts

    def _whole(self, part: str, tensors: Tensors, place: MessageContext) -> bytes:
        """The bytes of a part that is summed; says the first time that a client's are clipped."""
        assert self.sums is not None
        if place.share is None:
            raise ConfigError(
                f"channel.secure=masks keeps the part {part} of one client from the server, and "
                "here it would be sent on its own; set channel.secure=null."
            )
        _check_finite(part, tensors, math.nan)
        data, clipped = self.sums.encode(tensors, place.share)
        if clipped and (place.client, part) not in self._clipped:
            self._clipped.add((place.client, part))
            _log.warning(
                "%s, round %d: %d numbers of the part %s are beyond channel.range=%g and were "
                "clipped; set a larger range. Later rounds do not repeat this line.",
                short(place.client), place.round + 1, clipped, part, self.sums.range,
            )  # fmt: skip
        return data

    def _link(self, direction: Direction, phase: str, part: str) -> Link:
        link = self.links[direction]
        return link if link.compresses(phase, part) else self._others[direction]

    def _coded(
        self,
        part: str,
        message: Message,
        direction: Direction,
        place: MessageContext,
        after: Memory,
    ) -> EncodedPart:
        """Encodes a part, or finds the same bytes for others; changes the memory ``after`` it."""
        tensors, kind = message.parts[part], message.kinds.get(part, "state")
        link = self._link(direction, message.phase, part)
        last = self._encoded.get(part) if direction == "down" else None
        known = last[1] if last is not None and last[0] is tensors else {}
        # Most broadcasts are neither remembered nor drawn: nobody looks at their tensors again.
        same: _Alike = (kind, None, None)
        if link.direct and link.mode(kind) == "plain" and same in known:
            return known[same].encoded
        dtypes = {t.dtype for t in tensors.values()}
        if not all(dtype.is_floating_point for dtype in dtypes):
            name = next(n for n, t in tensors.items() if not t.is_floating_point())
            raise CodecError(
                f"{part}/{name} is {tensors[name].dtype}; only real floating-point tensors "
                "travel: convert it"
            )
        if self._summed(part, direction):
            return EncodedPart(kind, self._whole(part, tensors, place), layout_of(tensors))
        if link.unchanged(kind, torch.float64 if torch.float64 in dtypes else torch.float32):
            encoded = EncodedPart(kind, _unchanged(tensors))
            _check_finite(part, tensors, encoded.unchanged[1])
            if direction == "down":
                self._encoded[part] = tensors, {**known, same: _Sent(None, encoded, None)}
            return encoded
        layout = layout_of(tensors)
        before = after.get(key := memory_key(link, part, kind, layout))
        same = (kind, None if before is None else id(before), None)
        if not link.direct or same not in known:
            rng, flat = None, flatten(tensors).detach()
            _check_finite(part, tensors, total := float(flat.sum()))
            if not link.direct:
                # Downwards the content stands for the client: who is sent the same gets the same
                # bytes on every rank, and different vectors get independent random numbers.
                who = place.client if direction == "up" else total.hex()
                at = place.round, who, place.phase, direction, part
                draw = derive_seed(self.seed, *at, "codec")
                same, rng = (*same[:2], draw), np.random.default_rng(draw)
            if same not in known:
                options = self.buffers, before, rng, flat, layout, place.round
                try:
                    made = encode_part(tensors, kind, link, *options)
                    known[same] = _Sent(before, *made)
                except (ConfigError, NonFiniteError):
                    raise
                except ValueError as error:  # finite, but beyond what fp32 or a sum can hold
                    raise NonFiniteError(
                        f"{part} cannot be coded by {link.codec}: {str(error).rstrip('.')}"
                    ) from error
            if direction == "down":
                self._encoded[part] = tensors, known
        if (latest := known[same].after) is not None:
            after[key] = latest
        return known[same].encoded

    def _received(
        self, part: str, encoded: EncodedPart, link: Link, direction: Direction, after: Memory
    ) -> Tensors:
        """Decodes a part, or finds what others have received; changes the memory ``after`` it."""
        key, memo = "", self._decoded.get(part)
        if isinstance(encoded.content, bytes):
            key = memory_key(link, part, encoded.kind, encoded.layout)
        if memo is not None and memo[0] is encoded:
            tensors, new = memo[1], encoded.received.memory if encoded.received else None
        else:
            try:
                tensors, new = decode_part(encoded, link, self.buffers, after.get(key), self.device)
            except CodecError as error:
                why = str(error).rstrip(".")
                raise CodecError(f"{part} cannot be decoded by {link.codec}: {why}") from error
            if direction == "down":
                self._decoded[part] = (encoded, tensors)
        if new is not None:
            after[key] = new
        return tensors


def memory_key(link: Link, part: str, kind: Kind, layout: Layout) -> str:
    """Returns the key of a part in an end's memory; empty if nothing is remembered.

    Example:
        >>> memory_key(Link(shift=0.5), "shared", "update", (("w", (2,), "float32"),))
        'shift/shared/b5c87b37'
        >>> memory_key(Link(), "shared", "update", ())
        ''
    """
    mode = link.mode(kind)
    return "" if mode == "plain" else f"{mode}/{part}/{_fingerprint(layout)}"


@lru_cache(maxsize=1024)
def _fingerprint(layout: Layout) -> str:
    """8 hexadecimal digits for names and shapes, so that parts of one name do not mix."""
    return hashlib.blake2b(repr(layout).encode(), digest_size=4).hexdigest()


def encode_part(
    tensors: Tensors,
    kind: Kind,
    link: Link,
    buffers: Collection[str] = (),
    memory: Tensor | None = None,
    rng: np.random.Generator | None = None,
    flat: Tensor | None = None,
    layout: Layout | None = None,
    round: int = -1,
) -> tuple[EncodedPart, Tensor | None]:
    """Turns a part into bytes; `flat`, all its numbers, may change.

    `buffers`: names that no lossy codec may touch; they travel as fp32. `memory`: what the sender
    remembers, ``(d,)``. `round`: the round's number; -1 outside of rounds.

    Example:
        >>> part, _ = encode_part({"w": torch.ones(2), "mean": torch.ones(1)}, "update", Link())
        >>> len(part.data), decode_part(part, Link())[0]
        (24, {'w': tensor([1., 1.]), 'mean': tensor([1.])})
    """
    layout = layout or layout_of(tensors)
    coded, dense = sections(layout, link, buffers)
    if flat is None or dense:
        flat = _flat(tensors, coded)
    data, received, after = b"", None, None
    if coded or not dense:
        data, received, after = link.encode(flat, coded, kind, memory, rng, round, reuse=True)
    if dense:
        data += _DENSE.encode(_flat(tensors, dense))
    if link.zstd is not None:
        data = compress(data, link.zstd)
    return EncodedPart(kind, data, layout, received), after


def _unchanged(tensors: Tensors) -> Tensors:
    """What travels where no codec changes it: the tensors themselves, as no state changes."""
    return {
        n: t if t.is_contiguous() and not t.requires_grad else t.detach().contiguous()
        for n, t in tensors.items()
    }


def _check_finite(part: str, tensors: Tensors, total: float) -> None:
    """Refuses NaN and infinity; `total`: a sum or norm of all numbers, which is not finite then.

    As finite numbers may add up to infinity, tensors are checked one by one before any is refused.
    """
    if not math.isfinite(total) and (lost := first_non_finite(tensors)):
        raise NonFiniteError(f"{part}/{lost} holds NaN or infinity")


def decode_part(
    encoded: EncodedPart,
    link: Link,
    buffers: Collection[str] = (),
    memory: Tensor | None = None,
    device: torch.device | None = None,
) -> tuple[Tensors, Tensor | None]:
    """Undoes :func:`encode_part`.

    `memory`: what the receiver remembers, ``(d,)``. `device`: where the tensors are put; the CPU by
    default.
    """
    device = device or torch.device("cpu")
    if not isinstance(content := encoded.content, bytes):
        if device.type == "cpu" and all(map(attrgetter("is_cpu"), content.values())):
            return content, None
        return {n: t.to(device) for n, t in content.items()}, None
    coded, dense = sections(encoded.layout, link, buffers)
    least = dense_bytes(dense) if dense else 0
    data = encoded.data
    if link.zstd is not None:
        data = decompress(data, limit=1024 + 16 * numel(encoded.layout))
    if len(data) < least:
        raise CodecError(f"{len(data)} bytes are too few for {least} bytes of buffers.")
    end, tensors, after = len(data) - least, {}, None
    if coded or not dense:
        received = encoded.received
        if received is None:
            received = link.decode(data[:end], coded, encoded.kind, memory, device)
        tensors, after = _cut(received.values, coded), received.memory
    if dense:
        tensors |= _cut(_DENSE.decode(data[end:], numel(dense)).to(device), dense)
        tensors = select(tensors, (row[0] for row in encoded.layout))
    return tensors, after


def sections(layout: Layout, link: Link, buffers: Collection[str]) -> tuple[Layout, Layout]:
    """Returns the part for the codec, and the rest, which travels as fp32 after it.

    Example:
        >>> rows = (("w", (2,), "float32"), ("mean", (1,), "float32"))
        >>> sections(rows, Link(Dense("bfloat16")), {"mean"})
        ((('w', (2,), 'float32'),), (('mean', (1,), 'float32'),))
    """
    if (link.direct and link.codec.lossless) or not any(row[0] in buffers for row in layout):
        return layout, ()
    return (
        tuple(row for row in layout if row[0] not in buffers),
        tuple(row for row in layout if row[0] in buffers),
    )


def _cut(flat: Tensor, layout: Layout) -> Tensors:
    """As :func:`cut`, for finite numbers, which must stay finite in smaller types."""
    tensors = cut(flat, layout)
    for name, tensor in tensors.items():
        if tensor.dtype.itemsize < flat.dtype.itemsize and not all_finite(tensor):
            raise CodecError(f"{name} is beyond the range of {tensor.dtype}.")
    return tensors


def _flat(tensors: Tensors, layout: Layout) -> Tensor:
    return flatten(select(tensors, (name for name, _, _ in layout))).detach()


@dataclass(frozen=True)
class CER:
    """Replaces a vector by the solution of the fused lasso.

    The communication-efficient regulariser of pFedNet, in the corrected and exact form of
    :func:`medfed.functional.prox.fused_lasso`: a vector g that is about to be coded becomes the w
    that minimises ||w - g||^2 / 2 + gamma (sum_i |w_i - w_{i+1}| + |w_d|). Equal neighbours are
    what run-length codes save on. It comes after the residual is added, as the residual then holds
    what CER took away, too, and before the codec.

    pFedNet's authors advise a gamma that follows the gradients' size and changes over the rounds.
    With ``relative`` it does the former. With an ``end`` it goes from ``gamma`` in the first round
    to ``end`` in the last by equal factors: gamma_t = gamma (end / gamma)^(t / (rounds - 1)).

    Example:
        >>> import torch
        >>> cer = CER(gamma=0.5, relative=False)
        >>> cer(torch.tensor([4.0, 1.0, 2.0]))
        tensor([3.5000, 1.5000, 1.5000])
        >>> [CER(gamma=4.0, end=1.0, rounds=3).strength(t) for t in (0, 1, 2, 3, -1)]
        [4.0, 2.0, 1.0, 1.0, 1.0]
    """

    # How strongly neighbours are pulled together; 0: not at all, infinity: to zero.
    gamma: float = 0.0
    # Whether gamma is multiplied by the mean magnitude of the vector, so that it means the same in
    # every round; otherwise it is absolute.
    relative: bool = True
    # The gamma of the last round, more than 0; ``None``: that of the first.
    end: float | None = None
    rounds: int = 1  # after how many rounds the end is reached

    def __post_init__(self) -> None:
        if not self.gamma >= 0:
            raise ConfigError(f"cer.gamma must be 0 or more, not {self.gamma}.")
        if self.end is not None and not (0 < self.gamma < math.inf and 0 < self.end < math.inf):
            raise ConfigError(
                f"cer.end={self.end} changes cer.gamma={self.gamma} by equal factors, so both must "
                "be more than 0 and finite; set cer.end=null for a constant one."
            )

    def strength(self, round: int) -> float:
        """Returns gamma in a round; outside of rounds the smaller end, which loses least."""
        if self.end is None:
            return self.gamma
        if round < 0:
            return min(self.gamma, self.end)
        way = min(1.0, round / max(1, self.rounds - 1))
        return float(self.gamma * (self.end / self.gamma) ** way)

    def __call__(self, flat: Tensor, round: int = -1) -> Tensor:
        """Returns the vector of shape (d,) that is coded in place of finite ``flat`` (d,)."""
        gamma = self.strength(round)
        if not self.relative or flat.numel() == 0:
            return fused_lasso(flat, gamma)
        mean = float(flat.double().abs_().mean())
        # Infinity times zero is not a number, but the zero vector is its own solution.
        return fused_lasso(flat, gamma * mean if mean else 0.0)


def compress(data: bytes, level: int = 3) -> bytes:
    """Returns one Zstandard frame that states the length of ``data``.

    Example:
        >>> len(compress(bytes(10_000))) < 40
        True
    """
    frame: bytes = library().ZstdCompressor(level=level).compress(data)
    return frame


def decompress(data: bytes, limit: int) -> bytes:
    """Returns the input of :func:`compress`.

    `limit`: the most bytes that are accepted; a frame that states more, or nothing, is refused
    before anything is allocated.

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
    """Returns the package ``zstandard``."""
    try:
        import zstandard
    except ImportError as error:
        raise MachineError(
            "The zstd stage needs the package zstandard: pip install zstandard."
        ) from error
    return zstandard
