"""Brain tumour segmentation: patches for training, whole slices or volumes for evaluation."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medfed.datamodules import patches
from medfed.datamodules.base import ClientPlan, FederatedDataModule, resolve_root
from medfed.datamodules.cache import Recipe, Store, build, find
from medfed.datamodules.client_data import Augment, Batch, Block, ClientData, Split
from medfed.datamodules.generated.brats import BratsCohort
from medfed.datamodules.partitions.base import Partition
from medfed.datamodules.readers.base import Patient, Reader
from medfed.datamodules.seeding import torch_rng
from medfed.datamodules.spacing import ras_spacing, spacing_summary
from medfed.datamodules.volume_cache import (
    BlocksOnDemand,
    cached_hashes,
    cached_volume,
    volume_recipe,
)
from medfed.errors import ConfigError, DataError

log = logging.getLogger(__name__)


class BratsDataModule(FederatedDataModule):
    """Multi-channel volumes with region masks, from any reader.

    The patches of the training patients are drawn once, in `setup`, and stay in memory; so do the
    slices (or volumes) of the others, unless they take more than `memory_gb`. They are then read
    patient by patient at every evaluation, from a cache of all volumes, which is made where it is
    missing. A cache that is there is used in any case; it changes no number.
    Clients then hold ``image`` (N, C, h, w[, d]) and ``label`` (N, R, h, w[, d]).

    Args:
        partition: Assigns patients and channels to clients.
        reader: Makes the reader for a folder.
        seed: Seed of partition, splits and patch positions.
        path: The data; None generates `generated` below `root`.
        root: Folder for generated data.
        cache: Folder of caches; None is ``cache`` below `root`.
        memory_gb: Validation and test images up to this size (10^9 bytes) are kept in memory.
        generated: The cohort to generate where `path` is None.
        spatial_dims: 2 for axial slices, 3 for volumes.
        patch_size: (h, w) or (h, w, d).
        patches_per_patient: Patches from every training patient.
        background_share: Share of the patches that is centred off the tumour.
        eval_every: Evaluate every n-th axial slice of those that contain brain, 1 for all.
        val_fraction: Share of validation patients per client.
        test_fraction: Share of test patients per client.
        batch_size: Patches per training batch.
        eval_batch_size: Slices (or volumes) per evaluation batch.
        augment: A random MONAI dict transform of keys ``image`` and ``label``, or None.
    """

    def __init__(
        self,
        partition: Partition,
        reader: Callable[[Path], Reader],
        seed: int = 0,
        path: str | None = None,
        root: str = "data",
        cache: str | None = None,
        memory_gb: float = 2.0,
        generated: BratsCohort | None = None,
        spatial_dims: int = 2,
        patch_size: Sequence[int] = (64, 64),
        patches_per_patient: int = 32,
        background_share: float = 0.25,
        eval_every: int = 1,
        val_fraction: float = 0.2,
        test_fraction: float = 0.2,
        batch_size: int = 16,
        eval_batch_size: int = 16,
        augment: Augment | None = None,
    ) -> None:
        super().__init__(partition, seed, val_fraction, test_fraction)
        if not 0 <= background_share <= 1 or patches_per_patient < 1 or eval_every < 1:
            raise ConfigError(
                f"data.background_share={background_share} must be in [0, 1], and "
                f"patches_per_patient={patches_per_patient} and eval_every={eval_every} positive."
            )
        if memory_gb < 0:
            raise ConfigError(f"data.memory_gb={memory_gb} must not be negative.")
        self.make_reader = reader
        self.path = resolve_root(path)
        self.root = Path(root).expanduser()
        self.cache = resolve_root(cache) or self.root / "cache"
        self.memory_gb = memory_gb
        self.generated = generated
        self.spatial_dims = spatial_dims
        self.size = patches.patch_size_3d(patch_size, spatial_dims)
        self.patches_per_patient = patches_per_patient
        self.background_share = background_share
        self.eval_every = eval_every
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.augment = augment
        self.reader: Reader | None = None
        self.store: Store | None = None
        self._source: Path | None = None

    def prepare_data(self) -> None:
        """Generates the cohort where no path is given and it is not there yet."""
        if self.reader is not None:
            return
        path = self._source = self.path or self._generate()
        self.reader = self.make_reader(path)
        self.channel_names = self.reader.channels
        self.class_names = self.reader.regions
        self.description = self.description or f"Data: {path}."

    def _generate(self) -> Path:
        if self.generated is None:
            raise ConfigError("data.path is not set and data.generated is empty; set data.path.")
        count = self.generated.hospitals * self.generated.patients
        path, self.description = self.generated.provide(
            self.root,
            f"a BraTS-like cohort of {count} patients",
            "data=brats data.path=/path/to/Task01_BrainTumour",
        )
        return path

    def list_patients(self) -> list[Patient]:
        """See the base class."""
        self.prepare_data()
        assert self.reader is not None
        return self.reader.patients()

    def settings(self) -> dict[str, Any]:
        """How patches were drawn and slices chosen."""
        return {
            "patch_size": list(self.size[: self.spatial_dims]),
            "patches_per_patient": self.patches_per_patient,
            "background_share": self.background_share,
            "eval_slices": f"every {self.eval_every} of the axial slices with brain"
            if self.spatial_dims == 2
            else "whole volumes",
        }

    def preprocessing(self, client: str) -> dict[str, Any]:
        """See the base class: z-scored volumes in RAS, of which a 2-D model sees axial slices."""
        assert self.reader is not None
        scans = [self._patients[i] for i in self.plans[client].patients["train"]]
        spacings = (ras_spacing(next(iter(scan.files.values()))) for scan in scans)
        return {
            **super().preprocessing(client),
            **spacing_summary(spacings),
            "orientation": "RAS",
            "normalization": {"name": "zscore", "nonzero": True, "channel_wise": True},
            "input": {"kind": "volumes", **self.reader.layout()},
        }

    def recipe(self) -> Recipe:
        """What the cache is made of: every patient's volume, as the reader gives it."""
        patients = self.list_patients()
        assert self.reader is not None
        assert self._source is not None
        command = "scripts/prepare.py with the same data settings"
        return volume_recipe(self.reader, patients, self._source, command)

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
        """See the base class."""
        in_memory = self._evaluation_bytes(plans) <= self.memory_gb * 1e9
        self.store = self.store or find(self.recipe(), self.cache)
        if self.store is None and not in_memory:
            store = self.build_cache()
            log.info("Prepared the volumes once, in %s.", store.folder)
        return {name: self._client(name, plan, in_memory) for name, plan in plans.items()}

    def _evaluation_bytes(self, plans: Mapping[str, ClientPlan]) -> int:
        """Bytes of all validation and test images and labels, about: air counts, too."""
        assert self.reader is not None
        voxel = 4 * self.in_channels + self.num_classes
        ids = [i for p in plans.values() for s in ("val", "test") for i in p.patients[s]]
        voxels = sum(math.prod(self.reader.shape(self._patients[i])) for i in ids)
        return voxels * voxel // (self.eval_every if self.spatial_dims == 2 else 1)

    def _client(self, name: str, plan: ClientPlan, in_memory: bool) -> ClientData:
        parts = plan.patients
        drawn = [self.training_block(p, n, plan) for n, p in enumerate(parts["train"])]
        if not drawn:
            raise DataError(f"Client {name} has no training patient; give it more patients.")
        train = {key: torch.cat([block[key] for block in drawn]) for key in drawn[0]}
        evaluation: dict[Split, Sequence[Block]] = {}
        for split in ("val", "test"):
            read = partial(self._nth_block, parts[split], plan)
            blocks = BlocksOnDemand(len(parts[split]), read)
            evaluation[split] = list(blocks) if in_memory else blocks
        return ClientData(
            id=name,
            train={**train, "label": train["label"].float()},
            evaluation=evaluation,
            channels=plan.channels,
            label_counts=patches.voxel_counts(train["label"]),
            patients={split: list(ids) for split, ids in parts.items()},
            batch_size=self.batch_size,
            eval_batch_size=self.eval_batch_size if self.spatial_dims == 2 else 1,
            augment=self.augment,
        )

    def _nth_block(self, patients: Sequence[str], plan: ClientPlan, case: int) -> Batch:
        return self.evaluation_block(patients[case], case, plan)

    def file_hashes(self, patients: Sequence[str]) -> dict[str, str]:
        """See the base class; a cache has the hashes of the files that it was made of."""
        if self.store is None:
            return super().file_hashes(patients)
        found = [cached_hashes(self.store, self._patients[i]) for i in patients]
        return dict(sorted(item for hashes in found for item in hashes.items()))

    def _read(self, patient: str, plan: ClientPlan) -> tuple[Tensor, Tensor, Tensor]:
        """Image with missing channels zeroed, label, and brain mask."""
        assert self.reader is not None
        if self.store is not None:
            sample = cached_volume(self.store, patient)
        else:
            sample = self.reader.read(self._patients[patient])
        image = sample["image"]
        brain = (image != 0).any(dim=0)
        if not brain.any():
            raise DataError(f"Patient {patient} has only zero voxels; leave the patient out.")
        if plan.site is not None:
            image = plan.site.apply(image, patient)
        image[~plan.channels] = 0
        label = sample["label"]
        if plan.label_order is not None:
            label = label[torch.tensor(plan.label_order).argsort()]
        return image, label, brain

    def training_block(self, patient: str, case: int, plan: ClientPlan) -> Batch:
        """Draws one patient's patches; their places depend on the seed and the patient alone.

        Args:
            patient: Patient id.
            case: Its index in the split.
            plan: The client's channels and scanner.

        Returns:
            ``image`` (P, C, h, w[, d]), ``label`` (P, R, h, w[, d]) uint8, ``case`` (P,).
        """
        image, label, brain = self._read(patient, plan)
        image, label = patches.pad_to(image, self.size), patches.pad_to(label, self.size)
        centres = patches.sample_centres(
            tumour=label.any(dim=0),
            brain=patches.pad_to(brain[None], self.size)[0],
            count=self.patches_per_patient,
            background_share=self.background_share,
            size=self.size,
            generator=torch_rng(self.seed, "patches", patient),
        ).tolist()
        images = torch.stack([patches.crop(image, c, self.size) for c in centres])
        labels = torch.stack([patches.crop(label, c, self.size) for c in centres])
        if self.spatial_dims == 2:
            images, labels = images.squeeze(-1), labels.squeeze(-1)
        return {"image": images, "label": labels, "case": torch.full((len(images),), case)}

    def evaluation_block(self, patient: str, case: int, plan: ClientPlan) -> Batch:
        """Takes one patient's whole axial slices, or the volume.

        Args:
            patient: Patient id.
            case: Its index in the split.
            plan: The client's channels and scanner.

        Returns:
            ``image`` (S, C, H, W) or (1, C, H, W, D), ``label`` alike, ``case`` (S,) or (1,).
        """
        image, label, brain = self._read(patient, plan)
        if self.spatial_dims == 3:
            image, label = image[None], label[None]
        else:
            slices = patches.brain_slices(brain, self.eval_every)
            image, label = patches.axial(image, slices), patches.axial(label, slices)
        return {"image": image, "label": label, "case": torch.full((len(image),), case)}
