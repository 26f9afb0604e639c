"""What a partition decides: which patients a client has, and how its data differ.

Each question is answered by a method of its own, so that partitions compose: one that only changes
channels (`ChannelMissing`) or scanners takes another one that assigns the patients (`Wrapped`).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from medfed.datamodules.client_data import Split
from medfed.datamodules.readers.base import Patient
from medfed.errors import ConfigError


class Site(Protocol):
    """What the scanner of one client does to its images."""

    def apply(self, image: Tensor, *key: object) -> Tensor:
        """Returns the image (C, *spatial) as this scanner shows it.

        Args:
            image: Normalised image of two or three spatial dimensions, left as it is: either
                z-scored with background 0, which stays 0, or scaled to [-1, 1].
            key: What the randomness is drawn from, such as the patient's id.

        Raises:
            ConfigError: If it is no image.
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

    def label_orders(
        self, clients: Sequence[str], num_classes: int, seed: int
    ) -> dict[str, tuple[int, ...]]:
        """Says by which numbers clients call the classes: a planted conflict, for tests of methods.

        Args:
            clients: Client ids in order.
            num_classes: K classes, or regions of a segmentation.
            seed: Seed of every random choice.

        Returns:
            A permutation of 0 to K - 1 per client, whose entry k is what the client calls class
            (region) k; a client that is left out keeps its labels.
        """
        return {}

    def splits(self, clients: Sequence[str]) -> dict[str, dict[Split, list[str]]]:
        """Says which patients train, validate and test, where that is decided beforehand.

        Args:
            clients: Client ids in order.

        Returns:
            Patient ids per split and client; a client that is left out is split by the seed.
        """
        return {}


@dataclass(frozen=True)
class Wrapped(Partition):
    """Base of partitions that change one thing about the clients of another partition.

    Attributes:
        assignment: The partition that answers every question that the subclass does not.
    """

    assignment: Partition

    def __post_init__(self) -> None:
        if not isinstance(self.assignment, Partition):
            raise ConfigError(
                f"partition.assignment={self.assignment} is no partition; choose one by "
                "partition@partition.assignment=OPTION."
            )

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

    def label_orders(
        self, clients: Sequence[str], num_classes: int, seed: int
    ) -> dict[str, tuple[int, ...]]:
        """Leaves the order of classes to `assignment`."""
        return self.assignment.label_orders(clients, num_classes, seed)

    def splits(self, clients: Sequence[str]) -> dict[str, dict[Split, list[str]]]:
        """Leaves the splits to `assignment`."""
        return self.assignment.splits(clients)


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


def in_order(patients: Sequence[Patient]) -> list[Patient]:
    """Sorts patients by id, numbers by value, so that no partition depends on how they are listed.

    Args:
        patients: Patients with distinct ids.

    Returns:
        The same patients.

    Example:
        >>> [p.id for p in in_order([Patient("row_10"), Patient("row_9"), Patient("row_1")])]
        ['row_1', 'row_9', 'row_10']
    """

    def key(patient: Patient) -> tuple[list[str | int], str]:
        pieces = re.split(r"(\d+)", patient.id)
        return [int(p) if i % 2 else p for i, p in enumerate(pieces)], patient.id

    return sorted(patients, key=key)


def check_count(num_clients: int, patients: int, least: int = 1) -> None:
    """Checks that there are enough patients for the clients.

    Args:
        num_clients: Number of clients.
        patients: Number of patients.
        least: Patients that every client needs.

    Raises:
        ConfigError: If there is no client, or too few patients.

    Example:
        >>> check_count(3, 2)
        Traceback (most recent call last):
        ...
        medfed.errors.ConfigError: partition.num_clients=3 does not fit 2 patients.
    """
    if num_clients < 1 or num_clients * least > patients:
        each = f" of at least {least} for each client" if least > 1 else ""
        raise ConfigError(
            f"partition.num_clients={num_clients} does not fit {patients} patients{each}."
        )
