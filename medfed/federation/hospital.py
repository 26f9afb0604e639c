"""Clients of a user's own tensors, data sets and loaders."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, islice
from typing import Annotated, Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from medfed.common.arguments import check_arguments
from medfed.common.random_states import RandomStates
from medfed.common.seeding import derive_seed, torch_rng
from medfed.common.streams import seeded
from medfed.common.tensors import digest, onto
from medfed.federation.client import Batch
from medfed.standalone.checks import check_count, check_known
from medfed.standalone.errors import ConfigError, first_line

Split = Literal["train", "val", "test"]


class Batched:
    """What follows from the batches of a client's samples."""

    id: str
    num_samples: int
    classes: Sequence[str] | int | None = None
    resident_bytes: int | None = None  # of samples that may be on the device; None: of none

    def eval_batches(self, split: Split) -> Iterator[Batch]:
        """Yields a split in order."""
        raise NotImplementedError

    @cached_property
    def label_counts(self) -> Tensor:
        """Samples per class, ``(K,)``; one class if labels are not one whole number each."""
        labels: list[Any] = [batch.get("label") for batch in self.eval_batches("train")]
        if not all(isinstance(t, Tensor) and t.ndim == 1 and _counts(t) for t in labels):
            return torch.tensor([self.num_samples])
        counts = torch.bincount(torch.cat(labels).long())
        if self.classes is None:
            return counts
        names = range(self.classes) if isinstance(self.classes, int) else self.classes
        if len(counts) > len(names):
            raise ConfigError(
                f"Hospital {self.id}: the label {len(counts) - 1} is none of its {len(names)} "
                "classes, which begin at 0; give it all classes, or other labels."
            )
        return padded(counts, len(names))

    @cached_property
    def channels(self) -> Tensor:
        """Which channels it has, ``(C,)``: all of its tensors."""
        first = self.train_inputs(1)
        return torch.ones(first.shape[1] if first.ndim > 1 else 1, dtype=torch.bool)

    def train_inputs(self, limit: int) -> Tensor:
        """Returns the first inputs."""
        images: list[Tensor] = []
        for batch in self.eval_batches("train"):
            images.append(batch["image"])
            if sum(map(len, images)) >= limit:
                break
        return torch.cat(images)[:limit]

    def patients_behind(self, limit: int) -> int:
        """Returns how many samples these inputs are of; each counts as a patient."""
        return min(limit, self.num_samples)


check_split = partial(check_known, "split", known=get_args(Split))
"""Refuses a split that no client has."""


def _counts(labels: Tensor) -> bool:
    """Whether labels are whole numbers from 0."""
    whole = not labels.is_floating_point() and not labels.is_complex()
    return whole and not bool((labels < 0).any())


def padded(counts: Tensor, size: int) -> Tensor:
    """Returns counts of so many classes, of which the further ones have no sample."""
    return torch.cat([counts, counts.new_zeros(size - len(counts))])


@dataclass(frozen=True)
class ArrayClient(Batched):
    """A client whose data are two tensors."""

    id: str  # its name
    inputs: Tensor  # ``(n, ...)``, in batches under ``image``
    labels: Tensor  # ``(n, ...)``, in batches under ``label``
    batch_size: Annotated[int, check_count] = 16  # samples per training batch

    def __post_init__(self) -> None:
        """Refuses arrays, and samples without their label."""
        arguments = {"id": self.id, "batch_size": self.batch_size}
        check_arguments(type(self), arguments, f"Client {self.id}: ")
        for name, value in (("inputs", self.inputs), ("labels", self.labels)):
            if not isinstance(value, Tensor) or value.ndim == 0:
                raise ConfigError(
                    f"Client {self.id}: {name} must be a tensor with one row per sample, not a "
                    f"{type(value).__name__}; torch.as_tensor makes one of an array."
                )
        if len(self.inputs) != len(self.labels) or not len(self.inputs):
            raise ConfigError(
                f"Client {self.id}: there are {len(self.inputs)} inputs and {len(self.labels)} "
                "labels; give one label for each input, and at least one of both."
            )

    @property
    def num_samples(self) -> int:  # type: ignore[override]  # as a property it cannot be set
        """Number of training samples."""
        return len(self.inputs)

    def train_batches(self, seed: int) -> Iterator[Batch]:
        """Yields one epoch, in an order from the seed only."""
        order = torch.randperm(self.num_samples, generator=torch_rng(seed))
        yield from self._batches(onto(order, self.inputs.device))

    @property
    def resident_bytes(self) -> int | None:  # type: ignore[override]
        """Bytes of the samples; None of a subclass, which may change batches in main memory."""
        return self.inputs.nbytes + self.labels.nbytes if type(self) is ArrayClient else None

    def resident_on(self, device: torch.device) -> ArrayClient:
        """Returns the client with its samples on a device, where its batches are then made."""
        return replace(self, inputs=self.inputs.to(device), labels=self.labels.to(device))

    def eval_batches(self, split: Split) -> Iterator[Batch]:
        """Yields all samples in order, for every split."""
        check_split(split)
        yield from self._batches(torch.arange(self.num_samples))

    def _batches(self, order: Tensor) -> Iterator[Batch]:
        for rows in order.split(self.batch_size):
            yield {"image": self.inputs[rows], "label": self.labels[rows]}


