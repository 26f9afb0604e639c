"""A BraTS-like cohort on disk, in the layout of MSD Task01_BrainTumour."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import nibabel as nib
import numpy as np

from medfed.datamodules.generated.anatomy import make_head
from medfed.datamodules.generated.hospital import Hospital, make_hospitals
from medfed.datamodules.generated.scanner import CHANNELS, acquire
from medfed.datamodules.seeding import numpy_rng
from medfed.errors import ConfigError, DataError

log = logging.getLogger(__name__)
VERSION = 2  # raise when the images change, so that an old cohort is not taken for the new one


@dataclass(frozen=True)
class BratsCohort:
    """What is generated; equal parameters give equal files, byte by byte.

    Attributes:
        hospitals: Number of hospitals.
        patients: Patients per hospital.
        shape: Voxels (H, W, D); slices are thick.
        seed: Seed of everything. It is the data's own: another seed is another data set.
    """

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

    @property
    def name(self) -> str:
        """Folder name, with a hash of the parameters.

        Example:
            >>> BratsCohort().name == BratsCohort(seed=1).name
            False
        """
        text = json.dumps({"version": VERSION, **asdict(self)}, sort_keys=True)
        return f"brats_{hashlib.sha256(text.encode()).hexdigest()[:10]}"

    def ensure(self, root: Path) -> tuple[Path, bool]:
        """Generates the cohort unless it is there.

        Args:
            root: Data folder; the cohort lies in ``generated/`` below it.

        Returns:
            The cohort's folder, and whether it was generated now.

        Raises:
            DataError: If the folder cannot be written; nothing half-written is left.
        """
        target = root / "generated" / self.name
        if target.exists():
            return target, False
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            part = Path(tempfile.mkdtemp(prefix=f".{self.name}.", dir=target.parent))
        except OSError as error:
            raise DataError(f"Cannot write to {root} ({error}); set data.root.") from error
        try:
            self.write(part)
            part.chmod(0o755)
            part.rename(target)
        except OSError as error:
            # Another process may have finished first; its files are the same.
            if not (target / "dataset.json").exists():
                raise DataError(f"Cannot write {target} ({error}); set data.root.") from error
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return target, True

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
            "parameters": {"version": VERSION, **asdict(self)},
        }
