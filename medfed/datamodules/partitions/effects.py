"""Channels that hospitals lack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from medfed.common.checks import within
from medfed.common.errors import ConfigError
from medfed.common.seeding import torch_rng
from medfed.datamodules.partitions.base import Ids, Wrapped
from medfed.datamodules.readers.base import check_names


@dataclass(frozen=True)
class ChannelMissing(Wrapped):
    """Removes channels from the clients of another partition.

    A missing channel is zero after normalisation, and the presence mask travels in every batch.

    Attributes:
        assignment: The partition that assigns the patients.
        preset: ``lack_k``: the listed clients lack `channel`; ``rotate``: client n lacks channel n
            mod C; ``random``: each channel is missing with `probability`, but no client loses all;
            ``table``: as listed in `table`; ``none``: no channel is missing.
        channel: For ``lack_k``, the name of the missing channel.
        clients: For ``lack_k``, the clients that lack it: ids, or positions in the order.
        probability: For ``random``, in [0, 1).
        table: For ``table``, the channels that a client *has*, by client id; a client that is not
            listed has all.
    """

    preset: Literal["none", "lack_k", "rotate", "random", "table"] = "rotate"
    channel: str | None = None
    clients: Sequence[str | int] = ()
    probability: Annotated[float, within("[0, 1)")] = 0.0
    table: Mapping[str, Sequence[str]] | None = None

    def availability(self, clients: Ids, channels: Ids, seed: int) -> dict[str, Tensor]:
        """See `Partition.availability`.

        Example:
            >>> from medfed.datamodules.partitions.by_centre import ByCentre
            >>> rotate = ChannelMissing(ByCentre(), "rotate")
            >>> {k: v.tolist() for k, v in rotate.availability(["a", "b"], ["T1", "T2"], 0).items()}
            {'a': [False, True], 'b': [True, False]}
        """
        if self.preset == "lack_k":
            missing = self._lacking(clients, channels)
        elif self.preset == "rotate":
            missing = {client: [n % len(channels)] for n, client in enumerate(clients)}
        elif self.preset == "random":
            missing = {c: self._at_random(c, len(channels), seed) for c in clients}
        elif self.preset == "table":
            missing = self._from_table(clients, channels)
        else:
            missing = {}
        present = self.assignment.availability(clients, channels, seed)
        for client, indices in missing.items():
            present[client][indices] = False
            if not present[client].any():
                raise ConfigError(f"Client {client} would lack every channel; leave it at least 1.")
        return present

    def _lacking(self, clients: Ids, channels: Ids) -> dict[str, list[int]]:
        if self.channel is None or not self.clients:
            raise ConfigError("partition.preset=lack_k needs partition.channel and .clients.")
        index = list(channels).index(check_names("channel", [self.channel], channels)[0])
        known: dict[object, str] = dict(enumerate(clients))
        names = [known.get(client, str(client)) for client in self.clients]
        return {name: [index] for name in check_names("client", names, clients)}

    def _at_random(self, client: str, count: int, seed: int) -> list[int]:
        rng = torch_rng(seed, "channel_missing", client)
        missing = torch.rand(count, generator=rng) < self.probability
        missing[int(torch.randint(count, (1,), generator=rng))] &= not missing.all()
        return [int(i) for i in missing.nonzero()]

    def _from_table(self, clients: Ids, channels: Ids) -> dict[str, list[int]]:
        if not self.table:
            raise ConfigError("partition.preset=table needs partition.table.")
        check_names("client", list(self.table), clients)
        has = {c: check_names("channel", names, channels) for c, names in self.table.items()}
        return {c: [i for i, n in enumerate(channels) if n not in has[c]] for c in has}
