"""One part of a message as bytes: what the codec gets, and behind it what always travels dense."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from medfed.federation.codecs import CodecError, Dense
from medfed.federation.link import Link
from medfed.federation.message import Kind
from medfed.federation.packet import EncodedPart, dense_bytes
from medfed.federation.tensors import Layout, Tensors, cut, flatten, layout_of, numel, select

_DENSE = Dense()


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
    return EncodedPart(kind, link.squeezed(data), layout, received), after


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
    data = link.unsqueezed(encoded.data, limit=1024 + 32 * numel(encoded.layout))
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
