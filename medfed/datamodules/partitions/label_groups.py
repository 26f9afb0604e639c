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
from numpy.typing import NDArray

from medfed.common.errors import ConfigError
from medfed.common.seeding import numpy_rng
from medfed.datamodules.partitions.base import Dealt, Owners, Traits, count_classes
from medfed.datamodules.partitions.proportions import apportion
from medfed.datamodules.readers.base import Patient


@dataclass(frozen=True)
class LabelGroups(Dealt):
    """Groups of clients with labels of their own; within a group, clients are alike.

    Patients whose label is in no group stay unused.

    Attributes:
        num_clients: Number of clients, spread evenly over the groups.
        groups: The labels of every group; no label twice.
    """

    traits = Traits(frozenset({"label"}), keeps_all=False)

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

    def names(self) -> list[str]:
        """See `Dealt.names`."""
        return grouped_names(self.num_clients, len(self.groups))

    def deal(self, patients: Sequence[Patient], seed: int) -> Owners:
        """See `Dealt.deal`.

        Raises:
            ConfigError: If a patient has no label, or samples of two groups, or a group has fewer
                patients than clients.

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
            # Shuffled within each label and dealt in turn, so that every client gets its share.
            shuffled = numpy_rng(seed, "label_groups", n).permutation(members)
            order = sorted(shuffled, key=lambda i: patients[i].label or 0)
            owner[order] = sizes[:n].sum() + np.arange(len(members)) % size
        return owner

    def _groups(self, patients: Sequence[Patient]) -> NDArray[np.int64]:
        """(P,) the group of every patient, -1 where its labels are in none."""
        group_of = {label: n for n, group in enumerate(self.groups) for label in group}
        groups = np.full(len(patients), -1)
        for i, row in enumerate(count_classes(patients)):
            found = {group_of.get(int(label), -1) for label in np.flatnonzero(row)}
            if len(found) > 1:
                raise ConfigError(
                    f"Patient {patients[i].id} has samples of more than one label group; "
                    "partition=label_groups needs patients whose labels are all in one group."
                )
            groups[i] = next(iter(found), -1)
        return groups


def grouped_names(num_clients: int, groups: int) -> list[str]:
    """Names clients by their groups.

    Args:
        num_clients: Number of clients, spread evenly over the groups.
        groups: Number of groups.

    Example:
        >>> grouped_names(3, 2)
        ['group_0_hospital_0', 'group_1_hospital_0', 'group_1_hospital_1']
    """
    sizes = apportion(num_clients, [1 / groups] * groups)
    return [f"group_{g}_hospital_{i}" for g, size in enumerate(sizes) for i in range(size)]


def group_of(client: str) -> int:
    """Reads the group from the name of a client.

    Args:
        client: A name that `grouped_names` gave.

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
