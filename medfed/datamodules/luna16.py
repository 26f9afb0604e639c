"""Lung nodule classification: CT patches at candidates, mapped from a cache on disk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medfed.datamodules.base import ClientPlan, FederatedDataModule, resolve_root
from medfed.datamodules.cache import Item, Recipe, Store, build, ensure
from medfed.datamodules.cache.files import digest
from medfed.datamodules.cache.rows import MappedRows
from medfed.datamodules.classified import classified_client
from medfed.datamodules.client_data import SPLITS, Augment, ClientData, Split
from medfed.datamodules.ct_patches import PatchSpec, to_unit
from medfed.datamodules.generated.luna16 import LunaCohort
from medfed.datamodules.luna16_patches import channel_names, convert_patches, read_patches
from medfed.datamodules.partitions.base import Partition, Site
from medfed.datamodules.partitions.thinning import thin
from medfed.datamodules.readers.base import Patient
from medfed.datamodules.readers.luna16 import Luna16Reader
from medfed.datamodules.readers.metaimage import open_scan
from medfed.datamodules.seeding import derive_seed
from medfed.datamodules.spacing import spacing_summary
from medfed.errors import ConfigError, DataError

log = logging.getLogger(__name__)


class Luna16DataModule(FederatedDataModule):
    """Patches at nodule candidates: ``image`` (B, C, h, w[, d]) in [-1, 1], ``label`` (B,) int64.

    The patches of all kept candidates are extracted once, into a cache that every run maps; a
    client is a set of its rows. Only where a site effect changes the images are a client's patches
    held in memory. A scan is a patient: its candidates never straddle splits or clients.

    Args:
        partition: Assigns scans to clients, and says in which proportions each client has nodules:
            every split of it is thinned to these.
        reader: Makes the reader for a folder.
        patches: Which patch is cut at a candidate, of two or three dimensions.
        seed: Seed of partition, splits and thinning; the cache does not depend on it.
        path: The data; None generates `generated` below `root`.
        root: Folder for generated data.
        cache: Folder of caches; None is ``cache`` below `root`.
        generated: The cohort to generate where `path` is None.
        val_fraction: Share of validation scans per client.
        test_fraction: Share of test scans per client.
        batch_size: Patches per training batch.
        eval_batch_size: Patches per evaluation batch.
        augment: A random MONAI dict transform of key ``image``, or None.
    """

    def __init__(
        self,
        partition: Partition,
        reader: Callable[[Path], Luna16Reader],
        patches: PatchSpec,
        seed: int = 0,
        path: str | None = None,
        root: str = "data",
        cache: str | None = None,
        generated: LunaCohort | None = None,
        val_fraction: float = 0.2,
        test_fraction: float = 0.2,
        batch_size: int = 32,
        eval_batch_size: int = 256,
        augment: Augment | None = None,
    ) -> None:
        super().__init__(partition, seed, val_fraction, test_fraction)
        self.make_reader = reader
        self.patches = patches
        self.path = resolve_root(path)
        self.root = Path(root).expanduser()
        self.cache = resolve_root(cache) or self.root / "cache"
        self.generated = generated
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.augment = augment
        self.reader: Luna16Reader | None = None
        self.store: Store | None = None
        self._kept: dict[str, dict[str, Any]] = {}

    @property
    def spatial_dims(self) -> int:
        """2 for slices (one, or several as channels), 3 for cubes."""
        return len(self.patches.size)

    def prepare_data(self) -> None:
        """Generates the cohort where no path is given and it is not there yet."""
        if self.reader is not None:
            return
        path = self.path or self._generate()
        self.reader = self.make_reader(path)
        self.channel_names = channel_names(self.reader.channels[0], self.patches.slices)
        self.class_names = self.reader.classes
        self.description = self.description or f"Data: {path}."

    def _generate(self) -> Path:
        if self.generated is None:
            raise ConfigError("data.path is not set and data.generated is empty; set data.path.")
        count = self.generated.hospitals * self.generated.patients
        path, self.description = self.generated.provide(
            self.root,
            f"a LUNA16-like cohort of {count} scans",
            "data=luna16 data.path=/path/to/LUNA16",
        )
        return path

    def list_patients(self) -> list[Patient]:
        """One patient per scan that has candidates; see the base class."""
        self.prepare_data()
        assert self.reader is not None
        return self.reader.patients()

    def recipe(self) -> Recipe:
        """What the cache is made of: one item per scan, of all its kept candidates."""
        patients = self.list_patients()
        assert self.reader is not None
        return Recipe(
            kind="luna16",
            settings={"reader": self.reader.record(), "patches": asdict(self.patches)},
            items=tuple(
                Item(
                    id=p.id,
                    files=tuple(p.files.values()),
                    hashed=(p.files["header"],) if "raw" in p.files else (),
                    args=(p.files["header"], self.reader.candidates_of(p.id), self.patches),
                )
                for p in patients
            ),
            read=read_patches,
            command="python scripts/prepare.py data=luna16"
            + ("" if self.path is None else f" data.path={self.path}"),
        )

    def build_cache(self, workers: int | None = None) -> Store:
        """Makes the cache, or completes or verifies the one that is there.

        Args:
            workers: Worker processes; None takes as many as there are cores.

        Returns:
            The cache, also kept for `setup`.
        """
        self.store = build(self.recipe(), self.cache, workers)
        return self.store

    def build_clients(self, plans: Mapping[str, ClientPlan]) -> dict[str, ClientData]:
        """Maps every client's rows of the cache, which is made first where it is missing."""
        if self.store is None:
            self.store, made = ensure(self.recipe(), self.cache)
            if made:
                log.info("Prepared the patches once for all runs, in %s.", self.store.folder)
        labels = np.array(self.store.array("label"))
        return {name: self._client(name, plan, labels) for name, plan in plans.items()}

    def _client(self, name: str, plan: ClientPlan, labels: NDArray[np.int64]) -> ClientData:
        blocks = {split: self._block(name, plan, split, labels) for split in SPLITS}
        if not len(blocks["train"]["label"]):
            raise DataError(
                f"Client {name} has no training patch; give it more scans, or class shares that "
                "its nodules suffice for."
            )
        for split in ("val", "test"):
            if plan.patients[split] and not len(blocks[split]["label"]):
                log.warning("Client %s has no %s patch after thinning.", name, split)
        sizes = (self.num_classes, self.batch_size, self.eval_batch_size)
        return classified_client(name, plan, blocks, *sizes, self.augment)

    def _block(
        self, client: str, plan: ClientPlan, split: Split, labels: NDArray[np.int64]
    ) -> dict[str, Any]:
        """The samples of one split; images stay on disk unless a scanner changes them."""
        assert self.store is not None
        ranges = [self.store.rows(series) for series in plan.patients[split]]
        rows = np.concatenate([np.empty(0, np.int64), *(np.asarray(r) for r in ranges)])
        case = np.repeat(np.arange(len(ranges)), [len(r) for r in ranges])
        if plan.shares is not None:
            seed = derive_seed(self.seed, "thin", client, split)
            kept = thin(labels[rows], plan.shares, seed)
            rows, case = rows[kept], case[kept]
        convert = partial(
            convert_patches, window=self.patches.window, present=plan.channels.numpy()
        )
        images: MappedRows | Tensor = MappedRows(self.store.path("image"), rows, convert)
        if plan.site is not None:
            series = [plan.patients[split][i] for i in case]
            images = self._through(plan.site, rows, series, plan.channels)
        self._record(client, split, rows, labels)
        return {
            "image": images,
            "label": torch.from_numpy(labels[rows]),
            "case": torch.from_numpy(case),
        }

    def _through(
        self, site: Site, rows: NDArray[np.int64], series: Sequence[str], present: Tensor
    ) -> Tensor:
        """Patches as a client's scanner shows them, in memory: (n, C, h, w[, d])."""
        assert self.store is not None
        numbers = self.store.array("row")[rows]
        units = to_unit(self.store.array("image")[rows], self.patches.window)
        shown = torch.from_numpy(units)
        for i, (one, number) in enumerate(zip(series, numbers.tolist(), strict=True)):
            shown[i] = site.apply(shown[i], one, number)
        shown[:, ~present] = 0
        return shown

    def _record(
        self, client: str, split: Split, rows: NDArray[np.int64], labels: NDArray[np.int64]
    ) -> None:
        assert self.store is not None
        self._kept.setdefault(client, {})[split] = {
            "counts": np.bincount(labels[rows], minlength=self.num_classes).tolist(),
            "rows_sha256": digest(self.store.array("row")[rows].tolist()),
        }

    def preprocessing(self, client: str) -> dict[str, Any]:
        """See the base class: patches at candidates on the patient grid, HU windowed to [-1, 1]."""
        headers = [self._patients[i].files["header"] for i in self.plans[client].patients["train"]]
        spec = asdict(self.patches)
        spec = {k: list(v) if isinstance(v, tuple) else v for k, v in spec.items()}
        return {
            **super().preprocessing(client),
            **spacing_summary(open_scan(header).spacing for header in headers),
            "orientation": "LPS",
            "normalization": {"name": "window", "hu": list(self.patches.window), "to": [-1, 1]},
            "input": {"kind": "ct_patches", "patches": spec},
        }

    def settings(self) -> dict[str, Any]:
        """How candidates were chosen and patches cut, and what each client and split kept of them.

        The kept candidates are given as samples per class and a hash of their rows in the CSV.
        """
        assert self.reader is not None
        return {
            "reader": self.reader.record(),
            "patches": asdict(self.patches),
            "candidates": self._kept,
        }

    def file_hashes(self, patients: Sequence[str]) -> dict[str, str]:
        """SHA-256 of the CSV and the headers; a scan's voxels count by its patches' checksum.

        Hashing 120 GB of voxels at every run would take longer than training.
        """
        assert self.reader is not None
        assert self.store is not None
        record = self.reader.record()
        found = {str(self.reader.path / record["candidates"]): str(record["sha256"])}
        for series in patients:
            entry, files = self.store.entry(series), self._patients[series].files
            found |= {str(f): entry.hashes.get(f.name, entry.checksum) for f in files.values()}
        return dict(sorted(found.items()))
