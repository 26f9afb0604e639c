"""A BraTS-like cohort on disk, in the layout of MSD Task01_BrainTumour.

A head has no skull: tissues, tumour and look-alikes on a small grid, and scans of it.
"""

from __future__ import annotations

from scipy.ndimage import gaussian_filter

from medfed.datamodules.extending import *
from medfed.datamodules.generated import cohort
from medfed.datamodules.generated.cohort import Array, Label, Rng

Masks = dict[str, NDArray[np.bool_]]  # of the compartments

# The compartments with an intensity, in the order of `_INTENSITIES`.
_COMPARTMENTS = ("csf", "grey", "white", "oedema", "necrosis", "rim", "spot", "scar", "vessel")

CHANNELS = ("FLAIR", "T1w", "T1gd", "T2w")

# Rows as CHANNELS; columns: csf, grey, white, oedema, necrosis, rim, spot, scar, vessel.
_INTENSITIES = np.array(
    [
        [0.15, 0.55, 0.47, 0.86, 0.50, 0.72, 0.80, 0.72, 0.45],
        [0.22, 0.60, 0.80, 0.60, 0.42, 0.55, 0.70, 0.45, 0.60],
        [0.24, 0.62, 0.80, 0.60, 0.42, 1.20, 0.70, 0.47, 1.25],
        [1.00, 0.60, 0.44, 0.84, 0.98, 0.66, 0.70, 0.90, 0.35],
    ],
    dtype=np.float32,
)
# Added in full at protocol = 1: fluid less well suppressed, flatter tissue contrast.
_PROTOCOL = np.array(
    [
        [0.30, 0.02, 0.06, -0.10, 0.12, -0.06, -0.06, 0.00, 0.05],
        [0.05, 0.06, -0.06, 0.00, 0.04, 0.00, 0.00, 0.05, 0.00],
        [0.05, 0.06, -0.06, 0.00, 0.04, -0.20, 0.00, 0.05, -0.15],
        [-0.15, 0.05, 0.05, -0.06, -0.14, 0.04, -0.02, -0.10, 0.05],
    ],
    dtype=np.float32,
)
WHITE, TUMOUR = 2, slice(3, 6)


@dataclass(frozen=True)
class MriHospital(cohort.Hospital):
    """A hospital that scans heads."""

    tumour_size: float = cohort.trait(0.24, 0.44)  # typical half axis, in half fields of view
    position: float = cohort.trait(-0.3, 0.3)  # shift towards the front (positive) or the back
    enhancing: float = cohort.trait(0.35, 1.0)  # probability that a tumour has an enhancing rim
    strength: float = cohort.trait(0.6, 1.0)  # how strongly tumours stand out
    spots: float = cohort.trait(0.5, 7.0)  # mean number of bright spots of old age
    scars: float = cohort.trait(0.0, 0.8)  # probability of an old scar
    # How far outside the oedema's visible edge the outline runs, in radii.
    outline: float = cohort.trait(-0.08, 0.12)
    # Standard deviation of the noise; white matter on T1w has about 0.8.
    noise: float = cohort.trait(0.02, 0.075)
    bias: float = cohort.trait(0.05, 0.40)  # depth of the coil's slow shading
    blur: float = cohort.trait(0.1, 0.9)  # In-plane blur in voxels
    # Bends the grey scale: exponent exp(gamma), with the opposite sign on every other channel.
    gamma: float = cohort.trait(-0.30, 0.30)
    # The scanner's position between two sets of sequence parameters.
    protocol: float = cohort.trait(0.0, 0.7)


@dataclass(frozen=True)
class Head:
    """One generated patient."""

    weights: Array  # (9, H, W, D) share of every compartment per voxel; sums to 1 inside the brain
    brain: NDArray[np.bool_]  # (H, W, D) bool
    label: Label  # (H, W, D) uint8 in the MSD convention: 1 oedema, 2 non-enhancing, 3 enhancing


def make_head(rng: Rng, shape: tuple[int, int, int], hospital: MriHospital) -> Head:
    """Draws one patient of a hospital's case mix."""
    axes = (np.linspace(-1, 1, n, dtype=np.float32) for n in shape)
    grid = np.stack(np.meshgrid(*axes, indexing="ij"))
    radius = _norm(grid, (0.0, 0.0, 0.0), (0.78, 0.93, 1.15))
    radius += 0.03 * cohort.smooth_noise(rng, shape, 6)
    brain = radius < 1
    masks = {name: np.zeros(shape, bool) for name in _COMPARTMENTS}
    masks.update(_tissue(rng, grid, radius))
    _add_others(rng, grid, radius, masks, hospital)
    label = _add_tumour(rng, grid, radius, masks, hospital)
    return Head(_blend(masks, brain), brain, label * brain)


