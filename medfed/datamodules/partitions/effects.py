"""Effects of a hospital's equipment on its images: its scanner and its missing channels.

The availability table lists each client's channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from medfed.common.checks import within
from medfed.common.errors import ConfigError
from medfed.common.seeding import numpy_rng, torch_rng
from medfed.datamodules.partitions.base import Ids, Traits, Wrapped
from medfed.datamodules.readers.base import check_names
from medfed.datamodules.scanner import UNCHANGED, Scanner, is_number, scanners_from


@dataclass(frozen=True)
class SiteEffect(Wrapped):
    """Gives every client of another partition a scanner; see `medfed.datamodules.scanner.Scanner`.

    Each setting's range is spread evenly over the clients in a separate random order, so that the
    noisiest scanner is not also the coarsest (a Latin hypercube).

    Attributes:
        assignment: The partition that decides everything else.
        bias_field: Least and greatest strength of the shading, from 0.
        resolution: Least and greatest factor of resolution, in (0, 1].
        gamma: Least and greatest exponent of the grey scale.
        noise: Least and greatest standard deviation of the noise, from 0.
        table: In place of the ranges, the settings of every client, by client id; a missing setting
            has no effect, and a client that is not listed has no scanner.
    """

    bias_field: Sequence[float] = (0.0, 0.3)
    resolution: Sequence[float] = (0.5, 1.0)
    gamma: Sequence[float] = (0.7, 1.4)
    noise: Sequence[float] = (0.0, 0.2)
    table: Mapping[str, Mapping[str, float]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in UNCHANGED:
            value = getattr(self, name)
            numbers = isinstance(value, Sequence) and all(is_number(v) for v in value)
            if not numbers or len(value) != 2 or value[0] > value[1]:
                raise ConfigError(
                    f"partition.{name}={value} must be two numbers, the least and the greatest, "
                    f"such as [{value[0] if numbers and value else 0},1]."
                )
            for end in value:
                Scanner("any client", 0, **{name: end})

    @property
    def traits(self) -> Traits:
        """Those of `assignment`; also requires images."""
        inner = self.assignment.traits
        return replace(inner, needs=inner.needs | {"images"})

    def scanners_of(self, clients: Ids, seed: int) -> dict[str, Scanner]:
        """See `Partition.scanners_of`.

        Example:
            >>> from medfed.datamodules.partitions.by_centre import ByCentre
            >>> noisy = SiteEffect(ByCentre(), table={"b": {"noise": 0.5}})
            >>> noisy.scanners_of(["a", "b"], seed=0)["b"].noise
            0.5
        """
        if self.table is None:
            return scanners_from(self._spread(clients, seed), seed)
        if not self.table:
            raise ConfigError("partition.table names no client; leave it null to use the ranges.")
        names = check_names("client", list(self.table), clients)
        return scanners_from(dict(zip(names, self.table.values(), strict=True)), seed)

    def _spread(self, clients: Sequence[str], seed: int) -> dict[str, dict[str, float]]:
        columns: dict[str, list[float]] = {}
        for name in UNCHANGED:
            least, greatest = getattr(self, name)
            values = np.linspace(least, greatest, len(clients))
            if len(clients) == 1:
                values = np.array([(least + greatest) / 2])
            columns[name] = numpy_rng(seed, "site_effect", name).permutation(values).tolist()
        return {c: {name: columns[name][n] for name in columns} for n, c in enumerate(clients)}


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
