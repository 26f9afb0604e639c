"""A MedMNIST-like file of synthetic white blood cells: the task of BloodMNIST in small.

The four classes differ in the features that experts use: the lobes of the nucleus, its share of the
cell, and (for eosinophils) granules. Stain, size, position, focus and noise vary over images,
independent of the class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

from medfed.common.errors import ConfigError
from medfed.common.seeding import numpy_rng
from medfed.datamodules.generated.cohort import Cohort
from medfed.datamodules.splits import SPLITS

CLASSES = ("neutrophil", "eosinophil", "lymphocyte", "monocyte")
PLASMA, RED_CELL, CYTOPLASM, NUCLEUS, GRANULE = np.array(
    [
        *([0.93, 0.87, 0.84], [0.88, 0.62, 0.60], [0.80, 0.70, 0.82]),
        *([0.42, 0.25, 0.58], [0.86, 0.48, 0.46]),
    ]
)
Plane = NDArray[np.float64]
Pair = Sequence[float] | NDArray[np.float64]


@dataclass(frozen=True)
class BloodCells(Cohort):
    """The generated file; equal parameters give equal files, byte by byte.

    Attributes:
        images: Images of the training, validation and test split.
        size: Side of an image in pixels.
        seed: Seed of the data, not of the run: another seed gives another data set.

    Example:
        >>> BloodCells().name == BloodCells(seed=1).name
        False
    """

    kind: ClassVar[str] = "medmnist"
    version: ClassVar[int] = 1
    index: ClassVar[str] = "bloodcells.npz"
    instead: ClassVar[str] = "set data.path"

    images: tuple[int, int, int] = (1200, 400, 800)
    size: int = 28
    seed: int = 2023

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
            labels = np.arange(count) % len(CLASSES)
            labels = numpy_rng(self.seed, split).permutation(labels)
            cells = [
                draw_cell(numpy_rng(self.seed, split, n), int(label), self.size)
                for n, label in enumerate(labels)
            ]
            arrays[f"{split}_images"] = np.stack(cells)
            arrays[f"{split}_labels"] = labels[:, None].astype(np.uint8)
        np.savez_compressed(folder / self.index, **arrays)  # type: ignore[arg-type]


def draw_cell(rng: np.random.Generator, label: int, size: int) -> NDArray[np.uint8]:
    """Draws one cell among red cells.

    Args:
        rng: Source of all variation.
        label: Index in `CLASSES`.
        size: Side in pixels.

    Returns:
        (size, size, 3) uint8.
    """
    axis = (np.arange(size) + 0.5) * 2 / size - 1
    y, x = np.meshgrid(axis, axis, indexing="ij")
    image = np.broadcast_to(PLASMA, (size, size, 3)).copy()
    for _ in range(rng.integers(2, 5)):
        angle, far = rng.uniform(0, 2 * np.pi), rng.uniform(0.8, 1.15)
        place = far * np.cos(angle), far * np.sin(angle)
        disc = ellipse(x, y, place, (rng.uniform(0.22, 0.32),) * 2)
        pale = ellipse(x, y, place, (0.1, 0.1), soft=0.08)
        paint(image, disc * (1 - 0.5 * pale), RED_CELL)
    centre = rng.normal(0, 0.08, 2)
    turn = rng.uniform(0, 2 * np.pi)
    dx, dy = x - centre[0], y - centre[1]
    u, v = np.cos(turn) * dx + np.sin(turn) * dy, np.cos(turn) * dy - np.sin(turn) * dx
    radius = rng.uniform(0.5, 0.68) + (-0.06, 0.0, -0.1, 0.06)[label]
    cell = ellipse(u, v, (0, 0), radius * rng.uniform(0.9, 1.1, 2))
    paint(image, cell, CYTOPLASM + rng.normal(0, 0.02, 3))
    if label == 1:
        paint(image, cell * granules(rng, size), GRANULE)
    paint(image, cell * nucleus(rng, label, u / radius, v / radius), NUCLEUS)
    return _photograph(rng, image)


def nucleus(rng: np.random.Generator, label: int, u: Plane, v: Plane) -> Plane:
    """Draws a nucleus in a cell of radius 1.

    Args:
        rng: Source of the variation.
        label: Index in `CLASSES`.
        u: Horizontal coordinates (H, W).
        v: Vertical coordinates (H, W).

    Returns:
        (H, W) in [0, 1].
    """
    if label == 2:  # round, and nearly all of the cell
        return ellipse(u, v, rng.normal(0, 0.06, 2), rng.uniform(0.6, 0.85) * _uneven(rng))
    if label == 3:  # a kidney
        body = ellipse(u, v, rng.normal(0, 0.06, 2), rng.uniform(0.55, 0.75) * _uneven(rng))
        notch = ellipse(u, v, (rng.uniform(0.45, 0.75), 0), (0.36, 0.3))
        return body * (1 - notch)
    lobes = rng.integers(3, 5) if label == 0 else 2
    step = rng.uniform(1.0, 1.5) if label == 0 else rng.uniform(1.9, 2.6)
    out = np.zeros_like(u)
    for n in range(lobes):
        angle = (n - (lobes - 1) / 2) * step + rng.normal(0, 0.1)
        far = rng.uniform(0.35, 0.5)
        side = rng.uniform(0.24, 0.34) + 0.06 * (label == 1)
        lobe = ellipse(u, v, (far * np.cos(angle), far * np.sin(angle)), side * _uneven(rng))
        out = np.maximum(out, lobe)
    return out


def granules(rng: np.random.Generator, size: int) -> Plane:
    """Draws grains of a pixel or two, (size, size) in [0, 1]."""
    grains: Plane = gaussian_filter(rng.random((size, size)), 0.5)
    return np.where(grains > 0.55, rng.uniform(0.3, 0.8), 0.0)


def ellipse(x: Plane, y: Plane, centre: Pair, radii: Pair, soft: float = 0.04) -> Plane:
    """Draws a filled ellipse with a soft edge.

    Args:
        x: Horizontal coordinates (H, W).
        y: Vertical coordinates (H, W).
        centre: Its centre.
        radii: Its half axes.
        soft: Width of the edge.

    Returns:
        (H, W), 1 inside and 0 outside.

    Example:
        >>> axis = np.array([[0.0, 2.0]])
        >>> ellipse(axis, np.zeros((1, 2)), (0, 0), (1, 1)).round().tolist()
        [[1.0, 0.0]]
    """
    distance = np.hypot((x - centre[0]) / radii[0], (y - centre[1]) / radii[1])
    inside: Plane = 0.5 - 0.5 * np.tanh((distance - 1) * float(np.min(radii)) / soft)
    return inside


def paint(image: Plane, cover: Plane, colour: Plane) -> None:
    """Paints a colour (3,) on an image (H, W, 3), in place, where `cover` (H, W) is 1."""
    image += cover[..., None] * (colour - image)


def _uneven(rng: np.random.Generator) -> Plane:
    """Two half axes about 1."""
    return rng.uniform(0.88, 1.12, 2)


def _photograph(rng: np.random.Generator, image: Plane) -> NDArray[np.uint8]:
    """Stain, focus and noise."""
    image = gaussian_filter(image, (*[rng.uniform(0.3, 0.9)] * 2, 0))
    stain = rng.uniform(0.85, 1.15) * rng.uniform(0.95, 1.05, 3)
    image = 1 - (1 - image) * stain + rng.normal(0, 0.03) + rng.normal(0, 0.04, image.shape)
    return np.round(255 * np.clip(image, 0, 1)).astype(np.uint8)
