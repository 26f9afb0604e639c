"""The natural partition: one client per hospital."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from medfed.common.errors import ConfigError
from medfed.datamodules.partitions.base import Partition, Traits
from medfed.datamodules.readers.base import Patient, check_names


@dataclass(frozen=True)
class ByCentre(Partition):
    """Every centre of the data becomes a client with the centre's name.

    Attributes:
        centres: Names of the centres to keep, in this order; None keeps all, sorted.
    """

    centres: Sequence[str] | None = None

    @property
    def traits(self) -> Traits:
        """Patients may be left out where centres are chosen."""
        all_ = self.centres is None
        return Traits(frozenset({"centre"}), keeps_all=all_, seeded=False, natural=True)

    def assign(self, patients: Sequence[Patient], seed: int) -> dict[str, list[str]]:
        """See `Partition.assign`; no random choice is made.

        Example:
            >>> ByCentre().assign([Patient("a", centre="x"), Patient("b", centre="y")], seed=0)
            {'x': ['a'], 'y': ['b']}
        """
        for patient in patients:
            if patient.centre is None:
                raise ConfigError(
                    f"Patient {patient.id} has no centre; name the centres in the data "
                    "configuration (data.centre or data.reader.hospitals), or use "
                    "partition=round_robin."
                )
        known = sorted({str(p.centre) for p in patients})
        names = known if self.centres is None else check_names("centre", self.centres, known)
        found: dict[str, list[str]] = {name: [] for name in names}
        for patient in patients:
            if patient.centre in found:
                found[patient.centre].append(patient.id)
        return found
