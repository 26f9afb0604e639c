"""Volumes with masks, case by case, as networks see them: the base of the segmentation data."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from medfed.common.errors import ConfigError, DataError
from medfed.common.files import sha256
from medfed.datamodules.base_on_disk import CachedDataModule
from medfed.datamodules.cache.store import Item, Recipe
from medfed.datamodules.cache.volumes import (
    cached_hashes,
    cached_volume,
    case_files,
    read_volume,
)
from medfed.datamodules.normalization import CT_WINDOW, Rule, rules_of
from medfed.datamodules.plans import ClientPlan, by_id
from medfed.datamodules.preparation import Preparation, prepared_case
from medfed.datamodules.readers.base import Patient, VolumeReader, given_path
from medfed.functional.grids import on_grid

log = logging.getLogger(__name__)


class Seen(NamedTuple):
    """A case as a client's network sees it.

    Attributes:
        image: (C, h, w, d), channels that the client lacks 0.
        label: (R, H, W, D) on the grid of its file.
        brain: (h, w, d) bool, where any channel is not 0.
        grid: (4, 4) from the label's voxels to the image's; None where they are the same.
    """

    image: Tensor
    label: Tensor
    brain: Tensor
    grid: Tensor | None

    def mask(self) -> Tensor:
        """Returns the label (R, h, w, d) on the image's grid, by the nearest voxels."""
        if self.grid is None:
            return self.label
        return on_grid(self.label, self.grid.inverse(), self.image.shape[1:], nearest=True)


