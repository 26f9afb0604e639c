"""What a partition decides: the patients of each client, and how its data differ.

To add one, write a class in a new file and a yaml that names it; no other code refers to partitions
by name. A class that gives every patient to one of `num_clients` clients extends `Dealt`; one that
changes one aspect of another partition's clients extends `Wrapped`; any other extends `Partition`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from operator import index

import torch
from torch import Tensor

from medfed.datamodules.extending import *
from medfed.datamodules.scanner import Scanner

Ids = Sequence[str]
Shares = tuple[float, ...]  # (K,) of sum 1
Order = tuple[int, ...]  # (K,) the client's number of class k
Owners = NDArray[np.int64]  # (P,) the client of each patient
Counts = NDArray[np.int64]  # (P, K) samples per patient and class


@dataclass(frozen=True)
class Traits:
    """Properties of a partition that do not depend on the data.

    Attributes:
        needs: Its requirements: patients' ``label`` or ``centre``, a ``file``.
        keeps_all: Whether every patient belongs to a client.
        seeded: Whether another seed gives clients other patients.
        natural: Whether clients are the patients' real hospitals.
    """

    needs: frozenset[str] = frozenset()
    keeps_all: bool = True
    seeded: bool = True
    natural: bool = False


class Partition(ABC):
    """A rule, deterministic given its seed, that divides a data set among clients.

    Each question has a separate method, so that partitions compose; only `assign` has no default.
    """

    @property
    def traits(self) -> Traits:
        """The properties that are known without any patient."""
        return Traits()

    @abstractmethod
    def assign(self, patients: Sequence[Patient], seed: int) -> dict[str, list[str]]:
        """Gives every client its patients; a patient may be left out, but never assigned twice.

        Args:
            patients: All patients, sorted by id.
            seed: Seed of every random choice.

        Returns:
            Patient ids per client, clients in order.

        Raises:
            ConfigError: If the rule cannot be applied to these patients.
        """

    def availability(self, clients: Ids, channels: Ids, seed: int) -> dict[str, Tensor]:
        """Returns each client's channels; by default all.

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

    def class_shares(self, clients: Ids, num_classes: int, seed: int) -> dict[str, Shares]:
        """Returns the class proportions that clients should have.

        If a patient is one sample, `assign` itself can achieve them. If a patient has samples of
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

    def scanners_of(self, clients: Ids, seed: int) -> dict[str, Scanner]:
        """Gives clients simulated scanners; a client without one keeps its images.

        Args:
            clients: Client ids in order.
            seed: Seed of every random choice.
        """
        return {}

    def label_orders(self, clients: Ids, num_classes: int, seed: int) -> dict[str, Order]:
        """Returns the clients' class numbers: a planted conflict, for tests of methods.

        Args:
            clients: Client ids in order.
            num_classes: K classes, or regions of a segmentation.
            seed: Seed of every random choice.

        Returns:
            A permutation of 0 to K - 1 per client, whose entry k is the client's number for class
            (region) k; a client without one keeps its labels.
        """
        return {}

    def remark(self, patients: Sequence[Patient]) -> str:
        """Returns a remark for the user before training; empty if there is none.

        Args:
            patients: All patients.
        """
        return ""

    def splits(self, clients: Ids) -> dict[str, dict[Split, list[str]]]:
        """Returns the patients' splits if they are fixed beforehand.

        Args:
            clients: Client ids in order.

        Returns:
            Patient ids per split and client; the seed splits clients that are not included.
        """
        return {}


@dataclass(frozen=True)
class Dealt(Partition):
    """Base of partitions that divide whole patients among a given number of clients.

    Attributes:
        num_clients: Number of clients.
    """

    num_clients: int

    def __post_init__(self) -> None:
        check_fields("partition", self)

    @property
    def least(self) -> int:
        """The patients that every client needs; with 0 `deal` checks whether there are enough."""
        return 1

    @abstractmethod
    def deal(self, patients: Sequence[Patient], seed: int) -> Owners:
        """Assigns each patient to a client.

        Args:
            patients: P patients, in an order that does not depend on how they were listed.
            seed: Seed of every random choice.

        Returns:
            (P,) the number of each patient's client, -1 for a patient that is left out.

        Raises:
            ConfigError: If the rule cannot be applied to these patients.
        """

    def names(self) -> list[str]:
        """Returns the clients' names, in order."""
        return [f"hospital_{n}" for n in range(self.num_clients)]

    def assign(self, patients: Sequence[Patient], seed: int) -> dict[str, list[str]]:
        """See `Partition.assign`.

        Raises:
            ConfigError: If there is no client, or too few patients, or the rule does not apply.
        """
        if self.num_clients < 1 or self.num_clients * max(self.least, 1) > len(patients):
            each = f" of at least {self.least} for each client" if self.least > 1 else ""
            what = f"does not fit {len(patients)} patients{each}"
            raise ConfigError(f"partition.num_clients={self.num_clients} {what}.")
        patients = in_order(patients)
        owner = np.asarray(self.deal(patients, seed))
        fits = owner.shape == (len(patients),) and owner.dtype.kind in "iu"
        if not fits or owner.min() < -1 or owner.max() >= self.num_clients:
            what = f"{type(self).__name__}.deal must return a whole number for each of the"
            ends = f"-1 for none, or a client from 0 to {self.num_clients - 1}"
            raise ConfigError(f"{what} {len(patients)} patients: {ends}.")
        rows = {name: np.flatnonzero(owner == n) for n, name in enumerate(self.names())}
        return {name: sorted(patients[i].id for i in of) for name, of in rows.items()}


