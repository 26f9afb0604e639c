"""What stands around every send and reply: tensors become bytes and tensors again.

Training continues from the decoded result, so what a codec loses is lost for the run, too. Names
and shapes are agreed on with the model and do not travel; everything else is counted.

Either end owns a memory: a flat dictionary from ``mode/part/layout`` to a vector (see
:mod:`medfed.federation.wire.link`). The channel itself keeps nothing that a result depends on:
whoever calls it hands in the memory of the client at this end, gets a new one back, and decides
whether to keep it. An evaluation does not, and a message that cannot be coded leaves everything as
it was.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from medfed.common.errors import CodecError, ConfigError, NonFiniteError
from medfed.common.seeding import derive_seed
from medfed.common.tensors import Layout, Tensors, first_non_finite, flatten, layout_of
from medfed.federation.wire.codecs.base import Codec
from medfed.federation.wire.ledger import Direction
from medfed.federation.wire.link import Link
from medfed.federation.wire.message import Kind, Message
from medfed.federation.wire.packet import EncodedPart, Packet, decode_part, encode_part

Memory = Tensors


class Place(NamedTuple):
    """Where a message belongs; random choices of codecs are keyed by it.

    Attributes:
        client: The client at the other end.
        round: The round's number; -1 for what is delivered outside of rounds.
        phase: Position of the phase within the round.
    """

    client: str = ""
    round: int = -1
    phase: int = 0


NOWHERE = Place()


_Alike = tuple[Kind, int | None, int | None]
"""Kind, memory (by identity) and draw: who is sent a part under the same gets the same bytes."""


@dataclass(frozen=True)
class _Sent:
    """A part that went down, and the memory that it was coded from, which so keeps its identity."""

    before: Tensor | None
    encoded: EncodedPart
    after: Tensor | None


class Channel:
    """Both directions between the server and its clients.

    Args:
        up: What clients send goes through it: a link, or a codec alone; dense fp32 by default.
        down: The same for what the server sends.
        device: Where decoded tensors are put.
        seed: Seed of the run.
        buffers: Names of tensors that no lossy codec may touch (BatchNorm statistics).
    """

    def __init__(
        self,
        up: Link | Codec | None = None,
        down: Link | Codec | None = None,
        device: str = "cpu",
        seed: int = 0,
        buffers: Collection[str] = (),
    ) -> None:
        self.links: dict[Direction, Link] = {"up": _link(up), "down": _link(down)}
        self._others = {d: Link(zstd=link.zstd) for d, link in self.links.items()}
        self.device = torch.device(device)
        self.seed = seed
        self.buffers = frozenset(buffers)
        # A part that is broadcast is one object in many messages: it is coded once, and its
        # decoded tensors are one object at all clients, so memory grows with personal parts only.
        self._encoded: dict[str, tuple[Tensors, dict[_Alike, _Sent]]] = {}
        self._decoded: dict[str, tuple[EncodedPart, Tensors]] = {}

    def encode(
        self,
        message: Message,
        direction: Direction,
        place: Place = NOWHERE,
        memory: Memory | None = None,
    ) -> tuple[Packet, Memory]:
        """Turns a message into the bytes that travel.

        Args:
            message: The message.
            direction: The way it goes.
            place: Where it belongs.
            memory: What the sender remembers of this client and direction.

        Returns:
            The packet, and what the sender remembers if it is sent.

        Raises:
            NonFiniteError: If a tensor or scalar holds NaN or infinity, or numbers that a lossy
                codec cannot hold; it is named.
            CodecError: If a tensor is of whole numbers.
        """
        parts, after = {}, dict(memory or {})
        for part, tensors in message.parts.items():
            kind, link = message.kind(part), self._link(direction, message.phase, part)
            if (known := self._broadcast(part, tensors, kind, link, direction)) is not None:
                parts[part] = known.encoded
                continue
            for name, tensor in tensors.items():
                if not tensor.is_floating_point():
                    raise CodecError(
                        f"{part}/{name} is {tensor.dtype}; only real floating-point tensors "
                        "travel: convert it"
                    )
            layout = layout_of(tensors)
            key = memory_key(link, part, kind, layout)
            sent = self._sent(part, tensors, kind, link, direction, place, after.get(key), layout)
            parts[part] = sent.encoded
            if sent.after is not None:
                after[key] = sent.after
        for name, value in message.scalars.items():
            if not math.isfinite(value):
                raise NonFiniteError(f"the scalar {name} is {value}")
        return Packet(message.phase, message.scalars, parts), after

    def decode(
        self, packet: Packet, direction: Direction, memory: Memory | None = None
    ) -> tuple[Message, Memory]:
        """Turns the bytes back into the message that the receiver continues from.

        Args:
            packet: What :meth:`encode` returned.
            direction: The way it went.
            memory: What the receiver remembers of this client and direction.

        Returns:
            The message, and what the receiver remembers from now on.

        Raises:
            CodecError: If bytes are foreign or truncated, or decode to NaN or infinity, also
                together with what is remembered; part and codec are named.
        """
        parts, after = {}, dict(memory or {})
        for part, encoded in packet.parts.items():
            link = self._link(direction, packet.phase, part)
            key = memory_key(link, part, encoded.kind, encoded.layout)
            parts[part], kept = self._received(part, encoded, link, direction, after.get(key))
            if kept is not None:
                after[key] = kept
        kinds = {part: e.kind for part, e in packet.parts.items()}
        return Message(packet.phase, parts, packet.scalars, kinds), after

    def _link(self, direction: Direction, phase: str, part: str) -> Link:
        link = self.links[direction]
        return link if link.compresses(phase, part) else self._others[direction]

    def _broadcast(
        self, part: str, tensors: Tensors, kind: Kind, link: Link, direction: Direction
    ) -> _Sent | None:
        """Returns what other clients were sent, where a client's bytes depend on nothing else."""
        if direction == "up" or not link.direct or link.mode(kind) != "plain":
            return None
        return self._known(part, tensors).get((kind, None, None))

    def _known(self, part: str, tensors: Tensors) -> dict[_Alike, _Sent]:
        """What others were sent of these very tensors."""
        last = self._encoded.get(part)
        return last[1] if last is not None and last[0] is tensors else {}

    def _sent(
        self,
        part: str,
        tensors: Tensors,
        kind: Kind,
        link: Link,
        direction: Direction,
        place: Place,
        before: Tensor | None,
        layout: Layout,
    ) -> _Sent:
        known = self._known(part, tensors) if direction == "down" else {}
        alike: _Alike = (kind, None if before is None else id(before), None)
        if link.direct and alike in known:
            return known[alike]
        flat = flatten(tensors).detach()
        total = float(flat.sum())
        if not math.isfinite(total) and (name := first_non_finite(tensors)):
            raise NonFiniteError(f"{part}/{name} holds NaN or infinity")
        draw, rng = None, None
        if not link.direct:
            # Downwards the content stands for the client: who is sent the same gets the same
            # bytes, on whatever rank, and what differs is drawn independently.
            who = place.client if direction == "up" else total.hex()
            draw = derive_seed(self.seed, place.round, who, place.phase, direction, part, "codec")
            alike = (*alike[:2], draw)
            if alike in known:
                return known[alike]
            rng = np.random.default_rng(draw)
        try:
            encoded, after = encode_part(
                tensors, kind, link, self.buffers, before, rng, flat, layout
            )
        except (ConfigError, NonFiniteError):
            raise
        except ValueError as error:  # finite, but beyond what fp32 or a sum can hold
            raise NonFiniteError(
                f"{part} cannot be coded by {link.codec}: {str(error).rstrip('.')}"
            ) from error
        sent = _Sent(before, encoded, after)
        if direction == "down":
            known[alike] = sent
            self._encoded[part] = tensors, known
        return sent

    def _received(
        self,
        part: str,
        encoded: EncodedPart,
        link: Link,
        direction: Direction,
        before: Tensor | None,
    ) -> tuple[Tensors, Tensor | None]:
        memo = self._decoded.get(part)
        if memo is not None and memo[0] is encoded:
            return memo[1], encoded.received.memory if encoded.received else None
        try:
            tensors, after = decode_part(encoded, link, self.buffers, before, self.device)
        except CodecError as error:
            why = str(error).rstrip(".")
            raise CodecError(f"{part} cannot be decoded by {link.codec}: {why}") from error
        if direction == "down":
            self._decoded[part] = (encoded, tensors)
        return tensors, after


def memory_key(link: Link, part: str, kind: Kind, layout: Layout) -> str:
    """Returns the name under which an end remembers a part; empty where nothing is remembered.

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


def _link(given: Link | Codec | None) -> Link:
    return given if isinstance(given, Link) else Link(given)
