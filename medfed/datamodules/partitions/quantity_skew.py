"""Quantity skew: hospitals of very different size whose patients are otherwise alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from medfed.common.checks import check_known
from medfed.common.errors import ConfigError
from medfed.common.seeding import numpy_rng
from medfed.datamodules.partitions.base import Dealt, Owners
from medfed.datamodules.partitions.proportions import apportion
from medfed.datamodules.readers.base import Patient

LAWS = ("power", "lognormal", "shares")


@dataclass(frozen=True)
class QuantitySkew(Dealt):
    """Shuffles the patients and cuts them by size; every patient is used exactly once.

    Attributes:
        num_clients: Number of clients.
        law: ``power``: client n (from 1) has a share in proportion to n^-exponent; ``lognormal``:
            to exp(sigma·z) with z standard normal; ``shares``: as listed in `shares`.
        exponent: For ``power``; 0 makes all equal.
        sigma: For ``lognormal``; 0 makes all equal.
        shares: For ``shares``, one positive number per client, in any unit.
    """

    law: str = "power"
    exponent: float = 1.0
    sigma: float = 1.0
    shares: Sequence[float] | None = None

    def __post_init__(self) -> None:
        check_known("partition.law", self.law, LAWS)
        if not (0 <= self.exponent < np.inf and 0 <= self.sigma < np.inf):
            raise ConfigError(
                f"partition.exponent={self.exponent} and .sigma={self.sigma} must be at least 0."
            )
        if self.law == "shares" and (
            self.shares is None
            or len(self.shares) != self.num_clients
            or not all(0 < s < np.inf for s in self.shares)
        ):
            raise ConfigError(
                f"partition.law=shares needs partition.shares, {self.num_clients} positive "
                "numbers, one per client."
            )

    def deal(self, patients: Sequence[Patient], seed: int) -> Owners:
        """See `Dealt.deal`.

        Example:
            >>> np.bincount(QuantitySkew(3).deal([Patient(str(i)) for i in range(11)], seed=0))
            array([6, 3, 2])
        """
        sizes = at_least_one(apportion(len(patients), self._shares(seed).tolist()))
        owner = np.repeat(np.arange(self.num_clients), sizes)
        return numpy_rng(seed, "quantity_skew").permutation(owner)

    def _shares(self, seed: int) -> NDArray[np.float64]:
        if self.law == "power":
            logs = -self.exponent * np.log(np.arange(1, self.num_clients + 1))
        elif self.law == "lognormal":
            normal = numpy_rng(seed, "quantity_skew", "sizes").standard_normal(self.num_clients)
            logs = self.sigma * normal
        else:
            logs = np.log(np.asarray(self.shares, dtype=np.float64))
        sizes = np.exp(logs - logs.max())
        return np.asarray(sizes / sizes.sum())


def at_least_one(sizes: Sequence[int]) -> list[int]:
    """Lets the largest client give one patient to each that has none.

    Args:
        sizes: Patients per client, in total at least one for each.

    Returns:
        The same total, every size at least 1.

    Example:
        >>> at_least_one([5, 1, 0, 0])
        [3, 1, 1, 1]
    """
    filled = list(sizes)
    for n, size in enumerate(sizes):
        if size == 0:
            filled[filled.index(max(filled))] -= 1
            filled[n] = 1
    return filled
