"""The training data of all clients in one place: what federated learning is there to avoid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from math import ceil
from typing import Any

import torch

from medfed.common.seeding import derive_seed, torch_rng
from medfed.federation.client import Batch, ClientData


class Pool:
    """A client's data, whose training batches are drawn from those of all clients.

    An epoch has every training sample of every client once. Batches of as many clients' batches as
    there are clients, in a random order, are joined, shuffled and cut again: so each is a mixture,
    whatever a client's batches are made of. All else is the client's own.

    Args:
        own: The client's data.
        everyone: The data of all clients, this one among them.
    """

    device_bytes = None  # its batches are of many clients' samples, which it does not hold

    def __init__(self, own: ClientData, everyone: Sequence[ClientData]) -> None:
        self._own = own
        self._everyone = list(everyone)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of a copy that is not made yet
            raise AttributeError(name)
        return getattr(self._own, name)

    @property
    def num_samples(self) -> int:
        """Training samples per client, so that budgets by epochs come to those of all clients."""
        return ceil(sum(c.num_samples for c in self._everyone) / len(self._everyone))

    def train_batches(self, seed: int) -> Iterator[Batch]:
        """Yields one epoch over the samples of all clients, shuffled by nothing but the seed."""
        streams = [c.train_batches(derive_seed(seed, c.id)) for c in self._everyone]
        counts = [ceil(c.num_samples / c.batch_size) for c in self._everyone]
        turns = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        random = torch_rng(seed, "pool")
        turns = turns[torch.randperm(len(turns), generator=random)]
        waiting = iter(turns.tolist())
        while group := list(islice(waiting, len(counts))):
            batches = [next(streams[n]) for n in group]
            joined = {k: torch.cat([b[k] for b in batches]) for k in batches[0]}
            order = torch.randperm(len(next(iter(joined.values()))), generator=random)
            for index in order.split(self._own.batch_size):
                yield {k: v[index.to(v.device)] for k, v in joined.items()}