@dataclass(frozen=True)
class RoundRobin(Dealt):
    """Shuffles the patients and assigns them in turn; sizes differ by at most one."""

    shuffle: bool = True  # whether to shuffle first, by the seed

    @property
    def traits(self) -> Traits:
        """Seeded if patients are shuffled."""
        return Traits(seeded=self.shuffle)

    def deal(self, patients: Sequence[Patient], seed: int) -> Owners:
        """See `Dealt.deal`.

        Example:
            >>> RoundRobin(2, shuffle=False).assign([Patient("a"), Patient("b"), Patient("c")], 0)
            {'hospital_0': ['a', 'c'], 'hospital_1': ['b']}
        """
        order = np.arange(len(patients))
        if self.shuffle:
            order = numpy_rng(seed, "round_robin").permutation(len(patients))
        owner = np.empty_like(order)
        owner[order] = np.arange(len(patients)) % self.num_clients
        return owner


@dataclass(frozen=True)
class Wrapped(Partition):
    """Base of partitions that change one aspect of another partition's clients.

    Attributes:
        assignment: The partition that decides everything that the subclass does not change.
    """

    assignment: Partition

    def __post_init__(self) -> None:
        check_fields("partition", self)
        if not isinstance(self.assignment, Partition):
            what = f"partition.assignment={self.assignment} is no partition"
            raise ConfigError(f"{what}; choose one by partition@partition.assignment=OPTION.")

    @property
    def traits(self) -> Traits:
        """Those of `assignment`."""
        return self.assignment.traits

    def assign(self, patients: Sequence[Patient], seed: int) -> dict[str, list[str]]:
        """Leaves the assignment to `assignment`."""
        return self.assignment.assign(patients, seed)

    def among(self, clients: Ids) -> Ids:
        """Returns the clients among whom `assignment` decides; by default those that are there."""
        return clients

    def availability(self, clients: Ids, channels: Ids, seed: int) -> dict[str, Tensor]:
        """Leaves the channels to `assignment`."""
        return self.assignment.availability(self.among(clients), channels, seed)

    def class_shares(self, clients: Ids, num_classes: int, seed: int) -> dict[str, Shares]:
        """Leaves the classes to `assignment`."""
        return self.assignment.class_shares(self.among(clients), num_classes, seed)

    def scanners_of(self, clients: Ids, seed: int) -> dict[str, Scanner]:
        """Leaves the scanners to `assignment`."""
        return self.assignment.scanners_of(self.among(clients), seed)

    def label_orders(self, clients: Ids, num_classes: int, seed: int) -> dict[str, Order]:
        """Leaves the order of classes to `assignment`."""
        return self.assignment.label_orders(self.among(clients), num_classes, seed)

    def remark(self, patients: Sequence[Patient]) -> str:
        """Leaves the sentence to `assignment`."""
        return self.assignment.remark(patients)

    def splits(self, clients: Ids) -> dict[str, dict[Split, list[str]]]:
        """Leaves the splits to `assignment`."""
        return self.assignment.splits(clients)


