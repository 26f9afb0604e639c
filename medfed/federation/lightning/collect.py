"""Gathers byte strings over ranks; the only communication that a federated run needs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist


def world_size() -> int:
    """Returns the number of ranks, 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Returns this process's rank, also before its process group is there; 0 without one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))


def all_gather_bytes(payload: bytes, device: torch.device) -> list[bytes]:
    """Returns every rank's payload, in the order of ranks; a collective call.

    Args:
        payload: Any bytes, of different length on each rank.
        device: Where the backend transports tensors: the GPU for NCCL, else the CPU.

    Example:
        >>> all_gather_bytes(b"abc", torch.device("cpu"))
        [b'abc']
    """
    ranks = world_size()
    if ranks == 1:
        return [payload]
    length = torch.tensor([len(payload)], device=device)
    lengths = [torch.zeros_like(length) for _ in range(ranks)]
    dist.all_gather(lengths, length)
    sizes = [int(n) for n in lengths]
    buffer = torch.zeros(max(sizes), dtype=torch.uint8)
    if payload:
        buffer[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    buffers = [torch.zeros_like(buffer, device=device) for _ in range(ranks)]
    dist.all_gather(buffers, buffer.to(device))
    return [b.cpu().numpy()[:n].tobytes() for b, n in zip(buffers, sizes, strict=True)]


def pack(items: Mapping[str, bytes]) -> bytes:
    """Joins named byte strings into one.

    Example:
        >>> unpack([pack({"a": b"12"}), pack({"b": b""})])
        {'a': b'12', 'b': b''}
    """
    head = json.dumps([(name, len(data)) for name, data in items.items()]).encode()
    return b"".join((len(head).to_bytes(8, "little"), head, *items.values()))


def unpack(payloads: Iterable[bytes]) -> dict[str, bytes]:
    """Returns the named byte strings of all payloads that :func:`pack` made."""
    items: dict[str, bytes] = {}
    for payload in payloads:
        start = 8 + int.from_bytes(payload[:8], "little")
        for name, size in json.loads(payload[8:start]):
            items[name] = payload[start : start + size]
            start += size
    return items


def gather_named(items: Mapping[str, bytes], device: torch.device) -> dict[str, bytes]:
    """Returns the named byte strings of all ranks; a collective call.

    Args:
        items: This rank's byte strings; names are unique over ranks.
        device: See :func:`all_gather_bytes`.

    Example:
        >>> gather_named({"a": b"1"}, torch.device("cpu"))
        {'a': b'1'}
    """
    if world_size() == 1:
        return dict(items)
    return unpack(all_gather_bytes(pack(items), device))
