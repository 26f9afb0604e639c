"""Several clients per hospital: groups of clients that are alike within and differ between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from medfed.common.errors import ConfigError, did_you_mean
from medfed.common.seeding import numpy_rng
from medfed.datamodules.partitions.base import Partition, Traits, in_order
from medfed.datamodules.partitions.centre import ByCentre
from medfed.datamodules.readers.base import Patient


@dataclass(frozen=True)
class CentreSplit(Partition):
    """Deals the patients of every centre evenly to clients of its own.

    Attributes:
        parts: Clients of every centre; or of each by name, one of those that are not named.
    """

    parts: int | Mapping[str, int] = 2

    def __post_init__(self) -> None:
        counts = self.parts.values() if isinstance(self.parts, Mapping) else [self.parts]
        if not all(isinstance(n, int) and n >= 1 for n in counts):
            raise ConfigError(
                f"partition.parts={self.parts} must be a number of at least 1, or one per centre, "
                "such as {drive: 3, chase: 2}."
            )

    @property
    def traits(self) -> Traits:
        """Who is where within a centre is drawn."""
        return Traits(frozenset({"centre"}))

    def assign(self, patients: Sequence[Patient], seed: int) -> dict[str, list[str]]:
        """See `Partition.assign`.

        Raises:
            ConfigError: If a patient has no centre, a named centre is unknown, or has too few
                patients.

        Example:
            >>> found = CentreSplit(2).assign([Patient(i, centre="x") for i in "abc"], seed=0)
            >>> {name: len(ids) for name, ids in found.items()}
            {'x_0': 2, 'x_1': 1}
        """
        centres = ByCentre().assign(in_order(patients), seed)
        named = self.parts if isinstance(self.parts, Mapping) else {}
        for name in named:
            if name not in centres:
                raise ConfigError(
                    f"partition.parts names {name}, which is no centre"
                    f"{did_you_mean(name, centres)}; the centres are {', '.join(centres)}."
                )
        found: dict[str, list[str]] = {}
        for centre, ids in centres.items():
            count = self.parts if isinstance(self.parts, int) else named.get(centre, 1)
            if count > len(ids):
                raise ConfigError(
                    f"partition.parts: {centre} has {len(ids)} patients, too few for {count} "
                    "clients."
                )
            order = numpy_rng(seed, "centre split", centre).permutation(len(ids))
            for n in range(count):
                name = f"{centre}_{n}" if count > 1 else centre
                found[name] = sorted(ids[i] for i in order[n::count])
        return found