def answer(
    partition: Partition, name: str, clients: Ids, *facts: Any, size: int = 0
) -> dict[str, Any]:
    """Returns what a method of a partition answers for clients, or refuses it.

    Example:
        >>> answer(RoundRobin(1), "availability", ["a"], ["T1", "T2"], 0, size=2)
        {'a': tensor([True, True])}
    """
    result: Any = getattr(partition, name)(clients, *facts)
    known = [*clients]
    while isinstance(partition, Wrapped) and getattr(type(partition), name) is vars(Wrapped)[name]:
        known, partition = [*partition.among(known)], partition.assignment  # which answers
    take, form = _FORMS[name]
    who, form = f"{type(partition).__name__}.{name}", form.format(size)
    if not isinstance(result, Mapping):
        raise ConfigError(f"{who} returns {result!r:.60}; it must return {{client: {form}}}.")
    if odd := [client for client in result if client not in known]:
        what = f"{who} names {odd[0]!r:.60}, which is no client{did_you_mean(str(odd[0]), known)}"
        raise ConfigError(f"{what}; the clients are {few(known)}.")
    if name == "availability" and (lost := [c for c in clients if c not in result]):
        raise ConfigError(f"{who} leaves out {few(lost)}; it must give every client {form}.")
    taken: dict[str, Any] = {}
    for client, value in result.items():
        try:
            taken[client] = take(value, size)
        except (TypeError, ValueError):
            raise ConfigError(f"{who} gives {client} {value!r:.60}, not {form}.") from None
    return taken


def _channels(value: Any, size: int) -> Tensor:
    has = np.asarray(value)
    if has.shape != (size,) or has.dtype != bool or not has.any():
        raise ValueError
    return torch.tensor(has)


def _shares(value: Any, size: int) -> Shares:
    shares = tuple(map(float, value))
    if len(shares) != size or not min(shares) >= 0 or not abs(sum(shares) - 1) < 1e-6:
        raise ValueError
    return shares


def _order(value: Any, size: int) -> Order:
    order = tuple(map(index, value))
    if sorted(order) != [*range(size)]:
        raise ValueError
    return order


def _scanner(value: Any, size: int) -> Any:
    if not all(callable(getattr(value, name, None)) for name in ("apply", "record")):
        raise TypeError
    return value


def _parts(value: Any, size: int) -> dict[Split, list[str]]:
    if {*value} - {*SPLITS} or any(isinstance(ids, str) for ids in value.values()):
        raise ValueError
    return {split: sorted(map(str, value.get(split, ()))) for split in SPLITS}


_FORMS: dict[str, tuple[Callable[[Any, int], Any], str]] = {
    "availability": (_channels, "True or False for each of {} channels, at least one True"),
    "class_shares": (_shares, "{} shares that sum to 1, one per class"),
    "label_orders": (_order, "the {} numbers of the classes from 0, each once"),
    "scanners_of": (_scanner, "a Scanner, or what has its methods apply and record"),
    "splits": (_parts, "lists of patient ids by train, val and test"),
}


def in_order(patients: Sequence[Patient]) -> list[Patient]:
    """Sorts patients by id, numbers by value, so that their listed order has no influence.

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


def count_classes(patients: Sequence[Patient]) -> Counts:
    """Collects the samples per class of every patient.

    Example:
        >>> count_classes([Patient("a", label=2), Patient("b", counts=(5, 1))]).tolist()
        [[0, 0, 1], [5, 1, 0]]
    """
    classes = max((max((p.label or 0) + 1, len(p.counts or ())) for p in patients), default=0)
    rows = [p.class_counts(classes) for p in patients]
    return np.array(rows, dtype=np.int64).reshape(len(rows), classes)
