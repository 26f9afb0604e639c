"""Label groups: clients of one group share a set of labels that no other group has.

The pathological setting in which PPFL looks for groups of clients: the clients are cut into groups,
and each group holds the samples of its own labels (digits 0 to 2, 3 and 4, ...). The name of a
client says its group, so that every record and picture shows it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from medfed.datamodules.partitions.base import Partition, in_order
from medfed.datamodules.partitions.dealing import by_client, count_classes
from medfed.datamodules.partitions.thinning import apportion
from medfed.datamodules.readers.base import Patient
from medfed.datamodules.seeding import numpy_rng
from medfed.errors import ConfigError


@dataclass(frozen=True)
class LabelGroups(Partition):
    """Groups of clients with labels of their own; within a group, clients are alike.

    Patients whose label is in no group stay unused.

    Attributes:
        num_clients: Number of clients, spread evenly over the groups.
        groups: The labels of every group; no label twice.
    """

    num_clients: int
    groups: Sequence[Sequence[int]]

    def __post_init__(self) -> None:
        labels = [label for group in self.groups for label in group]
        if not labels or len(set(labels)) < len(labels) or not all(self.groups):
            raise ConfigError(
                f"partition.groups={[list(g) for g in self.groups]} must be lists of labels, none "
                "of them empty, and no label in two of them."
            )
        if self.num_clients < len(self.groups):
            raise ConfigError(
                f"partition.num_clients={self.num_clients} is fewer than {len(self.groups)} groups."
            )

    def sizes(self) -> tuple[int, ...]:
        """Returns the number of clients of every group.

        Example:
            >>> LabelGroups(7, [[0, 1], [2], [3]]).sizes()
            (2, 2, 3)
        """
        return apportion(self.num_clients, [1 / len(self.groups)] * len(self.groups))

    def assign(self, patients: Sequence[Patient], seed: int) -> dict[str, list[str]]:
        """See `Partition.assign`.

        Raises:
            ConfigError: If a patient has no label, or samples of two groups, or a group has fewer
                patients than clients.

        Example:
            >>> patients = [Patient(str(i), label=i % 3) for i in range(6)]
            >>> LabelGroups(3, [[0, 1], [2]]).assign(patients, seed=0)
            {'group_0_hospital_0': ['0', '1', '3', '4'], 'group_1_hospital_0': ['5'], \
'group_1_hospital_1': ['2']}
        """
        patients = in_order(patients)
        members = self._members(patients)
        clients: dict[str, list[str]] = {}
        for n, (group, size) in enumerate(zip(members, self.sizes(), strict=True)):
            if len(group) < size:
                raise ConfigError(
                    f"Group {n} (labels {', '.join(map(str, self.groups[n]))}) has {len(group)} "
                    f"patients for {size} clients; use fewer clients or other groups."
                )
            names = [f"group_{n}_hospital_{i}" for i in range(size)]
            # Shuffled within each label and dealt in turn, so that every client gets its share.
            shuffled = numpy_rng(seed, "label_groups", n).permutation(len(group))
            order = sorted(shuffled, key=lambda i: group[i].label or 0)
            owner = np.empty(len(group), dtype=np.int64)
            owner[order] = np.arange(len(group)) % size
            clients |= by_client([p.id for p in group], owner, names)
        return clients

    def _members(self, patients: Sequence[Patient]) -> list[list[Patient]]:
        """The patients of every group."""
        group_of = {label: n for n, group in enumerate(self.groups) for label in group}
        members: list[list[Patient]] = [[] for _ in self.groups]
        for patient, row in zip(patients, count_classes(patients), strict=True):
            found = {group_of.get(int(label)) for label in np.flatnonzero(row)}
            if len(found) > 1:
                raise ConfigError(
                    f"Patient {patient.id} has samples of more than one label group; "
                    "partition=label_groups needs patients whose labels are all in one group."
                )
            if (n := next(iter(found), None)) is not None:
                members[n].append(patient)
        return members


def group_of(client: str) -> int:
    """Reads the group from the name of a client.

    Args:
        client: A name that `LabelGroups` gave.

    Returns:
        The number of its group.

    Raises:
        ConfigError: If it is no such name.

    Example:
        >>> group_of("group_3_hospital_0")
        3
    """
    found = re.fullmatch(r"group_(\d+)_hospital_\d+", client)
    if found is None:
        raise ConfigError(f"Client {client} is in no label group; use partition=label_groups.")
    return int(found[1])
