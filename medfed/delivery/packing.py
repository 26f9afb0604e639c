"""Small integers as bit planes: one bit of every integer, eight integers to a byte.

Plane ``b`` holds bit ``b`` of all integers, the least significant bit first. Within a plane integer
``i`` lies in byte ``i // 8`` under the mask ``1 << (i % 8)``, which is ``numpy.packbits`` with
``bitorder="little"``. Bits beyond the last integer are zero.

Planes unpack by ``bitwise_and`` and comparisons alone, operations that every runtime has for bytes;
shifts of bytes are not among them everywhere (ONNX Runtime).
"""

from __future__ import annotations

import torch
from torch import Tensor

from medfed.errors import ConfigError

MAX_BITS = 8


def pack(indices: Tensor, bits: int) -> Tensor:
    """Packs integers into bit planes.

    Args:
        indices: Integers of any shape, n in all, each in ``[0, 2**bits)``.
        bits: Bits per integer, 1 to 8.

    Returns:
        ``(bits, ceil(n / 8))`` uint8.

    Raises:
        ConfigError: If ``bits`` is outside 1 to 8.
        ValueError: If an integer does not fit into the bits.

    Example:
        >>> pack(torch.tensor([3, 0, 1]), bits=2)
        tensor([[5],
                [1]], dtype=torch.uint8)
    """
    check_bits(bits)
    flat = indices.reshape(-1).to(torch.int64)
    if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < 2**bits:
        raise ValueError(f"Integers from {flat.min()} to {flat.max()} do not fit into {bits} bits.")
    padded = torch.zeros(-(-flat.numel() // 8) * 8, dtype=torch.uint8)
    padded[: flat.numel()] = flat.to(torch.uint8)
    masks = (2 ** torch.arange(bits)).to(torch.uint8)
    planes = (torch.bitwise_and(padded, masks[:, None]) != 0).reshape(bits, -1, 8)
    places = (2 ** torch.arange(8)).to(torch.uint8)
    return (planes * places).sum(dim=2, dtype=torch.int64).to(torch.uint8)


def unpack(planes: Tensor, count: int) -> Tensor:
    """Undoes :func:`pack`.

    Args:
        planes: ``(bits, ceil(count / 8))`` uint8.
        count: n, the integers that were packed.

    Returns:
        ``(count,)`` int64.

    Raises:
        ValueError: If the planes have another type or shape.

    Example:
        >>> unpack(torch.tensor([[5], [1]], dtype=torch.uint8), count=3)
        tensor([3, 0, 1])
    """
    if planes.dtype != torch.uint8 or planes.ndim != 2 or planes.shape[1] != -(-count // 8):
        raise ValueError(
            f"Planes of {count} integers are (bits, {-(-count // 8)}) uint8, "
            f"not {tuple(planes.shape)} {planes.dtype}."
        )
    places = (2 ** torch.arange(8, device=planes.device)).to(torch.uint8)
    bits = torch.bitwise_and(planes[:, :, None], places) != 0
    values = 2 ** torch.arange(len(planes), device=planes.device)
    summed: Tensor = (bits.reshape(len(planes), -1)[:, :count] * values[:, None]).sum(dim=0)
    return summed


def check_bits(bits: int, name: str = "bits") -> None:
    """Checks a number of bits per weight.

    Raises:
        ConfigError: If it is outside 1 to 8.

    Example:
        >>> check_bits(9)
        Traceback (most recent call last):
        ...
        medfed.errors.ConfigError: bits=9 must be a whole number from 1 to 8.
    """
    if not isinstance(bits, int) or isinstance(bits, bool) or not 1 <= bits <= MAX_BITS:
        raise ConfigError(f"{name}={bits} must be a whole number from 1 to {MAX_BITS}.")
