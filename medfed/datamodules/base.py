"""The federated data module: patients from a reader, clients from a partition, and their splits.

Its subclasses list patients and read them. The base class plans the clients, checks their labels,
and starts the worker processes that make training batches ahead of the training.
"""

from __future__ import annotations

import multiprocessing
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from itertools import islice

import torch
from torch import Tensor

from medfed.common.console import short
from medfed.common.floors import Statistic
from medfed.common.processes import WatchedPool, start_worker
from medfed.common.streams import globals_seeded, seeded
from medfed.datamodules.augmentation import Augment, Augmentation, ChannelDropout
from medfed.datamodules.client_data import Batch, BatchSize, Block, ClientData, label_counts
from medfed.datamodules.duplicates import Sample
from medfed.datamodules.extending import *
from medfed.datamodules.one_site import Agreed, Claims, Exchanged, Half, Merging
from medfed.datamodules.partitions.base import Partition
from medfed.datamodules.plans import ClientPlan, by_id, check_keep_out, plan_clients, remarks
from medfed.datamodules.readers.base import Account
from medfed.datamodules.splits import check_shares, warn_of_clients
from medfed.standalone.files import digest, sha256
from medfed.standalone.preparation import one_thread

_AHEAD = 2  # batches that each process prepares ahead
_clients: dict[str, ClientData] = {}  # in a worker: the data of all clients


class BatchWorkers:
    """Worker processes for all clients; a batch is the same in every process."""

    def __init__(self, clients: Mapping[str, ClientData], workers: int) -> None:
        self.clients = {name: replace(client, evaluation={}) for name, client in clients.items()}
        self.workers = workers

    @cached_property
    def pool(self) -> WatchedPool:
        """The processes; the first use starts them."""
        # Fork, where the platform has it, takes 0.1 s instead of 8 s and shares the data. A worker
        # runs PyTorch on one thread, so it misses no thread of its parent, and never uses a GPU.
        forks = "fork" in multiprocessing.get_all_start_methods()
        context = multiprocessing.get_context("fork" if forks else "spawn")
        pool = WatchedPool(self.workers, context, _start, (self.clients,))
        weakref.finalize(self, pool.shutdown, wait=False, cancel_futures=True)
        return pool

    def batches(self, client: str, seed: int, order: Sequence[Tensor]) -> Iterator[Batch]:
        """One epoch of a client; see `ClientData.train_batches`."""
        tasks = ((client, seed, number, index.numpy()) for number, index in enumerate(order))
        futures = (self.pool.submit(_make, *task) for task in tasks)
        waiting: deque[Future[dict[str, NDArray[Any]]]] = deque()
        try:
            waiting.extend(islice(futures, _AHEAD * self.workers))
            while waiting:
                made = waiting.popleft().result()
                waiting.extend(islice(futures, 1))
                yield {name: torch.from_numpy(values) for name, values in made.items()}
        except BrokenProcessPool as error:
            what = f"One of data.workers={self.workers} processes was killed (out of memory?)"
            raise DataError(f"{what}; run again with fewer, or data.workers=0.") from error
        finally:
            for future in waiting:
                future.cancel()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "pool"}


def _start(clients: dict[str, ClientData]) -> None:
    start_worker()
    _clients.update(clients)


