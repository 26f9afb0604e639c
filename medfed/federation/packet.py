"""A message as it travels: bytes per part, and what each part would have cost in fp32."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from medfed.federation.codecs.base import HEADER_BYTES
from medfed.federation.message import Kind
from medfed.federation.tensors import Layout, numel


class Received(NamedTuple):
    """What the receiver of a part ends with.

    Attributes:
        values: ``(d,)``, what it continues from; the entries that always travel dense left out.
        memory: ``(d,)``, what it remembers of them; ``None`` where nothing need be remembered.
    """

    values: Tensor
    memory: Tensor | None


@dataclass(frozen=True)
class EncodedPart:
    """One part as bytes, with the layout that both ends know from the model.

    Attributes:
        kind: Weights or an update.
        data: What travels.
        layout: Name, shape and dtype of each tensor.
        received: What a sender with memory knows of the other end, because it has decoded its own
            bytes. A receiver in the same process takes it instead of decoding them again, so that
            both ends refer to one tensor. It does not travel.
    """

    kind: Kind
    data: bytes
    layout: Layout
    received: Received | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Packet:
    """A message as it travels."""

    phase: str
    scalars: Mapping[str, float]
    parts: Mapping[str, EncodedPart]

    def sizes(self) -> dict[str, int]:
        """Returns the bytes of each part; scalars travel as 8-byte numbers."""
        sizes = {part: len(encoded.data) for part, encoded in self.parts.items()}
        return sizes | self._scalar_bytes()

    def dense_sizes(self) -> dict[str, int]:
        """Returns the bytes that each part would have as fp32: 12 of header, 4 per element."""
        sizes = {part: dense_bytes(encoded.layout) for part, encoded in self.parts.items()}
        return sizes | self._scalar_bytes()

    def _scalar_bytes(self) -> dict[str, int]:
        if not self.scalars:
            return {}
        return {"scalars": len(struct.pack(f"<{len(self.scalars)}d", *self.scalars.values()))}

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


def dense_bytes(layout: Layout) -> int:
    """Returns the length of tensors that travel as fp32, header included.

    Example:
        >>> dense_bytes((("w", (2, 3), "float32"), ("b", (), "float32")))
        40
    """
    return HEADER_BYTES + 4 * numel(layout)
