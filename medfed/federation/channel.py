"""What stands around every send and reply: a codec turns tensors into bytes and back.

Training continues from the decoded result, so what a codec loses is lost for the run, too. Names
and shapes are agreed on with the model and do not travel; everything else is counted.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from medfed.errors import NonFiniteError
from medfed.federation.codecs import Codec, Dense
from medfed.federation.ledger import Direction
from medfed.federation.message import Kind, Message
from medfed.federation.tensors import Layout, Tensors, cut, first_non_finite, flatten, layout_of


@dataclass(frozen=True)
class EncodedPart:
    """One part as bytes, with the layout that both ends know from the model."""

    kind: Kind
    data: bytes
    layout: Layout


@dataclass(frozen=True)
class Packet:
    """A message as it travels."""

    phase: str
    scalars: Mapping[str, float]
    parts: Mapping[str, EncodedPart]

    def sizes(self) -> dict[str, int]:
        """Returns the bytes of each part; scalars travel as 8-byte numbers."""
        sizes = {part: len(encoded.data) for part, encoded in self.parts.items()}
        if self.scalars:
            sizes["scalars"] = len(struct.pack(f"<{len(self.scalars)}d", *self.scalars.values()))
        return sizes

    def to_bytes(self) -> bytes:
        """Returns the packet as one byte string, for the transport between ranks."""
        head = {
            "phase": self.phase,
            "scalars": dict(self.scalars),
            "parts": [(p, e.kind, e.layout, len(e.data)) for p, e in self.parts.items()],
        }
        text = json.dumps(head).encode()
        payload = [e.data for e in self.parts.values()]
        return b"".join((len(text).to_bytes(8, "little"), text, *payload))

    @classmethod
    def from_bytes(cls, data: bytes) -> Packet:
        """Reads what :meth:`to_bytes` wrote."""
        start = 8 + int.from_bytes(data[:8], "little")
        head = json.loads(data[8:start])
        parts = {}
        for part, kind, layout, size in head["parts"]:
            rows = tuple((name, tuple(shape), dtype) for name, shape, dtype in layout)
            parts[part] = EncodedPart(kind, data[start : start + size], rows)
            start += size
        return cls(head["phase"], head["scalars"], parts)


class Channel:
    """Codecs of both directions.

    Args:
        up: Codec of what clients send; dense fp32 by default.
        down: Codec of what the server sends; dense fp32 by default.
        device: Where decoded tensors are put.
    """

    def __init__(
        self, up: Codec | None = None, down: Codec | None = None, device: str = "cpu"
    ) -> None:
        self.codecs: dict[Direction, Codec] = {"up": up or Dense(), "down": down or Dense()}
        self.device = torch.device(device)
        # A part that is broadcast is one object in many messages: it is coded once, and its
        # decoded tensors are one object at all clients, so memory grows with personal parts only.
        self._encoded: dict[str, tuple[Tensors, EncodedPart]] = {}
        self._decoded: dict[str, tuple[EncodedPart, Tensors]] = {}

    def encode(self, message: Message, direction: Direction) -> Packet:
        """Turns a message into the bytes that travel.

        Raises:
            NonFiniteError: If a tensor or scalar holds NaN or infinity; it is named.
        """
        parts = {}
        for part, tensors in message.parts.items():
            memo = self._encoded.get(part) if direction == "down" else None
            if memo is not None and memo[0] is tensors and memo[1].kind == message.kind(part):
                parts[part] = memo[1]
                continue
            parts[part] = self._encode_part(part, tensors, message.kind(part), direction)
            if direction == "down":
                self._encoded[part] = (tensors, parts[part])
        for name, value in message.scalars.items():
            if not math.isfinite(value):
                raise NonFiniteError(f"the scalar {name} is {value}")
        return Packet(message.phase, message.scalars, parts)

    def _encode_part(
        self, part: str, tensors: Tensors, kind: Kind, direction: Direction
    ) -> EncodedPart:
        flat = flatten(tensors)
        if not bool(torch.isfinite(flat.sum())) and (name := first_non_finite(tensors)):
            raise NonFiniteError(f"{part}/{name} holds NaN or infinity")
        return EncodedPart(kind, self.codecs[direction].encode(flat), layout_of(tensors))

    def decode(self, packet: Packet, direction: Direction) -> Message:
        """Turns the bytes back into the message that the receiver continues from."""
        parts: dict[str, Tensors] = {}
        for part, encoded in packet.parts.items():
            memo = self._decoded.get(part)
            if memo is not None and memo[0] is encoded:
                parts[part] = memo[1]
                continue
            flat = self.codecs[direction].decode(encoded.data).to(self.device)
            parts[part] = cut(flat, encoded.layout)
            if direction == "down":
                self._decoded[part] = (encoded, parts[part])
        kinds = {part: e.kind for part, e in packet.parts.items()}
        return Message(packet.phase, parts, packet.scalars, kinds)
