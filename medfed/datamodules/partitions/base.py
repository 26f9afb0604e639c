"""What a partition decides: which patients a client has, and how its data differ.

Each question is answered by a method of its own, so that partitions compose: one that only changes
channels (`ChannelMissing`) or scanners takes another one that assigns the patients (`Wrapped`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from medfed.datamodules.readers.base import Patient


class Site(Protocol):
    """What the scanner of one client does to its images."""

    def apply(self, image: Tensor, *key: object) -> Tensor:
        """Returns the image (C, *spatial) as this scanner shows it; voxels that are 0 stay 0.

        Args:
            image: Normalised image of any number of spatial dimensions; left as it is.
            key: What the randomness is drawn from, such as the patient's id.
        """
        ...

    def record(self) -> dict[str, Any]:
        """Returns the parameters, for the record of the partition."""
        ...


class Partition(ABC):
    """A rule, deterministic from its seed, that turns a data set into clients."""

    @abstractmethod
    def assign(self, patients: Sequence[Patient], seed: int) -> dict[str, list[str]]:
        """Gives every client its patients; a patient may be left out, but never given twice.

        Args:
            patients: All patients, sorted by id.
            seed: Seed of every random choice.

        Returns:
            Patient ids per client, clients in order.

        Raises:
            ConfigError: If the rule cannot be applied to these patients.
        """

    def availability(
        self, clients: Sequence[str], channels: Sequence[str], seed: int
    ) -> dict[str, Tensor]:
        """Says which channels each client has; by default all of them.

        Args:
            clients: Client ids in order.
            channels: Channel names, C of them.
            seed: Seed of every random choice.

        Returns:
            (C,) bool per client.

        Raises:
            ConfigError: If the rule names a client or channel that does not exist.
        """
        return {client: torch.ones(len(channels), dtype=torch.bool) for client in clients}

    def class_shares(
        self, clients: Sequence[str], num_classes: int, seed: int
    ) -> dict[str, tuple[float, ...]]:
        """Says in which proportions the classes shall stand at a client.

        `assign` alone can see to it where a patient is one sample. Where a patient has samples of
        several classes (the nodule candidates of a scan), every split of the client is thinned to
        these proportions.

        Args:
            clients: Client ids in order.
            num_classes: K.
            seed: Seed of every random choice.

        Returns:
            K numbers that sum to 1, per client; a client that is left out keeps its samples.
        """
        return {}

    def sites(self, clients: Sequence[str], seed: int) -> dict[str, Site]:
        """Gives clients a scanner of their own; a client that is left out keeps its images.

        Args:
            clients: Client ids in order.
            seed: Seed of every random choice.
        """
        return {}


@dataclass(frozen=True)
class Wrapped(Partition):
    """Base of partitions that change one thing about the clients of another partition.

    Attributes:
        assignment: The partition that answers every question that the subclass does not.
    """

    assignment: Partition

    def assign(self, patients: Sequence[Patient], seed: int) -> dict[str, list[str]]:
        """Leaves the assignment to `assignment`."""
        return self.assignment.assign(patients, seed)

    def availability(
        self, clients: Sequence[str], channels: Sequence[str], seed: int
    ) -> dict[str, Tensor]:
        """Leaves the channels to `assignment`."""
        return self.assignment.availability(clients, channels, seed)

    def class_shares(
        self, clients: Sequence[str], num_classes: int, seed: int
    ) -> dict[str, tuple[float, ...]]:
        """Leaves the classes to `assignment`."""
        return self.assignment.class_shares(clients, num_classes, seed)

    def sites(self, clients: Sequence[str], seed: int) -> dict[str, Site]:
        """Leaves the scanners to `assignment`."""
        return self.assignment.sites(clients, seed)


def client_names(count: int) -> list[str]:
    """Names clients that have no name of their own.

    Args:
        count: How many.

    Returns:
        ``hospital_0`` to ``hospital_{count-1}``.

    Example:
        >>> client_names(2)
        ['hospital_0', 'hospital_1']
    """
    return [f"hospital_{i}" for i in range(count)]
