"""The data of one hospital: its samples and their batches.

Samples are in memory, are mapped from disk, or are read or cut on demand.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

from medfed.common.tensors import onto
from medfed.datamodules.augmentation import Augment, ChannelDropout, augmented
from medfed.datamodules.cache.store import map_array
from medfed.datamodules.extending import *
from medfed.standalone.preparation import one_thread

Batch = dict[str, Tensor]
BatchSize = Annotated[int, within("[1, 2147483647]")]


class Rows(Protocol):
    """Samples that need not lie in memory, such as those of a cache on disk."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, ...), as of a tensor."""

    def take(self, index: Tensor) -> Tensor:
        """Returns the samples (B, ...) with the given numbers (B,) int64, as a CPU tensor."""

    def some(self, index: Tensor) -> Rows:
        """Returns only the samples with the given numbers (n,) int64, without reading them."""


class BatchSource(Protocol):
    """Makes the batches of an epoch in other processes, equal to `ClientData.train_batch`."""

    def batches(self, client: str, seed: int, order: Sequence[Tensor]) -> Iterator[Batch]:
        """Yields one batch for each entry of `order`, its sample numbers (B,)."""


Block = Mapping[str, Tensor | Rows]


class Draws(Protocol):
    """Training samples that are cut anew for every epoch."""

    def block(self, seed: int) -> Block:
        """Returns an epoch's samples, as many as in `ClientData.train`."""

    def some(self, cases: Sequence[int]) -> Draws:
        """Returns only the samples of some patients."""


def gather(values: Tensor | Rows, index: Tensor) -> Tensor:
    """Copies samples; on the CPU without PyTorch's threads, which cost more than a batch's copy."""
    if not isinstance(values, Tensor):
        return values.take(index)
    if torch.get_num_threads() == 1 or values.device.type != "cpu":
        return values.index_select(0, index)
    return torch.from_numpy(values.numpy().take(index.numpy(), axis=0))


def consecutive(values: Tensor | Rows, index: Tensor) -> Tensor:
    """Picks consecutive samples: a view if they are a tensor."""
    if isinstance(values, Tensor):
        return values[int(index[0]) : int(index[-1]) + 1]
    return values.take(index)


Pick = Callable[[Tensor | Rows, Tensor], Tensor]
_BESIDE = ("case", "scan", "spacing", "grid")  # the facts about its images in an evaluation batch


