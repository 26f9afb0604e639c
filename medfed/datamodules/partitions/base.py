"""What a partition decides: which patients a client has, and which channels.

The two questions are answered by two methods, so that partitions compose: one that only changes
channels (`ChannelMissing`) takes another one that assigns the patients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from medfed.datamodules.readers.base import Patient


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
