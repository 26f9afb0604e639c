"""Worker processes that make training batches ahead of the training."""

from __future__ import annotations

import multiprocessing
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medfed.common.errors import DataError
from medfed.common.pools import WatchedPool, start_worker
from medfed.datamodules.client_data import Batch, ClientData

AHEAD = 2  # batches per process that are made before they are asked for
_clients: dict[str, ClientData] = {}  # in a worker: the data of all clients


class BatchWorkers:
    """Processes that serve all clients of this one, from their first batch on.

    A batch is made of the epoch's seed, its number and its samples alone, so it is the same in
    whichever process.

    Args:
        clients: All clients, by id.
        workers: Number of processes.
    """

    def __init__(self, clients: Mapping[str, ClientData], workers: int) -> None:
        self.clients = {name: replace(client, evaluation={}) for name, client in clients.items()}
        self.workers = workers
        self._pool: WatchedPool | None = None

    @property
    def pool(self) -> WatchedPool:
        """The processes; they are started when they are first needed."""
        if self._pool is None:
            # Forked where that is known: it takes a tenth of a second, not eight, and the data are
            # shared. A worker runs PyTorch on one thread, so that no thread of its parent is
            # missed, and never touches a GPU.
            forks = "fork" in multiprocessing.get_all_start_methods()
            context = multiprocessing.get_context("fork" if forks else "spawn")
            self._pool = WatchedPool(self.workers, context, _start, (self.clients,))
            weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)
        return self._pool

    def batches(self, client: str, seed: int, order: Sequence[Tensor]) -> Iterator[Batch]:
        """One epoch of a client; see `ClientData.train_batches`.

        Args:
            client: Its id.
            seed: The epoch's.
            order: The samples of every batch.

        Raises:
            DataError: If a process was killed.
        """
        tasks = ((client, seed, number, index.numpy()) for number, index in enumerate(order))
        waiting: deque[Future[dict[str, NDArray[Any]]]] = deque()
        try:
            for task in islice(tasks, AHEAD * self.workers):
                waiting.append(self.pool.submit(_make, *task))
            while waiting:
                made = waiting.popleft().result()
                for task in islice(tasks, 1):
                    waiting.append(self.pool.submit(_make, *task))
                yield {name: torch.from_numpy(values) for name, values in made.items()}
        except BrokenProcessPool as error:
            raise DataError(
                f"One of data.workers={self.workers} processes was killed (out of memory?); run it "
                "with fewer, or data.workers=0."
            ) from error
        finally:
            for future in waiting:
                future.cancel()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_pool": None}


def _start(clients: dict[str, ClientData]) -> None:
    start_worker()
    torch.set_num_threads(1)
    _clients.update(clients)


def _make(client: str, seed: int, number: int, index: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    batch = _clients[client].train_batch(seed, number, torch.from_numpy(index))
    return {name: values.numpy() for name, values in batch.items()}
