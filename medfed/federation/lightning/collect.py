"""Gathers items over ranks; the only communication that a federated run needs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

import torch.distributed as dist

from medfed.common.processes import number

Item = TypeVar("Item")
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


def gathered(item: Item, group: dist.ProcessGroup | None = None) -> list[Item]:
    """Returns every rank's item, in the order of ranks; a collective call.

    Example:
        >>> gathered({"a": 1})
        [{'a': 1}]
    """
    if world_size() == 1:
        return [item]
    items: list[Any] = [None] * world_size()
    dist.all_gather_object(items, item, group)
    return items


def gather_named(
    items: Mapping[str, Item], group: dist.ProcessGroup | None = None
) -> dict[str, Item]:
    """Returns the items of all ranks, whose names differ; a collective call."""
    everywhere = gathered(dict(items), group)
    return {name: item for of_rank in everywhere for name, item in of_rank.items()}


class Gathering:
    """Gathers named items of all ranks while the ranks make further ones.

    The k-th of all ranks are sent together once the slowest rank has its k-th of `turns`, in a
    separate thread and process group (gloo: items need no GPU).
    """

    def __init__(self, turns: int, group: dist.ProcessGroup) -> None:
        self._left, self._group = turns, group
        self._made: SimpleQueue[Mapping[str, Any]] = SimpleQueue()
        self._gathered: dict[str, Any] = {}
        self._error: Exception | None = None
        self._thread = Thread(
            target=self._carry, args=(turns,), name="medfed-gathering", daemon=True
        )
        self._thread.start()

    def _carry(self, turns: int) -> None:
        try:
            for _ in range(turns):
                self._gathered |= gather_named(self._made.get(), self._group)
        except Exception as error:
            self._error = error

    def put(self, items: Mapping[str, Any]) -> None:
        """Adds one more, whose names are unique over ranks."""
        self._left -= 1
        self._made.put(items)

    def finish(self) -> dict[str, Any]:
        """Returns the items of all ranks, once all have arrived."""
        while self._left:
            self.put({})
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._gathered
