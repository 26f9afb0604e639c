"""Experimental: batches on a GPU, of samples that are kept there or on their way before their step.

Which batches there are, in which order, and what is drawn for them never depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from medfed.common.tensors import to_device
from medfed.federation.client import Batch, ClientData

SHARE = 0.25  # of the memory that is free when the first client trains, by default


@runtime_checkable
class Keepable(Protocol):
    """Data of a client that a device can keep."""

    @property
    def device_bytes(self) -> int | None:
        """What that takes; ``None`` where it cannot be."""

    def keep_on(self, device: torch.device) -> None:
        """Copies the training samples there, so that batches are made there."""


class Samples:
    """Brings the batches of all clients of a process to a device.

    A client's samples are kept on the device from its first batch on, as long as there is room:
    the first clients to train have it. The batches of the others are copied from pinned memory on
    a stream of their own. That is early enough without a thread: a step is only queued when the
    next batch is asked for, which is made and copied while the device computes.

    Args:
        gigabytes: Room for samples, in GB; ``None``: a quarter of what is free at the first batch.

    Attributes:
        left: Bytes of that room that are left; ``None`` before the first batch.
    """

    def __init__(self, gigabytes: float | None = None) -> None:
        self.gigabytes = gigabytes
        self.left: float | None = None
        self._kept: set[int] = set()
        self._stream: torch.cuda.Stream | None = None

    def batches(self, data: ClientData, seed: int, device: torch.device) -> Iterator[Batch]:
        """Yields an epoch of a client's training batches on a device.

        Args:
            data: The client's data.
            seed: Of the epoch, see :meth:`medfed.federation.client.ClientData.train_batches`.
            device: Where the network is.
        """
        if device.type != "cuda":
            for batch in data.train_batches(seed):
                yield to_device(batch, device)
            return
        side = self._stream = self._stream or torch.cuda.Stream(device)
        with torch.cuda.stream(side):
            self.keep(data, device, lambda: torch.cuda.mem_get_info(device)[0])
        batches = iter(data.train_batches(seed))
        while True:
            # What alters samples on the device waits for this stream alone, never for the steps.
            with torch.cuda.stream(side):
                moved = to_device(next(batches, {}), device)
            if not moved:
                return
            steps = torch.cuda.current_stream(device)
            steps.wait_stream(side)
            for tensor in moved.values():
                if isinstance(tensor, Tensor):
                    tensor.record_stream(steps)
            yield moved

    def keep(self, data: ClientData, device: torch.device, free: Callable[[], int]) -> bool:
        """Keeps a client's samples on a device if they can be and there is room.

        Args:
            data: The client's data.
            device: The device.
            free: Gives the device's free memory in bytes.

        Returns:
            Whether they are there.
        """
        if id(data) in self._kept:
            return True
        if self.left is None:
            self.left = SHARE * free() if self.gigabytes is None else 1e9 * self.gigabytes
        size = data.device_bytes if isinstance(data, Keepable) else None
        if size is None or size > self.left:
            return False
        data.keep_on(device)  # type: ignore[attr-defined]
        self.left -= size
        self._kept.add(id(data))
        return True