@dataclass(eq=False, repr=False)
class PreparedCases(CachedDataModule[VolumeReader]):
    """Base of the data modules of volumes: what is read, and what is done to it before training.

    Attributes:
        normalize: How grey values are normalised, see `normalization.rules_of`; None: as is usual
            for these data.
        spacing: mm that volumes are resampled to, see `preparation.Preparation`; of slices two.
        crop_foreground: Whether to cut off what lies around the body, see there.
        slices: Of 2-D: how many neighbouring slices a network sees as channels, itself included.
        spatial_dims: 2 for axial slices, 3 for volumes.
    """

    _: KW_ONLY
    normalize: Any = None
    spacing: Sequence[float] | None = None
    crop_foreground: bool = False
    slices: int = 1
    spatial_dims: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slices < 1 or self.slices % 2 == 0 or (self.slices > 1 and self.spatial_dims == 3):
            raise ConfigError(
                f"data.slices={self.slices} must be odd, such as 3 for a slice and its two "
                "neighbours; with data.spatial_dims=3 it must be 1."
            )
        if self.spacing is not None and len(self.spacing) != self.spatial_dims:
            raise ConfigError(
                f"data.spacing={list(self.spacing)} must have {self.spatial_dims} numbers for "
                f"data.spatial_dims={self.spatial_dims}: slices keep their distance."
            )

    @property
    def exclusive(self) -> bool:
        """Whether no voxel is in two regions; of several regions a softmax is then trained."""
        return self.scans.exclusive

    @property
    def in_channels(self) -> int:
        """Channels that a network sees: those of the images, with each one's neighbours."""
        return len(self.channel_names) * self.slices

    @cached_property
    def preparation(self) -> Preparation | None:
        """What is done to every volume; None where the reader's own normalisation is all.

        Raises:
            ConfigError: If a setting cannot be used, or the reader normalises by itself.
        """
        changed = self.normalize is not None or self.spacing is not None or self.crop_foreground
        setting = self.scans.normalize if self.normalize is None else self.normalize
        if self.scans.normalize == "own":
            if changed:
                raise ConfigError(
                    f"{type(self.scans).__name__} prepares its images by itself; leave "
                    "data.normalize and data.spacing at null, and data.crop_foreground at false."
                )
            return None
        rules = rules_of(setting, self.scans.channels)
        mm = None if self.spacing is None else tuple(map(float, self.spacing))
        found = Preparation(rules, mm, self.crop_foreground)
        plain = found.keeps_grid and {rule.name for rule in rules} == {"zscore_nonzero"}
        return None if plain else found

    def facts(self) -> dict[str, Any]:
        """See the base class; also whether regions exclude each other."""
        return {**super().facts(), "exclusive": self.exclusive}

    def prepare_data(self) -> None:
        """Generates the cohort where no path is given and it is not there yet."""
        self.channel_names = self.scans.channels
        self.class_names = self.scans.regions
        rules = self.preparation.rules if self.preparation else ()
        if self.normalize is None and any(rule.name == "window" for rule in rules):
            low, high = CT_WINDOW
            log.info(
                "CT: grey values from %g to %g HU, soft tissue, become 0 to 1; for lungs set "
                "'data.normalize={window: [-1000, 400]}'.",
                *(low, high),
            )

    def preprocessing(self, client: str) -> dict[str, Any]:
        """See the base class: volumes in RAS, of which a 2-D model sees axial slices.

        `preparation.Preparation.from_record` makes of it what is done to a volume; ``input`` has
        ``adjacent_slices``, how many a network sees as channels.
        """
        usual = Preparation((Rule("zscore_nonzero"),))
        return {
            **super().preprocessing(client),
            "orientation": "RAS",
            **(self.preparation or usual).record(),
            "input": {
                "kind": "volumes",
                "adjacent_slices": self.slices,
                **self.scans.layout(),
            },
        }

    @cached_property
    def cases(self) -> dict[str, Patient]:
        """All cases by id: a patient is one, or has several. Known after `setup` has begun."""
        return by_id([c for p in self._patients.values() for c in self.scans.cases_of(p)])

    def cases_among(self, patients: Sequence[str]) -> list[tuple[str, int]]:
        """The cases of patients, and each one's patient's place in the list."""
        found = [(n, self.scans.cases_of(self._patients[p])) for n, p in enumerate(patients)]
        return [(case.id, n) for n, own in found for case in own]

    def recipe(self) -> Recipe:
        """What the cache is made of: every patient's volume, as the reader gives it."""
        reader, path = self.scans, given_path(self.source).resolve()
        prepared = self.preparation
        cases = (case for patient in reader.patients() for case in reader.cases_of(patient))
        items = (Item(c.id, tuple(case_files(c)), args=(reader, c, prepared)) for c in cases)
        # The path tells apart data sets with the same patient ids.
        settings = {"path": str(path), "reader": reader.record()}
        if prepared is not None:
            settings["preparation"] = prepared.record()
        again = "medfed prepare with the same data settings"
        return Recipe("volumes", settings, tuple(items), read_volume, joined=False, command=again)

    def resampled_shape(self, case: str) -> tuple[int, ...]:
        """Voxels of a case as it is resampled; cropping is not foreseen."""
        shape = tuple(self.scans.shape(self.cases[case]))
        if self.spacing is None:
            return shape
        found = zip(shape, self.scans.spacing(self.cases[case]), self.spacing, strict=False)
        resampled = tuple(max(1, round(n * old / new)) for n, old, new in found)
        return resampled + shape[len(resampled) :]

    def file_hashes(self, patients: Sequence[str]) -> dict[str, str]:
        """See the base class; a cache has the hashes of the files that it was made of."""
        cases = [self.cases[case] for case, _ in self.cases_among(patients)]
        if self.store is None:
            files = {file for case in cases for file in case_files(case)}
            return {str(path): sha256(path) for path in sorted(files)}
        found = [cached_hashes(self.store, case) for case in cases]
        return dict(sorted(item for hashes in found for item in hashes.items()))

    def seen(self, case: str, plan: ClientPlan) -> Seen:
        """A case as a client's network sees it."""
        if self.store is not None:
            sample = cached_volume(self.store, case)
        else:
            sample = prepared_case(self.scans, self.cases[case], self.preparation)
        image, label, grid = sample["image"], sample["label"], sample.get("grid")
        brain = (image != 0).any(dim=0)
        if not brain.any():
            raise DataError(f"Patient {case} has only zero voxels; leave the patient out.")
        if plan.scanner is not None:
            scaled = self.preparation and all(r.is_scaled for r in self.preparation.rules)
            # Of images on a fixed scale, a scanner knows those from -1 to 1.
            image = plan.scanner.apply(image * 2 - 1 if scaled else image, case)
            image = (image + 1) / 2 if scaled else image
        image[~plan.channels] = 0
        if plan.label_order is not None:
            label = label[torch.tensor(plan.label_order).argsort()]
        return Seen(image, label, brain, grid)