class Hospital(Batched):
    """A client whose data are PyTorch's data sets or loaders, MONAI's among them.

    A sample is a pair of image and label, or a dictionary with both; or, as MONAI's random crops
    give it, a list of dictionaries. An epoch is what the loader yields once, and the hospital's
    weight is the number of samples in it: samplers, batch samplers, ``drop_last`` and batches that
    a data set makes itself (``batch_size=None``) keep their meaning.

    The order of an epoch and all random transforms depend on the run's seed, the round and the
    hospital alone, wherever the transforms are: the global generators of Python, NumPy and PyTorch
    and all random states in the loader and the data set get new seeds in every epoch, and other
    ones in each of PyTorch's workers. Your own random states are as before after each batch. `val`:
    the same, of the validation split; only some methods need it. `batch_size`: samples per batch; a
    loader keeps its batches. `classes`: the classes that the hospitals have agreed on, or their
    number; by default as many as the highest label of any hospital of the federation.

    Example:
        >>> samples = [{"ct": torch.zeros(1, 8), "mask": torch.tensor(k)} for k in (0, 1, 1)]
        >>> north = Hospital("north", samples, batch_size=2, keys=("ct", "mask"))
        >>> [batch["image"].shape for batch in north.train_batches(seed=0)]
        [torch.Size([2, 1, 8]), torch.Size([1, 1, 8])]
        >>> north.label_counts
        tensor([1, 2])
    """

    def __init__(
        self,
        id: str,
        train: Any,
        val: Any = None,
        test: Any = None,
        *,
        batch_size: Annotated[int, check_count] = 16,
        keys: tuple[str, str] = ("image", "label"),
        classes: Sequence[str] | int | None = None,
    ) -> None:
        self.id, self.keys, self.classes = id, keys, classes
        arguments = {"id": id, "batch_size": batch_size, "classes": classes}
        check_arguments(type(self).__init__, arguments, f"Hospital {id}: ")
        if isinstance(classes, int):
            check_count(f"Hospital {id}: classes", classes)
        if isinstance(keys, str) or not isinstance(keys, Sequence) or len(keys) != 2:
            raise ConfigError(
                f"Hospital {id}: keys must name image and label, as in keys=('ct', 'mask'), not "
                f"{keys!r}."
            )
        splits = {"train": train, "val": val, "test": test}
        self._loaders = {
            name: self._loader(name, arguments, int(batch_size))
            for name, arguments in splits.items()
            if arguments is not None or name == "train"
        }
        self._train = self._loaders["train"]

    def _loader(self, split: str, source: Any, batch_size: int) -> DataLoader[Any]:
        data: Any = source.dataset if isinstance(source, DataLoader) else source
        kind = f"Hospital {self.id}: {split} is of the type"
        if isinstance(data, IterableDataset):
            raise ConfigError(
                f"{kind} {type(data).__name__}, an IterableDataset, which has no samples that a "
                "seed could order; give a Dataset with a length, such as a list of its samples."
            )
        unordered = not isinstance(data, Sized) or isinstance(data, Mapping | set | frozenset)
        if unordered or len(data) == 0:
            raise ConfigError(
                f"{kind} {type(data).__name__}, without a "
                "length or without a sample; give a Dataset with both, or a DataLoader of one."
            )
        if type(data).__name__ == "SmartCacheDataset":
            raise ConfigError(
                f"{kind} SmartCacheDataset, of which an epoch has the {len(data)} samples in the "
                "cache and never the others; give a CacheDataset of all samples."
            )
        if not isinstance(source, DataLoader):
            return DataLoader(source, batch_size, shuffle=split == "train", collate_fn=_collated)
        sampler: Any = source.sampler
        drops = split != "train" and source.drop_last and isinstance(sampler, Sized)
        if drops and (left := len(sampler) % (source.batch_size or 1)):
            raise ConfigError(
                f"Hospital {self.id}: the loader of {split} leaves out {left} of its samples; set "
                "drop_last=False, so that results are of all."
            )
        threads = any(kind.__name__ == "ThreadDataLoader" for kind in type(source).__mro__)
        if threads or source.persistent_workers:
            problem = "is a ThreadDataLoader" if threads else "keeps its workers for several epochs"
            raise ConfigError(
                f"Hospital {self.id}: {split} {problem}, so that no seed determines its random "
                "transforms; give a DataLoader with persistent_workers=False."
            )
        return source

    @cached_property
    def _sizes(self) -> list[int]:
        """The samples of each batch of an epoch."""
        first = self._first()
        # Transforms may make their random states for the first sample, so only later ones count.
        if first != (again := self._first()) != self._first():
            raise ConfigError(
                f"Hospital {self.id}: two epochs of the same seed begin with different samples, so "
                "that no run could be repeated; let random transforms and samplers draw from "
                "np.random, torch or a generator that is an attribute."
            )
        groups, loader = self._groups, self._train
        plain = loader.collate_fn in (default_collate, _collated)
        if loader.batch_sampler is None or not plain or len(groups[0]) != again[0]:
            return [len(batch["image"]) for batch in map(self._named, _drawn(loader, 0))]
        return list(map(len, groups))

    def _first(self) -> tuple[int, str]:
        """Returns the number of samples in an epoch's first batch, and a hash of them."""
        try:
            batch = next(map(self._named, _drawn(self._train, 0)), None)
        except (RuntimeError, TypeError) as error:
            raise ConfigError(
                f"Hospital {self.id}: the first batch cannot be made: {first_line(error)}; give "
                "samples that PyTorch can join, or a DataLoader with a collate_fn."
            ) from error
        if batch is None:
            raise ConfigError(
                f"Hospital {self.id}: the loader of train yields no batch; set drop_last=False, or "
                "a smaller batch_size."
            )
        pair = {k: t for k in ("image", "label") if isinstance(t := batch.get(k), Tensor)}
        return len(batch["image"]), digest(pair)

    @cached_property
    def _groups(self) -> list[Any]:
        """The numbers of the samples of an epoch, in its batches."""
        loader = self._train
        batches = loader.batch_sampler
        with RandomStates(0, loader):
            drawn: Iterable[Any] = loader.sampler if batches is None else batches
            groups = list(drawn if hasattr(drawn, "__len__") else islice(drawn, _MOST))
        if len(groups) == _MOST and not hasattr(drawn, "__len__"):
            raise ConfigError(
                f"Hospital {self.id}: the sampler of train does not end; give one of one epoch."
            )
        return groups

    @property
    def num_samples(self) -> int:  # type: ignore[override]  # as a property it cannot be set
        """Training samples of an epoch."""
        return sum(self._sizes)

    @property
    def num_batches(self) -> int:
        """Batches of an epoch."""
        return len(self._sizes)

    @property
    def batch_size(self) -> int:
        """Samples of the largest batch."""
        return max(self._sizes)

    def train_batches(self, seed: int) -> Iterator[Batch]:
        """Yields one epoch, in an order and with random transforms from the seed only."""
        assert self._sizes  # the loader has been checked
        return map(self._named, _drawn(self._train, seed))

    def eval_batches(self, split: Split) -> Iterator[Batch]:
        """Yields a split in an order that never changes; nothing of a split that is not there."""
        check_split(split)
        if split not in self._loaders:
            return iter(())
        loader = self._in_order if split == "train" else self._loaders[split]
        return map(self._named, _drawn(loader, 0))

    @cached_property
    def _in_order(self) -> DataLoader[Any]:
        """The loader of an epoch's samples in the order of the data set."""
        loader, groups = copy.copy(self._train), self._groups
        sampler: Any = getattr(loader.batch_sampler, "sampler", None)
        if loader.batch_sampler is None:
            vars(loader)["sampler"] = sorted(groups)
            return loader
        if type(loader.batch_sampler) is BatchSampler and loader.drop_last:
            with RandomStates(0, loader):
                groups = [list(sampler)]  # those that an epoch drops count, too
        size = max(map(len, self._groups), default=1)
        numbers = sorted(chain.from_iterable(groups))
        vars(loader)["batch_sampler"] = BatchSampler(numbers, size, drop_last=False)
        return loader

    def patients_behind(self, limit: int) -> int:
        """Returns how many samples these inputs are of; each counts as a patient."""
        data: Any = self._train.dataset
        return min(limit, self.num_samples, len(data))

    def _named(self, item: Any) -> Batch:
        """Returns a batch with the names that federations use, the image first."""
        pair = isinstance(item, list | tuple) and len(item) == 2
        batch = dict(zip(self.keys, item, strict=True)) if pair else item
        image, label = self.keys
        if not isinstance(batch, Mapping) or not isinstance(batch.get(image), Tensor):
            listing = f"with {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else ""
            raise ConfigError(
                f"Hospital {self.id}: a batch is a {type(item).__name__} {listing}".rstrip()
                + f"; give pairs of image and label, or dictionaries with the tensor {image!r}, "
                "or name the keys, as in keys=('ct', 'mask')."
            )
        renamed = {"image": batch[image], **({"label": batch[label]} if label in batch else {})}
        batch = renamed | {k: v for k, v in batch.items() if k not in self.keys}
        return {k: v.as_tensor() if hasattr(v, "as_tensor") else v for k, v in batch.items()}


