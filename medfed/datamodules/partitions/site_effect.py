"""Scanner shift: every client sees its images through a scanner of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from medfed.common.errors import ConfigError
from medfed.common.seeding import numpy_rng
from medfed.datamodules.partitions.base import Ids, Traits, Wrapped
from medfed.datamodules.readers.base import check_names
from medfed.datamodules.scanner import UNCHANGED, Scanner, is_number, scanners_from


@dataclass(frozen=True)
class SiteEffect(Wrapped):
    """Gives every client of another partition a scanner; see `medfed.datamodules.scanner.Scanner`.

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
            numbers = isinstance(value, Sequence) and all(is_number(v) for v in value)
            if not numbers or len(value) != 2 or value[0] > value[1]:
                raise ConfigError(
                    f"partition.{name}={value} must be two numbers, the least and the greatest, "
                    f"such as [{value[0] if numbers and value else 0},1]."
                )
            for end in value:
                Scanner("at one end of the range", 0, **{name: end})

    @property
    def traits(self) -> Traits:
        """Those of `assignment`; and images are needed."""
        inner = self.assignment.traits
        return replace(inner, needs=inner.needs | {"images"})

    def scanners_of(self, clients: Ids, seed: int) -> dict[str, Scanner]:
        """See `Partition.scanners_of`.

        Example:
            >>> from medfed.datamodules.partitions.centre import ByCentre
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
