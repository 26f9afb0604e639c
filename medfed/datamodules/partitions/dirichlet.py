"""Dirichlet label skew: every class is divided among the clients by its own random proportions.

Sources: M. Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks", ICML
2019, section 4; Q. Li et al., "Federated Learning on Non-IID Data Silos", ICDE 2022: for each class
k, p_k ~ Dir_N(alpha), and client n gets the share p_kn of the samples of class k. The idea is that
of T.-M. H. Hsu et al., arXiv:1909.06335, who draw one distribution over classes per client instead;
there all clients have one size, here sizes differ, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from medfed.common.errors import ConfigError
from medfed.common.seeding import derive_seed, numpy_rng
from medfed.datamodules.partitions.base import Counts, Dealt, Owners, Traits, count_classes
from medfed.datamodules.partitions.proportions import apportion, deal_whole
from medfed.datamodules.readers.base import Patient

ATTEMPTS = 1000


@dataclass(frozen=True)
class Dirichlet(Dealt):
    """p_k ~ Dir_N(alpha) for every class k; every patient is used exactly once.

    Patients with samples of several classes stay whole: they are dealt so that the samples per
    client and class come near to the drawn numbers.

    Attributes:
        num_clients: Number of clients N.
        alpha: Concentration: small is skewed, large is even.
        min_patients: The proportions are drawn anew until every client has as many patients.
    """

    traits = Traits(frozenset({"label"}))

    alpha: float = 0.5
    min_patients: int = 3

    def __post_init__(self) -> None:
        if not 0 < self.alpha < float("inf") or self.min_patients < 1:
            raise ConfigError(
                f"partition.alpha={self.alpha} and .min_patients={self.min_patients} must be "
                "positive."
            )

    @property
    def least(self) -> int:
        """See `Dealt.least`."""
        return self.min_patients

    def deal(self, patients: Sequence[Patient], seed: int) -> Owners:
        """See `Dealt.deal`.

        Raises:
            ConfigError: If a patient has no label, or some client stays too small however often
                the proportions are drawn.

        Example:
            >>> patients = [Patient(str(i), label=i % 2) for i in range(8)]
            >>> Dirichlet(2, alpha=0.5, min_patients=2).deal(patients, seed=0)
            array([1, 1, 1, 0, 1, 1, 1, 0])
        """
        counts = count_classes(patients)
        for attempt in range(ATTEMPTS):
            owner = self._drawn(counts, derive_seed(seed, "dirichlet", attempt))
            if np.bincount(owner, minlength=self.num_clients).min() >= self.min_patients:
                return owner
        raise ConfigError(
            f"In {ATTEMPTS} draws with partition.alpha={self.alpha}, never did all "
            f"{self.num_clients} clients get {self.min_patients} of the {len(patients)} patients; "
            "use a larger alpha, fewer clients or a smaller min_patients."
        )

    def _drawn(self, counts: Counts, seed: int) -> NDArray[np.int64]:
        """The client of every patient, (P,), in one draw of the proportions."""
        shares = class_proportions(counts.shape[1], self.num_clients, self.alpha, seed)
        if (counts.sum(axis=1) != 1).any():
            return deal_whole(counts, shares.T * counts.sum(axis=0), seed)
        owner = np.empty(len(counts), dtype=np.int64)
        for k, share in enumerate(shares):
            members = numpy_rng(seed, "members", k).permutation(np.flatnonzero(counts[:, k]))
            owner[members] = np.repeat(
                np.arange(self.num_clients), apportion(len(members), share.tolist())
            )
        return owner


def class_proportions(
    num_classes: int, num_clients: int, alpha: float, seed: int
) -> NDArray[np.float64]:
    """Draws the proportions in which every class is divided.

    Args:
        num_classes: K.
        num_clients: N.
        alpha: Concentration.
        seed: Seed of the draw; a class's proportions do not depend on the other classes.

    Returns:
        (K, N), each row from Dir_N(alpha).

    Example:
        >>> class_proportions(3, 4, 1.0, seed=0).sum(axis=1).round(6).tolist()
        [1.0, 1.0, 1.0]
    """
    rows = (
        numpy_rng(seed, "proportions", k).dirichlet([alpha] * num_clients)
        for k in range(num_classes)
    )
    return np.stack(list(rows))
