"""The federated data module: a reader's patients, a partition's clients, one split for each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset

from medfed.datamodules.client_data import SPLITS, Batch, ClientData, Split
from medfed.datamodules.newcomers import check_newcomers
from medfed.datamodules.partitions.base import Partition, Site
from medfed.datamodules.readers.base import Patient
from medfed.datamodules.seeding import derive_seed
from medfed.datamodules.splits import check_leakage, sha256_of, split_patients, warn_small
from medfed.datamodules.threads import one_thread
from medfed.errors import DataError


@dataclass(frozen=True)
class ClientPlan:
    """All that the partition and the split decide about one client, before data are read.

    Attributes:
        patients: Patient ids per split.
        channels: (C,) bool, the channels that it has.
        shares: (K,) wanted class proportions, or None.
        site: Its scanner, or None.
        label_order: (K,) what it calls every class or region, or None for the order of the data.
    """

    patients: Mapping[Split, list[str]]
    channels: torch.Tensor
    shares: tuple[float, ...] | None = None
    site: Site | None = None
    label_order: tuple[int, ...] | None = None

    def record(self, channel_names: Sequence[str]) -> dict[str, Any]:
        """Returns what is worth writing down beside the patients, for JSON."""
        present = zip(channel_names, self.channels.tolist(), strict=True)
        return {
            "channels": [name for name, has in present if has],
            "class_shares": None if self.shares is None else list(self.shares),
            "site": None if self.site is None else self.site.record(),
        } | ({} if self.label_order is None else {"label_order": list(self.label_order)})


class FederatedDataModule(pl.LightningDataModule, ABC):
    """Base of the data modules; a subclass lists patients and builds one client's tensors.

    Attributes:
        clients: `ClientData` per client id, in the partition's order; filled by `setup`.
        keep_out: Clients that join after training; set it before `setup`.
        newcomers: Their `ClientData`, which is not among `clients`; filled by `setup`.
        plans: What was decided about every client; filled by `setup`.
        channel_names: Names of the C channels (or F features).
        class_names: Names of the classes, or of the regions.
        description: One line about where the data come from; filled by `setup`.
        mixtures: Of data generated as mixtures: the true one per client; filled by `setup`.
    """

    channel_names: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    description: str = ""

    def __init__(
        self, partition: Partition, seed: int, val_fraction: float, test_fraction: float
    ) -> None:
        super().__init__()
        self.partition = partition
        self.seed = seed
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.clients: dict[str, ClientData] = {}
        self.keep_out: tuple[str, ...] = ()
        self.newcomers: dict[str, ClientData] = {}
        self.mixtures: dict[str, tuple[float, ...]] = {}
        self.plans: dict[str, ClientPlan] = {}
        self._patients: dict[str, Patient] = {}
        self._hashes: dict[str, str] | None = None

    @property
    def in_channels(self) -> int:
        """Image channels C, or features F."""
        return len(self.channel_names)

    @property
    def num_classes(self) -> int:
        """Classes K of a classification, or regions R of a segmentation."""
        return len(self.class_names)

    @abstractmethod
    def list_patients(self) -> list[Patient]:
        """Lists all patients, each with its centre and label where known."""

    @abstractmethod
    def build_clients(self, plans: Mapping[str, ClientPlan]) -> dict[str, ClientData]:
        """Reads the patients, or opens the cache that holds them.

        Args:
            plans: What each client has, by client id.
        """

    def settings(self) -> dict[str, Any]:
        """Choices that belong beside the splits in the record, such as the evaluated slices."""
        return {}

    def preprocessing(self, client: str) -> dict[str, Any]:
        """What becomes of a scan, image or row before a client's network sees it, as JSON.

        Args:
            client: Its id; call `setup` first.

        Returns:
            ``channels`` (all, in order), ``present`` (which of them the client has; the others are
            0), ``labels`` in the order of the network's outputs, and what a subclass knows:
            ``spacing`` and ``spacing_range`` in mm of the training scans, ``orientation``,
            ``normalization`` by ``name``, and ``input``: the ``kind`` of input with what is needed
            to read one as in training.
        """
        plan = self.plans[client]
        order = plan.label_order or range(self.num_classes)
        return {
            "channels": list(self.channel_names),
            "present": plan.record(self.channel_names)["channels"],
            "labels": [self.class_names[list(order).index(k)] for k in range(self.num_classes)],
            "spacing": None,
            "spacing_range": None,
            "orientation": None,
            "normalization": None,
            "input": None,
        }

    def setup(self, stage: str | None = None) -> None:
        """Assigns, splits and reads, once; further calls change nothing.

        Args:
            stage: Ignored: all splits are read together.

        Raises:
            DataError: If a client has no patients, a patient appears twice, or a file is bad.
            ConfigError: If the partition does not fit the data.
        """
        if self.clients:
            return
        self.prepare_data()
        patients = self.list_patients()
        self._patients = {p.id: p for p in patients}
        if len(self._patients) < len(patients):
            twice = Counter(p.id for p in patients).most_common(1)[0][0]
            raise DataError(f"Patient {twice} is listed twice; patient ids must be unique.")
        assigned = self.partition.assign(patients, self.seed)
        check_newcomers(self.keep_out, list(assigned))
        given = self.partition.splits(list(assigned))
        splits = {c: self._split(c, ids, given.get(c)) for c, ids in assigned.items()}
        check_leakage(splits)
        names, partition = list(assigned), self.partition
        channels = partition.availability(names, self.channel_names, self.seed)
        shares = partition.class_shares(names, self.num_classes, self.seed)
        sites = partition.sites(names, self.seed)
        orders = partition.label_orders(names, self.num_classes, self.seed)
        self.plans = {
            n: ClientPlan(splits[n], channels[n], shares.get(n), sites.get(n), orders.get(n))
            for n in names
        }
        with one_thread():
            built = self.build_clients(self.plans)
        self.newcomers = {n: built.pop(n) for n in self.keep_out}
        self.clients = built

    def _split(
        self, client: str, ids: Sequence[str], fixed: dict[Split, list[str]] | None = None
    ) -> dict[Split, list[str]]:
        if not ids:
            raise DataError(
                f"Client {client} has no patients; use fewer clients or another partition."
            )
        if fixed is not None:
            warn_small(client, fixed)
            return fixed
        labels = {i: self._patients[i].label for i in ids}
        given: dict[Split, list[str]] = {split: [] for split in SPLITS}
        for i in ids:
            if (place := self._patients[i].split) is not None:
                given[place].append(i)
        if sum(map(len, given.values())) == len(ids):
            warn_small(client, given)
            return given
        seed = derive_seed(self.seed, client)
        parts = split_patients(ids, self.val_fraction, self.test_fraction, seed, labels)
        warn_small(client, parts)
        return parts

    def centre_of(self, patient: str) -> str | None:
        """Returns the hospital that the data name for a patient, after `setup`."""
        return self._patients[patient].centre

    def splits(self) -> dict[str, Any]:
        """The record to be written beside a run, as JSON.

        Returns:
            ``seed``, ``clients`` (patient ids per client and split), ``partition`` (channels,
            class shares and scanner of each client), ``settings``, and ``files`` (SHA-256 per file
            that was used).
        """
        if self._hashes is None:
            used = {i for p in self.plans.values() for ids in p.patients.values() for i in ids}
            self._hashes = self.file_hashes(sorted(used))
        return {
            "seed": self.seed,
            "clients": {name: dict(p.patients) for name, p in self.plans.items()},
            "partition": {name: p.record(self.channel_names) for name, p in self.plans.items()},
            "settings": self.settings(),
            "files": dict(self._hashes),
        }

    def file_hashes(self, patients: Sequence[str]) -> dict[str, str]:
        """Returns the SHA-256 of every file of the given patients, by path."""
        files = {f for i in patients for f in self._patients[i].files.values()}
        return {str(path): sha256_of(path) for path in sorted(files)}

    def train_dataloader(self) -> DataLoader[Batch]:
        """Training samples of all clients together, for central training.

        Returns:
            A shuffled loader (its own seeded generator) of dict batches.
        """
        clients = list(self.clients.values())
        return DataLoader(
            ConcatDataset([_Samples(c) for c in clients]),
            batch_size=clients[0].batch_size,
            shuffle=True,
            generator=torch.Generator().manual_seed(self.seed),
        )

    def val_dataloader(self) -> DataLoader[Batch]:
        """Validation batches of all clients, in fixed order."""
        return DataLoader(_Evaluation(list(self.clients.values()), "val"), batch_size=None)

    def test_dataloader(self) -> DataLoader[Batch]:
        """Test batches of all clients, in fixed order."""
        return DataLoader(_Evaluation(list(self.clients.values()), "test"), batch_size=None)


class _Samples(Dataset[Batch]):
    """One client's training samples, one by one."""

    def __init__(self, client: ClientData) -> None:
        self.client = client

    def __len__(self) -> int:
        return self.client.num_samples

    def __getitem__(self, index: int) -> Batch:
        batch = self.client.samples(torch.tensor([index]))
        return {name: values[0] for name, values in batch.items()}


class _Evaluation(IterableDataset[Batch]):
    """Every client's evaluation batches; ``case`` counts on over the clients."""

    def __init__(self, clients: Sequence[ClientData], split: Split) -> None:
        self.clients = clients
        self.split = split

    def __iter__(self) -> Iterator[Batch]:
        offset = 0
        for client in self.clients:
            for batch in client.eval_batches(self.split):
                yield {**batch, "case": batch["case"] + offset}
            offset += len(client.patients[self.split])


def resolve_root(path: str | Path | None) -> Path | None:
    """Expands ``~``; None stays None.

    Args:
        path: A path from the configuration.

    Returns:
        The path.

    Example:
        >>> resolve_root(None) is None, resolve_root("data").name
        (True, 'data')
    """
    return None if path is None else Path(path).expanduser()
