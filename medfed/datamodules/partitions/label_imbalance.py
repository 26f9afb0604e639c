"""Clients with different label ratios: δ = negatives / positives, mirrored over the clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from medfed.datamodules.partitions.base import Partition, client_names
from medfed.datamodules.readers.base import Patient
from medfed.datamodules.seeding import numpy_rng
from medfed.errors import ConfigError


@dataclass(frozen=True)
class LabelImbalance(Partition):
    """Equal-sized clients, half of which (rounded up) are δ:1, the others mirrored 1:δ.

    Samples are used at most once; what does not fit the ratios stays unused. The split of every
    client is stratified, so its test set has the same ratio as its training set.

    Attributes:
        num_clients: Number of clients.
        delta: δ = negatives per positive of the first half of the clients.
        positive_fractions: Share of positives per client, in place of `delta`.
        samples_per_client: Patients per client; None takes as many as the rarer label allows.
    """

    num_clients: int
    delta: float = 4.0
    positive_fractions: Sequence[float] | None = None
    samples_per_client: int | None = None

    def fractions(self) -> list[float]:
        """Share of positives per client.

        Returns:
            `num_clients` numbers in [0, 1].

        Raises:
            ConfigError: If a setting is out of range.

        Example:
            >>> LabelImbalance(3, delta=3.0).fractions()
            [0.25, 0.25, 0.75]
        """
        if self.positive_fractions is not None:
            shares = [float(f) for f in self.positive_fractions]
            if len(shares) != self.num_clients or not all(0 <= f <= 1 for f in shares):
                raise ConfigError(
                    f"partition.positive_fractions={shares} must be {self.num_clients} numbers "
                    "in [0, 1], one per client."
                )
            return shares
        if self.delta <= 0 or self.num_clients < 1:
            raise ConfigError(
                f"partition.delta={self.delta} and .num_clients={self.num_clients} must be "
                "positive."
            )
        low = 1 / (1 + self.delta)
        half = (self.num_clients + 1) // 2
        return [low] * half + [1 - low] * (self.num_clients - half)

    def assign(self, patients: Sequence[Patient], seed: int) -> dict[str, list[str]]:
        """See `Partition.assign`.

        Example:
            >>> patients = [Patient(str(i), label=i % 2) for i in range(10)]
            >>> LabelImbalance(2, 3.0, samples_per_client=4).assign(patients, seed=0)
            {'hospital_0': ['2', '4', '5', '8'], 'hospital_1': ['1', '3', '6', '9']}
        """
        negatives, positives = self._pools(patients, seed)
        shares = self.fractions()
        size = self._size(shares, len(negatives), len(positives))
        clients = {}
        for name, share in zip(client_names(self.num_clients), shares, strict=True):
            count = _half_up(size * share)
            chosen = [positives.pop() for _ in range(count)]
            chosen += [negatives.pop() for _ in range(size - count)]
            clients[name] = sorted(chosen)
        return clients

    def _pools(self, patients: Sequence[Patient], seed: int) -> tuple[list[str], list[str]]:
        pools: dict[int, list[str]] = {0: [], 1: []}
        for patient in patients:
            if patient.label not in pools:
                raise ConfigError(
                    f"Patient {patient.id} has label {patient.label}; partition=label_imbalance "
                    "needs one label, 0 or 1, per patient."
                )
            pools[patient.label].append(patient.id)
        for label, ids in pools.items():
            numpy_rng(seed, "label_imbalance", label).shuffle(ids)
        return pools[0], pools[1]

    def _size(self, shares: Sequence[float], negatives: int, positives: int) -> int:
        """The largest common client size that both labels suffice for, or the one asked for."""

        def fits(size: int) -> bool:
            used = sum(_half_up(size * share) for share in shares)
            return used <= positives and size * len(shares) - used <= negatives

        largest = (negatives + positives) // len(shares)
        size = self.samples_per_client or next((n for n in range(largest, 0, -1) if fits(n)), 0)
        if size == 0 or not fits(size):
            raise ConfigError(
                f"{negatives} negatives and {positives} positives do not suffice for "
                f"{len(shares)} clients of {size or 1} samples with these label ratios; use fewer "
                "clients, a smaller delta or fewer samples_per_client."
            )
        return size


def _half_up(value: float) -> int:
    """Rounds a half up; Python's own rounding to even would favour one label."""
    return int(value + 0.5)
