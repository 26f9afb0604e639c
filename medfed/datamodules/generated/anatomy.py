"""A head without skull: tissues, tumour and look-alikes on a small grid.

Nothing here knows of scanners; `scanner.acquire` turns the maps into images.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

from medfed.datamodules.generated.hospital import Hospital

Array = NDArray[np.float32]
Rng = np.random.Generator

# The compartments that have an intensity of their own, in the order of `scanner.INTENSITIES`.
COMPARTMENTS = ("csf", "grey", "white", "oedema", "necrosis", "rim", "spot", "scar", "vessel")


@dataclass(frozen=True)
class Head:
    """One generated patient.

    Attributes:
        weights: (9, H, W, D) share of every compartment per voxel; sums to 1 inside the brain.
        brain: (H, W, D) bool.
        label: (H, W, D) uint8 in the MSD convention: 1 oedema, 2 non-enhancing, 3 enhancing.
    """

    weights: Array
    brain: NDArray[np.bool_]
    label: NDArray[np.uint8]


def smooth_noise(rng: Rng, shape: tuple[int, ...], width: float) -> Array:
    """Smooth random field of unit variance; slices are thick, so it is narrower along them.

    Args:
        rng: Source of randomness.
        shape: (H, W, D).
        width: In-plane width in voxels.

    Returns:
        (H, W, D) float32.

    Example:
        >>> field = smooth_noise(np.random.default_rng(0), (16, 16, 4), 2.0)
        >>> field.shape, round(float(field.std()), 3)
        ((16, 16, 4), 1.0)
    """
    noise = rng.standard_normal(shape, dtype=np.float32)
    field = gaussian_filter(noise, (width, width, width / 3), mode="wrap", truncate=3)
    return np.asarray(field / field.std(), dtype=np.float32)


def make_head(rng: Rng, shape: tuple[int, int, int], hospital: Hospital) -> Head:
    """Draws one patient of a hospital's case mix.

    Args:
        rng: Source of randomness, this patient's own.
        shape: (H, W, D).
        hospital: Case mix and outlining habits.

    Returns:
        The maps and the label.
    """
    axes = (np.linspace(-1, 1, n, dtype=np.float32) for n in shape)
    grid = np.stack(np.meshgrid(*axes, indexing="ij"))
    radius = _norm(grid, (0.0, 0.0, 0.0), (0.78, 0.93, 1.15))
    radius += 0.03 * smooth_noise(rng, shape, 6)
    brain = radius < 1
    masks = {name: np.zeros(shape, bool) for name in COMPARTMENTS}
    masks.update(_tissue(rng, grid, radius))
    _add_lookalikes(rng, grid, radius, masks, hospital)
    label = _add_tumour(rng, grid, radius, masks, hospital)
    return Head(_blend(masks, brain), brain, label * brain)


def _norm(grid: Array, centre: tuple[float, ...], size: tuple[float, ...]) -> Array:
    """Distance from a centre in units of an ellipsoid's half axes."""
    terms = [((g - c) / s) ** 2 for g, c, s in zip(grid, centre, size, strict=True)]
    return np.asarray(np.sqrt(sum(terms)), dtype=np.float32)


def _tissue(rng: Rng, grid: Array, radius: Array) -> dict[str, NDArray[np.bool_]]:
    """Folded cortex, white matter, deep grey nuclei, ventricles and sulci."""
    folds = smooth_noise(rng, radius.shape, 1.6)
    cortex = radius > 0.86 + 0.07 * folds
    sulci = (radius > 0.80) & (folds > 1.3)
    fissure = (np.abs(grid[0]) < 0.03) & ((np.abs(grid[1]) > 0.5) | (grid[2] > 0.6))
    deep = np.zeros(radius.shape, bool)
    ventricles = np.zeros(radius.shape, bool)
    width = rng.uniform(0.7, 1.4)
    for side in (-1, 1):
        deep |= _norm(grid, (side * 0.2, -0.05, -0.1), (0.11, 0.2, 0.3)) < 1
        bent = np.stack([grid[0] - side * 0.25 * grid[1] ** 2, grid[1], grid[2]])
        ventricles |= _norm(bent, (side * 0.1, 0.05, 0.1), (0.07 * width, 0.36, 0.4)) < 1
    csf = sulci | fissure | ventricles
    grey = (cortex | deep) & ~csf
    return {"csf": csf, "grey": grey, "white": ~csf & ~grey}


