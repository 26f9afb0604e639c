"""CT of abdomens on disk, in the layout of the Medical Segmentation Decathlon: several organs."""

from __future__ import annotations

from scipy.ndimage import gaussian_filter

from medfed.datamodules.extending import *
from medfed.datamodules.generated import cohort
from medfed.datamodules.generated.cohort import Label, Rng

LABELS = ("background", "liver", "spleen", "kidneys", "tumour")
# Painted in this order: centre and half axes in mm, HU without contrast agent, share of the agent.
_PARTS: tuple[tuple[str, tuple[int, ...], tuple[int, ...], int, float], ...] = (
    ("fat", (0, 0, 0), (150, 108, 4000), -95, 0.0),
    ("muscle", (0, 0, 0), (134, 92, 4000), 50, 0.1),
    ("fat", (0, 18, 0), (116, 68, 4000), -95, 0.0),
    ("bowel", (-40, 40, -20), (50, 22, 60), 40, 0.0),
    ("spine", (0, -66, 0), (21, 19, 4000), 250, 0.0),
    ("aorta", (12, -36, 0), (10, 10, 4000), 40, 1.1),
    ("kidneys", (66, -42, -32), (26, 24, 46), 32, 1.4),
    ("kidneys", (-66, -42, -26), (26, 24, 46), 32, 1.4),
    ("spleen", (-92, -22, 42), (28, 40, 42), 46, 0.8),
    ("liver", (58, 8, 38), (66, 64, 54), 50, 0.6),
)


@dataclass(frozen=True)
class AbdomenHospital(cohort.Hospital):
    """A hospital that scans abdomens."""

    # HU that the contrast agent adds, from a native scan to the venous phase.
    agent: float = cohort.trait(15.0, 90.0)
    # Distance of the slices, as a multiple of the cohort's.
    thickness: float = cohort.trait(0.7, 1.4)
    pixel: float = cohort.trait(0.9, 1.15)  # size of the pixels, as a multiple of the cohort's
    noise: float = cohort.trait(12.0, 40.0)  # standard deviation of the noise, in HU
    blur: float = cohort.trait(0.2, 0.9)  # In-plane blur of the reconstruction kernel, in pixels
    offset: float = cohort.trait(-12.0, 12.0)  # HU by which the calibration is wrong
    tumour_size: float = cohort.trait(14.0, 24.0)  # typical radius of a tumour of the liver, in mm


@dataclass(frozen=True)
class OrgansCohort(cohort.VolumeCohort):
    """The generated cohort; equal parameters give equal files, byte by byte."""

    kind: ClassVar[str] = "organs"
    version: ClassVar[int] = 2
    field: ClassVar[tuple[float, float, float]] = (340.0, 270.0, 190.0)
    least: ClassVar[int] = 12
    instead: ClassVar[str] = "data=datalist data.path=/path/to/Task09_Spleen"

    hospitals: int = 4  # number of hospitals
    patients: int = 8  # patients per hospital
    # Voxels (H, W, D) of a typical scan; the spacing differs between hospitals.
    shape: tuple[int, int, int] = (84, 68, 24)
    seed: int = 2019  # seed of everything. It is the data's own: another seed is another data set.

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
        return *_make_abdomen(rng, shape, spacing, hospital), spacing


def _make_abdomen(
    rng: Rng, shape: tuple[int, ...], spacing: NDArray[np.float64], hospital: AbdomenHospital
) -> tuple[NDArray[np.int16], Label]:
    """Draws one patient and scans it: HU, and labels as `LABELS` numbers them."""
    axes = ((np.arange(n) - (n - 1) / 2) * mm for n, mm in zip(shape, spacing, strict=True))
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1)
    rough = 0.06 * cohort.smooth_noise(rng, shape, 3.0)  # of all surfaces

    def inside(centre: NDArray[np.float64], half: NDArray[np.float64]) -> NDArray[np.bool_]:
        return np.asarray(np.linalg.norm((grid - centre) / half, axis=-1) + rough < 1)

    agent = hospital.agent * rng.uniform(0.8, 1.2)
    image, label = np.full(shape, -1000.0), np.zeros(shape, np.uint8)
    for name, centre, half, value, share in _PARTS:
        part = inside(rng.normal(centre, 4), np.multiply(half, rng.uniform(0.9, 1.1, 3)))
        image[part] = rng.normal(value, 4) + share * agent
        label[part] = LABELS.index(name) if name in LABELS else 0
    liver = label == LABELS.index("liver")
    for _ in range(int(rng.integers(1, 4))):
        radius = hospital.tumour_size * rng.uniform(0.6, 1.3)
        tumour = liver & inside(rng.uniform((24, -26, 8), (92, 42, 68)), np.full(3, radius))
        image[tumour] -= rng.uniform(30, 60)
        label[tumour] = LABELS.index("tumour")
    image = gaussian_filter(image, (hospital.blur, hospital.blur, 0))
    noise = gaussian_filter(rng.standard_normal(shape), (0.5, 0.5, 0))
    image += hospital.noise * noise / noise.std() + hospital.offset
    return np.clip(np.rint(image), -1024, 3000).astype(np.int16), label
