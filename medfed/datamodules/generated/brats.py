"""A BraTS-like cohort on disk, in the layout of MSD Task01_BrainTumour."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np

from medfed.common.checks import check_not_negative
from medfed.common.seeding import numpy_rng
from medfed.datamodules.generated.cohort import ScanCohort, added, check_range
from medfed.datamodules.generated.head import CHANNELS, acquire, make_head
from medfed.datamodules.generated.hospitals import MriHospital

LABELS = ("background", "edema", "non-enhancing tumor", "enhancing tumour")


@dataclass(frozen=True)
class BratsCohort(ScanCohort):
    """What is generated; equal parameters give equal files, byte by byte.

    Attributes:
        hospitals: Number of hospitals.
        patients: Patients per hospital.
        shape: Voxels (H, W, D); slices are thick.
        seed: Seed of everything. It is the data's own: another seed is another data set.
        outline: How much hospitals differ in where they outline the fading edge of the oedema: 0,
            all at the edge that is seen; 1, from well inside to well outside; 2, twice as much.
        strength: How strongly tumours stand out, from one hospital to another.
        blur: In-plane blur in voxels, likewise.

    Example:
        >>> BratsCohort().name == BratsCohort(seed=1).name
        False
    """

    kind: ClassVar[str] = "brats"
    version: ClassVar[int] = 2
    index: ClassVar[str] = "dataset.json"

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
        """Writes images, labels, ``dataset.json`` and ``centres.json``.

        Args:
            folder: An existing, empty folder.
        """
        (folder / "imagesTr").mkdir()
        (folder / "labelsTr").mkdir()
        low, high = MriHospital.traits()["outline"]
        outline = (self.outline * low, self.outline * high)
        ranges = {"outline": outline, "strength": self.strength, "blur": self.blur}
        owners = self.owners(MriHospital, self.seed, ranges)  # type: ignore[arg-type]
        cases = {f"BRATS_{n:03d}": hospital for n, hospital in enumerate(owners, start=1)}
        with ThreadPoolExecutor(max_workers=4) as pool:  # each case has a generator of its own
            list(pool.map(partial(self._write_case, folder), cases, cases.values()))
        centres = {case: hospital.name for case, hospital in cases.items()}
        (folder / "centres.json").write_text(json.dumps(centres, indent=1))
        (folder / "dataset.json").write_text(json.dumps(self._index(list(cases)), indent=1))

    def _write_case(self, folder: Path, case: str, hospital: MriHospital) -> None:
        rng = numpy_rng(self.patients_seed(self.seed), "brats", case)
        head = make_head(rng, self.shape, hospital)
        image = acquire(rng, head, hospital)
        size = np.array([192, 192, 144]) / self.shape  # mm; the field of view of a head
        # Left to right reversed, as in many real files: readers must reorient.
        affine = np.diag([-size[0], size[1], size[2], 1.0])
        affine[:3, 3] = [96, -96, -72]
        import nibabel as nib

        for part, data in (("imagesTr", image[::-1]), ("labelsTr", head.label[::-1])):
            nib.save(nib.Nifti1Image(data, affine), folder / part / f"{case}.nii.gz")

    def _index(self, cases: list[str]) -> dict[str, object]:
        pairs = [
            {"image": f"./imagesTr/{c}.nii.gz", "label": f"./labelsTr/{c}.nii.gz"} for c in cases
        ]
        return {
            "name": "BRATS",
            "description": "Generated, BraTS-like: not real patients",
            "tensorImageSize": "4D",
            "modality": {str(n): name for n, name in enumerate(CHANNELS)},
            "labels": {str(n): name for n, name in enumerate(LABELS)},
            "numTraining": len(cases),
            "training": pairs,
            "parameters": {"version": self.version, **self.parameters()},
        }
