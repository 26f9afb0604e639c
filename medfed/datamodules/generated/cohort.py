"""Shared by all generated cohorts: how hospitals differ, and a folder, written once and whole.

Hospitals differ in whom they treat, how they scan, and how they outline. The folder of a cohort is
named by its parameters.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from typing import Self, TypeVar

from medfed.datamodules.extending import *
from medfed.standalone.files import digest, made_once, writing

Array = NDArray[np.float32]
Label = NDArray[np.uint8]
Rng = np.random.Generator
Range = tuple[float, float]


def trait(low: float, high: float) -> Any:
    """A field of a hospital that goes from `low` to `high` over the hospitals of a cohort."""
    return field(metadata={"range": (low, high)})


@dataclass(frozen=True)
class Hospital:
    """Base of the hospitals: each trait is spread evenly, in its random order."""

    name: str  # such as ``hospital_0``

    @classmethod
    def traits(cls) -> dict[str, tuple[float, float]]:
        """Returns the lowest and the highest value of every trait."""
        return {f.name: f.metadata["range"] for f in fields(cls) if "range" in f.metadata}

    @classmethod
    def draw(cls, count: int, seed: int, ranges: Mapping[str, Range] | None = None) -> list[Self]:
        """Draws the hospitals of a cohort.

        Example:
            >>> sorted(h.name for h in Hospital.draw(2, seed=0))
            ['hospital_0', 'hospital_1']
        """
        values: list[dict[str, float]] = [{} for _ in range(count)]
        for name, (low, high) in {**cls.traits(), **(ranges or {})}.items():
            order = numpy_rng(seed, "trait", name).permutation(count).tolist()
            for of_hospital, place in zip(values, order, strict=True):
                of_hospital[name] = low + (high - low) * (place / max(count - 1, 1))
        return [cls(f"hospital_{n}", **traits) for n, traits in enumerate(values)]


AnyHospital = TypeVar("AnyHospital", bound=Hospital)


def added(default: Any) -> Any:
    """A parameter that was added later: at its default, cohorts keep their old names."""
    return field(default=default, metadata={"added": True})


@dataclass(frozen=True)
class Cohort(ABC):
    """Base of the cohorts; the fields of a subclass are its parameters."""

    kind: ClassVar[str]  # first part of the folder's name
    # Raised when the files change, so that an old cohort is not used as the new one.
    version: ClassVar[int]
    index: ClassVar[str]  # a file that every complete cohort has
    instead: ClassVar[str]  # the overrides that use real data in its place

    @property
    def name(self) -> str:
        """Folder name, with a hash of the parameters."""
        return f"{self.kind}_{digest({'version': self.version, **self.parameters()})[:10]}"

    def parameters(self) -> dict[str, Any]:
        """Returns the parameters of the files; later-added ones only if they are set."""
        usual = {f.name for f in fields(self) if "added" in f.metadata}
        usual = {n for n in usual if getattr(self, n) == getattr(type(self), n)}
        return {n: v for n, v in asdict(self).items() if n not in usual}

    @property
    @abstractmethod
    def what(self) -> str:
        """What it is, such as ``"a BraTS-like cohort of 40 patients"``."""

    def provide(self, root: Path) -> tuple[Path, str]:
        """Generates the cohort unless it exists, and logs it."""
        path, new = self.ensure(root)
        began = "Generated" if new else "Data:"
        return path, f"{began} {self.what} in {path} (real data: {self.instead})."

    def ensure(self, root: Path) -> tuple[Path, bool]:
        """Generates the cohort unless it exists."""
        target = root / "generated" / self.name
        if target.exists():
            return target, False
        with writing(target, "set data.root to another folder"), made_once(target) as part:
            if part is None:  # another process has finished first; its files are the same
                return target, False
            self.write(part)
        return target, True

    @abstractmethod
    def write(self, folder: Path) -> None:
        """Writes all files."""


@dataclass(frozen=True)
class ScanCohort(Cohort):
    """Base of the cohorts of scans from several hospitals."""

    least: ClassVar[int]  # the least allowed size along each axis

    hospitals: int = 5  # number of hospitals
    # Patients per hospital; only for training and validation if `test_patients` is set.
    patients: int = 12
    shape: tuple[int, int, int] = (80, 80, 20)  # voxels of a scan
    _: KW_ONLY
    # Further patients per hospital, which form the test split; so its size does not depend on
    # `patients`. With 0 the test split is a share of `patients`.
    test_patients: Annotated[int, check_not_negative] = added(0)
    # Another number gives other patients of the same hospitals.
    sample: Annotated[int, check_not_negative] = added(0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        check_fields("data.generated", self)
        sizes = (*self.shape, self.least)
        if self.hospitals < 1 or self.patients < 1 or len(sizes) != 4 or min(sizes) < self.least:
            what = "data.generated needs at least 1 hospital and patient"
            raise ConfigError(f"{what}, and 3 sizes of {self.least} or more: {self}.")

    @property
    def each(self) -> int:
        """All patients of a hospital."""
        return self.patients + self.test_patients

    def patients_seed(self, seed: int) -> int:
        """Returns the seed of the patients, given the hospitals' `seed`."""
        return derive_seed(seed, "sample", self.sample) if self.sample else seed

    def owners(
        self, kind: type[AnyHospital], seed: int, ranges: Mapping[str, Range] | None = None
    ) -> list[AnyHospital]:
        """Returns the hospital of every patient."""
        all_hospitals = kind.draw(self.hospitals, seed, ranges)
        return [hospital for hospital in all_hospitals for _ in range(self.each)]


