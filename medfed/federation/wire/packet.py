"""A message in transit: its parts as bytes, and the cost of each in fp32."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from medfed.common.errors import CodecError, first_line
from medfed.common.tensors import Layout, numel
from medfed.federation.wire.codecs.base import HEADER_BYTES, MAX_UNCHECKED, Payload
from medfed.federation.wire.message import KINDS, Kind

_Described = tuple[str, Kind, Layout, int]
_MOST_AXES = 32
FLOATS = ("float32", "float64", "float16", "bfloat16")
"""The types of tensors that travel: codecs, which compute in fractions, would not keep others."""


class Received(NamedTuple):
    """The receiver's result for a part.

    Attributes:
        values: ``(d,)``, the decoded values, without the entries that always travel dense.
        memory: ``(d,)``, the new memory; ``None`` if nothing need be remembered.
    """

    values: Tensor
    memory: Tensor | None


@dataclass(frozen=True)
class EncodedPart:
    """One part as bytes, with the layout that both ends know from the model.

    Attributes:
        kind: Weights or an update.
        data: The bytes.
        layout: Name, shape and dtype of each tensor.
        received: The other end's result, which a sender with memory has decoded itself. A receiver
            in the same process uses it instead of decoding again, so that both ends share one
            tensor. It does not travel.
    """

    kind: Kind
    data: bytes
    layout: Layout
    received: Received | None = field(default=None, compare=False, repr=False)

    @cached_property
    def dense_size(self) -> int:
        """Its bytes as fp32, which every client of a broadcast needs."""
        return dense_bytes(self.layout)


@dataclass(frozen=True)
class Packet:
    """A message as it travels."""

    phase: str
    scalars: Mapping[str, float]
    parts: Mapping[str, EncodedPart]

    @property
    def size(self) -> int:
        """The bytes of all parts."""
        return sum(len(encoded.data) for encoded in self.parts.values())

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Returns the bytes of each part, and its bytes as fp32.

        That is 12 of header and 4 per element; scalars travel as 8-byte numbers either way.
        """
        sizes = {part: (len(e.data), e.dense_size) for part, e in self.parts.items()}
        scalars = 8 * len(self.scalars)
        return sizes | ({"scalars": (scalars, scalars)} if scalars else {})

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
        """Reads the bytes of :meth:`to_bytes`, and trusts nothing in them.

        Args:
            data: The bytes.
            most: The most elements that the receiver would take, all parts together; bytes that
                could hold a bit of each may state more.

        Raises:
            CodecError: If the bytes are foreign, incomplete or too many, or invalid for a packet.
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
        CodecError: If it is not JSON, or anything in it is not written by a sender.
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
