"""Where and when training batches are made, with the same bits.

On a GPU a client's samples are copied once, and its batches are picked there in the order of the
CPU. Samples that are augmented, joined from several clients, drawn for privacy or made by other
processes stay in main memory; a thread may make their batches ahead of the steps.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch

from medfed.federation.client import ClientData

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
DEVICES = {"cuda"}  # a test adds the CPU, where the same code must give the same bits
_AHEAD = 2  # steps


class _Resident(NamedTuple):
    data: ClientData
    there: ClientData
    size: int
    turn: int


class Residents:
    """Clients whose training samples are on a device, up to `limit` bytes.

    The client that trained the longest ago makes room, but only for one that has trained twice
    since: of clients that take turns, each would else be copied in every turn.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._device: torch.device | None = None
        self._here: dict[str, _Resident] = {}  # the one that trained the longest ago first
        self._turns: dict[str, int] = {}  # the last turn of each client
        self._turn = 0
        self._latest: ClientData | None = None

    @property
    def size(self) -> int:
        """Bytes of all samples on the device."""
        return sum(resident.size for resident in self._here.values())

    def of(self, data: ClientData) -> ClientData:
        """Returns a client that makes its batches on the device, or the client itself."""
        resident = self._here.get(data.id)
        return data if resident is None or resident.data is not data else resident.there

    def admit(self, data: ClientData, device: torch.device) -> None:
        """Copies the samples of a client that begins to train to its device, if there is room."""
        if device != self._device:
            self.release()
            self._device = device
        if device.type not in DEVICES or data is self._latest:
            return
        self._turn += 1
        self._latest = data
        resident = self._here.pop(data.id, None)
        if resident is None or resident.data is not data:
            # Looked up in the class: a user's wrapper may pass on attributes of what it wraps.
            kind = type(data)
            resident = self._move(data, device) if hasattr(kind, "resident_bytes") else None
        if resident is not None:
            self._here[data.id] = resident._replace(turn=self._turn)
        self._turns[data.id] = self._turn

    def _move(self, data: ClientData, device: torch.device) -> _Resident | None:
        size: int | None = data.resident_bytes  # type: ignore[attr-defined]
        if size is None or size > self.limit:
            return None
        before = self._turns.get(data.id, 0)
        leaving, room = list[str](), self.limit - self.size
        for name, resident in self._here.items():
            if room < size and resident.turn < before:
                leaving.append(name)
                room += resident.size
        if room < size:
            return None
        for name in leaving:
            del self._here[name]
        try:
            if device.type == "cuda" and size > torch.cuda.mem_get_info(device)[0] / 2:
                return None  # training needs memory, too
            return _Resident(data, data.resident_on(device), size, self._turn)  # type: ignore[attr-defined]
        except torch.OutOfMemoryError:
            self._close()
        return None

    def give_up(self) -> bool:
        """Makes room on a full device; returns whether samples were there."""
        if had := bool(self._here):
            self._close()
        return had

    def _close(self) -> None:
        self.limit = 0
        self.release()
        _log.warning(
            "The device's memory is full: from now on batches are made in main memory; "
            "local.resident_gib=0 does so from the start."
        )

    def release(self) -> None:
        """Gives the device's memory back."""
        cached = bool(self._here) and self._device is not None and self._device.type == "cuda"
        self._here.clear()
        self._latest = None
        if cached:
            torch.cuda.empty_cache()


def may_run_ahead(data: ClientData, device: torch.device) -> bool:
    """Whether a thread may make a client's batches: they draw from no stream of the process."""
    declares = hasattr(type(data), "may_run_ahead")  # see `Residents.admit`
    return declares and device.type in DEVICES and bool(data.may_run_ahead)  # type: ignore[attr-defined]


@contextmanager
def ahead(groups: Iterator[_T], device: torch.device) -> Iterator[Iterator[_T]]:
    """Gives an iterator's values and errors in their order; a thread makes them two ahead.

    The thread ends with the block.

    Example:
        >>> with ahead(iter("abc"), torch.device("cpu")) as letters:
        ...     "".join(letters)
        'abc'
    """
    end = object()

    def make() -> _T | object:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return next(groups, end)

    def made() -> Iterator[_T]:
        waiting = deque(pool.submit(make) for _ in range(_AHEAD))
        while (group := waiting.popleft().result()) is not end:
            waiting.append(pool.submit(make))
            yield group  # type: ignore[misc]

    pool = ThreadPoolExecutor(1, "batches")
    try:
        yield made()
    finally:
        pool.shutdown(cancel_futures=True)
