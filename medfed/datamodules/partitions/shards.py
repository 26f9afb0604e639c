"""Shards: the pathological partition, in which a client sees only a few labels.

Source: B. McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017, section 3: sort by label, cut into equal shards, deal each client a few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from medfed.common.errors import ConfigError
from medfed.common.seeding import numpy_rng
from medfed.datamodules.partitions.base import Dealt, Owners, Traits, count_classes
from medfed.datamodules.readers.base import Patient


@dataclass(frozen=True)
class Shards(Dealt):
    """Cuts the patients, sorted by label, into shards and deals the shards at random.

    N·S shards have at most N·S + K - 1 labels among them (a shard may straddle a boundary), so
    that a client sees about S labels. Every patient is used exactly once. Patients with several
    samples are sorted by their most frequent class and, within it, by their mean class.

    Attributes:
        num_clients: Number of clients N.
        shards_per_client: S, 2 in the paper.
    """

    traits = Traits(frozenset({"label"}))

    shards_per_client: int = 2

    def __post_init__(self) -> None:
        if self.shards_per_client < 1:
            raise ConfigError(
                f"partition.shards_per_client={self.shards_per_client} must be at least 1."
            )

    @property
    def least(self) -> int:
        """See `Dealt.least`."""
        return self.shards_per_client

    def deal(self, patients: Sequence[Patient], seed: int) -> Owners:
        """See `Dealt.deal`.

        Raises:
            ConfigError: If a patient has no label, or there are more shards than patients.

        Example:
            >>> patients = [Patient(str(i), label=i // 2) for i in range(8)]
            >>> Shards(2).deal(patients, seed=3)
            array([1, 1, 0, 0, 0, 0, 1, 1])
        """
        counts = count_classes(patients)
        rng = numpy_rng(seed, "shards")
        mean = counts @ np.arange(counts.shape[1]) / counts.sum(axis=1).clip(min=1)
        order = np.lexsort((rng.permutation(len(patients)), mean, counts.argmax(axis=1)))
        shards = np.array_split(order, self.num_clients * self.shards_per_client)
        hands = rng.permutation(len(shards)) // self.shards_per_client
        owner = np.empty(len(patients), dtype=np.int64)
        for shard, client in zip(shards, hands, strict=True):
            owner[shard] = client
        return owner