def _norm(grid: Array, centre: tuple[float, ...], size: tuple[float, ...]) -> Array:
    """Distance from a centre in units of an ellipsoid's half axes."""
    terms = [((g - c) / s) ** 2 for g, c, s in zip(grid, centre, size, strict=True)]
    return np.asarray(np.sqrt(sum(terms)), dtype=np.float32)


def _tissue(rng: Rng, grid: Array, radius: Array) -> Masks:
    """Folded cortex, white matter, deep grey nuclei, ventricles and sulci."""
    folds = cohort.smooth_noise(rng, radius.shape, 1.6)
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
    # As rough far away as at the edge (no islands), and smooth in the middle (no holes).
    roughness = rough * np.minimum(field, 1) * cohort.smooth_noise(rng, field.shape, 4)
    return np.asarray(field + roughness, dtype=np.float32)


def _add_others(rng: Rng, grid: Array, radius: Array, masks: Masks, hospital: MriHospital) -> None:
    """Bright spots of old age, scars and vessels, which are not tumour."""
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


def _add_tumour(rng: Rng, grid: Array, radius: Array, masks: Masks, hospital: MriHospital) -> Label:
    """Nested oedema, core and rim; returns the label as the hospital outlines it."""
    size = rng.uniform(0.75, 1.25) * hospital.tumour_size
    centre = _place(rng, 0.62, hospital.position)
    inner = _blob(rng, grid, centre, size * rng.uniform(0.45, 0.65), 0.15)
    outer = np.minimum(_blob(rng, grid, centre, size, 0.28), inner)
    room = (radius < 0.97) & ~(masks["csf"] & (radius < 0.7))
    enhancing = rng.random() < hospital.enhancing
    rim = (inner < 1) & (inner > rng.uniform(0.55, 0.8)) & enhancing & room
    core = (inner < 1) & room
    masks.update(oedema=(outer < 1) & ~core & room, necrosis=core & ~rim, rim=rim)
    # Observers disagree about the fading edge of the oedema; each hospital has its habit.
    outlined = (outer < 1 + hospital.outline) & room & ~core
    return np.asarray(1 * outlined + 2 * (core & ~rim) + 3 * rim, dtype=np.uint8)


def _blend(masks: Masks, brain: NDArray[np.bool_]) -> Array:
    """Later compartments cover earlier ones; edges are blurred as by partial volume."""
    owner = np.full(brain.shape, _COMPARTMENTS.index("white"))
    for index, name in enumerate(_COMPARTMENTS):
        owner[masks[name]] = index
    for name in ("oedema", "necrosis", "rim"):  # the tumour lies over the look-alikes
        owner[masks[name]] = _COMPARTMENTS.index(name)
    edge = {"oedema": 1.1, "scar": 1.0}
    widths = enumerate(edge.get(name, 0.5) for name in _COMPARTMENTS)
    masks_of = (((owner == i).astype(np.float32), (w, w, w / 3)) for i, w in widths)
    weights = np.stack([gaussian_filter(mask, width, truncate=3) for mask, width in masks_of])
    total = weights.sum(axis=0, keepdims=True)
    return np.asarray(weights / np.maximum(total, 1e-6), dtype=np.float32)


def acquire(rng: Rng, head: Head, hospital: MriHospital) -> NDArray[np.int16]:
    """Scans one head: (H, W, D, 4) int16, 0 outside the brain and at least 1 inside."""
    table = _INTENSITIES + hospital.protocol * _PROTOCOL
    visible = np.clip(hospital.strength * rng.uniform(0.6, 1.3), 0.35, 1.1)
    table[:, TUMOUR] = table[:, [WHITE]] + visible * (table[:, TUMOUR] - table[:, [WHITE]])
    table *= rng.normal(1, 0.06, size=table.shape)  # a different scan for every patient
    images = np.tensordot(table.astype(np.float32), head.weights, axes=1)
    texture = cohort.smooth_noise(rng, head.brain.shape, 1.5)
    scanned = [_channel(rng, x, texture, n, hospital) for n, x in enumerate(images)]
    out = np.stack(scanned, axis=-1) * 600 * rng.uniform(0.8, 1.25, size=len(CHANNELS))
    return (np.clip(out, 1, 4000) * head.brain[..., None]).astype(np.int16)


