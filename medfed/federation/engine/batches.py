"""What stays on a GPU, and where training batches are made, with the same bits.

On a GPU a client's samples are copied once, and its batches are picked there in the order of the
CPU. Samples that are augmented, joined from several clients, drawn for privacy or made by other
processes stay in main memory. Clients' states may stay between turns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

if TYPE_CHECKING:
    from medfed.federation.client import ClientData

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
DEVICES = {"cuda"}  # a test adds the CPU, where the same code must give the same bits


def on_gpu(device: torch.device) -> bool:
    """Returns whether batches may be made on a device."""
    return device.type in DEVICES


class Leaving(Protocol):
    """A client whose state may be on a device."""

    def offload(self) -> None:
        """Moves it to main memory."""


class Residents:
    """What of clients is on a device: up to `limit` bytes of samples, and as many of states.

    The client that trained the longest ago makes room, but only for one that has trained twice
    since: of clients that take turns, each would else be copied in every turn.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._device: torch.device | None = None
        # Each client, it on the device, and bytes; the one that trained the longest ago first.
        self._here: dict[str, tuple[ClientData, ClientData, int]] = {}
        # Clients whose states are there, with their bytes, but for the client that trains.
        self.states: dict[Leaving, int] = {}
        self._turns: dict[object, int] = {}  # the number of the last turn of each client
        self._number = count(1)
        self._latest: ClientData | None = None

    @property
    def size(self) -> int:
        """Bytes of all samples on the device."""
        return sum(size for *_, size in self._here.values())

    def of(self, data: ClientData) -> ClientData:
        """Returns a client that makes its batches on the device, or the client itself."""
        known, there, _ = self._here.get(data.id, (data, data, 0))
        return there if known is data else data

    def admit(self, data: ClientData, device: torch.device) -> None:
        """Copies the samples of a client that begins to train to its device, if there is room."""
        if device != self._device:
            self.release()
            self._device = device
        if not on_gpu(device) or data is self._latest:
            return
        self._latest, before = data, self._turns.get(data.id, 0)
        known, there, size = self._here.pop(data.id, (None, data, 0))
        if known is not data:
            there, size = self._put(data, device, before)
        if there is not data:
            self._here[data.id] = data, there, size
        self._turns[data.id] = next(self._number)

    def _put(self, data: ClientData, device: torch.device, before: int) -> tuple[ClientData, int]:
        # Looked up in the class: a user's wrapper may pass on attributes of what it wraps.
        here = hasattr(type(data), "resident_bytes")
        size: int | None = data.resident_bytes if here else None  # type: ignore[attr-defined]
        if size is None or size > self.limit:
            return data, 0
        for name in [n for n in self._here if self._turns[n] < before]:
            if self.size + size > self.limit:
                del self._here[name]
        full, cuda = self.size + size > self.limit, device.type == "cuda"
        try:
            # Training needs memory, too.
            full = full or (cuda and size > torch.cuda.mem_get_info(device)[0] / 2)
            return (data, 0) if full else (data.resident_on(device), size)  # type: ignore[attr-defined]
        except torch.OutOfMemoryError:
            self.give_up()
        return data, 0

    def keep(self, client: Leaving, size: int) -> None:
        """Keeps a client's state on the device after its turn, if there is room, or moves it."""
        before, self._turns[client] = self._turns.get(client, 0), next(self._number)
        self.states[client] = size
        for leaving in [*(c for c in self.states if self._turns[c] < before), client]:
            if sum(self.states.values()) > self.limit:
                leaving.offload()

    def making_room(self, act: Callable[[], _T], again: bool = True) -> _T:
        """Returns what a function does; calls it `again` if it finds the device's memory full."""
        try:
            return act()
        except torch.OutOfMemoryError:
            if not again or not (self._here or self.states):
                raise
        self.give_up()  # only here, as the error keeps tensors
        return act()

    def give_up(self) -> None:
        """Makes room on a full device, and takes no more."""
        self.limit = 0
        self.release()
        _log.warning(
            "The device's memory is full: from now on clients' samples and states wait in main "
            "memory; local.resident_gib=0 does so from the start."
        )

    def release(self) -> None:
        """Gives the device's memory back."""
        self._here.clear()
        self._latest = None
        for client in [*self.states]:
            client.offload()
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.empty_cache()
