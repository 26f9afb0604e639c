"""Scanner shift: every client sees its images through a scanner of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from medfed.datamodules.partitions.base import Site, Wrapped
from medfed.datamodules.readers.base import check_names
from medfed.datamodules.seeding import numpy_rng
from medfed.datamodules.site import UNCHANGED, Scanner
from medfed.errors import ConfigError


@dataclass(frozen=True)
class SiteEffect(Wrapped):
    """Gives every client of another partition a scanner; see `medfed.datamodules.site.Scanner`.

    A range is spread evenly over the clients, each setting in a random order of its own, so that
    the noisiest scanner is not also the coarsest (a Latin hypercube).

    Attributes:
        assignment: The partition that decides everything else.
        bias_field: Least and greatest strength of the shading, from 0.
        resolution: Least and greatest factor of resolution, in (0, 1].
        gamma: Least and greatest exponent of the grey scale.
        noise: Least and greatest standard deviation of the noise, from 0.
        table: In place of the ranges, the settings of every client, by client id; what is not
            written there is as without a scanner, and a client that is not listed has none.
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
            numbers = isinstance(value, Sequence) and all(_is_number(v) for v in value)
            if not numbers or len(value) != 2 or value[0] > value[1]:
                raise ConfigError(
                    f"partition.{name}={value} must be two numbers, the least and the greatest, "
                    f"such as [{value[0] if numbers and value else 0},1]."
                )
            for end in value:
                Scanner("at one end of the range", 0, **{name: end})

    def sites(self, clients: Sequence[str], seed: int) -> dict[str, Site]:
        """See `Partition.sites`.

        Example:
            >>> from medfed.datamodules.partitions import ByCentre
            >>> noisy = SiteEffect(ByCentre(), table={"b": {"noise": 0.5}})
            >>> noisy.sites(["a", "b"], seed=0)["b"].record()["noise"]
            0.5
        """
        settings = self._spread(clients, seed) if self.table is None else self._listed(clients)
        return {client: Scanner(client, seed, **values) for client, values in settings.items()}

    def _spread(self, clients: Sequence[str], seed: int) -> dict[str, dict[str, float]]:
        settings: dict[str, dict[str, float]] = {client: {} for client in clients}
        for name in UNCHANGED:
            least, greatest = getattr(self, name)
            values = np.linspace(least, greatest, len(clients))
            if len(clients) == 1:
                values = np.array([(least + greatest) / 2])
            shuffled = numpy_rng(seed, "site_effect", name).permutation(values)
            for client, value in zip(clients, shuffled.tolist(), strict=True):
                settings[client][name] = value
        return settings

    def _listed(self, clients: Sequence[str]) -> dict[str, dict[str, float]]:
        if not self.table:
            raise ConfigError("partition.table names no client; leave it null to use the ranges.")
        names = check_names("client", list(self.table), clients)
        settings: dict[str, dict[str, float]] = {}
        for client, values in zip(names, self.table.values(), strict=True):
            check_names("setting of a scanner", list(values), list(UNCHANGED))
            for name, value in values.items():
                if not _is_number(value):
                    raise ConfigError(f"partition.table: {name} of {client} is no number: {value}.")
            settings[client] = {name.lower(): float(value) for name, value in values.items()}
        return settings


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
