"""Equal, identically distributed clients: patients are assigned in turn, like cards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from medfed.common.seeding import numpy_rng
from medfed.datamodules.partitions.base import Dealt, Owners, Traits
from medfed.datamodules.readers.base import Patient


@dataclass(frozen=True)
class RoundRobin(Dealt):
    """Shuffles the patients and assigns them in turn; sizes differ by at most one.

    Attributes:
        num_clients: Number of clients.
        shuffle: Whether to shuffle first, by the seed.
    """

    shuffle: bool = True

    @property
    def traits(self) -> Traits:
        """Seeded if patients are shuffled."""
        return Traits(seeded=self.shuffle)

    def deal(self, patients: Sequence[Patient], seed: int) -> Owners:
        """See `Dealt.deal`.

        Example:
            >>> RoundRobin(2, shuffle=False).assign([Patient("a"), Patient("b"), Patient("c")], 0)
            {'hospital_0': ['a', 'c'], 'hospital_1': ['b']}
        """
        order = np.arange(len(patients))
        if self.shuffle:
            order = numpy_rng(seed, "round_robin").permutation(len(patients))
        owner = np.empty_like(order)
        owner[order] = np.arange(len(patients)) % self.num_clients
        return owner