@dataclass
class ClientData:
    """One hospital's data, extracted once and kept as contiguous tensors.

    A *block* maps names to tensors (or `Rows`, whose samples stay on disk) with the same first
    dimension: ``image`` (N, C, *spatial) or (N, F) float32; ``label`` (N, R, *spatial) for regions
    (any dtype; batches carry float32), (N,) int64 for classes, (N, K) float32 for findings (1, 0,
    or NaN where unknown) or (N, 2) float64 for times and events; ``case`` (N,) int64, the index of
    the patient in ``patients[split]``. Where some samples lack a channel that the client has,
    ``present`` (N, C) bool says which channels each one has. Blocks for evaluation may also have
    ``spacing`` (N, 3) float32, the mm between voxels along the three axes, including the distance
    of slices; if a patient has several scans, ``scan`` (N,) int64, the scan's number; and if label
    and image have different voxels, ``grid`` (N, d + 1, d + 1) float64, from the label's voxels to
    the image's.
    """

    id: str  # the client's name, such as ``"hospital_0"``
    train: Block  # the block of training samples (patches or rows)
    # Blocks per evaluation split; the sequence may read a block on demand. A batch never spans two
    # blocks, so blocks may have volumes of different sizes.
    evaluation: Mapping[Split, Iterable[Block]]
    channels: Tensor  # (C,) bool, this hospital's channels. The others are zero in every image.
    # (K,) float32 over the training samples. Classification: samples per class. Segmentation:
    # voxels of ``[background, region_1, ..., region_R]`` in the patches. Findings: see
    # `finding_counts`.
    label_counts: Tensor
    patients: dict[Split, list[str]]  # the patient ids of every split
    batch_size: BatchSize  # samples per training batch
    eval_batch_size: BatchSize = 16  # samples (slices, volumes or rows) per evaluation batch
    # Alters training samples: a recipe's transforms, or a random MONAI dict transform of one
    # sample; reseeded for every batch from the epoch's seed and the batch's number.
    augment: Augment | None = field(default=None, repr=False)
    # Normalises each image of a training batch after `augment`, from a seed, or None.
    normalize: Callable[[Tensor, int], Tensor] | None = None
    # Zeroes channels of training samples after that, or None.
    channel_dropout: ChannelDropout | None = None
    balanced: bool = False  # whether training batches carry ``class_weights``, see `class_weights`
    # (R,) bool, the regions that this hospital outlines, which batches then carry (B, R); None if
    # every hospital outlines all.
    annotated: Tensor | None = None
    # (K,) weights of positive findings, which are then the `class_weights`.
    positive_weights: Tensor | None = None
    # Cuts new samples for every epoch; `train` is then one such set, for callers that only inspect
    # samples. None: every epoch uses `train`.
    fresh: Draws | None = field(default=None, repr=False)
    _drawn: tuple[int, Block] | None = field(default=None, init=False, repr=False)
    _present: Tensor | None = field(default=None, init=False, repr=False)  # of a batch's size
    # `replace` does not pass it on: it holds only this client's samples.
    # Makes training batches ahead; None: they are made on demand.
    source: BatchSource | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.num_samples == 0:
            what = f"Client {self.id} has no training data"
            raise DataError(f"{what}; give it patients or leave it out of the partition.")
        check_fields("data", self)

    @property
    def num_samples(self) -> int:
        """Training samples (patches or rows)."""
        return int(self.train["image"].shape[0])

    @property
    def class_weights(self) -> Tensor:
        """(K,) scikit-learn's ``balanced`` weights, 0 for a class without a training sample."""
        if self.positive_weights is not None:
            return self.positive_weights
        counts = self.label_counts
        present = counts > 0
        return torch.where(present, counts.sum() / (present.sum() * counts.clamp(min=1)), 0.0)

    def samples(self, index: Tensor) -> Batch:
        """Picks training samples, without augmentation."""
        return self._training_batch(*self._picked(self.train, index))

    def train_batches(self, seed: int) -> Iterator[Batch]:
        """One epoch over the training samples; the last, short batch is kept."""
        order = torch.randperm(self.num_samples, generator=torch_rng(seed, "order"))
        if isinstance(image := self.train["image"], Tensor):
            order = onto(order, image.device)  # of the whole epoch: one copy
        batches = order.split(self.batch_size)
        if self.source is not None:
            yield from self.source.batches(self.id, seed, batches)
            return
        for number, index in enumerate(batches):
            yield self.train_batch(seed, number, index)

    @property
    def resident_bytes(self) -> int | None:
        """Bytes of the training samples; None if batches must be made in main memory."""
        changes = (self.augment, self.normalize, self.channel_dropout, self.fresh, self.source)
        if type(self) is not ClientData or any(c is not None for c in changes):
            return None
        one = (gather(values, torch.zeros(1).long()) for values in self.train.values())
        return self.num_samples * sum(t.numel() * t.element_size() for t in one)

    def resident_on(self, device: torch.device) -> ClientData:
        """Returns the client with a copy of its training samples on a device.

        Its training batches are then made there: in the same order, and of the same bits.
        """
        parts = torch.arange(self.num_samples).split(256)  # of which one is in main memory
        moved = {
            name: torch.cat([consecutive(values, rows).to(device) for rows in parts])
            for name, values in self.train.items()
        }
        weights = onto(self.class_weights, device) if self.balanced else None
        annotated = None if self.annotated is None else onto(self.annotated, device)
        channels = onto(self.channels, device)
        return replace(
            self, train=moved, channels=channels, positive_weights=weights, annotated=annotated
        )

    def units(self, unit: Literal["patient", "row"]) -> Tensor:
        """(num_samples,) numbers of the patients, or rows, that training samples are of."""
        every = torch.arange(self.num_samples)
        if unit == "row":
            return every
        patients: Tensor = gather(self.train["case"], every).unique(return_inverse=True)[1]
        return patients

    def train_batch(self, seed: int, number: int, index: Tensor) -> Batch:
        """One batch of an epoch, independent of earlier batches."""
        image, label, present = self._picked(self._samples_of(seed), index)
        if not index.numel():  # of patients drawn by chance, there may be none
            return self._training_batch(image, label, present)
        if self.augment is not None:
            key = derive_seed(seed, "augment", number)
            image, label = augmented(self.augment, image, label, key)
            # Otherwise an intensity transform would fill the channels that the hospital lacks.
            image = image * present.view(*present.shape, *[1] * (image.ndim - 2))
        if self.normalize is not None:
            image = self.normalize(image, derive_seed(seed, "normalize", number))
        batch = self._training_batch(image, label, present)
        if self.channel_dropout is not None:
            key = derive_seed(seed, "channels", number)
            image, remaining = self.channel_dropout(image, present, key)
            batch |= {"image": image, "channels": remaining}
        return batch

    def _samples_of(self, seed: int) -> Block:
        """The samples of an epoch, cut once for all its batches."""
        if self.fresh is None:
            return self.train
        if self._drawn is None or self._drawn[0] != seed:
            self._drawn = seed, self.fresh.block(seed)
        return self._drawn[1]

    def train_inputs(self, limit: int) -> Tensor:
        """Training inputs in a fixed order, spread evenly over the patients."""
        return gather(self.train["image"], self._spread(limit))

    def patients_behind(self, limit: int) -> int:
        """Returns how many patients :meth:`train_inputs` of this limit are of."""
        return len(gather(self.train["case"], self._spread(limit)).unique())

    def _spread(self, limit: int) -> Tensor:
        count = min(limit, self.num_samples)
        return torch.arange(count) * self.num_samples // max(count, 1)

    def eval_batches(self, split: Split) -> Iterator[Batch]:
        """The samples of a split in fixed order, without augmentation."""
        for block in [self.train] if split == "train" else self.evaluation[split]:
            count = block["image"].shape[0]
            for start in range(0, count, self.eval_batch_size):
                index = torch.arange(start, min(start + self.eval_batch_size, count))
                more = {n: consecutive(block[n], index) for n in _BESIDE if n in block}
                yield {**self._batch(*self._picked(block, index, consecutive)), **more}

    def _picked(
        self, block: Block, index: Tensor, pick: Pick = gather
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Images, labels and the channels that are there, (B, C)."""
        image, label = pick(block["image"], index), pick(block["label"], index)
        if "present" in block:
            return image, label, pick(block["present"], index)
        if self._present is None or self._present.shape[0] != image.shape[0]:
            self._present = self.channels.expand(image.shape[0], -1)
        return image, label, self._present

    def _batch(self, image: Tensor, label: Tensor, present: Tensor) -> Batch:
        if label.ndim > 1 and label.dtype != torch.float32:
            label = label.float()  # stored as uint8: a quarter of the memory
        batch = {"image": image, "label": label, "channels": present}
        if self.annotated is not None:
            batch["annotated"] = self.annotated.expand(image.shape[0], -1)
        return batch

    def _training_batch(self, image: Tensor, label: Tensor, present: Tensor) -> Batch:
        batch = self._batch(image, label, present)
        if self.balanced:
            batch["class_weights"] = self.class_weights.expand(len(label), -1)
        return batch


def finding_counts(label: Tensor) -> Tensor:
    """(2 K,) findings absent and present; of times and events (1,) samples.

    Example:
        >>> finding_counts(torch.tensor([[1.0, float("nan")], [0.0, 1.0]])).tolist()
        [1.0, 0.0, 1.0, 1.0]
    """
    if label.dtype == torch.float64:
        return torch.tensor([float(len(label))])
    return torch.cat([(label == value).sum(0) for value in (0, 1)]).float()


@dataclass(eq=False)
class ArrayRows:
    """One client's rows of an array or file, which each process maps when it takes the first."""

    source: NDArray[Any] | Path  # the array (N, ...), or the ``.npy`` file that holds it
    index: NDArray[np.int64]  # (n,) the numbers of the client's rows, in order
    # Converts gathered rows for a batch, such as int16 HU to [-1, 1].
    convert: Callable[[NDArray[Any]], NDArray[Any]]

    @cached_property
    def array(self) -> NDArray[Any]:
        """The whole array, (N, ...)."""
        return map_array(self.source) if isinstance(self.source, Path) else self.source

    @property
    def shape(self) -> tuple[int, ...]:
        """(n, ...), as of a tensor."""
        return (len(self.index), *self.array.shape[1:])

    def take(self, index: Tensor) -> Tensor:
        """See `Rows.take`; gathers by NumPy on one thread, and copies."""
        return torch.from_numpy(self.convert(self.array.take(self.index[index.numpy()], axis=0)))

    def some(self, index: Tensor) -> ArrayRows:
        """See `Rows.some`."""
        return ArrayRows(self.source, self.index[index.numpy()], self.convert)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "array"}


