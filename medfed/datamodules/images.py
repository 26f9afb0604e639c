"""Classification of small images: MedMNIST files, class-named folders, digits, findings.

Also means and deviations of channels over a client's training images, and FedRDN, which mixes them.
Yan et al., "A Simple Data Augmentation for Feature Distribution Skewed Federated Learning"
(FedRDN), CVPR 2025. Before training each client i sends mu_i and sigma_i, and receives those of
all. A client normalises a training image x, after other augmentation, by those of a client j,

    (x - mu_j) / sigma_j,

where j is drawn for each image, all alike. It normalises other images by its own, and sends nothing
else. Deviation from the authors' code: that draws mu and sigma of different clients, once a batch.

============  ==================================================================================
symbol        here
============  ==================================================================================
mu, sigma     ``channel_statistics``, over all pixels of all training images in [-1, 1]
j             ``rows`` in ``_drawn``, which undoes mu_i and sigma_i and takes j's
============  ==================================================================================

A channel that a client lacks, or of equal values, has sigma 0. Others do not use it, nor a sigma
below a hundredth of their own, which would let one client ruin all models.
"""

from __future__ import annotations

from inspect import signature
from itertools import compress
from typing import Literal

import torch
from torch import Tensor

from medfed.common.floors import Statistic
from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.cache.volumes import OnDiskDataModule
from medfed.datamodules.client_data import ArrayRows, ClientData, Rows, finding_counts, gather
from medfed.datamodules.duplicates import Sample, content, one_patient_each
from medfed.datamodules.extending import *
from medfed.datamodules.one_site import Claims, Half, Merging
from medfed.datamodules.plans import ClientPlan, client_images
from medfed.datamodules.readers.base import Account
from medfed.datamodules.readers.last_read import read_once
from medfed.datamodules.readers.samples import ImageSet, Index
from medfed.datamodules.tables.agreement import packed, unpacked
from medfed.datamodules.tables.columns import class_remarks
from medfed.standalone.columns import Array
from medfed.standalone.pictures import SUFFIXES, Pixels, standardized, unit_range

Convert = Callable[[NDArray[Any]], Pixels]
_AT_ONCE = 1024  # images
_BELOW = 100  # times less than a client's own
_HEAVIEST = 10.0  # weight of a positive finding: a rarer one would rule the loss


