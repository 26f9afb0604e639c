"""Equal, identically distributed clients: patients are dealt out like cards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from medfed.datamodules.partitions.base import Partition, check_count, client_names, in_order
from medfed.datamodules.readers.base import Patient
from medfed.datamodules.seeding import numpy_rng


@dataclass(frozen=True)
class RoundRobin(Partition):
    """Shuffles the patients and deals them out; sizes differ by one at most.

    Attributes:
        num_clients: Number of clients.
        shuffle: Whether to shuffle first, by the seed.
    """

    num_clients: int
    shuffle: bool = True

    def assign(self, patients: Sequence[Patient], seed: int) -> dict[str, list[str]]:
        """See `Partition.assign`.

        Example:
            >>> RoundRobin(2, shuffle=False).assign([Patient("a"), Patient("b"), Patient("c")], 0)
            {'hospital_0': ['a', 'c'], 'hospital_1': ['b']}
        """
        check_count(self.num_clients, len(patients))
        ids = [p.id for p in in_order(patients)]
        if self.shuffle:
            ids = [ids[i] for i in numpy_rng(seed, "round_robin").permutation(len(ids))]
        names = client_names(self.num_clients)
        return {name: sorted(ids[n :: self.num_clients]) for n, name in enumerate(names)}
