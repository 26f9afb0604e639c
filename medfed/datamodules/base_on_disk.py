"""Data of the user's that a reader reads, or a generated cohort in the same format."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from medfed.common.errors import ConfigError
from medfed.common.files import ExistingPath
from medfed.datamodules.augmentation import Augment, Augmentation
from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.cache.building import build
from medfed.datamodules.cache.store import Recipe, Store, find
from medfed.datamodules.generated.cohort import Cohort, ScanCohort
from medfed.datamodules.readers.base import Patient, Reader, expanded, given_path

AnyReader = TypeVar("AnyReader", bound=Reader)


@dataclass(eq=False, repr=False)
class OnDiskDataModule(FederatedDataModule):
    """Base of the data modules whose data lie in a file or folder.

    Attributes:
        path: The data; None generates `generated` below `root`.
        root: Folder for generated data.
        generated: The cohort to generate where `path` is None. If it has patients for testing, they
            decide `test_fraction`, and `val_fraction` is a share of the others.
        augment: How training images are altered: a recipe of `configs/augment`, a random MONAI dict
            transform of one sample's ``image`` and ``label``, or None.
        flips: Axes along which a recipe may flip images: those whose sides do not matter.
        workers: Processes that make training batches ahead; 0 makes them when they are needed.
    """

    _: KW_ONLY
    path: ExistingPath | None = None
    root: str = "data"
    generated: Cohort | None = None
    augment: Augmentation | Augment | None = None
    flips: Sequence[int] = ()
    workers: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.workers <= 64:
            raise ConfigError(f"data.workers={self.workers} must be in [0, 64].")
        if not all(isinstance(axis, int) and axis >= 0 for axis in self.flips):
            raise ConfigError(
                f"data.flips={list(self.flips)} must be axes of the images: 0, 1, and 2 of volumes."
            )
        made = self.generated if self.path is None else None
        if isinstance(made, ScanCohort) and made.test_patients:
            self.test_fraction = made.test_patients / made.each
            self.val_fraction *= made.patients / made.each

    @cached_property
    def source(self) -> Path | None:
        """Where the data lie; they are generated first where that is wanted and not done yet."""
        if self.path is None and self.generated is not None:
            made, self.description = self.generated.provide(Path(self.root).expanduser())
            return made
        path = expanded(self.path)
        self.description = f"Data: {path}."
        return path


@dataclass(eq=False, repr=False)
class CachedDataModule(OnDiskDataModule, Generic[AnyReader]):
    """Base of the data modules that keep in a cache what is slow to read.

    Attributes:
        reader: Makes the reader for a folder.
        cache: Folder of caches; None is ``cache`` below `root`.
        store: The cache, once it is opened or made.
    """

    reader: Callable[[Path], AnyReader]
    _: KW_ONLY
    cache: str | None = None
    store: Store | None = field(default=None, init=False)

    @cached_property
    def scans(self) -> AnyReader:
        """The reader of these data.

        Raises:
            ConfigError: If there are none: no path, and nothing to generate.
        """
        return self.reader(given_path(self.source))

    @property
    def caches(self) -> Path:
        """The folder of caches."""
        return Path(self.cache or Path(self.root, "cache")).expanduser()

    def list_patients(self) -> list[Patient]:
        """See the base class."""
        return self.scans.patients()

    def preprocessing(self, client: str) -> dict[str, Any]:
        """See the base class, with the distances of the training scans' voxels."""
        scans = [self._patients[i] for i in self.plans[client].patients["train"]]
        spacings = spacing_summary(self.scans.spacing(scan) for scan in scans)
        return {**super().preprocessing(client), **spacings}

    @abstractmethod
    def recipe(self) -> Recipe:
        """What the cache is made of."""

    def build_cache(self, workers: int | None = None) -> Store:
        """Makes the cache, or completes or verifies the one that is there.

        Args:
            workers: Worker processes; None takes as many as there are cores.

        Returns:
            The cache, also kept for `setup`.
        """
        self.store = build(self.recipe(), self.caches, workers)
        return self.store

    def find_cache(self) -> Store | None:
        """Opens the cache, if it is there and finished.

        Raises:
            DataError: If it is damaged, or a source has changed since it was made.
        """
        self.store = self.store or find(self.recipe(), self.caches)
        return self.store


def spacing_summary(spacings: Iterable[tuple[float, ...]]) -> dict[str, Any]:
    """Returns the median spacing, and the least and greatest one per axis.

    Args:
        spacings: mm along the three axes, of every scan.

    Example:
        >>> spacing_summary([(1.0, 1.0, 2.0), (1.0, 1.0, 5.0), (0.5, 0.5, 2.5)])
        {'spacing': [1.0, 1.0, 2.5], 'spacing_range': [[0.5, 0.5, 2.0], [1.0, 1.0, 5.0]]}
    """
    found = np.array(list(spacings))
    return {
        "spacing": np.median(found, axis=0).tolist(),
        "spacing_range": [found.min(axis=0).tolist(), found.max(axis=0).tolist()],
    }