@dataclass(eq=False, repr=False)
class ImageDataModule(OnDiskDataModule):
    """Images of one class each; ``image`` is (B, C, *spatial), ``label`` (B,) int64.

    Of several findings each, ``label`` is (B, K) float32: 1, 0, or NaN where it is unknown. If they
    are `balanced`, clients agree on weights by their sums of counts. Images stay in memory as
    bytes.
    """

    reader: Callable[..., ImageSet]  # reads a file or folder
    _: KW_ONLY
    official_splits: bool = True  # whether to use the data set's splits
    # What to do about equal images in two splits or at two clients: ``"warn"``, ``"error"``, or
    # ``"together"``, which counts patients who share an image as one.
    duplicates: Literal["warn", "error", "together"] = "warn"
    # ``"range"``: from -1 to 1. ``"client"``: then each channel by the mean and deviation of the
    # client's training images. ``"fedrdn"``: likewise, but training images by those of a client
    # drawn for each, so that all see them before the first round; see `channel_statistics`.
    scaling: Literal["range", "client", "fedrdn"] = "range"
    # (2, C) means and deviations of each client, if they scale its images.
    statistics: dict[str, Array] = field(default_factory=dict, init=False)
    joined: tuple[str, ...] | None = field(default=None, init=False)  # a federation's classes
    # (N,) of each client's training images, if it sends statistics of them.
    train_patients: dict[str, Index] = field(default_factory=dict, init=False)

    @cached_property
    def data(self) -> ImageSet:
        """All images, with the official splits only if they are used."""
        joins = self.joined is not None and "joined" in signature(self.reader).parameters
        more = {"joined": self.joined} if joins else {}
        data: ImageSet = read_once(self, ImageSet, self.reader, self.source, **more)
        samples = data.samples if self.official_splits else replace(data.samples, splits=())
        if self.duplicates == "together":
            one = one_patient_each(_by_content(data))
            samples = replace(samples, patients=[one.get(p, p) for p in samples.patients])
        return replace(data, samples=samples)

    def join(self, federation: FederatedDataModule) -> None:
        """See the base class."""
        super().join(federation)
        self.joined = federation.class_names

    @property
    def findings(self) -> bool:
        """Whether images have several findings each instead of one class."""
        return self.data.samples.labels.ndim == 2

    @property
    def spatial_dims(self) -> int:
        """2 for images, 3 for volumes."""
        return self.data.images.ndim - 2

    def prepare_data(self) -> None:
        """Reads the images; generates them first if no path is given."""
        data = self.data
        self.channel_names, self.class_names = data.channels, data.classes
        if self.path is not None or self.generated is None:
            what = "findings" if self.findings else "classes"
            count = f"{len(data.images)} images of {len(data.classes)} {what}"
            self.description = f"Data: {data.source}, {count}."

    def facts(self) -> dict[str, Any]:
        """See the base class; adds the images' size and the value of white."""
        size = list(self.data.images.shape[2:])
        findings = {"findings": True} if self.findings else {}
        return {**super().facts(), "size": size, "white": int(self.data.peak), **findings}

    def plan(self) -> None:
        """See the base class; a client annotates the findings of which it has any cell."""
        super().plan()
        if not self.findings:
            return
        known = {}
        for name, plan in self.plans.items():
            unknown = self._labels_of(plan.every).isnan().all(0)
            known[name] = tuple(compress(self.class_names, ~unknown))
        self.annotate(known)

    def _labels_of(self, patients: Sequence[str]) -> Tensor:
        return torch.from_numpy(self.data.samples.labels[self._select(patients)[0]])

    def _select(self, patients: Sequence[str]) -> tuple[Index, Index]:
        return self.data.samples.select(patients, None, 0)

    def _form(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """The form of a client's message before training; empty if it sends none."""
        counts = self.balanced and facts.get("findings")
        form = {"counts": 2 * len(facts["classes"])} if counts else {}
        size = 2 * len(facts["channels"])
        return form | ({"channels": size} if self.scaling == "fedrdn" else {})

    def half(self, client: str) -> Half[dict[str, Any] | None]:
        """See the base class: counts of findings if they are balanced; channel statistics."""
        form, message, plan = self._form(self.facts()), dict[str, Any](), self.plans[client]
        if not form:
            return None
        self.train_patients[client] = self._select(plan.patients["train"])[1]
        if "counts" in form:
            message["counts"] = finding_counts(self._labels_of(plan.patients["train"])).tolist()
        if "channels" in form:
            images = self._block(client, plan, "train")["image"]
            message["channels"] = channel_statistics(images).ravel().tolist()
            form["channels"] = None  # of any number of clients
        return unpacked((yield packed(message)), form)

    @property
    def positive_weights(self) -> Tensor | None:
        """The agreed weights of positive findings; None without."""
        if self.agreed is None or "counts" not in self.agreed:
            return None
        absent, present = torch.tensor(self.agreed["counts"]).chunk(2)
        return torch.where(present > 0, absent / present, 1.0).clamp(1 / _HEAVIEST, _HEAVIEST)

    def merging(self, facts: Mapping[str, Any], claims: Claims | None = None) -> Merging:
        """See the base class."""
        if form := self._form(facts):
            messages = [unpacked(content, form) for content in (yield b"")]
            claims, answer = claims or Claims(), dict[str, Any]()
            if "counts" in form:
                counts = claims.counted("findings", [one["counts"] for one in messages])
                answer["counts"] = counts.sum(axis=0).tolist()
            if "channels" in form:
                every = [one["channels"] for one in messages]
                answer["channels"] = collected(every, claims)
            yield packed(answer)

    def summaries(self, client: str) -> list[Statistic]:
        """See the base class: counts of findings, channel statistics."""
        patients, form = len(self.plans[client].patients["train"]), self._form(self.facts())
        words = {
            "counts": ("the counts of findings", "model.class_weights"),
            "channels": ("the means and deviations of channels", "data.scaling"),
        }
        return [Statistic(client, *words[name], size, patients) for name, size in form.items()]

    def list_patients(self) -> list[Patient]:
        """See the base class."""
        return self.data.samples.list_patients()

    def data_remarks(self) -> list[str]:
        """See the base class: classes that are perhaps outcomes."""
        return class_remarks(self.class_names, "join them to a few classes")

    @property
    def accounts(self) -> Sequence[Account]:
        """See the base class."""
        return self.files_with(SUFFIXES, self.data.left)

    def contents(self) -> tuple[str, Iterator[Sample]]:
        """See the base class: images as they are after decoding and resizing."""
        return "images", _by_content(self.data)

    def settings(self) -> dict[str, Any]:
        """The source of the splits."""
        official = bool(self.data.samples.splits)
        return {"splits": "official" if official else "by patient, from the seed"}

    def preprocessing(self, client: str) -> dict[str, Any]:
        """See the base class: images of one size, 0 to `peak` scaled to [-1, 1]."""
        color = "rgb" if len(self.data.channels) == 3 else "grey"
        size, white = list(self.data.images.shape[2:]), self.data.white
        more: dict[str, Any] = {"converted": self.data.converted}
        more |= {} if white == 65535 else {"white": white}
        normalization: dict[str, Any] = {"name": "range", "range": [0, self.data.peak]}
        if self.scaling != "range":
            normalization |= zip(("mean", "sd"), self.statistics[client].tolist(), strict=True)
        return {
            **super().preprocessing(client),
            "normalization": {**normalization, "to": [-1, 1]},
            "input": {"kind": "images", "size": size, "color": color} | more,
        }

    def build_clients(self, plans: Mapping[str, ClientPlan]) -> dict[str, ClientData]:
        """See the base class."""
        blocks = {n: {s: self._block(n, p, s) for s in SPLITS} for n, p in plans.items()}
        if self.scaling != "range":
            for name, of in blocks.items():
                self.statistics[name] = channel_statistics(of["train"]["image"])
                for block in of.values():
                    block["image"] = normalized(block["image"], self.statistics[name])
        clients = {name: self.labelled_client(name, p, blocks[name]) for name, p in plans.items()}
        weights, every = self.positive_weights, (self.agreed or {}).get("channels")
        for name, client in clients.items():
            client.positive_weights = weights
            if every is not None:
                client.normalize = random_statistics(self.statistics[name], every)
        return clients

    def _block(self, client: str, plan: ClientPlan, split: Split) -> dict[str, Tensor | ArrayRows]:
        samples, seed = self.data.samples, derive_seed(self.seed, client, split)
        index, case = samples.select(plan.patients[split], plan.shares, seed)
        patients = ((samples.patients[n], n) for n in index)
        keys = ((p, samples.rows[p].index(n)) for p, n in patients)  # each image has other noise
        unit = partial(unit_range, peak=self.data.peak)
        return {
            "image": client_images(plan, self.data.images, index, unit, keys),
            "label": torch.from_numpy(samples.labels[index]),
            "case": torch.from_numpy(case),
        }


def _by_content(data: ImageSet) -> Iterator[Sample]:
    samples = data.samples
    grouped, continuous = samples.grouped, samples.continuous
    keys = [content(image) for image in data.images]
    for n, (patient, key) in enumerate(zip(samples.patients, keys, strict=True)):
        if key is not None:
            name = f"{samples.files[n].name} of {patient}" if grouped else patient
            yield Sample(patient, name, key, None if continuous else int(samples.labels[n]))


def channel_statistics(images: Tensor | Rows) -> Array:
    """Returns (2, C) means and deviations of (N, C, ...) images; 0 where all values are equal."""
    parts = torch.arange(images.shape[0]).split(_AT_ONCE)
    first = gather(images, parts[0][:1]).flatten(2)[0, :, :1].double().numpy()
    total, squares, count = np.zeros(len(first)), np.zeros(len(first)), 0
    for index in parts:
        # Less the first value, so that equal values have deviation 0, without rounding.
        apart = gather(images, index).flatten(2).double().numpy() - first
        total += apart.sum(axis=(0, 2))
        squares += (apart**2).sum(axis=(0, 2))
        count += apart[:, 0].size
    mean = total / count
    return np.stack([first[:, 0] + mean, np.sqrt(np.maximum(squares / count - mean**2, 0))])


def normalized(images: Tensor | ArrayRows, statistics: Array) -> Tensor | ArrayRows:
    """Normalises (N, C, *spatial) images by (2, C) statistics; those on disk when they are read."""
    if isinstance(images, ArrayRows):
        return replace(images, convert=partial(_then, images.convert, statistics))
    return torch.from_numpy(standardized(images.numpy(), *statistics))


def random_statistics(channel: Array, every: Sequence[float]) -> Callable[[Tensor, int], Tensor]:
    """Changes a batch from a client's statistics (2, C) to those of a client drawn by a seed."""
    if not every or len(every) % channel.size:
        raise DataError(
            "The server's answer about channels is not as medfed makes it; compare versions."
        )
    mean, sd = channel
    others, theirs = np.array(every).reshape(-1, *channel.shape).swapaxes(0, 1)
    used = (sd > 0) & (_BELOW * theirs >= sd)
    divisor = np.where(used, theirs, 1.0)
    scale = torch.from_numpy(np.where(used, sd, 1.0) / divisor).float()
    shift = torch.from_numpy(np.where(used, mean - others, 0.0) / divisor).float()
    return partial(_drawn, scale, shift)


def _drawn(scale: Tensor, shift: Tensor, image: Tensor, seed: int) -> Tensor:
    """Multiplies and shifts each (B, C, *spatial) image by a row of (H, C)."""
    rows = torch.randint(len(scale), (len(image),), generator=torch_rng(seed, "client"))
    shape = (*image.shape[:2], *[1] * (image.ndim - 2))
    return image * scale[rows].view(shape) + shift[rows].view(shape)


def _then(convert: Convert, statistics: Array, values: NDArray[Any]) -> Pixels:
    return standardized(convert(values), *statistics)


def collected(messages: Sequence[Sequence[float]], claims: Claims) -> list[float]:
    """The server's half: the numbers of all clients, if those of images in [-1, 1]."""
    mean, sd = np.split(np.array(messages, float), 2, axis=1)
    wrong = (sd < 0) | (mean**2 + sd**2 > 1 + 1e-9)
    claims.refuse(wrong, "means and deviations of channels that no images have")
    return [number for numbers in messages for number in numbers]
