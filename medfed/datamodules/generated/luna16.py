"""A LUNA16-like cohort on disk: MetaImage scans, annotations and candidates."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

from medfed.common.seeding import derive_seed, numpy_rng
from medfed.datamodules.generated.canvas import Canvas, Point, Rng, Spacing
from medfed.datamodules.generated.chest import Shape, add_lookalikes, add_nodules, make_chest
from medfed.datamodules.generated.cohort import ScanCohort
from medfed.datamodules.generated.hospitals import CtHospital

IDENTITY = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0)
FLIPPED = (-1.0, 0.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0, 1.0)
FIELD_OF_VIEW = (154.0, 230.0)  # mm; 0.6 to 0.9 mm at a matrix of 256
SUBSETS = 10


@dataclass(frozen=True)
class LunaCohort(ScanCohort):
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

    least: ClassVar[int] = 16
    instead: ClassVar[str] = "data=luna16 data.path=/path/to/LUNA16"

    shape: tuple[int, int, int] = (128, 128, 48)
    lookalikes: int = 34
    seed: int = 2016

    @property
    def what(self) -> str:
        """See `Cohort.what`."""
        return f"a LUNA16-like cohort of {self.hospitals * self.each} scans"

    def write(self, folder: Path) -> None:
        """Writes the subsets, ``annotations.csv``, ``candidates.csv`` and ``centres.json``.

        Args:
            folder: An existing, empty folder.
        """
        owners = self.owners(CtHospital, self.seed)
        series = [
            _series(self.patients_seed(self.seed), hospital.name, n % self.each)
            for n, hospital in enumerate(owners)
        ]
        for subset in range(min(SUBSETS, len(series))):
            (folder / f"subset{subset}").mkdir()
        with ThreadPoolExecutor(max_workers=2) as pool:  # each scan has a generator of its own
            one = partial(self._write_scan, folder)
            tables = list(pool.map(one, series, range(len(series)), owners))
        _write_csv(folder / "annotations.csv", "diameter_mm", (t[0] for t in tables))
        centres = {s: hospital.name for s, hospital in zip(series, owners, strict=True)}
        (folder / "centres.json").write_text(json.dumps(centres, indent=1))
        parameters = {"version": self.version, **self.parameters()}
        (folder / "generated.json").write_text(json.dumps(parameters, indent=1))
        _write_csv(folder / "candidates.csv", "class", (t[1] for t in tables))

    def _write_scan(
        self, folder: Path, series: str, number: int, hospital: CtHospital
    ) -> tuple[list[str], list[str]]:
        """One scan; returns its rows of annotations and candidates."""
        rng = numpy_rng(self.patients_seed(self.seed), "luna16", series)
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
        # A detector finds some nodules twice.
        hits = ((n, _) for n in nodules for _ in range(1 + int(rng.random() < 0.15)))
        near = [_near(rng, n.centre, 0.1 * n.diameter) for n, _ in hits]
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
    import SimpleITK as sitk

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


def _spacing(rng: Rng, shape: Shape, hospital: CtHospital) -> Spacing:
    """Distances of the voxels along x, y, z in mm, rounded as in headers."""
    pixel = rng.uniform(*FIELD_OF_VIEW) / max(shape[:2])
    slices = np.clip(hospital.thickness * rng.uniform(0.85, 1.15), 1.0, 2.5)
    return round(pixel, 4), round(pixel, 4), round(float(slices), 2)


def _series(seed: int, hospital: str, number: int) -> str:
    """A DICOM UID under the root 2.25, which is free for all."""
    parts = [derive_seed(seed, "series", hospital, number, part) for part in range(3)]
    return "2.25." + ".".join(map(str, parts))


def _near(rng: Rng, place: Point, spread: float) -> Point:
    """Where a detector sees something: close to its middle."""
    return place + np.clip(rng.normal(0, spread, size=3), -1.5, 1.5)


def _row(series: str, world: Point, last: str) -> str:
    return f"{series},{','.join(f'{mm:.4f}' for mm in world)},{last}"


def _write_csv(path: Path, last: str, tables: Iterable[list[str]]) -> None:
    rows = [f"seriesuid,coordX,coordY,coordZ,{last}", *(row for table in tables for row in table)]
    path.write_text("\n".join(rows) + "\n")
