"""Classification of small images: MedMNIST files, class-named folders, digits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medfed.datamodules.base import ClientPlan, FederatedDataModule, resolve_root
from medfed.datamodules.classified import classified_client
from medfed.datamodules.client_data import SPLITS, Augment, Block, ClientData, Rows, Split
from medfed.datamodules.generated.cohort import Cohort
from medfed.datamodules.partitions.base import Partition, Site
from medfed.datamodules.readers.base import Patient
from medfed.datamodules.readers.image_set import ImageSet
from medfed.datamodules.seeding import derive_seed


@dataclass(frozen=True, eq=False)
class ByteRows:
    """Images that stay bytes until a batch of them is asked for.

    Attributes:
        images: (N, C, *spatial) uint8, of all clients.
        index: (n,) int64, which of them are meant.
        present: (C,) bool; the other channels are 0.
        peak: The value that becomes 1; 0 becomes -1.
    """

    images: NDArray[np.uint8]
    index: NDArray[np.int64]
    present: NDArray[np.bool_]
    peak: int = 255

    @property
    def shape(self) -> tuple[int, ...]:
        """(n, C, *spatial)."""
        return (len(self.index), *self.images.shape[1:])

    def take(self, index: Tensor) -> Tensor:
        """See `client_data.Rows.take`; float32 in [-1, 1].

        Example:
            >>> images = np.array([[[0, 16]]], np.uint8)
            >>> rows = ByteRows(images, np.array([0]), np.array([True]), peak=16)
            >>> rows.take(torch.tensor([0])).tolist()
            [[[-1.0, 1.0]]]
        """
        chosen = self.images[self.index[index.numpy()]].astype(np.float32)
        chosen *= 2 / self.peak
        chosen -= 1
        chosen[:, ~self.present] = 0
        return torch.from_numpy(chosen)


class ImageDataModule(FederatedDataModule):
    """Images of one class each; ``image`` is (B, C, *spatial) in [-1, 1], ``label`` (B,) int64.

    The images stay in memory as bytes and become numbers batch by batch; only a client with a
    scanner of its own (a site effect) holds its images as float32.

    Args:
        partition: Assigns patients, channels and scanners to clients.
        reader: Reads a file or folder; None where the reader needs none.
        seed: Seed of partition and splits.
        path: The data; None generates `generated` below `root`.
        root: Folder for generated data.
        generated: What to generate where `path` is None; None leaves the reader without a path.
        official_splits: Whether to keep the splits that the data set itself defines.
        val_fraction: Share of validation patients per client, where splits are drawn.
        test_fraction: Share of test patients per client, where splits are drawn.
        batch_size: Images per training batch.
        eval_batch_size: Images per evaluation batch.
        augment: A random MONAI dict transform of ``image`` (and ``label``), or None.
    """

    def __init__(
        self,
        partition: Partition,
        reader: Callable[[Path | None], ImageSet],
        seed: int = 0,
        path: str | None = None,
        root: str = "data",
        generated: Cohort | None = None,
        official_splits: bool = True,
        val_fraction: float = 0.2,
        test_fraction: float = 0.2,
        batch_size: int = 32,
        eval_batch_size: int = 256,
        augment: Augment | None = None,
    ) -> None:
        super().__init__(partition, seed, val_fraction, test_fraction)
        self.read = reader
        self.path = resolve_root(path)
        self.root = Path(root).expanduser()
        self.generated = generated
        self.official_splits = official_splits
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.augment = augment
        self.data: ImageSet | None = None

    @property
    def spatial_dims(self) -> int:
        """2 for images, 3 for volumes."""
        return 2 if self.data is None else self.data.images.ndim - 2

    def prepare_data(self) -> None:
        """Reads the images, after generating them where no path is given."""
        if self.data is not None:
            return
        path, new = self.path, False
        if path is None and self.generated is not None:
            path, new = self.generated.ensure(self.root)
        data = self.read(path)
        if not self.official_splits:
            data = replace(data, samples=replace(data.samples, splits=()))
        self.data = data
        self.channel_names, self.class_names = data.channels, data.classes
        count = f"{len(data.images)} images of {len(data.classes)} classes"
        self.description = f"Data: {data.source}, {count}."
        if path is not None and self.path is None:
            self.description = (
                f"{'Generated' if new else 'Data:'} {count} in {path} (real data: set data.path)."
            )

    def list_patients(self) -> list[Patient]:
        """See the base class."""
        self.prepare_data()
        assert self.data is not None
        return self.data.samples.list_patients()

    def settings(self) -> dict[str, Any]:
        """Where the splits come from."""
        assert self.data is not None
        official = bool(self.data.samples.splits)
        return {"splits": "official" if official else "by patient, from the seed"}

    def preprocessing(self, client: str) -> dict[str, Any]:
        """See the base class: images of one size, 0 to `peak` scaled to [-1, 1]."""
        assert self.data is not None
        images = self.data.images
        color = "rgb" if len(self.data.channels) == 3 else "grey"
        return {
            **super().preprocessing(client),
            "normalization": {"name": "range", "range": [0, self.data.peak], "to": [-1, 1]},
            "input": {
                "kind": "images",
                "size": list(images.shape[2:]),
                "color": color,
                "converted": self.data.converted,
            },
        }

    def build_clients(self, plans: Mapping[str, ClientPlan]) -> dict[str, ClientData]:
        """See the base class."""
        return {name: self._client(name, plan) for name, plan in plans.items()}

    def _client(self, name: str, plan: ClientPlan) -> ClientData:
        assert self.data is not None
        blocks: dict[Split, Block] = {}
        for split in SPLITS:
            seed = derive_seed(self.seed, name, split)
            index, case = self.data.samples.select(plan.patients[split], plan.shares, seed)
            blocks[split] = self._block(index, case, plan)
        sizes = (self.num_classes, self.batch_size, self.eval_batch_size)
        return classified_client(name, plan, blocks, *sizes, self.augment)

    def _block(self, index: NDArray[np.int64], case: NDArray[np.int64], plan: ClientPlan) -> Block:
        assert self.data is not None
        data = self.data
        image: Tensor | Rows = ByteRows(data.images, index, plan.channels.numpy(), data.peak)
        if plan.site is not None:
            image = self._scanned(index, plan.site)
            image[:, ~plan.channels] = 0
        label = torch.from_numpy(data.samples.labels[index])
        return {"image": image, "label": label, "case": torch.from_numpy(case)}

    def _scanned(self, index: NDArray[np.int64], site: Site) -> Tensor:
        """The images (n, C, *spatial) as a client's scanner shows them."""
        assert self.data is not None
        patients, rows = self.data.samples.patients, self.data.samples.rows
        everything = np.ones(len(self.data.channels), dtype=bool)
        plain = ByteRows(self.data.images, index, everything, self.data.peak)
        images = plain.take(torch.arange(len(index)))
        for place, sample in enumerate(index.tolist()):
            # The second image of a patient has noise of its own.
            number = rows[patients[sample]].index(sample)
            images[place] = site.apply(images[place], patients[sample], number)
        return images