def _place(rng: Rng, reach: float, side: float = 0.0) -> tuple[float, float, float]:
    """A point inside the brain, at most `reach` of the way to its surface."""
    angle = rng.uniform(0, 2 * np.pi)
    far = reach * rng.uniform(0.35, 1)
    x, y = 0.75 * far * np.cos(angle), 0.9 * far * np.sin(angle) + side
    return float(x), float(np.clip(y, -0.7, 0.7)), float(rng.uniform(-0.45, 0.55))


def _blob(rng: Rng, grid: Array, centre: tuple[float, ...], size: float, rough: float) -> Array:
    """Distance field of an irregular blob; below 1 is inside."""
    stretch = rng.uniform(0.75, 1.3, size=3) * np.array([1, 1, 1.3])
    field = _norm(grid, centre, tuple(size * stretch))
    # No rougher far away than at the edge (no islands), and smooth in the middle (no holes).
    roughness = rough * np.minimum(field, 1) * smooth_noise(rng, field.shape, 4)
    return np.asarray(field + roughness, dtype=np.float32)


def _add_lookalikes(
    rng: Rng,
    grid: Array,
    radius: Array,
    masks: dict[str, NDArray[np.bool_]],
    hospital: Hospital,
) -> None:
    """Bright spots of old age, scars and vessels, none of which is tumour."""
    for _ in range(rng.poisson(hospital.spots)):
        size = rng.uniform(0.04, 0.10)
        masks["spot"] |= _norm(grid, _place(rng, 0.6), (size, size, 1.6 * size)) < 1
    if rng.random() < hospital.scars:
        masks["scar"] |= _blob(rng, grid, _place(rng, 0.75), rng.uniform(0.12, 0.24), 0.2) < 1
    for _ in range(rng.poisson(4)):
        x, y, z = _place(rng, 0.95)
        masks["vessel"] |= _norm(grid, (x, y, z), (0.035, 0.035, rng.uniform(0.2, 0.6))) < 1
    masks["vessel"] |= (radius > 0.9) & (np.abs(grid[0]) < 0.05) & (grid[1] < -0.4)
    for name in ("spot", "scar"):
        masks[name] &= ~masks["csf"] & (radius < 0.92)


def _add_tumour(
    rng: Rng,
    grid: Array,
    radius: Array,
    masks: dict[str, NDArray[np.bool_]],
    hospital: Hospital,
) -> NDArray[np.uint8]:
    """Nested oedema, core and rim; returns the label as the hospital outlines it."""
    size = rng.uniform(0.75, 1.25) * hospital.tumour_size
    centre = _place(rng, 0.62, hospital.position)
    inner = _blob(rng, grid, centre, size * rng.uniform(0.45, 0.65), 0.15)
    outer = np.minimum(_blob(rng, grid, centre, size, 0.28), inner)
    room = (radius < 0.97) & ~(masks["csf"] & (radius < 0.7))
    enhancing = rng.random() < hospital.enhancing
    rim = (inner < 1) & (inner > rng.uniform(0.55, 0.8)) & enhancing & room
    core = (inner < 1) & room
    oedema = (outer < 1) & ~core & room
    masks.update(oedema=oedema, necrosis=core & ~rim, rim=rim)
    # Observers disagree about the fading edge of the oedema; each hospital has its habit.
    outlined = (outer < 1 + hospital.outline) & room & ~core
    return np.asarray(1 * outlined + 2 * (core & ~rim) + 3 * rim, dtype=np.uint8)


def _blend(masks: dict[str, NDArray[np.bool_]], brain: NDArray[np.bool_]) -> Array:
    """Later compartments cover earlier ones; edges are blurred as by partial volume."""
    owner = np.full(brain.shape, COMPARTMENTS.index("white"))
    for index, name in enumerate(COMPARTMENTS):
        owner[masks[name]] = index
    for name in ("oedema", "necrosis", "rim"):  # the tumour lies over the look-alikes
        owner[masks[name]] = COMPARTMENTS.index(name)
    edge = {"oedema": 1.1, "scar": 1.0}
    weights = np.stack(
        [
            gaussian_filter((owner == i).astype(np.float32), (w, w, w / 3), truncate=3)
            for i, w in enumerate(edge.get(name, 0.5) for name in COMPARTMENTS)
        ]
    )
    total = weights.sum(axis=0, keepdims=True)
    return np.asarray(weights / np.maximum(total, 1e-6), dtype=np.float32)
