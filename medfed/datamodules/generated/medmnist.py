"""A MedMNIST-like file of synthetic white blood cells: the task of BloodMNIST in small.

The four classes differ in the features that experts use: the lobes of the nucleus, its share of the
cell, and (for eosinophils) granules. Stain, size, position, focus and noise vary over images,
independent of the class.
"""

from __future__ import annotations

from scipy.ndimage import gaussian_filter

from medfed.datamodules.extending import *
from medfed.datamodules.generated.cohort import Cohort

CLASSES = ("neutrophil", "eosinophil", "lymphocyte", "monocyte")
PLASMA, CYTOPLASM, NUCLEUS, GRANULE = np.array(
    [[0.93, 0.87, 0.84], [0.80, 0.70, 0.82], [0.42, 0.25, 0.58], [0.86, 0.48, 0.46]]
)
# By class: lobes of the nucleus, angle between two, their distance from the middle, and size.
_LOBES = ((4, 1.2, 0.42, 0.29), (2, 2.2, 0.42, 0.35), (1, 0.0, 0.05, 0.7), (3, 0.6, 0.3, 0.4))
Plane = NDArray[np.float64]
Pair = Sequence[float] | NDArray[np.float64]


@dataclass(frozen=True)
class BloodCells(Cohort):
    """The generated file; equal parameters give equal files, byte by byte.

    Example:
        >>> BloodCells().name == BloodCells(seed=1).name
        False
    """

    kind: ClassVar[str] = "medmnist"
    version: ClassVar[int] = 2
    index: ClassVar[str] = "bloodcells.npz"
    instead: ClassVar[str] = "set data.path"

    # Images of the training, validation and test split.
    images: tuple[int, int, int] = (1200, 400, 800)
    size: int = 28  # side of an image in pixels
    seed: int = 2023  # seed of the data, not of the run: another seed gives another data set

    def __post_init__(self) -> None:
        object.__setattr__(self, "images", tuple(self.images))
        if len(self.images) != 3 or min(self.images) < len(CLASSES) or self.size < 16:
            raise ConfigError(
                f"data.generated.images={list(self.images)} must be three numbers of at least "
                f"{len(CLASSES)}, and data.generated.size={self.size} at least 16 pixels."
            )

    @property
    def what(self) -> str:
        """See `Cohort.what`."""
        return f"{sum(self.images)} images of {len(CLASSES)} classes"

    def ensure(self, root: Path) -> tuple[Path, bool]:
        """See `Cohort.ensure`; the path is that of the file."""
        folder, new = super().ensure(root)
        return folder / self.index, new

    def write(self, folder: Path) -> None:
        """See `Cohort.write`."""
        arrays: dict[str, NDArray[np.uint8]] = {}
        for split, count in zip(SPLITS, self.images, strict=True):
            labels = numpy_rng(self.seed, split).permutation(np.arange(count) % len(CLASSES))
            rngs = ((numpy_rng(self.seed, split, n), int(y)) for n, y in enumerate(labels))
            arrays[f"{split}_images"] = np.stack([_draw_cell(r, y, self.size) for r, y in rngs])
            arrays[f"{split}_labels"] = labels[:, None].astype(np.uint8)
        np.savez_compressed(folder / self.index, **arrays)  # type: ignore[arg-type]


def _draw_cell(rng: np.random.Generator, label: int, size: int) -> NDArray[np.uint8]:
    """Draws one cell, (size, size, 3) uint8."""
    axis = (np.arange(size) + 0.5) * 2 / size - 1
    place = np.stack(np.meshgrid(axis, axis)) - rng.normal(0, 0.08, (2, 1, 1))
    image = np.broadcast_to(PLASMA, (size, size, 3)).copy()
    radius = rng.uniform(0.5, 0.68)
    cell = disc(place, (0, 0), radius * rng.uniform(0.9, 1.1, 2))
    _paint(image, cell, CYTOPLASM + rng.normal(0, 0.02, 3))
    if label == 1:
        grains = gaussian_filter(rng.random((size, size)), 0.5) > 0.55
        _paint(image, cell * grains * rng.uniform(0.3, 0.8), GRANULE)
    count, step, far, width = _LOBES[label]
    turn = rng.uniform(0, 2 * np.pi)
    for angle in turn + step * np.arange(count) + rng.normal(0, 0.1, count):
        centre = radius * far * np.array([np.cos(angle), np.sin(angle)])
        extent = radius * width * rng.uniform(0.85, 1.15, 2)
        _paint(image, cell * disc(place, centre, extent), NUCLEUS)
    image = gaussian_filter(image, (*[rng.uniform(0.3, 0.9)] * 2, 0))
    stain = rng.uniform(0.85, 1.15) * rng.uniform(0.95, 1.05, 3)
    image = 1 - (1 - image) * stain + rng.normal(0, 0.03) + rng.normal(0, 0.04, image.shape)
    return np.asarray(np.round(255 * np.clip(image, 0, 1)), dtype=np.uint8)


def disc(place: Plane, centre: Pair, radii: Pair) -> Plane:
    """Draws a filled ellipse with a soft edge.

    Example:
        >>> disc(np.array([[[0.0, 2.0]], [[0.0, 0.0]]]), (0, 0), (1, 1)).round().tolist()
        [[1.0, 0.0]]
    """
    distance = np.hypot((place[0] - centre[0]) / radii[0], (place[1] - centre[1]) / radii[1])
    inside: Plane = 0.5 - 0.5 * np.tanh((distance - 1) * float(np.min(radii)) / 0.04)
    return inside


def _paint(image: Plane, cover: Plane, colour: Plane) -> None:
    """Paints a colour (3,) on an image (H, W, 3), in place, where `cover` (H, W) is 1."""
    image += cover[..., None] * (colour - image)
