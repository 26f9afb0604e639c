"""Classification of small images: MedMNIST files, class-named folders, digits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medfed.common.seeding import derive_seed
from medfed.datamodules.cache.volumes import OnDiskDataModule
from medfed.datamodules.client_data import ArrayRows, Block, ClientData, Rows
from medfed.datamodules.duplicates import Sample, content, one_patient_each
from medfed.datamodules.plans import ClientPlan
from medfed.datamodules.readers.base import Patient
from medfed.datamodules.readers.pictures import unit_range
from medfed.datamodules.readers.samples import ImageSet, Index
from medfed.datamodules.scanner import scan_each
from medfed.datamodules.splits import SPLITS, Split


@dataclass(eq=False, repr=False)
class ImageDataModule(OnDiskDataModule):
    """Images of one class each; ``image`` is (B, C, *spatial) in [-1, 1], ``label`` (B,) int64.

    The images stay in memory as bytes and are converted batch by batch; only a client with a
    simulated scanner (a site effect) holds its images as float32.

    Attributes:
        reader: Reads a file or folder.
        official_splits: Whether to use the data set's splits.
        duplicates: What to do about equal images in two splits or at two clients: ``"warn"``,
            ``"error"``, or ``"together"``, which counts patients who share an image as one.

    Raises:
        ConfigError: If a choice is unknown.
    """

    reader: Callable[[Path | None], ImageSet]
    _: KW_ONLY
    official_splits: bool = True
    duplicates: Literal["warn", "error", "together"] = "warn"

    @cached_property
    def data(self) -> ImageSet:
        """All images, with the official splits only if they are used."""
        data = self.reader(self.source)
        samples = data.samples if self.official_splits else replace(data.samples, splits=())
        if self.duplicates == "together":
            one = one_patient_each(_by_content(data))
            samples = replace(samples, patients=[one.get(p, p) for p in samples.patients])
        return replace(data, samples=samples)

    @property
    def spatial_dims(self) -> int:
        """2 for images, 3 for volumes."""
        return self.data.images.ndim - 2

    def prepare_data(self) -> None:
        """Reads the images; generates them first if no path is given."""
        data = self.data
        self.channel_names, self.class_names = data.channels, data.classes
        if self.path is not None or self.generated is None:
            count = f"{len(data.images)} images of {len(data.classes)} classes"
            self.description = f"Data: {data.source}, {count}."

    def facts(self) -> dict[str, Any]:
        """See the base class; adds the images' size and the value of white."""
        size = list(self.data.images.shape[2:])
        return {**super().facts(), "size": size, "white": int(self.data.peak)}

    def list_patients(self) -> list[Patient]:
        """See the base class."""
        return self.data.samples.list_patients()

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
        size, converted = list(self.data.images.shape[2:]), self.data.converted
        return {
            **super().preprocessing(client),
            "normalization": {"name": "range", "range": [0, self.data.peak], "to": [-1, 1]},
            "input": {"kind": "images", "size": size, "color": color, "converted": converted},
        }

    def build_clients(self, plans: Mapping[str, ClientPlan]) -> dict[str, ClientData]:
        """See the base class."""
        return {
            name: self.labelled_client(name, plan, {s: self._block(name, plan, s) for s in SPLITS})
            for name, plan in plans.items()
        }

    def _block(self, client: str, plan: ClientPlan, split: Split) -> Block:
        samples, present = self.data.samples, plan.channels.numpy()
        seed = derive_seed(self.seed, client, split)
        index, case = samples.select(plan.patients[split], plan.shares, seed)
        image: Tensor | Rows = self._rows(index, present)
        if plan.scanner is not None:
            patients = [samples.patients[sample] for sample in index]
            # Each image of a patient has different noise.
            keys = [(p, samples.rows[p].index(n)) for p, n in zip(patients, index, strict=True)]
            plain = self._rows(index, np.ones_like(present)).take(torch.arange(len(index)))
            image = scan_each(plain, plan.scanner, keys)
            # After the scanner, whose noise would fill these channels.
            image[:, ~plan.channels] = 0
        label = torch.from_numpy(samples.labels[index])
        return {"image": image, "label": label, "case": torch.from_numpy(case)}

    def _rows(self, index: Index, present: NDArray[np.bool_]) -> ArrayRows:
        convert = partial(unit_range, peak=self.data.peak, present=present)
        return ArrayRows(self.data.images, index, convert)


def _by_content(data: ImageSet) -> Iterator[Sample]:
    samples = data.samples
    for n, patient in enumerate(samples.patients):
        if (key := content(data.images[n])) is not None:
            name = f"{samples.files[n].name} of {patient}" if samples.grouped else patient
            yield Sample(patient, name, key, int(samples.labels[n]))
