"""A message as it travels: its parts as bytes, and what each would have cost in fp32.

Behind what the codec gets of a part stands what always travels dense.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medfed.common.errors import CodecError, first_line
from medfed.common.tensors import Layout, Tensors, cut, flatten, layout_of, numel, select
from medfed.federation.wire.codecs.base import HEADER_BYTES, MAX_UNCHECKED, Payload, all_finite
from medfed.federation.wire.codecs.dense import Dense
from medfed.federation.wire.link import Link, Received, compress, decompress
from medfed.federation.wire.message import KINDS, Kind

_DENSE = Dense()
_Described = tuple[str, Kind, Layout, int]
_MOST_AXES = 32
FLOATS = ("float32", "float64", "float16", "bfloat16")
"""The types of tensors that travel: codecs, which compute in fractions, would not keep others."""


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

    @cached_property
    def dense_size(self) -> int:
        """Its bytes as fp32, asked for by every client of a broadcast."""
        return dense_bytes(self.layout)


@dataclass(frozen=True)
class Packet:
    """A message as it travels."""

    phase: str
    scalars: Mapping[str, float]
    parts: Mapping[str, EncodedPart]

    def sizes(self) -> dict[str, int]:
        """Returns the bytes of each part; scalars travel as 8-byte numbers."""
        return {part: len(e.data) for part, e in self.parts.items()} | self._scalar_bytes()

    def dense_sizes(self) -> dict[str, int]:
        """Returns the bytes that each part would have as fp32: 12 of header, 4 per element."""
        return {part: e.dense_size for part, e in self.parts.items()} | self._scalar_bytes()

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
        return b"".join(
            (len(text).to_bytes(8, "little"), text, *(e.data for e in self.parts.values()))
        )

    @classmethod
    def from_bytes(cls, data: bytes, most: int = MAX_UNCHECKED) -> Packet:
        """Reads what :meth:`to_bytes` wrote, and trusts nothing in it.

        Args:
            data: The bytes.
            most: The most elements that the receiver would take, all parts together; bytes that
                could hold a bit of each may state more.

        Raises:
            CodecError: If the bytes are foreign, torn or too many, or state what no packet has.
        """
        payload = Payload(memoryview(data))
        (size,) = payload.numbers("<Q")
        phase, scalars, described = _read_head(payload.take(size))
        parts: dict[str, EncodedPart] = {}
        for part, kind, layout, length in described:
            if part in parts:
                raise CodecError(f"The packet holds the part {part} twice.")
            parts[part] = EncodedPart(kind, bytes(payload.take(length)), layout)
        payload.finish()
        elements = sum(numel(encoded.layout) for encoded in parts.values())
        if elements > max(most, 8 * len(data)):
            raise CodecError(f"{len(data)} bytes claim {elements} elements, which is too many.")
        return cls(phase, scalars, parts)


def _read_head(text: memoryview) -> tuple[str, dict[str, float], list[_Described]]:
    """Returns the phase, the scalars, and of each part its name, kind, layout and length.

    Raises:
        CodecError: If it is no JSON, or anything in it is not what a sender writes.
    """
    try:
        head = json.loads(bytes(text))
        if set(head) != {"phase", "scalars", "parts"}:
            raise ValueError(f"it has the keys {sorted(head)}")
        scalars = {_name(n): _number(value) for n, value in head["scalars"].items()}
        described = [
            (_name(part), _kind(kind), _layout(rows), _whole(length))
            for part, kind, rows, length in head["parts"]
        ]
        return _name(head["phase"]), scalars, described
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CodecError(f"The head of a packet cannot be read ({first_line(error)}).") from error


def _layout(rows: list[list[Any]]) -> Layout:
    layout = tuple(
        (_name(name), tuple(map(_whole, shape)), _dtype(dtype)) for name, shape, dtype in rows
    )
    if len({name for name, _, _ in layout}) < len(layout):
        raise ValueError("two tensors of a part have one name")
    if any(len(shape) > _MOST_AXES for _, shape, _ in layout):
        raise ValueError(f"a tensor has more than {_MOST_AXES} axes")
    return layout


def _name(value: object) -> str:
    # Names end up in tables and sentences: no line breaks, nothing that UTF-8 cannot hold.
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError(f"{value!r:.40} is no name")
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r:.40} is no finite number")
    return value


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**48:
        raise ValueError(f"{value!r:.40} is no size")
    return value


def _kind(value: object) -> Kind:
    for kind in KINDS:
        if kind == value:
            return kind
    raise ValueError(f"{value!r:.40} is none of {', '.join(KINDS)}")


def _dtype(value: object) -> str:
    if value not in FLOATS:
        raise ValueError(f"{value!r:.40} is none of {', '.join(FLOATS)}")
    return str(value)


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
    layout: Layout | None = None,
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
        layout: Theirs, likewise.

    Returns:
        The encoded part, and what the sender remembers if it is sent.

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
        CodecError: If the bytes are foreign, truncated or of another length, or hold numbers that
            are not finite in the type of their tensor.
    """
    device = device or torch.device("cpu")
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


def _cut(flat: Tensor, layout: Layout) -> Tensors:
    """As :func:`cut`, of finite numbers, which must stay so in types that hold fewer."""
    tensors = cut(flat, layout)
    for name, tensor in tensors.items():
        if tensor.dtype.itemsize < flat.dtype.itemsize and not all_finite(tensor):
            raise CodecError(f"{name} is beyond the range of {tensor.dtype}.")
    return tensors


def _flat(tensors: Tensors, layout: Layout) -> Tensor:
    return flatten(select(tensors, (name for name, _, _ in layout))).detach()
