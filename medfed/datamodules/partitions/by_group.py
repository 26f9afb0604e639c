"""Planted differences between clients.

Groups test whether a method finds them, as PPFL's memberships do. Label groups are PPFL's
pathological setting: each group of clients has the samples of some labels. Site groups are
hospitals that share a scanner, channels and a way of labelling. A client's name contains its group.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from medfed.datamodules.extending import *
from medfed.datamodules.partitions import base
from medfed.datamodules.partitions.by_label import apportion
from medfed.datamodules.scanner import Scanner, scanners_from


@dataclass(frozen=True)
class LabelGroups(base.Dealt):
    """Groups of clients with different labels; patients of other labels are not used."""

    traits = base.Traits(frozenset({"label"}), keeps_all=False)

    groups: Sequence[Sequence[int]]  # the labels of every group; no label twice

    def __post_init__(self) -> None:
        super().__post_init__()
        labels = [label for group in self.groups for label in group]
        if not labels or len(set(labels)) < len(labels) or not all(self.groups):
            what = f"partition.groups={[list(g) for g in self.groups]} must be lists of labels"
            raise ConfigError(f"{what}, none of them empty, and no label in two of them.")
        if self.num_clients < len(self.groups):
            raise ConfigError(
                f"partition.num_clients={self.num_clients} is fewer than {len(self.groups)} groups."
            )

    def names(self) -> list[str]:
        """See `Dealt.names`."""
        return _grouped_names(self.num_clients, len(self.groups))

    def deal(self, patients: Sequence[Patient], seed: int) -> base.Owners:
        """See `Dealt.deal`.

        Example:
            >>> patients = [Patient(str(i), label=i % 3) for i in range(6)]
            >>> LabelGroups(3, [[0, 1], [2]]).deal(patients, seed=0)
            array([0, 0, 2, 0, 0, 1])
        """
        group = self._groups(patients)
        sizes = np.bincount([group_of(name) for name in self.names()])
        owner = np.full(len(patients), -1)
        for n, size in enumerate(sizes):
            members = np.flatnonzero(group == n)
            if len(members) < size:
                raise ConfigError(
                    f"Group {n} (labels {', '.join(map(str, self.groups[n]))}) has {len(members)} "
                    f"patients for {size} clients; use fewer clients or other groups."
                )
            # Shuffled within each label and assigned in turn, so that every client gets its share.
            shuffled = numpy_rng(seed, "label_groups", n).permutation(members)
            order = sorted(shuffled, key=lambda i: patients[i].label or 0)
            owner[order] = sizes[:n].sum() + np.arange(len(members)) % size
        return owner

    def _groups(self, patients: Sequence[Patient]) -> NDArray[np.int64]:
        """(P,) the group of every patient, -1 if its labels are in no group."""
        group_of = {label: n for n, group in enumerate(self.groups) for label in group}
        groups = np.full(len(patients), -1)
        for i, row in enumerate(base.count_classes(patients)):
            groups_of_row = {group_of.get(int(label), -1) for label in np.flatnonzero(row)}
            if len(groups_of_row) > 1:
                what = f"Patient {patients[i].id} has samples of more than one label group"
                mend = "partition=label_groups needs patients whose labels are all in one group"
                raise ConfigError(f"{what}; {mend}.")
            groups[i] = next(iter(groups_of_row), -1)
        return groups


def _grouped_names(num_clients: int, groups: int) -> list[str]:
    """Names clients by their groups.

    Example:
        >>> _grouped_names(3, 2)
        ['group_0_hospital_0', 'group_1_hospital_0', 'group_1_hospital_1']
    """
    sizes = apportion(num_clients, [1 / groups] * groups)
    return [f"group_{g}_hospital_{i}" for g, size in enumerate(sizes) for i in range(size)]


def group_of(client: str) -> int:
    """Reads the group from the name of a client."""
    match = re.fullmatch(r"group_(\d+)_hospital_\d+", client)
    if match is None:
        raise ConfigError(f"Client {client} is in no label group; use partition=label_groups.")
    return int(match[1])


@dataclass(frozen=True)
class SiteGroups(base.Dealt):
    """Divides patients evenly; clients of one group share scanners, channels and class numbers.

    `label_shift` plants a *conflict*: groups number the classes in different orders, so that no
    network can be right in two. It tests what a method recovers and does not represent real
    practice.
    """

    groups: int = 2  # number of groups
    # The settings of a `scanner.Scanner` per group; ``{}`` changes nothing.
    scanners: Sequence[Mapping[str, float]] | None = None
    lacks: Sequence[Sequence[str]] | None = None  # the channels that each group lacks
    # s; group g numbers class (region) k as (k + s g) mod K.
    label_shift: Annotated[int, check_not_negative] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.groups <= self.num_clients:
            raise ConfigError(
                f"partition.groups={self.groups} must be at least 1, and partition.num_clients="
                f"{self.num_clients} at least as many."
            )
        for name in ("scanners", "lacks"):
            value = getattr(self, name)
            if value is not None and len(value) != self.groups:
                what = f"partition.{name} has {len(value)} entries for {self.groups} groups"
                mend = "give one per group, an empty one for a group without a change"
                raise ConfigError(f"{what}; {mend}.")
        self.scanners_of(self.names(), seed=0)

    def names(self) -> list[str]:
        """See `Dealt.names`."""
        return _grouped_names(self.num_clients, self.groups)

    def deal(self, patients: Sequence[Patient], seed: int) -> base.Owners:
        """See `Dealt.deal`; the sizes of clients differ by one patient at most."""
        return base.RoundRobin(self.num_clients).deal(patients, seed)

    def availability(self, clients: base.Ids, channels: base.Ids, seed: int) -> dict[str, Tensor]:
        """See `Partition.availability`."""
        if self.lacks is None:
            return super().availability(clients, channels, seed)
        lacks = [check_names("channel", names, channels) if names else () for names in self.lacks]
        for group, names in enumerate(lacks):
            if len(names) == len(channels):
                what = f"takes every channel from group {group}; leave it at least 1"
                raise ConfigError(f"partition.lacks {what}.")
        missing = {client: lacks[group_of(client)] for client in clients}
        return {c: torch.tensor([n not in missing[c] for n in channels]) for c in clients}

    def scanners_of(self, clients: base.Ids, seed: int) -> dict[str, Scanner]:
        """See `Partition.scanners_of`; shading and noise differ for each client and image."""
        table = {c: self.scanners[group_of(c)] for c in clients} if self.scanners else {}
        return scanners_from({c: settings for c, settings in table.items() if settings}, seed)

    def label_orders(self, clients: base.Ids, num_classes: int, seed: int) -> dict[str, base.Order]:
        """See `Partition.label_orders`."""
        if not self.label_shift:
            return {}
        if self.label_shift % num_classes == 0:
            classes = f"{num_classes} class{'es' * (num_classes > 1)} (or regions) as it is"
            what = f"partition.label_shift={self.label_shift} leaves the order of {classes}"
            raise ConfigError(f"{what}; choose a number below theirs, or 0.")
        shifts = {c: self.label_shift * group_of(c) % num_classes for c in clients}
        order = tuple(range(num_classes))
        return {c: order[shift:] + order[:shift] for c, shift in shifts.items() if shift}


@dataclass(frozen=True)
class ChannelMissing(base.Wrapped):
    """Removes channels from another partition's clients: they are 0 after normalisation."""

    # ``lack_k``: the listed clients lack `channel`; ``rotate``: client n lacks channel n mod C;
    # ``random``: each channel is missing with `probability`, but no client loses all; ``table``: as
    # listed in `table`; ``none``: no channel is missing.
    preset: Literal["none", "lack_k", "rotate", "random", "table"] = "rotate"
    channel: str | None = None  # for ``lack_k``, the name of the missing channel
    # For ``lack_k``, the clients that lack it: ids, or positions in the order.
    clients: Sequence[str | int] = ()
    probability: Annotated[float, within("[0, 1)")] = 0.0  # for ``random``, in [0, 1)
    # For ``table``, the channels that a client *has*, by client id; a client that is not listed has
    # all.
    table: Mapping[str, Sequence[str]] | None = None

    def availability(self, clients: base.Ids, channels: base.Ids, seed: int) -> dict[str, Tensor]:
        """See `Partition.availability`."""
        missing: dict[str, list[int]] = {}
        if self.preset == "lack_k":
            missing = self._lacking(clients, channels)
        elif self.preset == "rotate":
            missing = {client: [n % len(channels)] for n, client in enumerate(clients)}
        elif self.preset == "random":
            missing = {c: self._at_random(c, len(channels), seed) for c in clients}
        elif self.preset == "table":
            missing = self._from_table(clients, channels)
        facts = clients, channels, seed
        present = base.answer(self.assignment, "availability", *facts, size=len(channels))
        for client, indices in missing.items():
            present[client][indices] = False
            if not present[client].any():
                raise ConfigError(f"Client {client} would lack every channel; leave it at least 1.")
        return present

    def _lacking(self, clients: base.Ids, channels: base.Ids) -> dict[str, list[int]]:
        if self.channel is None or not self.clients:
            raise ConfigError("partition.preset=lack_k needs partition.channel and .clients.")
        index = list(channels).index(check_names("channel", [self.channel], channels)[0])
        known: dict[object, str] = dict(enumerate(clients))
        names = [known.get(client, str(client)) for client in self.clients]
        return {name: [index] for name in check_names("client", names, clients)}

    def _at_random(self, client: str, count: int, seed: int) -> list[int]:
        rng = torch_rng(seed, "channel_missing", client)
        missing = torch.rand(count, generator=rng) < self.probability
        missing[int(torch.randint(count, (1,), generator=rng))] &= not missing.all()
        return [int(i) for i in missing.nonzero()]

    def _from_table(self, clients: base.Ids, channels: base.Ids) -> dict[str, list[int]]:
        if not self.table:
            raise ConfigError("partition.preset=table needs partition.table.")
        check_names("client", list(self.table), clients)
        has = {c: check_names("channel", names, channels) for c, names in self.table.items()}
        return {c: [i for i, n in enumerate(channels) if n not in has[c]] for c in has}
