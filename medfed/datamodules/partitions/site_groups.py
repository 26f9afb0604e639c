"""Site groups: planted groups of hospitals with a scanner, channels and a reading of their own.

For testing whether a method finds groups (PPFL's memberships do) in data that have none, such as a
cohort of scans. The name of a client says its group, so that every record and picture shows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medfed.common.errors import ConfigError
from medfed.datamodules.partitions.base import Dealt, Ids, Order, Owners
from medfed.datamodules.partitions.label_groups import group_of, grouped_names
from medfed.datamodules.partitions.round_robin import RoundRobin
from medfed.datamodules.readers.base import Patient, check_names
from medfed.datamodules.scanner import Scanner, scanners_from


@dataclass(frozen=True)
class SiteGroups(Dealt):
    """Patients dealt evenly to clients; clients of one group see and read them in one way.

    Scanners and missing channels change what a network gets, but one network may serve all of them.
    `label_shift` plants a *conflict*: the groups number the classes (or regions) in another order,
    so that no network can be right in two groups of different orders, as if hospitals followed
    opposite conventions. It is a test of what a method recovers and stands for no real practice.

    Attributes:
        num_clients: Number of clients, spread evenly over the groups.
        groups: Number of groups.
        scanners: A scanner per group, of the settings of `SiteEffect`; ``{}`` changes nothing.
        lacks: The channels that each group lacks.
        label_shift: s; group g calls class (region) k by the number (k + s g) mod K.
    """

    groups: int = 2
    scanners: Sequence[Mapping[str, float]] | None = None
    lacks: Sequence[Sequence[str]] | None = None
    label_shift: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.groups <= self.num_clients:
            raise ConfigError(
                f"partition.groups={self.groups} must be at least 1, and partition.num_clients="
                f"{self.num_clients} at least as many."
            )
        if self.label_shift < 0:
            raise ConfigError(
                f"partition.label_shift={self.label_shift} must be 0 (the groups name the classes "
                "alike) or more."
            )
        for name in ("scanners", "lacks"):
            value = getattr(self, name)
            if value is not None and len(value) != self.groups:
                raise ConfigError(
                    f"partition.{name} has {len(value)} entries for {self.groups} groups; give "
                    "one per group, an empty one where nothing changes."
                )
        self.scanners_of(self.names(), seed=0)

    def names(self) -> list[str]:
        """See `Dealt.names`."""
        return grouped_names(self.num_clients, self.groups)

    def deal(self, patients: Sequence[Patient], seed: int) -> Owners:
        """See `Dealt.deal`; the sizes of clients differ by one patient at most."""
        return RoundRobin(self.num_clients).deal(patients, seed)

    def availability(self, clients: Ids, channels: Ids, seed: int) -> dict[str, Tensor]:
        """See `Partition.availability`.

        Raises:
            ConfigError: If a channel is unknown, or a group lacks all of them.

        Example:
            >>> two = SiteGroups(2, lacks=[["T1"], []])
            >>> {k: v.tolist() for k, v in two.availability(two.names(), ["T1", "T2"], 0).items()}
            {'group_0_hospital_0': [False, True], 'group_1_hospital_0': [True, True]}
        """
        if self.lacks is None:
            return super().availability(clients, channels, seed)
        lacks = [check_names("channel", names, channels) if names else () for names in self.lacks]
        for group, names in enumerate(lacks):
            if len(names) == len(channels):
                raise ConfigError(
                    f"partition.lacks takes every channel from group {group}; leave it at least 1."
                )
        missing = {client: lacks[group_of(client)] for client in clients}
        return {c: torch.tensor([n not in missing[c] for n in channels]) for c in clients}

    def scanners_of(self, clients: Ids, seed: int) -> dict[str, Scanner]:
        """See `Partition.scanners_of`; shading and noise are drawn anew for each client and image.

        Example:
            >>> two = SiteGroups(2, scanners=[{}, {"gamma": 2.0}])
            >>> {name: one.gamma for name, one in two.scanners_of(two.names(), 0).items()}
            {'group_1_hospital_0': 2.0}
        """
        table = {c: self.scanners[group_of(c)] for c in clients} if self.scanners else {}
        return scanners_from({client: own for client, own in table.items() if own}, seed)

    def label_orders(self, clients: Ids, num_classes: int, seed: int) -> dict[str, Order]:
        """See `Partition.label_orders`.

        Raises:
            ConfigError: If the shift leaves the classes as they are.

        Example:
            >>> two = SiteGroups(2, label_shift=1)
            >>> two.label_orders(two.names(), 3, 0)
            {'group_1_hospital_0': (1, 2, 0)}
        """
        if not self.label_shift:
            return {}
        if self.label_shift % num_classes == 0:
            raise ConfigError(
                f"partition.label_shift={self.label_shift} leaves the order of {num_classes} "
                f"class{'es' * (num_classes > 1)} (or regions) as it is; choose a number below "
                "theirs, or 0."
            )
        shifts = {c: self.label_shift * group_of(c) % num_classes for c in clients}
        return {
            client: tuple((k + shift) % num_classes for k in range(num_classes))
            for client, shift in shifts.items()
            if shift
        }
