"""Clients with different label ratios: δ = negatives / positives, mirrored over the clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from medfed.common.errors import ConfigError
from medfed.common.seeding import derive_seed, numpy_rng
from medfed.datamodules.partitions.base import Dealt, Ids, Owners, Shares, Traits, count_classes
from medfed.datamodules.partitions.proportions import deal_whole
from medfed.datamodules.readers.base import Patient


@dataclass(frozen=True)
class LabelImbalance(Dealt):
    """Equal-sized clients, half of which (rounded up) are δ:1, the others mirrored 1:δ.

    Samples are used at most once; what does not fit the ratios stays unused. The split of every
    client is stratified, so its test set has the same ratio as its training set.

    A patient with several samples stays whole: patients are dealt so that every client has enough
    negatives and positives for its ratio at about the largest equal size, and every split of a
    client is then thinned to the ratio (`class_shares`).

    Attributes:
        num_clients: Number of clients.
        delta: δ = negatives per positive of the first half of the clients.
        positive_fractions: Share of positives per client, in place of `delta`.
        samples_per_client: Samples per client; None takes as many as the rarer label allows. Where
            patients stay whole, the number that a client can at least be thinned to before it is
            split.
    """

    traits = Traits(frozenset({"label"}), keeps_all=False)
    least = 0

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
        if self.samples_per_client is not None and self.samples_per_client < 1:
            raise ConfigError(
                f"partition.samples_per_client={self.samples_per_client} must be positive or null."
            )
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

    def deal(self, patients: Sequence[Patient], seed: int) -> Owners:
        """See `Dealt.deal`.

        Example:
            >>> patients = [Patient(str(i), label=i % 2) for i in range(10)]
            >>> LabelImbalance(2, 3.0, samples_per_client=4).deal(patients, seed=0)
            array([-1,  1,  0,  1,  0,  0,  1, -1,  0,  1])
        """
        shares = self.fractions()
        if any(p.counts is not None for p in patients):
            return self._deal_whole(patients, shares, seed)
        negatives, positives = self._pools(patients, seed)
        size = self._size(shares, len(negatives), len(positives))
        owner = np.full(len(patients), -1)
        for client, share in enumerate(shares):
            count = _half_up(size * share)
            chosen = [positives.pop() for _ in range(count)]
            chosen += [negatives.pop() for _ in range(size - count)]
            owner[chosen] = client
        return owner

    def class_shares(self, clients: Ids, num_classes: int, seed: int) -> dict[str, Shares]:
        """See `Partition.class_shares`; clients are taken in the order of `assign`.

        Example:
            >>> LabelImbalance(2, delta=3.0).class_shares(["a", "b"], 2, seed=0)
            {'a': (0.75, 0.25), 'b': (0.25, 0.75)}
        """
        if num_classes != 2:
            raise ConfigError(
                f"partition=label_imbalance needs 2 classes, but the data have {num_classes}; use "
                "partition=dirichlet or another partition."
            )
        return {c: (1 - f, f) for c, f in zip(clients, self.fractions(), strict=True)}

    def _deal_whole(self, patients: Sequence[Patient], shares: list[float], seed: int) -> Owners:
        """Deals whole patients so that every client can be thinned to as many samples."""
        counts = count_classes(patients)
        beyond = counts[:, 2:].any(axis=1)
        if beyond.any():
            raise ConfigError(
                f"Patient {patients[int(beyond.argmax())].id} has samples beyond classes 0 and 1; "
                "partition=label_imbalance needs 2 classes."
            )
        counts = np.pad(counts, ((0, 0), (0, 2 - counts.shape[1])))
        wishes = np.array([(1 - f, f) for f in shares])
        seed = derive_seed(seed, "label_imbalance")

        def deal(size: int) -> tuple[Owners, bool]:
            owner = deal_whole(counts, wishes * size, seed, spare=False)
            have = [counts[owner == n].sum(axis=0) for n in range(len(shares))]
            return owner, bool((have >= wishes * size - 1e-6).all())

        size = self.samples_per_client or _largest(lambda n: deal(n)[1], int(counts.sum()))
        owner, enough = deal(size)
        if size == 0 or not enough:
            negatives, positives = counts.sum(axis=0)
            raise ConfigError(_too_few(negatives, positives, len(shares), size))
        return owner

    def _pools(self, patients: Sequence[Patient], seed: int) -> tuple[list[int], list[int]]:
        """Which patients are negative and which positive, each in an order of its own."""
        pools: dict[int, list[int]] = {0: [], 1: []}
        for n, patient in enumerate(patients):
            if patient.label not in pools:
                raise ConfigError(
                    f"Patient {patient.id} has label {patient.label}; partition=label_imbalance "
                    "needs one label, 0 or 1, per patient."
                )
            pools[patient.label].append(n)
        for label, members in pools.items():
            numpy_rng(seed, "label_imbalance", label).shuffle(members)
        return pools[0], pools[1]

    def _size(self, shares: Sequence[float], negatives: int, positives: int) -> int:
        """The largest common client size that both labels suffice for, or the one asked for."""

        def fits(size: int) -> bool:
            used = sum(_half_up(size * share) for share in shares)
            return used <= positives and size * len(shares) - used <= negatives

        largest = (negatives + positives) // len(shares)
        size = self.samples_per_client or next((n for n in range(largest, 0, -1) if fits(n)), 0)
        if size == 0 or not fits(size):
            raise ConfigError(_too_few(negatives, positives, len(shares), size))
        return size


def _half_up(value: float) -> int:
    """Rounds a half up; Python's own rounding to even would favour one label."""
    return int(value + 0.5)


def _too_few(negatives: int, positives: int, clients: int, size: int) -> str:
    return (
        f"{negatives} negatives and {positives} positives do not suffice for {clients} clients of "
        f"{size or 1} samples with these label ratios; use fewer clients, a smaller delta or fewer "
        "samples_per_client."
    )


def _largest(fits: Callable[[int], bool], bound: int) -> int:
    """The largest whole number up to a bound that fits, by bisection; 0 where none does."""
    least, most = 0, bound
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(middle) else (least, middle - 1)
    return least
