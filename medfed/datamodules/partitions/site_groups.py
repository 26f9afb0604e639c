"""Site groups: planted groups of hospitals with a scanner, channels and a reading of their own.

For testing whether a method finds groups (PPFL's memberships do) in data that have none, such as a
cohort of scans. The name of a client says its group, so that every record and picture shows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from medfed.datamodules.partitions.base import Partition, Site
from medfed.datamodules.partitions.channel_missing import ChannelMissing
from medfed.datamodules.partitions.label_groups import group_of
from medfed.datamodules.partitions.round_robin import RoundRobin
from medfed.datamodules.partitions.site_effect import SiteEffect
from medfed.datamodules.partitions.thinning import apportion
from medfed.datamodules.readers.base import Patient, check_names
from medfed.errors import ConfigError


@dataclass(frozen=True)
class SiteGroups(Partition):
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

    num_clients: int
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
        self.sites(self.names(), seed=0)

    def names(self) -> list[str]:
        """Returns the clients' names.

        Example:
            >>> SiteGroups(3, groups=2).names()
            ['group_0_hospital_0', 'group_1_hospital_0', 'group_1_hospital_1']
        """
        sizes = apportion(self.num_clients, [1 / self.groups] * self.groups)
        return [f"group_{g}_hospital_{i}" for g, size in enumerate(sizes) for i in range(size)]

    def assign(self, patients: Sequence[Patient], seed: int) -> dict[str, list[str]]:
        """See `Partition.assign`; the sizes of clients differ by one patient at most.

        Raises:
            ConfigError: If there are fewer patients than clients.

        Example:
            >>> SiteGroups(2).assign([Patient("a"), Patient("b"), Patient("c")], seed=0)
            {'group_0_hospital_0': ['a', 'b'], 'group_1_hospital_0': ['c']}
        """
        dealt = RoundRobin(self.num_clients).assign(patients, seed)
        return dict(zip(self.names(), dealt.values(), strict=True))

    def availability(
        self, clients: Sequence[str], channels: Sequence[str], seed: int
    ) -> dict[str, Tensor]:
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
        has = {c: [n for n in channels if n not in lacks[group_of(c)]] for c in clients}
        lacking = ChannelMissing(RoundRobin(self.num_clients), "table", table=has)
        return lacking.availability(clients, channels, seed)

    def sites(self, clients: Sequence[str], seed: int) -> dict[str, Site]:
        """See `Partition.sites`; shading and noise are drawn anew for each client and image.

        Example:
            >>> two = SiteGroups(2, scanners=[{}, {"gamma": 2.0}])
            >>> {name: site.record()["gamma"] for name, site in two.sites(two.names(), 0).items()}
            {'group_1_hospital_0': 2.0}
        """
        table = {c: self.scanners[group_of(c)] for c in clients} if self.scanners else {}
        changed = {client: settings for client, settings in table.items() if settings}
        if not changed:
            return {}
        return SiteEffect(RoundRobin(self.num_clients), table=changed).sites(clients, seed)

    def label_orders(
        self, clients: Sequence[str], num_classes: int, seed: int
    ) -> dict[str, tuple[int, ...]]:
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
