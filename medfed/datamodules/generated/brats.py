"""A BraTS-like cohort on disk, in the layout of MSD Task01_BrainTumour."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import nibabel as nib
import numpy as np

from medfed.datamodules.generated.anatomy import make_head
from medfed.datamodules.generated.cohort import Cohort
from medfed.datamodules.generated.hospital import Hospital, make_hospitals
from medfed.datamodules.generated.scanner import CHANNELS, acquire
from medfed.datamodules.seeding import numpy_rng
from medfed.errors import ConfigError


@dataclass(frozen=True)
class BratsCohort(Cohort):
    """What is generated; equal parameters give equal files, byte by byte.

    Attributes:
        hospitals: Number of hospitals.
        patients: Patients per hospital.
        shape: Voxels (H, W, D); slices are thick.
        seed: Seed of everything. It is the data's own: another seed is another data set.

    Example:
        >>> BratsCohort().name == BratsCohort(seed=1).name
        False
    """

    kind: ClassVar[str] = "brats"
    version: ClassVar[int] = 2
    index: ClassVar[str] = "dataset.json"

    hospitals: int = 5
    patients: int = 12
    shape: tuple[int, int, int] = (80, 80, 20)
    seed: int = 2017

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if self.hospitals < 1 or self.patients < 1 or len(self.shape) != 3 or min(self.shape) < 8:
            raise ConfigError(
                "data.generated needs at least 1 hospital and patient, and 3 sizes of 8 or more: "
                f"{self}."
            )

    def write(self, folder: Path) -> None:
        """Writes images, labels, ``dataset.json`` and ``centres.json``.

        Args:
            folder: An existing, empty folder.
        """
        (folder / "imagesTr").mkdir()
        (folder / "labelsTr").mkdir()
        hospitals = make_hospitals(self.hospitals, self.seed)
        owners = [hospital for hospital in hospitals for _ in range(self.patients)]
        cases = {f"BRATS_{n:03d}": hospital for n, hospital in enumerate(owners, start=1)}
        with ThreadPoolExecutor(max_workers=4) as pool:  # each case has a generator of its own
            list(pool.map(partial(self._write_case, folder), cases, cases.values()))
        centres = {case: hospital.name for case, hospital in cases.items()}
        (folder / "centres.json").write_text(json.dumps(centres, indent=1))
        (folder / "dataset.json").write_text(json.dumps(self._index(list(cases)), indent=1))

    def _write_case(self, folder: Path, case: str, hospital: Hospital) -> None:
        rng = numpy_rng(self.seed, "brats", case)
        head = make_head(rng, self.shape, hospital)
        image = acquire(rng, head, hospital)
        size = np.array([192, 192, 144]) / self.shape  # mm; the field of view of a head
        # Left to right reversed, as in many real files: readers must reorient.
        affine = np.diag([-size[0], size[1], size[2], 1.0])
        affine[:3, 3] = [96, -96, -72]
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
            "labels": {
                "0": "background",
                "1": "edema",
                "2": "non-enhancing tumor",
                "3": "enhancing tumour",
            },
            "numTraining": len(cases),
            "training": pairs,
            "parameters": {"version": self.version, **asdict(self)},
        }
