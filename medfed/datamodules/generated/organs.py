"""CT of abdomens on disk, in the layout of the Medical Segmentation Decathlon: several organs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

from medfed.datamodules.generated.cohort import VolumeCohort
from medfed.datamodules.generated.head import Array, Label, Rng, smooth_noise
from medfed.datamodules.generated.hospitals import Hospital, trait

LABELS = ("background", "liver", "spleen", "kidneys", "tumour")
_AIR, _FAT = -1000.0, -95.0


@dataclass(frozen=True)
class AbdomenHospital(Hospital):
    """A hospital that scans abdomens.

    Attributes:
        agent: HU that the contrast agent adds, from a native scan to the venous phase.
        thickness: Distance of the slices, as a multiple of the cohort's.
        pixel: Size of the pixels, as a multiple of the cohort's.
        noise: Standard deviation of the noise, in HU.
        blur: In-plane blur of the reconstruction kernel, in pixels.
        offset: HU by which the calibration is wrong.
        tumour_size: Typical radius of a tumour of the liver, in mm.
        steatosis: HU by which fat darkens the livers.
    """

    agent: float = trait(15.0, 90.0)
    thickness: float = trait(0.7, 1.4)
    pixel: float = trait(0.9, 1.15)
    noise: float = trait(12.0, 40.0)
    blur: float = trait(0.2, 0.9)
    offset: float = trait(-12.0, 12.0)
    tumour_size: float = trait(14.0, 24.0)
    steatosis: float = trait(0.0, 25.0)


@dataclass(frozen=True)
class OrgansCohort(VolumeCohort):
    """The generated cohort; equal parameters give equal files, byte by byte.

    Attributes:
        hospitals: Number of hospitals.
        patients: Patients per hospital.
        shape: Voxels (H, W, D) of a typical scan; the spacing differs between hospitals.
        seed: Seed of everything. It is the data's own: another seed is another data set.
    """

    kind: ClassVar[str] = "organs"
    version: ClassVar[int] = 1
    field: ClassVar[tuple[float, float, float]] = (340.0, 270.0, 190.0)
    least: ClassVar[int] = 12
    instead: ClassVar[str] = "data=datalist data.path=/path/to/Task09_Spleen"

    hospitals: int = 4
    patients: int = 8
    shape: tuple[int, int, int] = (84, 68, 24)
    seed: int = 2019

    @property
    def what(self) -> str:
        """See `Cohort.what`."""
        return f"CT of {self.hospitals * self.each} abdomens with organs"

    def write(self, folder: Path) -> None:
        """See `Cohort.write`."""
        about = {
            "name": "Organs",
            "description": "Generated abdomens: not real patients",
            "tensorImageSize": "3D",
            "modality": {"0": "CT"},
            "labels": {str(n): name for n, name in enumerate(LABELS)},
        }
        owners = self.owners(AbdomenHospital, self.seed)
        self.write_cases(folder, "abdomen", owners, self.seed, about)

    def scan(self, rng: Rng, hospital: AbdomenHospital) -> tuple[Any, Any, Any]:
        """See `VolumeCohort.scan`."""
        usual = np.array(self.field) / self.shape
        spacing = usual * (hospital.pixel, hospital.pixel, hospital.thickness)
        sides = zip(self.field, spacing, strict=True)
        shape = tuple(max(self.least, round(f / s)) for f, s in sides)
        return *make_abdomen(rng, shape, spacing, hospital), spacing


def make_abdomen(
    rng: Rng, shape: tuple[int, ...], spacing: NDArray[np.float64], hospital: AbdomenHospital
) -> tuple[NDArray[np.int16], Label]:
    """Draws one patient and scans it.

    Args:
        rng: Source of randomness, this patient's own.
        shape: (H, W, D) voxels, to the right, to the front and to the head.
        spacing: (3,) mm between them.
        hospital: Scanner and case mix.

    Returns:
        (H, W, D) int16 in HU, and (H, W, D) uint8 as `LABELS` numbers them.
    """
    scale = rng.uniform(0.88, 1.08)  # of the whole patient
    axes = (
        (np.arange(n, dtype=np.float32) - (n - 1) / 2) * np.float32(mm / scale)
        for n, mm in zip(shape, spacing, strict=True)
    )
    grid = np.stack(np.meshgrid(*axes, indexing="ij"))
    rough = smooth_noise(rng, shape, 3.0)
    at = partial(_ellipsoid, grid, rough, rng)
    agent = hospital.agent * rng.uniform(0.8, 1.2)
    image, label = np.full(shape, _AIR, np.float32), np.zeros(shape, np.uint8)
    image[at((0, 0, 0), (150, 108, 4000), 0.01) < 1] = _FAT
    image[at((0, 0, 0), (134, 92, 4000), 0.03) < 1] = 50 + 0.1 * agent  # muscle
    image[at((0, 18, 0), (116, 68, 4000), 0.06) < 1] = _FAT
    _bowel(rng, image, at)
    image[at((0, -66, 0), (21, 19, 4000), 0.05) < 1] = rng.uniform(180, 320)  # spine
    image[at((12, -36, 0), (10, 10, 4000), 0.02) < 1] = 40 + 1.1 * agent  # aorta
    organs = {  # centre, half axes, roughness, HU
        "kidneys": (((66, -42, -32), (26, 24, 46)), ((-66, -42, -26), (26, 24, 46))),
        "spleen": (((-92, -22, 42), (28, 40, 42)),),
        "liver": (((58, 8, 38), (66, 64, 54)), ((0, 34, 44), (44, 28, 34))),
    }
    values = {"kidneys": 32 + 1.4 * agent, "spleen": 46 + 0.8 * agent}
    values["liver"] = 58 + 0.6 * agent - hospital.steatosis * rng.uniform(0.5, 1.5)
    for name, parts in organs.items():
        for centre, half in parts:
            moved = tuple(np.add(centre, rng.normal(0, 5, 3)))
            inside = at(moved, tuple(np.multiply(half, rng.uniform(0.88, 1.12, 3))), 0.08) < 1
            image[inside] = values[name] + rng.normal(0, 4)
            label[inside] = LABELS.index(name)
    _tumours(rng, image, label, at, hospital, values["liver"])
    return _scanned(rng, image, hospital), label


def _ellipsoid(
    grid: Array,
    rough: Array,
    rng: Rng,
    centre: tuple[float, ...],
    half: tuple[float, ...],
    roughness: float,
) -> Array:
    """Distance from a centre in units of the half axes, its surface rough."""
    terms = [((g - c) / h) ** 2 for g, c, h in zip(grid, centre, half, strict=True)]
    distance = np.sqrt(sum(terms))
    shift = [int(rng.integers(n)) for n in rough.shape]  # another piece of the same noise
    noise = np.roll(rough, shift, axis=(0, 1, 2))
    return np.asarray(distance + roughness * noise * np.minimum(distance, 1), dtype=np.float32)


def _bowel(rng: Rng, image: Array, at: partial[Array]) -> None:
    """Loops of soft tissue, some with gas, which look like organs."""
    for _ in range(14):
        centre = (rng.uniform(-95, 95), rng.uniform(-10, 66), rng.uniform(-95, 60))
        half = tuple(rng.uniform(12, 24, 3))
        image[at(centre, half, 0.15) < 1] = rng.uniform(10, 75)
        if rng.random() < 0.35:
            image[at(centre, tuple(np.multiply(half, 0.5)), 0.2) < 1] = -750


def _tumours(
    rng: Rng,
    image: Array,
    label: Label,
    at: partial[Array],
    hospital: AbdomenHospital,
    liver: float,
) -> None:
    """One to three tumours within the liver, darker than it."""
    inside = label == LABELS.index("liver")
    for _ in range(int(rng.integers(1, 4))):
        radius = hospital.tumour_size * rng.uniform(0.6, 1.3)
        centre = (58 + rng.uniform(-34, 34), 8 + rng.uniform(-34, 34), 38 + rng.uniform(-30, 30))
        tumour = (at(centre, tuple(radius * rng.uniform(0.8, 1.2, 3)), 0.12) < 1) & inside
        image[tumour] = liver - rng.uniform(30, 60)
        label[tumour] = LABELS.index("tumour")


def _scanned(rng: Rng, image: Array, hospital: AbdomenHospital) -> NDArray[np.int16]:
    """Texture, the kernel's blur, noise and calibration."""
    image = image + 6 * smooth_noise(rng, image.shape, 1.2)
    image = gaussian_filter(image, (hospital.blur, hospital.blur, 0))
    noise = gaussian_filter(rng.standard_normal(image.shape, dtype=np.float32), (0.5, 0.5, 0))
    image = image + hospital.noise * noise / noise.std() + hospital.offset
    return np.clip(np.rint(image), -1024, 3000).astype(np.int16)
