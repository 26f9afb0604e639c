"""A BraTS-like cohort on disk, in the layout of MSD Task01_BrainTumour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from medfed.common.checks import check_not_negative
from medfed.datamodules.generated.cohort import VolumeCohort, added, check_range
from medfed.datamodules.generated.head import CHANNELS, Rng, acquire, make_head
from medfed.datamodules.generated.hospitals import MriHospital

LABELS = ("background", "edema", "non-enhancing tumor", "enhancing tumour")


@dataclass(frozen=True)
class BratsCohort(VolumeCohort):
    """The generated cohort; equal parameters give equal files, byte by byte.

    Attributes:
        hospitals: Number of hospitals.
        patients: Patients per hospital.
        shape: Voxels (H, W, D); slices are thick.
        seed: Seed of the data, not of the run: another seed gives another data set.
        outline: How much hospitals differ in outlining the fading edge of the oedema: 0, all at the
            visible edge; 1, from well inside to well outside; 2, twice as much.
        strength: The range over hospitals of how strongly tumours stand out.
        blur: The range over hospitals of the in-plane blur in voxels.

    Example:
        >>> BratsCohort().name == BratsCohort(seed=1).name
        False
    """

    kind: ClassVar[str] = "brats"
    version: ClassVar[int] = 2
    field: ClassVar[tuple[float, float, float]] = (192, 192, 144)  # the field of view of a head
    least: ClassVar[int] = 8
    instead: ClassVar[str] = "data=brats data.path=/path/to/Task01_BrainTumour"

    shape: tuple[int, int, int] = (80, 80, 20)
    seed: int = 2017
    outline: float = added(1.0)
    strength: Sequence[float] = added(MriHospital.traits()["strength"])
    blur: Sequence[float] = added(MriHospital.traits()["blur"])

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative("data.generated.outline", self.outline)
        for name in ("strength", "blur"):
            given = check_range(f"data.generated.{name}", getattr(self, name))
            object.__setattr__(self, name, given)

    @property
    def what(self) -> str:
        """See `Cohort.what`."""
        return f"a BraTS-like cohort of {self.hospitals * self.each} patients"

    def write(self, folder: Path) -> None:
        """See `Cohort.write`."""
        low, high = MriHospital.traits()["outline"]
        outline = (self.outline * low, self.outline * high)
        ranges = {"outline": outline, "strength": self.strength, "blur": self.blur}
        owners = self.owners(MriHospital, self.seed, ranges)  # type: ignore[arg-type]
        about = {
            "name": "BRATS",
            "description": "Generated, BraTS-like: not real patients",
            "tensorImageSize": "4D",
            "modality": {str(n): name for n, name in enumerate(CHANNELS)},
            "labels": {str(n): name for n, name in enumerate(LABELS)},
        }
        self.write_cases(folder, "BRATS", owners, self.seed, about)

    def scan(self, rng: Rng, hospital: MriHospital) -> tuple[Any, Any, Any]:
        """See `VolumeCohort.scan`."""
        head = make_head(rng, self.shape, hospital)
        return acquire(rng, head, hospital), head.label, np.array(self.field) / self.shape
