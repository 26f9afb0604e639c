"""Gathers byte strings over ranks; the only communication that a federated run needs."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from queue import SimpleQueue
from threading import Thread

import msgspec
import torch
import torch.distributed as dist

from medfed.common.processes import number

_log = logging.getLogger(__name__)


def world_size() -> int:
    """Returns the number of ranks, 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Returns this process's rank, even before its process group exists; 0 without one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return number()


def warn(sentence: str) -> None:
    """Logs a warning, on the first rank alone."""
    if rank() == 0:
        _log.warning("%s", sentence)


def inform(sentence: str) -> None:
    """Logs a fact, on the first rank alone."""
    if rank() == 0:
        _log.info("%s", sentence)


def all_gather_bytes(
    payload: bytes, device: torch.device, group: dist.ProcessGroup | None = None
) -> list[bytes]:
    """Returns every rank's payload, in the order of ranks; a collective call.

    Example:
        >>> all_gather_bytes(b"abc", torch.device("cpu"))
        [b'abc']
    """
    ranks = world_size()
    if ranks == 1:
        return [payload]
    if dist.get_backend(group) != "nccl":
        device = torch.device("cpu")
    length = torch.tensor([len(payload)], device=device)
    lengths = [torch.zeros_like(length) for _ in range(ranks)]
    dist.all_gather(lengths, length, group)
    sizes = [int(n) for n in lengths]
    buffer = torch.zeros(max(sizes), dtype=torch.uint8)
    if payload:
        buffer[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    buffers = [torch.zeros_like(buffer, device=device) for _ in range(ranks)]
    dist.all_gather(buffers, buffer.to(device), group)
    return [b.cpu().numpy()[:n].tobytes() for b, n in zip(buffers, sizes, strict=True)]


def pack(items: Mapping[str, bytes]) -> bytes:
    """Joins named byte strings into one.

    Example:
        >>> unpack([pack({"a": b"12"}), pack({"b": b""})])
        {'a': b'12', 'b': b''}
    """
    return msgspec.msgpack.encode(items)


def unpack(payloads: Iterable[bytes]) -> dict[str, bytes]:
    """Returns the named byte strings of all payloads that :func:`pack` made."""
    items: dict[str, bytes] = {}
    for payload in payloads:
        items |= msgspec.msgpack.decode(payload, type=dict[str, bytes])
    return items


def gather_named(items: Mapping[str, bytes], device: torch.device) -> dict[str, bytes]:
    """Returns the byte strings of all ranks, whose names differ; a collective call."""
    if world_size() == 1:
        return dict(items)
    return unpack(all_gather_bytes(pack(items), device))


class Gathering:
    """Gathers named byte strings of all ranks while the ranks make further ones.

    The k-th of all ranks are sent together once the slowest rank has its k-th of `turns`, in a
    separate thread and process group (gloo: bytes need no GPU).
    """

    def __init__(self, turns: int, group: dist.ProcessGroup) -> None:
        self._left, self._group = turns, group
        self._made: SimpleQueue[bytes] = SimpleQueue()
        self._found: list[bytes] = []
        self._error: Exception | None = None
        self._thread = Thread(
            target=self._carry, args=(turns,), name="medfed-gathering", daemon=True
        )
        self._thread.start()

    def _carry(self, turns: int) -> None:
        try:
            for _ in range(turns):
                payload = self._made.get()
                self._found += all_gather_bytes(payload, torch.device("cpu"), self._group)
        except Exception as error:
            self._error = error

    def put(self, items: Mapping[str, bytes]) -> None:
        """Adds one more, whose names are unique over ranks."""
        self._left -= 1
        self._made.put(pack(items))

    def finish(self) -> dict[str, bytes]:
        """Returns the byte strings of all ranks, once all have arrived."""
        while self._left:
            self.put({})
        self._thread.join()
        if self._error is not None:
            raise self._error
        return unpack(self._found)
