"""A message as it travels: its parts as bytes, and what each would have cost in fp32.

Behind what the codec gets of a part stands what always travels dense.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from medfed.common.tensors import Layout, Tensors, cut, flatten, layout_of, numel, select
from medfed.federation.wire.codecs.base import HEADER_BYTES, CodecError
from medfed.federation.wire.codecs.dense import Dense
from medfed.federation.wire.link import Link, Received
from medfed.federation.wire.message import Kind
from medfed.federation.wire.zstd import compress, decompress

_DENSE = Dense()


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
        return {"scalars": 8 * len(self.scalars)} if self.scalars else {}

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


def encode_part(
    tensors: Tensors,
    kind: Kind,
    link: Link,
    buffers: Collection[str] = (),
    memory: Tensor | None = None,
    rng: np.random.Generator | None = None,
    flat: Tensor | None = None,
) -> tuple[EncodedPart, Tensor | None]:
    """Turns a part into bytes.

    Args:
        tensors: Finite tensors by name.
        kind: Weights or an update.
        link: What happens on the way.
        buffers: Names that no lossy codec may touch; they travel as fp32.
        memory: What the sender remembers, ``(d,)``.
        rng: Source of the codec's random choices.
        flat: The tensors flattened, where the caller has them so.

    Returns:
        The encoded part, and what the sender remembers if it is sent.

    Example:
        >>> part, _ = encode_part({"w": torch.ones(2), "mean": torch.ones(1)}, "update", Link())
        >>> len(part.data), decode_part(part, Link())[0]
        (24, {'w': tensor([1., 1.]), 'mean': tensor([1.])})
    """
    layout = layout_of(tensors)
    coded, dense = sections(layout, link, buffers)
    if flat is None or dense:
        flat = _flat(tensors, coded)
    data, received, after = b"", None, None
    if coded or not dense:
        data, received, after = link.encode(flat, coded, kind, memory, rng)
    if dense:
        data += _DENSE.encode(_flat(tensors, dense))
    if link.zstd is not None:
        data = compress(data, link.zstd)
    return EncodedPart(kind, data, layout, received), after


def decode_part(
    encoded: EncodedPart,
    link: Link,
    buffers: Collection[str] = (),
    memory: Tensor | None = None,
    device: torch.device | None = None,
) -> tuple[Tensors, Tensor | None]:
    """Undoes :func:`encode_part`.

    Args:
        encoded: The part.
        link: What happened on the way.
        buffers: Names that no lossy codec may touch.
        memory: What the receiver remembers, ``(d,)``.
        device: Where the tensors are put; the CPU by default.

    Returns:
        The tensors by name, and what the receiver remembers from now on.

    Raises:
        CodecError: If the bytes are foreign, truncated or of another length.
    """
    device = device or torch.device("cpu")
    coded, dense = sections(encoded.layout, link, buffers)
    least = dense_bytes(dense) if dense else 0
    data = encoded.data
    if link.zstd is not None:
        data = decompress(data, limit=1024 + 32 * numel(encoded.layout))
    if len(data) < least:
        raise CodecError(f"{len(data)} bytes are too few for {least} bytes of buffers.")
    end, tensors, after = len(data) - least, {}, None
    if coded or not dense:
        received = encoded.received
        if received is None:
            received = link.decode(data[:end], coded, encoded.kind, memory, device)
        tensors, after = cut(received.values, coded), received.memory
    if dense:
        tensors |= cut(_DENSE.decode(data[end:], numel(dense)).to(device), dense)
        tensors = select(tensors, (row[0] for row in encoded.layout))
    return tensors, after


def sections(layout: Layout, link: Link, buffers: Collection[str]) -> tuple[Layout, Layout]:
    """Returns what the codec gets, and what travels as fp32 behind it.

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


def _flat(tensors: Tensors, layout: Layout) -> Tensor:
    return flatten(select(tensors, (name for name, _, _ in layout))).detach()
