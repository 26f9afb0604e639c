"""Messages, the only objects that cross between a client and the server, and their bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from medfed.common.schemas import Count, Number, parse_json
from medfed.common.tensors import Layout, Tensors, flatten, joined, layout_of, length, numel
from medfed.federation.wire.codecs.base import HEADER_BYTES, MAX_UNCHECKED, Payload
from medfed.federation.wire.codecs.dense import Dense
from medfed.standalone.errors import CodecError, first_line

Kind = Literal["state", "update"]
KINDS: tuple[Kind, ...] = ("state", "update")


@dataclass(frozen=True)
class Message:
    """Named parts, each a group of named tensors, and a few scalars.

    Attributes:
        phase: The phase of the round that the message belongs to.
        parts: Part name (``shared``, ``personal``, ``sketch`` ...) to its tensors.
        scalars: Numbers that travel with the tensors.
        kinds: Per part ``state`` (weights) or ``update`` (gradient, displacement); a lossy codec
            encodes an update directly and a state as a difference. The default is ``state``.
            Sending checks the kinds.

    Example:
        >>> import torch
        >>> m = Message("fit", {"shared": {"w": torch.ones(2)}}, kinds={"shared": "update"})
        >>> m.kind("shared")
        'update'
    """

    phase: str = "fit"
    parts: Mapping[str, Tensors] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)
    kinds: Mapping[str, Kind] = field(default_factory=dict)

    def kind(self, part: str) -> Kind:
        """Returns the declared kind of a part."""
        return self.kinds.get(part, "state")


# The types of tensors that travel: codecs, which compute in fractions, would not keep others.
Float = Literal["float32", "float64", "float16", "bfloat16"]
_Shape = Annotated[tuple[Count, ...], msgspec.Meta(max_length=32)]


class _Part(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    name: str
    kind: Kind
    layout: tuple[tuple[str, _Shape, Float], ...]
    length: Count


class _Head(msgspec.Struct, forbid_unknown_fields=True):
    phase: str
    scalars: dict[str, Number]
    parts: list[_Part]


class Received(NamedTuple):
    """The receiver's result for a part."""

    values: Tensor  # ``(d,)``, the decoded values, without the entries that always travel dense
    memory: Tensor | None  # ``(d,)``, the new memory; ``None`` if nothing need be remembered


@dataclass(frozen=True)
class EncodedPart:
    """One part, with the layout that both ends know from the model."""

    kind: Kind  # weights or an update
    # Its ``bytes``. What no codec changes is instead the ``Tensors`` themselves: a receiver in the
    # same process needs no bytes, and they are only counted.
    content: Any = field(repr=False)
    rows: Layout | None = None  # name, shape and dtype of each tensor; None: those of the content
    # The other end's result, which a sender with memory has decoded itself. A receiver in the same
    # process uses it instead of decoding again, so that both ends share one tensor. It does not
    # travel.
    received: Received | None = field(default=None, compare=False, repr=False)

    @cached_property
    def layout(self) -> Layout:
        """Name, shape and dtype of each tensor."""
        return layout_of(self.content) if self.rows is None else self.rows

    @property
    def data(self) -> bytes:
        """The bytes that travel."""
        if isinstance(self.content, bytes):
            return self.content
        codec = Dense("float64" if self._is_double else "float32")
        return codec.encode(flatten(self.content).to(codec.dtype))

    @cached_property
    def size(self) -> int:
        """The number of bytes that travel."""
        if isinstance(self.content, bytes):
            return len(self.content)
        return 2 * self.dense_size - HEADER_BYTES if self._is_double else self.dense_size

    @property
    def _is_double(self) -> bool:
        return any(t.dtype == torch.float64 for t in self.content.values())

    def few(self, decoded: Tensors) -> tuple[dict[Any, Tensor], float]:
        """Returns the tensors that it was decoded to, joined, and their norm."""
        return self.unchanged if decoded is self.content else _few(decoded)

    @cached_property
    def unchanged(self) -> tuple[dict[Any, Tensor], float]:
        """The same of what no codec changes; the norm is not finite if a number is not."""
        return _few(self.content)

    @cached_property
    def dense_size(self) -> int:
        """Its bytes as fp32, which every client of a broadcast needs."""
        if isinstance(self.content, bytes):
            return dense_bytes(self.layout)
        return HEADER_BYTES + 4 * sum(map(Tensor.numel, self.content.values()))


def _few(tensors: Tensors) -> tuple[dict[Any, Tensor], float]:
    few = joined(tensors)
    return few, length(few)


@dataclass(frozen=True)
class Packet:
    """A message as it travels."""

    phase: str
    scalars: Mapping[str, float]
    parts: Mapping[str, EncodedPart]

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Returns the bytes of each part, and its bytes as fp32.

        That is 12 of header and 4 per element; scalars travel as 8-byte numbers either way.
        """
        sizes = {part: (e.size, e.dense_size) for part, e in self.parts.items()}
        scalars = 8 * len(self.scalars)
        return sizes | ({"scalars": (scalars, scalars)} if scalars else {})

    def to_bytes(self) -> bytes:
        """Returns the packet as one byte string, for the transport between ranks."""
        head = {
            "phase": self.phase,
            "scalars": dict(self.scalars),
            "parts": [(p, e.kind, e.layout, e.size) for p, e in self.parts.items()],
        }
        text = json.dumps(head).encode()
        return b"".join(
            (len(text).to_bytes(8, "little"), text, *(e.data for e in self.parts.values()))
        )

    @classmethod
    def from_bytes(cls, data: bytes, most: int = MAX_UNCHECKED) -> Packet:
        """Reads the bytes of :meth:`to_bytes`, and trusts nothing in them.

        `most`: the most elements that the receiver would take, all parts together; bytes that could
        hold a bit of each may state more.
        """
        payload = Payload(memoryview(data))
        (size,) = payload.numbers("<Q")
        head = _read_head(payload.take(size))
        parts: dict[str, EncodedPart] = {}
        for part in head.parts:
            if part.name in parts:
                raise CodecError(f"The packet holds the part {part.name} twice.")
            parts[part.name] = EncodedPart(part.kind, bytes(payload.take(part.length)), part.layout)
        payload.finish()
        elements = sum(numel(encoded.layout) for encoded in parts.values())
        if elements > max(most, 8 * len(data)):
            raise CodecError(f"{len(data)} bytes claim {elements} elements, which is too many.")
        return cls(head.phase, head.scalars, parts)


def _read_head(text: memoryview) -> _Head:
    """Returns the head of a packet."""
    try:
        head = parse_json(text, _Head)
        rows = [name for part in head.parts for name, _, _ in part.layout]
        # Names end up in tables and sentences: no line breaks, nothing that UTF-8 cannot hold.
        for name in (head.phase, *head.scalars, *(part.name for part in head.parts), *rows):
            if not name.isprintable():
                raise ValueError(f"{name!r:.40} is no name")
        if any(len({row[0] for row in part.layout}) < len(part.layout) for part in head.parts):
            raise ValueError("two tensors of a part have one name")
    except ValueError as error:
        raise CodecError(f"The head of a packet cannot be read ({first_line(error)}).") from error
    return head


def dense_bytes(layout: Layout) -> int:
    """Returns the length of tensors that travel as fp32, header included.

    Example:
        >>> dense_bytes((("w", (2, 3), "float32"), ("b", (), "float32")))
        40
    """
    return HEADER_BYTES + 4 * numel(layout)