def _make(client: str, seed: int, number: int, index: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    batch = _clients[client].train_batch(seed, number, torch.from_numpy(index))
    return {name: values.numpy() for name, values in batch.items()}


Blocks = Mapping[Split, Block]
log = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class FederatedDataModule(ABC):
    """Base of the data modules; a subclass lists patients and builds one client's tensors."""

    partition: Partition  # assigns patients to clients, and says what data each client has
    _: KW_ONLY
    seed: int = 0  # seed of the partition, the splits and all other random choices about the data
    val_fraction: float = 0.2  # share of validation patients per client, if splits are random
    test_fraction: float = 0.2  # share of test patients per client, if splits are random
    # k and K: the test patients are the k-th of K parts instead of a share. Over all k, from 0,
    # every patient is tested once.
    fold: Sequence[int] | None = None
    stratify: bool = True  # whether random splits give each split the same share of every label
    # At most so many patients of a client train and validate, chosen at random, and the others are
    # left out, so that few patients can be tried; the test patients stay.
    most_patients: Annotated[int, check_positive] | None = None
    batch_size: BatchSize = 32  # samples per training batch
    eval_batch_size: BatchSize = 256  # samples per evaluation batch
    # See `cache.volumes.OnDiskDataModule`, as `flips` and `workers`.
    augment: Augmentation | Augment | None = field(default=None, init=False)
    flips: Sequence[int] = field(default=(), init=False)
    workers: int = field(default=0, init=False)
    # Clients that join after training; set it before `setup`.
    keep_out: tuple[str, ...] = field(default=(), init=False)
    # Whether training batches carry their client's class weights; set it before `setup`.
    balanced: bool = field(default=False, init=False)
    # Names of the C channels (or F features); known after `prepare_data`.
    channel_names: tuple[str, ...] = field(default=(), init=False)
    # Names of the classes, or of the regions.
    class_names: tuple[str, ...] = field(default=(), init=False)
    description: str = field(default="", init=False)  # one line about where the data come from

    def __post_init__(self) -> None:
        if not isinstance(self.partition, Partition):
            what = f"data.partition={self.partition} is no partition"
            raise ConfigError(f"{what}; choose one by partition=OPTION.")
        check_shares(self.val_fraction, self.test_fraction, self.fold)
        check_fields("data", self)
        # `ClientData` per client id, in the partition's order; filled by `setup`.
        self.clients: dict[str, ClientData] = {}
        # `ClientData` of the clients in `keep_out`; filled by `setup`.
        self.kept_out: dict[str, ClientData] = {}
        self.plans: dict[str, ClientPlan] = {}  # the plan of every client; filled by `setup`
        # Sentences that a person should read before training; filled by `setup`.
        self.remarks: list[str] = []
        # For data generated as mixtures, each client's true mixture; filled by `setup`.
        self.mixtures: dict[str, tuple[float, ...]] = {}
        # What clients have agreed on before the first round, and the client, direction and bytes of
        # their messages; filled by `setup`.
        self.agreed: Any = None
        self.exchanged: list[Exchanged] = []
        # All patients by id, including those without a client; filled by `setup`.
        self.patients: dict[str, Patient] = {}

    @property
    def stratified(self) -> bool:
        """Whether splits were drawn so that each has the same share of every label."""
        patients = self.patients.values()
        return self.stratify and any(p.split is None and p.label is not None for p in patients)

    @property
    def in_channels(self) -> int:
        """Image channels C, or features F."""
        return len(self.channel_names)

    @property
    def plan_names(self) -> Sequence[str]:
        """The channels, or the columns of a table, that clients may have or lack."""
        return self.channel_names

    @property
    def absent(self) -> list[str]:
        """The channels of which no case has a file; known after `plan`."""
        return []

    @property
    def num_classes(self) -> int:
        """Classes K of a classification, or regions R of a segmentation."""
        return len(self.class_names)

    def prepare_data(self) -> None:  # noqa: B027
        """Learns what channels and classes there are; generates the data if no path is given."""

    @abstractmethod
    def list_patients(self) -> list[Patient]:
        """Lists all patients, each with its centre and label if known."""

    @abstractmethod
    def build_clients(self, plans: Mapping[str, ClientPlan]) -> dict[str, ClientData]:
        """Reads the patients, or opens the cache that holds them."""

    def settings(self) -> dict[str, Any]:
        """Settings that the record holds next to the splits, such as the evaluated slices."""
        return {}

    def preprocessing(self, client: str) -> dict[str, Any]:
        """Returns how a scan, image or row is prepared for a client's network, as JSON."""
        plan = self.plans[client]
        labels = self._labels(plan)
        return {
            "channels": list(self.channel_names),
            "present": plan.record(self.plan_names)["channels"],
            **plan.gaps(),
            "labels": labels,
            **dict.fromkeys(("spacing", "spacing_range", "orientation", "normalization", "input")),
        }

    def _labels(self, plan: ClientPlan) -> list[str]:
        """The labels in the order of a client's outputs."""
        order = list(plan.label_order or range(self.num_classes))
        return [self.class_names[order.index(k)] for k in range(self.num_classes)]

    def setup(self, stage: str | None = None) -> None:
        """Assigns, splits and reads, once; further calls change nothing."""
        if not self.clients:
            self.plan()
            self.build()

    def setup_alone(self, site: str) -> Generator[bytes, bytes, None]:
        """Does `setup` for one client, without reading others' patients; see `one_site`."""
        self.plan()
        if site not in self.plans:
            what = f"{site} is no client of these data{did_you_mean(site, self.plans)}"
            raise ConfigError(f"{what}; the clients are {few(list(self.plans))}.")
        self.plans = {site: self.plans[site]}
        if self.agreed is None:
            self.agreed = yield from self.half(site)
        self.build()

    def half(self, client: str) -> Half[Any]:
        """A planned client's half of the agreement before its data are read; see `one_site`."""
        yield from ()

    def merging(self, facts: Mapping[str, Any], claims: Claims | None = None) -> Merging:
        """The server's half of it, for clients with these common `facts`."""
        yield from ()

    def agree(self) -> None:
        """Lets the planned clients agree in this process, unless they have."""
        if self.agreed is None:
            halves = {c: self.half(c) for c in self.plans if c not in self.keep_out}
            server = self.merging(self.facts(), Claims([*halves]))
            self.agreed, self.exchanged = converse_here(server, halves)

    def join(self, federation: FederatedDataModule) -> None:
        """Takes over what a federation has agreed on, for a hospital that joins it later."""
        self.agreed = federation.agreed

    def summaries(self, client: str) -> Sequence[Statistic]:
        """Returns what a client's messages of `half` hold, with the patients behind it."""
        return ()

    def facts(self) -> dict[str, Any]:
        """Facts that all sites must share to train one model, as JSON; after `plan`."""
        return {"channels": list(self.plan_names), "classes": list(self.class_names)}

    def plan(self) -> None:
        """The first half of `setup`: lists, assigns and splits patients."""
        self.prepare_data()
        self.patients = by_id(self.list_patients())
        names = self.plan_names, self.class_names
        sizes = (self.val_fraction, self.test_fraction), self.fold, self.most_patients
        how = (self.seed, *sizes, self.stratify)
        stream = derive_seed(self.seed, "partition")  # for what a partition draws without a seed
        with seeded(stream), globals_seeded(stream):
            self.plans = plan_clients(self.partition, self.patients, names, *how)
        check_keep_out(self.keep_out, list(self.plans))
        from_partition = remarks(self.partition, list(self.patients.values()))
        self.remarks = [*self.data_remarks(), *from_partition]
        if self.most_patients is not None:
            most = f"At most {self.most_patients} patients of a hospital train and validate; others"
            self.remarks += [f"{most} that are not tested are left out (data.most_patients)."]

    def annotate(self, labels: Mapping[str, tuple[str, ...]]) -> None:
        """Notes in the plans which labels each client annotates, if one does not annotate all."""
        every = {name for names in labels.values() for name in names}
        lost = [name for name in self.class_names if name not in every]
        if lost and not hasattr(self.partition, "sites"):  # other sites may annotate it
            raise DataError(f"No client annotates {few(lost)}; leave it out.")
        if idle := [client for client, names in labels.items() if not names]:
            raise DataError(f"{few(idle)} annotates no label at all; leave its patients out.")
        if any(len(names) < self.num_classes for names in labels.values()):
            self.plans = {c: replace(p, annotated=labels[c]) for c, p in self.plans.items()}
            what = "a label has a loss and metrics at those that annotate it, and a client's mean"
            self.remarks += [f"Clients annotate different labels: {what} is over its labels."]

    def build(self) -> None:
        """The second half of `setup`: reads the patients of the planned clients."""
        with one_thread():
            self.agree()
            built = self.build_clients(self.plans)
        self._warn_of_classes(built)
        if self.workers:
            source = BatchWorkers(built, self.workers)
            for client in built.values():
                client.source = source
        self.kept_out = {n: built.pop(n) for n in self.keep_out if n in built}
        self.clients = built

    def _warn_of_classes(self, clients: Mapping[str, ClientData]) -> None:
        """Names the clients that train on a single class, or lack one that weights balance."""
        remarks = []
        for name, client in clients.items():
            label = client.train["label"]
            if not isinstance(label, Tensor) or label.dim() > 1 or label.is_floating_point():
                continue  # regions, or an outcome
            absent = (client.label_counts == 0).nonzero().flatten().tolist()
            if len(absent) > len(client.label_counts) - 2:
                remarks.append((name, "trains on a single class", "train on a single class"))
            if self.balanced and absent:
                names = ", ".join(short(self.class_names[k]) for k in absent)
                what = f"no training sample of {names}, to which balanced weights give 0"
                remarks.append((name, f"has {what}", f"have {what}"))
        warn_of_clients(remarks)

    def client_of(self, name: str, plan: ClientPlan, **samples: Any) -> ClientData:
        """Makes a client from its plan, the settings, and the other arguments of `ClientData`."""
        augment, dropout = self.augment, None
        patients = {split: list(plan.patients[split]) for split in SPLITS}
        planes = getattr(self, "slices", 1)  # of each channel, with its neighbours
        if isinstance(augment, Augmentation):
            if augment.channel_dropout:
                dropout = ChannelDropout(augment.channel_dropout, augment.rescale, planes)
            train: Block = samples["train"]
            size, regions = train["image"].shape[2:], len(train["label"].shape) > 3
            augment = augment.build(size, self.flips, regions) if augment.alters else None
        annotated = None
        if plan.annotated is not None and len(samples["train"]["label"].shape) > 2:
            annotated = torch.tensor([n in plan.annotated for n in self._labels(plan)])
        return ClientData(
            id=name,
            channels=plan.channels.repeat_interleave(planes),
            patients=patients,
            batch_size=self.batch_size,
            eval_batch_size=self.eval_batch_size,
            augment=augment,
            channel_dropout=dropout,
            balanced=self.balanced,
            annotated=annotated,
            **samples,
        )

    def labelled_client(self, name: str, plan: ClientPlan, blocks: Blocks) -> ClientData:
        """Makes a client whose samples have one label each, in its own order of classes."""
        labels = {split: torch.as_tensor(block["label"]) for split, block in blocks.items()}
        if labels["train"].is_floating_point():
            if plan.label_order is not None or plan.shares is not None:
                raise ConfigError(
                    f"The partition changes the classes of client {name}, but its outcome is a "
                    "number; choose partition=round_robin, quantity_skew or centre."
                )
        elif plan.label_order is not None:
            order = torch.tensor(plan.label_order)
            labels = {split: order[values] for split, values in labels.items()}
        counts = label_counts(labels["train"], len(self.class_names))
        named = {s: {**blocks[s], "label": labels[s]} for s in SPLITS}
        evaluation = {s: [named[s]] if len(labels[s]) else [] for s in SPLITS[1:]}
        made = {"train": named["train"], "evaluation": evaluation, "label_counts": counts}
        return self.client_of(name, plan, **made)

    def contents(self) -> tuple[str, Iterable[Sample]]:
        """Returns the samples that `find_duplicates` compares, and their name; after `setup`."""
        return "samples", ()

    def data_remarks(self) -> list[str]:
        """Returns remarks about how the data are read; by default nothing."""
        return []

    @property
    def accounts(self) -> Sequence[Account]:
        """What was taken of the files, rows and cells, and left out; by default unknown."""
        return ()

    def positive_of(self, client: str) -> int | None:
        """The client's class of lesions, if samples are candidates in scans; else None."""
        return None

    def found_places(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Returns the boxes among the rows of ``cases.csv`` as the data set writes places."""
        return []

    def test_remarks(self) -> list[str]:
        """Remarks that a reader of the test metrics needs."""
        return []

    def splits(self) -> dict[str, Any]:
        """The record for the run folder, as JSON."""
        names, every = self.plan_names, self.patients.items()
        labels = [(i, str(p.label), *map(str, p.counts or ())) for i, p in every]
        return {
            "seed": self.seed,
            "clients": {name: dict(p.patients) for name, p in self.plans.items()},
            "partition": {client: p.record(names) for client, p in self.plans.items()},
            "settings": self.settings(),
            "files": dict(self.hashes),
            "labels": digest(labels),
        }

    @cached_property
    def hashes(self) -> dict[str, str]:
        """The SHA-256 of every file of the planned patients, by path; after `plan`."""
        return self.file_hashes(sorted({i for p in self.plans.values() for i in p.every}))

    def file_hashes(self, patients: Sequence[str]) -> dict[str, str]:
        """Returns the SHA-256 of every file of the given patients, by path."""
        files = {f for i in patients for f in self.patients[i].files.values()}
        return {str(path): sha256(path) for path in sorted(files)}


def converse_here(
    server: Merging, halves: Mapping[str, Half[Agreed]]
) -> tuple[Agreed, list[Exchanged]]:
    """Passes messages between clients, in order, and the server's half until both have ended."""
    exchanged, agreed, answer = list[Exchanged](), list[Agreed](), None
    next(server, None)
    while True:
        messages: dict[str, bytes] = {}
        for client, half in halves.items():
            try:
                messages[client] = next(half) if answer is None else half.send(answer)
            except StopIteration as stop:
                agreed.append(stop.value)
        if len(messages) < len(halves):
            break
        exchanged += [(c, "up", len(content)) for c, content in messages.items()]
        try:
            answer = server.send([*messages.values()])
        except StopIteration:
            break
        exchanged += [(c, "down", len(answer)) for c in halves]
    if messages:
        what = f"{next(iter(messages))} shares other facts about its data than the others"
        raise DataError(f"{what}; read all data alike.")
    return agreed[0], exchanged
