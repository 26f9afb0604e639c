"""Data as they are: nothing is left out, doubled or altered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from medfed.common.errors import ConfigError
from medfed.datamodules.partitions.base import Partition, Traits
from medfed.datamodules.partitions.centre import ByCentre
from medfed.datamodules.partitions.round_robin import RoundRobin
from medfed.datamodules.readers.base import Patient

CLIENTS, LEAST = 5, 3  # of equal parts, unless that leaves below three patients to a client


@dataclass(frozen=True)
class Auto(Partition):
    """A client per hospital where the data name one for every patient, else equal parts at random.

    Attributes:
        num_clients: How many equal parts; None makes 5, or fewer where a part would have below 3
            patients. Where hospitals are known they decide, and a number is refused.
        protocol: The partition that an experiment has for its own cohort, and that data of one's
            own do not get; it is only named.
    """

    # Where hospitals are named no choice is random.
    traits = Traits(seeded=False, natural=True)

    num_clients: int | None = None
    protocol: str | None = None

    def assign(self, patients: Sequence[Patient], seed: int) -> dict[str, list[str]]:
        """See `Partition.assign`.

        Raises:
            ConfigError: If a number of clients is asked for where hospitals are known.

        Example:
            >>> Auto().assign([Patient("a", centre="x"), Patient("b", centre="y")], seed=0)
            {'x': ['a'], 'y': ['b']}
            >>> list(Auto().assign([Patient(n) for n in "abcdefg"], seed=0))
            ['hospital_0', 'hospital_1']
        """
        if not all(p.centre for p in patients):
            return RoundRobin(self._parts(len(patients))).assign(patients, seed)
        if self.num_clients is not None:
            raise ConfigError(
                f"partition.num_clients={self.num_clients} does not go with data of "
                f"{len({p.centre for p in patients})} known hospitals, which are the clients; "
                "leave it out, or deal the patients out by partition=round_robin."
            )
        return ByCentre().assign(patients, seed)

    def remark(self, patients: Sequence[Patient]) -> str:
        """See `Partition.remark`."""
        named = sum(p.centre is not None for p in patients)
        if named == len(patients):
            count = len({p.centre for p in patients})
            told = f"Each of the {count} hospitals of the data is a client"
        else:
            lack = f" for {len(patients) - named} of them" * bool(named)
            parts = self._parts(len(patients))
            told = (
                f"All {len(patients):,} patients are dealt to {parts} clients at random, as the "
                f"data name no hospitals{lack}"
            )
        if self.protocol is None:
            return "" if named == len(patients) else f"{told} (partition=auto)."
        return (
            f"{told} (partition=auto); the experiment's own protocol is partition={self.protocol}, "
            "for whoever names it."
        )

    def _parts(self, count: int) -> int:
        return self.num_clients or max(1, min(CLIENTS, count // LEAST))