class VolumeCohort(ScanCohort):
    """Base of the cohorts in the layout of the Medical Segmentation Decathlon."""

    # The scan's extent in mm to the right, to the front and to the head.
    field: ClassVar[tuple[float, float, float]]
    index: ClassVar[str] = "dataset.json"  # see `Cohort`

    @abstractmethod
    def scan(self, rng: Any, hospital: Any) -> tuple[Any, Any, Any]:
        """Draws and scans one patient: image (H, W, D[, C]), label (H, W, D), and (3,) mm."""

    def write_cases(
        self, folder: Path, prefix: str, owners: Sequence[Hospital], seed: int, about: Any
    ) -> None:
        """Writes images, labels, ``dataset.json`` and ``centres.json``."""
        for part in ("imagesTr", "labelsTr"):
            (folder / part).mkdir()
        cases = {f"{prefix}_{n:03d}": hospital for n, hospital in enumerate(owners, start=1)}
        write = partial(self._write_case, folder, self.patients_seed(seed))
        with ThreadPoolExecutor(max_workers=4) as pool:  # each case has its generator
            list(pool.map(write, cases, cases.values()))
        centres = {case: hospital.name for case, hospital in cases.items()}
        index = {
            **about,
            "numTraining": len(cases),
            "training": [{n: f"./{n}sTr/{c}.nii.gz" for n in ("image", "label")} for c in cases],
            "parameters": {"version": self.version, **self.parameters()},
        }
        for name, content in (("centres.json", centres), (self.index, index)):
            (folder / name).write_text(json.dumps(content, indent=1))

    def _write_case(self, folder: Path, seed: int, case: str, hospital: Hospital) -> None:
        import nibabel as nib

        image, label, spacing = self.scan(numpy_rng(seed, self.kind, case), hospital)
        # Left to right reversed, as in many real files: readers must reorient.
        affine = np.diag([-spacing[0], spacing[1], spacing[2], 1.0])
        affine[:3, 3] = np.array(self.field) / 2 * (1, -1, -1)
        for part, data in (("imagesTr", image[::-1]), ("labelsTr", label[::-1])):
            nib.save(nib.Nifti1Image(data, affine), folder / part / f"{case}.nii.gz")


def check_range(key: str, ends: Sequence[float]) -> Range:
    """Returns a range of a trait over the hospitals.

    Example:
        >>> check_range("data.generated.blur", [0.1, 0.9])
        (0.1, 0.9)
    """
    if len(ends) != 2 or not 0 < ends[0] <= ends[1]:
        raise ConfigError(
            f"{key}={list(ends)} must be two positive numbers, of the hospital that has the least "
            "and of the one that has the most."
        )
    return float(ends[0]), float(ends[1])


def smooth_noise(rng: Rng, shape: tuple[int, ...], width: float) -> Array:
    """Smooth random field of unit variance, narrower along the thick slices.

    Example:
        >>> field = smooth_noise(np.random.default_rng(0), (16, 16, 4), 2.0)
        >>> field.shape, round(float(field.std()), 3)
        ((16, 16, 4), 1.0)
    """
    from scipy.ndimage import gaussian_filter  # all commands read this file, few make a cohort

    noise = rng.standard_normal(shape, dtype=np.float32)
    field = gaussian_filter(noise, (width, width, width / 3), mode="wrap", truncate=3)
    return np.asarray(field / field.std(), dtype=np.float32)