_MOST = 1_000_000  # batches of an epoch of a sampler that does not say how many it has


def _drawn(loader: DataLoader[Any], seed: int) -> Iterator[Any]:
    """Yields a loader's batches; whatever is random in them depends on the seed alone."""
    if loader.num_workers:
        loader = copy.copy(loader)
        loader.worker_init_fn = partial(_begin_worker, loader.worker_init_fn, loader.collate_fn)
    if _is_of_tensors(loader):
        # Nothing but the order is random, and picking rows takes a tenth of a loader's time.
        with seeded(derive_seed(seed, "torch")):  # as RandomStates does
            torch.empty((), dtype=torch.int64).random_()  # a loader draws its workers' seed first
            groups = list(loader.batch_sampler or ())
        yield from (loader.dataset[torch.as_tensor(rows)] for rows in groups)
        return
    states = RandomStates(seed, loader)
    with states:
        batches = iter(loader)
    while True:
        with states:
            try:
                batch = next(batches)
            except StopIteration:
                return
        yield batch


def _is_of_tensors(loader: DataLoader[Any]) -> bool:
    """Whether a loader does nothing but pick rows of tensors in the order of its sampler."""
    sampler = getattr(loader.batch_sampler, "sampler", None)
    return (
        type(loader) is DataLoader
        and loader.collate_fn in (default_collate, _collated)
        and type(loader.dataset) is TensorDataset
        and type(loader.batch_sampler) is BatchSampler
        and type(sampler) in (RandomSampler, SequentialSampler)
        and getattr(sampler, "generator", None) is loader.generator is None
        and not (loader.num_workers or loader.pin_memory)
    )


def _begin_worker(before: Callable[[int], None] | None, collate: Any, number: int) -> None:
    """Gives each worker other random numbers: it starts with a copy of all random states."""
    if before is not None:
        before(number)
    info = get_worker_info()
    assert info is not None
    RandomStates(info.seed, info.dataset, collate).seed()


def _collated(samples: Sequence[Any]) -> Any:
    """Joins samples to a batch, as MONAI does: one sample may be a list of dictionaries."""
    crops = isinstance(samples[0], list) and isinstance(samples[0][0], Mapping)
    return default_collate([s for each in samples for s in each] if crops else list(samples))