@dataclass(frozen=True)
class BlocksOnDemand:
    """A block per patient that is read on every access and not kept."""

    patients: Sequence[str]  # their ids
    # Reads the block of a patient, from its id and its position in `patients`.
    read: Callable[[str, int], Block]

    def __iter__(self) -> Iterator[Block]:
        return map(self._alone, self.patients, range(len(self.patients)))  # which keeps no block

    def _alone(self, name: str, case: int) -> Block:
        with one_thread():
            return self.read(name, case)


def voxel_counts(label: Tensor) -> Tensor:
    """(1 + R,) voxels of (N, R, *spatial) in no region, then of every region.

    Example:
        >>> voxel_counts(torch.tensor([[[0, 1, 1, 0]], [[0, 0, 0, 0]]])).tolist()
        [6.0, 2.0]
    """
    regions = label.bool().transpose(0, 1).flatten(1)
    return torch.cat([(~regions.any(dim=0)).sum()[None], regions.sum(dim=1)]).float()


def label_counts(label: Tensor, size: int) -> Tensor:
    """Counts the labels of samples, see `ClientData.label_counts`.

    Example:
        >>> label_counts(torch.tensor([0, 2, 2]), 3).tolist()
        [1.0, 0.0, 2.0]
    """
    if label.ndim > 1:
        return finding_counts(label) if label.ndim == 2 else voxel_counts(label)
    if label.is_floating_point():  # outcomes without classes
        return torch.full((size,), float(len(label)))
    return torch.bincount(label, minlength=size).float()