def _channel(rng: Rng, image: Array, texture: Array, n: int, hospital: MriHospital) -> Array:
    """Texture, blur, grey scale, shading, an occasional ghost, and Rician noise."""
    shape = image.shape
    image = image * (1 + 0.04 * texture)
    image = gaussian_filter(image, (hospital.blur, hospital.blur, 0))
    exponent = np.exp(hospital.gamma * (-1) ** n + rng.normal(0, 0.1))
    image = np.power(np.maximum(image, 0), exponent, dtype=np.float32)
    image = image * np.exp(hospital.bias * _shading(rng, shape))
    if rng.random() < 0.25:  # motion: a shifted, faint copy of this channel alone
        image = image + 0.10 * np.roll(image, int(rng.integers(8, 16)), axis=int(rng.integers(2)))
    real, imaginary = hospital.noise * rng.standard_normal((2, *shape), dtype=np.float32)
    return np.asarray(np.hypot(image + real, imaginary), dtype=np.float32)


def _shading(rng: Rng, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """A slow field in [-1, 1]: a slope and a bend along every axis."""
    lines = (np.linspace(-1, 1, n, dtype=np.float32) for n in shape)
    axes = np.meshgrid(*lines, sparse=True, indexing="ij")
    field = sum(rng.uniform(-1, 1) * x + rng.uniform(-0.5, 0.5) * x**2 for x in axes)
    return np.asarray(field / np.abs(field).max(), dtype=np.float32)


LABELS = ("background", "edema", "non-enhancing tumor", "enhancing tumour")


@dataclass(frozen=True)
class BratsCohort(cohort.VolumeCohort):
    """The generated cohort; equal parameters give equal files, byte by byte.

    Example:
        >>> BratsCohort().name == BratsCohort(seed=1).name
        False
    """

    kind: ClassVar[str] = "brats"
    version: ClassVar[int] = 2
    field: ClassVar[tuple[float, float, float]] = (192, 192, 144)  # the field of view of a head
    least: ClassVar[int] = 8
    instead: ClassVar[str] = "data=brats data.path=/path/to/Task01_BrainTumour"

    shape: tuple[int, int, int] = (80, 80, 20)  # voxels (H, W, D); slices are thick
    seed: int = 2017  # seed of the data, not of the run: another seed gives another data set
    # How much hospitals differ in outlining the fading edge of the oedema: 0, all at the visible
    # edge; 1, from well inside to well outside; 2, twice as much.
    outline: float = cohort.added(1.0)
    # The range over hospitals of how strongly tumours stand out.
    strength: tuple[float, float] = cohort.added(MriHospital.traits()["strength"])
    # The range over hospitals of the in-plane blur in voxels.
    blur: tuple[float, float] = cohort.added(MriHospital.traits()["blur"])

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative("data.generated.outline", self.outline)
        for name in ("strength", "blur"):
            bounds = cohort.check_range(f"data.generated.{name}", getattr(self, name))
            object.__setattr__(self, name, bounds)

    @property
    def what(self) -> str:
        """See `Cohort.what`."""
        return f"a BraTS-like cohort of {self.hospitals * self.each} patients"

    def write(self, folder: Path) -> None:
        """See `Cohort.write`."""
        low, high = MriHospital.traits()["outline"]
        outline = (self.outline * low, self.outline * high)
        ranges = {"outline": outline, "strength": self.strength, "blur": self.blur}
        owners = self.owners(MriHospital, self.seed, ranges)  # type: ignore[arg-type]
        about = {
            "name": "BRATS",
            "description": "Generated, BraTS-like: not real patients",
            "tensorImageSize": "4D",
            "modality": {str(n): name for n, name in enumerate(CHANNELS)},
            "labels": {str(n): name for n, name in enumerate(LABELS)},
        }
        self.write_cases(folder, "BRATS", owners, self.seed, about)

    def scan(self, rng: Rng, hospital: MriHospital) -> tuple[Any, Any, Any]:
        """See `VolumeCohort.scan`."""
        head = make_head(rng, self.shape, hospital)
        return acquire(rng, head, hospital), head.label, np.array(self.field) / self.shape
