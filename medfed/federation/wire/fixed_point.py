"""Sums of whole numbers, exact and free of order, so that clients may hide what they add.

Bonawitz et al.: Practical secure aggregation for privacy-preserving machine learning, CCS 2017:
the server learns Σ_n y_n modulo 2^32 of vectors of whole numbers, and no y_n.

A client turns each number x of a part into round(p_n s x), where p_n is its weight among all
clients of the federation (whoever takes part: a sum of any clients then has one scale), and the
scale s maps the stated range to 2^31. The server divides the sum by s Σ p_n over those that sent.
32 bits are enough: each client adds a rounding error of at most half a step, range / 2^31, so the
mean of 20 clients with a range of 16 is within 7.5e-8, and a message is as long as in fp32.
Numbers outside of the range are clipped, and the log says so.

In a simulation nothing hides the vectors: it computes the same sums. Across hospitals
:mod:`medfed.sites.masks` adds masks that cancel in the sum.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import torch

from medfed.common.tensors import Tensors, cut, flatten, numel
from medfed.federation.wire.packet import EncodedPart, Packet
from medfed.standalone.checks import check_fields, within
from medfed.standalone.errors import CodecError

Whole = np.ndarray[Any, np.dtype[np.uint32]]
FEWEST = 3  # clients of a sum: of two, each knows the other's vector
_HEADER = struct.Struct("<4sQ")
_MAGIC = b"mfq1"
_MOST = 2**31 - 2**16  # leaves room for the rounding of 2^17 clients


@dataclass(frozen=True)
class FixedPoint:
    """Parts of clients' messages that the server receives only as a sum.

    Example:
        >>> sums = FixedPoint(("shared",), 16.0)
        >>> sent = [({"w": torch.tensor([1.0])}, 0.25), ({"w": torch.tensor([-3.0])}, 0.75)]
        >>> layout = (("w", (1,), "float32"),)
        >>> parts = [EncodedPart("update", sums.encode(*each)[0], layout) for each in sent]
        >>> sums.mean(parts, 1.0)
        {'w': tensor([-2.])}
    """

    parts: tuple[str, ...]  # their names
    # The largest magnitude that is not clipped; it is cut into 2^31 steps.
    range: Annotated[float, within("(0, 1000000]")] = 16.0

    def __post_init__(self) -> None:
        check_fields("channel", self)

    @property
    def scale(self) -> float:
        """Steps per unit."""
        return _MOST / self.range

    def encode(self, tensors: Tensors, share: float) -> tuple[bytes, int]:
        """Returns a client's whole numbers as bytes, and how many were clipped.

        `share`: the client's weight among all clients, from 0 to 1.
        """
        flat = flatten(tensors).detach().double()
        clipped = int((flat.abs() > self.range).sum())
        whole = flat.clamp_(-self.range, self.range).mul_(share * self.scale).round_()
        data = whole.to("cpu", torch.int32).numpy().astype("<i4").tobytes()
        return _HEADER.pack(_MAGIC, flat.numel()) + data, clipped

    def mean(self, parts: Sequence[EncodedPart], share: float, device: str = "cpu") -> Tensors:
        """Returns the clients' mean."""
        layout = parts[0].layout
        total = np.zeros(numel(layout), np.uint32)
        for part in parts:
            if part.layout != layout:
                raise CodecError("Clients send other names or shapes of a part that is summed.")
            total += read(part)
        values = torch.from_numpy(total.view(np.int32)).to(device, torch.float64)
        return cut(values / (share * self.scale), layout)

    def read(self, packet: Packet) -> Whole:
        """Returns the numbers of all parts of a packet that are summed, in the order of names."""
        parts = [read(packet.parts[name]) for name in sorted(packet.parts) if name in self.parts]
        return np.concatenate(parts) if parts else np.zeros(0, np.uint32)

    def added(self, packet: Packet, whole: Whole) -> Packet:
        """Returns a packet to whose numbers, in the order of :meth:`read`, others are added."""
        parts, at = dict(packet.parts), 0
        for name in sorted(parts):
            if name in self.parts:
                numbers = read(parts[name])
                moved = numbers + whole[at : (at := at + len(numbers))]
                data = _HEADER.pack(_MAGIC, len(moved)) + moved.astype("<u4").tobytes()
                parts[name] = replace(parts[name], content=data)
        return replace(packet, parts=parts)


def read(part: EncodedPart) -> Whole:
    """Returns the whole numbers of a part, ``(d,)``."""
    length = numel(part.layout)
    if part.data[: _HEADER.size] != _HEADER.pack(_MAGIC, length):
        raise CodecError("These bytes are not of a part that is summed.")
    if len(part.data) != _HEADER.size + 4 * length:
        raise CodecError(f"{len(part.data)} bytes do not hold {length} whole numbers.")
    return np.frombuffer(part.data, "<u4", offset=_HEADER.size).astype(np.uint32, copy=False)
