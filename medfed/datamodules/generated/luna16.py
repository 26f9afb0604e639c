"""A LUNA16-like cohort on disk: MetaImage scans, annotations and candidates."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import SimpleITK as sitk
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

from medfed.datamodules.generated.canvas import Canvas, Point
from medfed.datamodules.generated.chest import Rng, make_chest
from medfed.datamodules.generated.cohort import Cohort
from medfed.datamodules.generated.ct_hospital import CtHospital, make_ct_hospitals
from medfed.datamodules.generated.lesions import add_lookalikes, add_nodules
from medfed.datamodules.seeding import derive_seed, numpy_rng
from medfed.errors import ConfigError

IDENTITY = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0)
FLIPPED = (-1.0, 0.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0, 1.0)
FIELD_OF_VIEW = (154.0, 230.0)  # mm; 0.6 to 0.9 mm at a matrix of 256
SUBSETS = 10


@dataclass(frozen=True)
class LunaCohort(Cohort):
    """What is generated; equal parameters give equal files, byte by byte.

    Attributes:
        hospitals: Number of hospitals.
        patients: Scans per hospital.
        shape: Voxels (x, y, z).
        lookalikes: Candidates per scan that are no nodules, before those too near to one.
        seed: Seed of everything. It is the data's own: another seed is another data set.

    Example:
        >>> LunaCohort().name == LunaCohort(seed=1).name
        False
    """

    kind: ClassVar[str] = "luna16"
    version: ClassVar[int] = 1
    index: ClassVar[str] = "candidates.csv"

    hospitals: int = 5
    patients: int = 12
    shape: tuple[int, int, int] = (128, 128, 48)
    lookalikes: int = 34
    seed: int = 2016

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if self.hospitals < 1 or self.patients < 1 or len(self.shape) != 3 or min(self.shape) < 16:
            raise ConfigError(
                "data.generated needs at least 1 hospital and patient, and 3 sizes of 16 or more: "
                f"{self}."
            )

    def write(self, folder: Path) -> None:
        """Writes the subsets, ``annotations.csv``, ``candidates.csv`` and ``centres.json``.

        Args:
            folder: An existing, empty folder.
        """
        owners = [
            (hospital, n)
            for hospital in make_ct_hospitals(self.hospitals, self.seed)
            for n in range(self.patients)
        ]
        series = [_series(self.seed, hospital.name, n) for hospital, n in owners]
        for subset in range(min(SUBSETS, len(series))):
            (folder / f"subset{subset}").mkdir()
        with ThreadPoolExecutor(max_workers=2) as pool:  # each scan has a generator of its own
            tables = list(pool.map(partial(self._write_scan, folder), series, range(len(series)),
                                   [hospital for hospital, _ in owners]))  # fmt: skip
        _write_csv(folder / "annotations.csv", "diameter_mm", (t[0] for t in tables))
        centres = {s: hospital.name for s, (hospital, _) in zip(series, owners, strict=True)}
        (folder / "centres.json").write_text(json.dumps(centres, indent=1))
        parameters = {"version": self.version, **asdict(self)}
        (folder / "generated.json").write_text(json.dumps(parameters, indent=1))
        _write_csv(folder / "candidates.csv", "class", (t[1] for t in tables))

    def _write_scan(
        self, folder: Path, series: str, number: int, hospital: CtHospital
    ) -> tuple[list[str], list[str]]:
        """One scan; returns its rows of annotations and candidates."""
        rng = numpy_rng(self.seed, "luna16", series)
        spacing = _spacing(rng, self.shape, hospital)
        chest = make_chest(rng, self.shape, spacing, hospital)
        nodules = add_nodules(rng, chest, hospital)
        others = add_lookalikes(rng, chest, hospital, nodules, self.lookalikes)
        voxels = acquire(rng, chest.canvas, hospital)
        middle = np.append(rng.uniform(-30, 30, size=2), rng.uniform(-250, -100))
        # One scan in four is stored from left to right and back to front, as some of LUNA16 are.
        flipped = number % 4 == 3
        origin = middle + chest.canvas.half * ([1, 1, -1] if flipped else [-1, -1, -1])
        write_scan(
            folder / f"subset{number % SUBSETS}",
            series,
            voxels[:, ::-1, ::-1] if flipped else voxels,
            spacing,
            origin.tolist(),
            FLIPPED if flipped else IDENTITY,
        )
        annotations = [_row(series, n.centre + middle, f"{n.diameter:.4f}") for n in nodules]
        near = [_near(rng, n.centre, 0.1 * n.diameter) for n in nodules for _ in range(_hits(rng))]
        candidates = [(_row(series, p + middle, "1"), rng.random()) for p in near]
        candidates += [
            (_row(series, _near(rng, p, 0.7) + middle, "0"), rng.random()) for p in others
        ]
        return annotations, [row for row, _ in sorted(candidates, key=lambda c: c[1])]


def write_scan(
    folder: Path,
    series: str,
    voxels: NDArray[np.int16],
    spacing: Sequence[float] = (1.0, 1.0, 1.0),
    origin: Sequence[float] = (0.0, 0.0, 0.0),
    direction: Sequence[float] = IDENTITY,
) -> Path:
    """Writes ``<series>.mhd`` and ``<series>.raw``, by SimpleITK.

    Args:
        folder: An existing folder.
        series: The series id; it may contain dots.
        voxels: (z, y, x) int16 HU, in the order of the file.
        spacing: mm along the file's x, y, z.
        origin: Place of the first voxel, in mm.
        direction: The nine numbers of the direction matrix, row by row.

    Returns:
        The header.

    Raises:
        OSError: If the files cannot be written.
    """
    image = sitk.GetImageFromArray(voxels)
    image.SetSpacing([float(mm) for mm in spacing])
    image.SetOrigin([float(mm) for mm in origin])
    image.SetDirection([float(cosine) for cosine in direction])
    header = folder / f"{series}.mhd"
    try:
        sitk.WriteImage(image, str(header), useCompression=False)
    except RuntimeError as error:
        raise OSError(f"{header} cannot be written: {error}") from error
    return header


def acquire(rng: Rng, canvas: Canvas, hospital: CtHospital) -> NDArray[np.int16]:
    """Scans a chest: blur of kernel and slice, noise as fine as the kernel is sharp, offset.

    Args:
        rng: Source of randomness, this patient's own.
        canvas: The anatomy.
        hospital: The scanner.

    Returns:
        (z, y, x) int16 HU.
    """
    blur = hospital.blur / canvas.spacing[0]
    image = gaussian_filter(canvas.hu, (0.4, blur, blur), truncate=3)
    noise = rng.standard_normal(image.shape, dtype=np.float32)
    noise = gaussian_filter(noise, (0, 0.7 * blur, 0.7 * blur), truncate=3)
    image += hospital.noise * rng.uniform(0.8, 1.25) / noise.std() * noise + hospital.offset
    return np.asarray(np.rint(np.clip(image, -1024, 3071)), dtype=np.int16)


def _spacing(
    rng: Rng, shape: tuple[int, int, int], hospital: CtHospital
) -> tuple[float, float, float]:
    """Distances of the voxels along x, y, z in mm, rounded as in headers."""
    pixel = rng.uniform(*FIELD_OF_VIEW) / max(shape[:2])
    slices = np.clip(hospital.thickness * rng.uniform(0.85, 1.15), 1.0, 2.5)
    return round(pixel, 4), round(pixel, 4), round(float(slices), 2)


def _series(seed: int, hospital: str, number: int) -> str:
    """A DICOM UID under the root 2.25, which is free for all."""
    parts = [derive_seed(seed, "series", hospital, number, part) for part in range(3)]
    return "2.25." + ".".join(map(str, parts))


def _hits(rng: Rng) -> int:
    """How many candidates a detector finds on one nodule."""
    return 1 + int(rng.random() < 0.15)


def _near(rng: Rng, place: Point, spread: float) -> Point:
    """Where a detector sees something: close to its middle."""
    return place + np.clip(rng.normal(0, spread, size=3), -1.5, 1.5)


def _row(series: str, world: Point, last: str) -> str:
    return f"{series},{','.join(f'{mm:.4f}' for mm in world)},{last}"


def _write_csv(path: Path, last: str, tables: Iterable[list[str]]) -> None:
    rows = [f"seriesuid,coordX,coordY,coordZ,{last}", *(row for table in tables for row in table)]
    path.write_text("\n".join(rows) + "\n")
