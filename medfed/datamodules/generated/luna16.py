"""A LUNA16-like cohort on disk: MetaImage scans, annotations and candidates.

A scan shows one side of a chest: wall, lung, vessels, nodules and look-alikes. Distances are in mm
from the middle of the volume. The lung scales with the field of view, as scans are fitted to the
patient; vessels, airways and nodules have sizes in mm.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

from scipy.ndimage import gaussian_filter, zoom

from medfed.datamodules.extending import *
from medfed.datamodules.generated.cohort import Hospital, ScanCohort, trait

Rng = np.random.Generator
Array = NDArray[np.float32]
Point = NDArray[np.float64]  # (3,) mm x y z
Spacing = tuple[float, float, float]  # mm along x, y, z
Box = tuple[slice, ...]


@dataclass(frozen=True)
class CtHospital(Hospital):
    """A hospital that scans lungs."""

    nodules: float = trait(3.5, 8.5)  # mean number of nodules per scan
    diameter: float = trait(5.5, 9.5)  # their median diameter, in mm
    subsolid: float = trait(0.1, 0.6)  # share of nodules that are ground glass or partly so
    pleural: float = trait(0.1, 0.5)  # share of nodules at the pleura
    # Share of scars and pleural plaques among the candidates that are not nodules.
    scars: float = trait(0.05, 0.35)
    # Depth of the dark patches in the lungs, as a share of the worst.
    emphysema: float = trait(0.0, 1.0)
    agent: float = trait(0.0, 150.0)  # HU that the contrast agent adds to the vessels
    noise: float = trait(15.0, 60.0)  # standard deviation of the noise, in HU
    blur: float = trait(0.4, 1.1)  # In-plane blur of the reconstruction kernel, in mm
    thickness: float = trait(1.1, 2.3)  # typical distance of the slices, in mm
    offset: float = trait(-40.0, 40.0)  # HU by which the calibration is wrong


@dataclass(frozen=True)
class Canvas:
    """A volume and its scale. Points are mm x y z, counted from the volume's middle."""

    hu: Array  # (z, y, x) float32, changed in place
    spacing: Spacing  # (3,) mm along x, y, z

    @property
    def half(self) -> Point:
        """(3,) mm from the middle to the outermost voxels."""
        return np.asarray((np.array(self.hu.shape[::-1]) - 1) / 2 * np.array(self.spacing))

    def window(self, low: Point, high: Point) -> tuple[Box, list[Array]]:
        """The voxels of a box, as slices (z, y, x), and their positions x, y, z in mm."""
        half, step = self.half, np.array(self.spacing)
        size = np.array(self.hu.shape[::-1])
        first = np.clip(np.ceil((low + half) / step), 0, size).astype(int)
        last = np.clip(np.floor((high + half) / step) + 1, first, size).astype(int)
        slices = tuple(slice(a, b) for a, b in zip(first, last, strict=True))[::-1]
        ends = zip(first, last, step, half, strict=True)
        x, y, z = ((np.arange(a, b) * s - h).astype(np.float32) for a, b, s, h in ends)
        return slices, [x[None, None], y[None, :, None], z[:, None, None]]

    def tube(
        self, start: Point, end: Point, radius: float, value: float, dark: bool = False
    ) -> None:
        """Paints a tube (mm, HU); brighter voxels (darker if `dark`) do not change."""
        reach = radius + self.spacing[0]
        box, position = self.window(np.minimum(start, end) - reach, np.maximum(start, end) + reach)
        along = (end - start).astype(np.float32)
        offset = [p - np.float32(s) for p, s in zip(position, start, strict=True)]
        length = max(float(along @ along), 1e-6)
        share = sum(o * a for o, a in zip(offset, along, strict=True)) / length
        share = np.clip(share, 0, 1)
        square = sum((o - share * a) ** 2 for o, a in zip(offset, along, strict=True))
        self._blend(box, np.sqrt(square) - np.float32(radius), value, self.spacing[0], dark)

    def blob(
        self,
        centre: Point,
        radius: float,
        value: float,
        *,
        stretch: Sequence[float] = (1.0, 1.0, 1.0),
        waves: Array | None = None,
        soft: float | None = None,
    ) -> None:
        """Paints an ellipsoid (mm, HU), with `waves` (n, 5): direction, phase, height."""
        soft = soft or self.spacing[0]
        reach = 1.5 * radius * max(stretch) + soft
        box, position = self.window(centre - reach, centre + reach)
        parts = zip(position, centre, stretch, strict=True)
        scaled = [(p - np.float32(c)) / np.float32(s) for p, c, s in parts]
        distance: Array = np.sqrt(sum(s**2 for s in scaled))
        surface = np.ones_like(distance)
        for *wave, phase, height in waves if waves is not None else ():
            angle = sum(w * s for w, s in zip(wave, scaled, strict=True))
            surface += height * np.sin(angle / np.maximum(distance, np.float32(1e-3)) + phase)
        self._blend(box, distance - np.float32(radius) * surface, value, soft, dark=False)

    def _blend(self, box: Box, distance: Array, value: float, soft: float, dark: bool) -> None:
        """Mixes a value in by the share of each voxel that lies within; `distance` is in mm."""
        share = np.clip(0.5 - distance / np.float32(soft), 0, 1)
        old = self.hu[box]
        mixed = old + share * (np.float32(value) - old)
        self.hu[box] = np.minimum(old, mixed) if dark else np.maximum(old, mixed)


@dataclass(frozen=True)
class Nodule:
    """One nodule."""

    centre: Point  # (3,) mm from the middle of the volume
    diameter: float  # mm


def _paint_nodule(rng: Rng, canvas: Canvas, nodule: Nodule, subsolid: bool) -> None:
    """Solid, ground glass or both; round to lobulated, sometimes with spicules."""
    radius = nodule.diameter / 2
    stretch = rng.uniform(0.85, 1.15, size=3).tolist()
    height = np.full((4, 1), rng.uniform(0.0, 0.13))
    directions, phases = rng.normal(0, 2.2, size=(4, 3)), rng.uniform(0, 2 * np.pi, size=(4, 1))
    waves = np.hstack([directions, phases, height]).astype(np.float32)
    value = rng.uniform(-620, -380) if subsolid else rng.uniform(-80, 80)
    soft = rng.uniform(1.5, 3.0) if subsolid else None
    canvas.blob(nodule.centre, radius, value, stretch=stretch, waves=waves, soft=soft)
    if subsolid and rng.random() < 0.5:
        off = nodule.centre + 0.25 * radius * rng.standard_normal(3)
        canvas.blob(off, 0.45 * radius, rng.uniform(-150, 30))
    if rng.random() < 0.25:
        for _ in range(int(rng.integers(4, 8))):
            spicule = _unit(rng.standard_normal(3)) * radius * rng.uniform(1.4, 2.0)
            canvas.tube(nodule.centre, nodule.centre + spicule, 0.5, -250)


Shape = tuple[int, int, int]
Tube = tuple[Point, Point, float]  # start, end, radius
_MAX_TUBES = 420  # pieces of vessel in one lung
_DIAMETERS = (4.0, 20.0)  # of nodules, mm


@dataclass(frozen=True)
class Chest:
    """A lung, whose parts are painted one after the other."""

    rng: Rng  # source of randomness, this patient's own
    hospital: CtHospital  # whose patient it is
    canvas: Canvas  # the volume
    depth: Array  # (z, y, x) 0 in the middle of the lung, 1 at the pleura, more outside
    side: int  # 1 if the chest wall is to the patient's right, else -1
    vessels: list[Tube] = field(default_factory=list)  # pieces of vessel
    airways: list[Point] = field(default_factory=list)  # middles of the pieces of airway
    # Its nodules; they do not touch each other or the end of the volume.
    nodules: list[Nodule] = field(default_factory=list)

    def depth_at(self, point: Point) -> float:
        """`depth` at a point; infinite outside the volume."""
        canvas = self.canvas
        index = np.rint((point + canvas.half) / np.array(canvas.spacing)).astype(int)[::-1]
        if (index < 0).any() or (index >= self.depth.shape).any():
            return float("inf")
        return float(self.depth[tuple(index)])

    def is_free(self, place: Point, radius: float) -> bool:
        """Whether a ball lies inside the volume and apart from all nodules."""
        if (np.abs(place) + radius > self.canvas.half).any():
            return False
        gaps = [np.linalg.norm(place - n.centre) - n.diameter / 2 - radius for n in self.nodules]
        return not gaps or float(min(gaps)) > 2.0

    def free_place(self, diameter: float, low: float, high: float) -> Point | None:
        """A place in the lung between two depths, where a ball of this diameter has room."""
        for _ in range(400):
            place = self.rng.uniform(-0.95, 0.95, size=3) * self.canvas.half
            if low <= self.depth_at(place) <= high and self.is_free(place, diameter / 2):
                return np.asarray(place)
        return None


def make_chest(rng: Rng, shape: Shape, spacing: Spacing, hospital: CtHospital) -> Chest:
    """Draws one patient's lung, without nodules."""
    canvas = Canvas(np.full(shape[::-1], -1000, dtype=np.float32), spacing)
    side = int(rng.choice([-1, 1]))
    ends = zip(canvas.half, shape, strict=True)
    x, y, z = (np.linspace(-h, h, n, dtype=np.float32) for h, n in ends)
    u = side * x[None, None] / canvas.half[0]
    v, w = y[None, :, None] / canvas.half[1], z[:, None, None] / canvas.half[2]
    chest = Chest(rng, hospital, canvas, _lung_depth(rng, u, v, w), side)
    _paint_body(chest, u, v, w)
    _paint_lung(chest, v)
    for _ in range(int(rng.integers(8, 12))):
        chest.vessels.extend(_walk(chest, (2.4, 4.2), 0.93))
    for start, end, radius in chest.vessels:
        # Thin vessels fill less of a voxel, so the scanner shows less of the agent.
        canvas.tube(start, end, radius, 40 + hospital.agent * min(radius / 2, 1))
    for _ in range(int(rng.integers(2, 5))):
        pieces = _walk(chest, (3.0, 4.0), 0.88)[:14]
        for start, end, radius in pieces:
            canvas.tube(start, end, radius + 1.1, -20)
        for start, end, radius in pieces:
            canvas.tube(start, end, radius, -980, dark=True)
        chest.airways.extend((start + end) / 2 for start, end, radius in pieces if radius > 1)
    return chest


def _lung_depth(rng: Rng, u: Array, v: Array, w: Array) -> Array:
    """Chest wall at u = -1, mediastinum at u = 1; v runs to the back, w to the head."""
    width = rng.uniform(0.66, 0.76) * (1 - 0.12 * w**2 - 0.06 * w)
    height = rng.uniform(0.80, 0.88) * (1 - 0.10 * w**2)
    lung = (np.abs((u + 0.05) / width) ** 2.3 + np.abs(v / height) ** 2.3) ** (1 / 2.3)
    angle = np.arctan2(v, u + 0.05)
    for k in (2, 3, 5):
        lung = lung * (1 + 0.025 * np.sin(k * angle + rng.uniform(0, 6.3) + rng.normal(0, 0.8) * w))
    heart = np.hypot((u - 0.95) / rng.uniform(0.5, 0.75), (v + 0.25) / 0.6)
    above = w + rng.uniform(1.15, 1.9)
    dome = np.sqrt(((u + 0.05) / 0.75) ** 2 + (v / 0.9) ** 2 + (above / 0.7) ** 2)
    # Heart and liver push the pleura in.
    return np.asarray(np.maximum(np.maximum(lung, 2 - heart), 2 - dome), dtype=np.float32)


def _paint_body(chest: Chest, u: Array, v: Array, w: Array) -> None:
    """Muscle, fat and ribs outside, heart and great vessels inside."""
    depth, draw = chest.depth, chest.rng.uniform
    fat = draw(1.22, 1.32)
    inside = u < 0.25
    body = np.where(depth > fat, -100.0, 45.0) + 0 * w
    body = np.where(inside & (depth > draw(1.45, 1.6)), -1000.0, body)
    body = np.where(~inside, 40 + 0.8 * chest.hospital.agent * (u > 0.6), body)
    turn = np.arctan2(v, u + 0.05) * draw(3.5, 4.5) + 2.5 * w + draw(0, 6.3)
    rib = inside & (np.abs(depth - 1.11) < 0.045) & (np.sin(2 * turn) > 0.1)
    spine = np.hypot((u - 1.0) / 0.3, (v - 0.85) / 0.3) < 1
    chest.canvas.hu[:] = np.where(rib, 450, np.where(spine, 300, body))


def _paint_lung(chest: Chest, v: Array) -> None:
    """Air with fine texture, denser towards the back, darker where emphysema is."""
    shape, hu = chest.depth.shape, chest.canvas.hu
    coarse = chest.rng.standard_normal([max(n // 4, 3) for n in shape], dtype=np.float32)
    texture = zoom(coarse, [n / m for n, m in zip(shape, coarse.shape, strict=True)], order=1)
    patches = gaussian_filter(texture, (1, 3, 3))
    patches /= patches.std()
    air = -870 + 30 * v + 16 * texture - 70 * chest.hospital.emphysema * np.clip(patches, 0, 1.5)
    hu[:] += np.clip((1 - chest.depth) / 0.02, 0, 1) * (air - hu)


def _unit(vector: Point) -> Point:
    return np.asarray(vector / np.linalg.norm(vector))


def _walk(chest: Chest, calibre: tuple[float, float], taper: float) -> list[Tube]:
    """A branching walk from the hilum outwards, until the twigs are thin or at the pleura."""
    rng, side = chest.rng, chest.side
    share = np.array([0.42 * side, rng.uniform(-0.1, 0.35), rng.uniform(-0.9, 0.9)])
    aim = np.array([-side, rng.uniform(-1.3, 1.3), rng.uniform(-0.9, 0.9)])
    tips = [(share * chest.canvas.half, _unit(aim), rng.uniform(*calibre))]
    pieces: list[Tube] = []
    while tips and len(pieces) < _MAX_TUBES:
        point, heading, radius = tips.pop(0)
        heading = _unit(heading + 0.22 * rng.standard_normal(3))
        end = point + heading * rng.uniform(4, 7)
        if radius < 0.55 or chest.depth_at(end) > 0.97:
            continue
        pieces.append((point, end, radius))
        tips.append((end, heading, radius * taper))
        if rng.random() < 0.33:
            fork = heading + rng.uniform(0.5, 0.9) * _unit(rng.standard_normal(3))
            tips.append((end, _unit(fork), radius * rng.uniform(0.6, 0.85)))
    return pieces


def add_nodules(chest: Chest) -> None:
    """Paints the nodules of one patient, at least one."""
    rng, hospital = chest.rng, chest.hospital
    for _ in range(max(int(rng.poisson(hospital.nodules)), 1)):
        diameter = float(np.clip(rng.lognormal(np.log(hospital.diameter), 0.38), *_DIAMETERS))
        pleural = rng.random() < hospital.pleural
        centre = chest.free_place(diameter, *((0.88, 0.97) if pleural else (0, 0.85)))
        if centre is not None:
            chest.nodules.append(Nodule(centre, diameter))
            _paint_nodule(rng, chest.canvas, chest.nodules[-1], rng.random() < hospital.subsolid)


def add_lookalikes(chest: Chest, count: int) -> list[Point]:
    """Returns the places of vessels, airways, scars, plaques and bumps; paints some."""
    rng, scars, places = chest.rng, chest.hospital.scars, list[Point]()
    # Of the calibre of a nodule; forks and bends are where pieces meet.
    vessels = [end for _, end, radius in chest.vessels if radius > 0.9]
    for _ in range(count):
        kind = rng.random()
        if kind < scars:
            place = _scar(chest) if rng.random() < 0.6 else _bump(chest)
        elif kind < scars + 0.12 and chest.airways:
            place = chest.airways[int(rng.integers(len(chest.airways)))]
        elif kind < scars + 0.22:
            place = chest.free_place(2.0, 0.9, 1.0)
        else:
            place = vessels[int(rng.integers(len(vessels)))] if vessels else None
        if place is not None and chest.is_free(place, 3.0):
            places.append(place)
    return places


def _scar(chest: Chest) -> Point | None:
    """A band of scar tissue: thin in one direction, long in another."""
    if (place := chest.free_place(8.0, 0.3, 0.95)) is None:
        return None
    rng = chest.rng
    way = rng.standard_normal(3) * [1, 1, 0.5]
    way *= rng.uniform(5, 11) / np.linalg.norm(way)
    bend = place + rng.normal(0, 1.5, size=3)
    radius, value = rng.uniform(1.0, 2.2), rng.uniform(-150, 40)
    for start, end in ((place - way, bend), (bend, place + way)):
        chest.canvas.tube(start, end, radius, value)
    return bend


def _bump(chest: Chest) -> Point | None:
    """A plaque: a flat thickening of the pleura."""
    if (place := chest.free_place(6.0, 0.95, 1.0)) is None:
        return None
    rng = chest.rng
    inwards = -place * [1, 1, 0]
    inwards /= max(float(np.linalg.norm(inwards)), 1e-6)
    along = np.array([-inwards[1], inwards[0], 0.3 * rng.standard_normal()])
    along *= rng.uniform(4, 9)
    chest.canvas.tube(place - along, place + along, rng.uniform(1.3, 2.6), rng.uniform(-20, 60))
    return place


_IDENTITY = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0)
FLIPPED = (-1.0, 0.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0, 1.0)
_FIELD_OF_VIEW = (154.0, 230.0)  # mm; 0.6 to 0.9 mm at a matrix of 256
_SUBSETS = 10


@dataclass(frozen=True)
class LunaCohort(ScanCohort):
    """The generated cohort; equal parameters give equal files, byte by byte.

    Example:
        >>> LunaCohort().name == LunaCohort(seed=1).name
        False
    """

    kind: ClassVar[str] = "luna16"
    version: ClassVar[int] = 1
    index: ClassVar[str] = "candidates.csv"

    least: ClassVar[int] = 16
    instead: ClassVar[str] = "data.path=/path/to/LUNA16"

    shape: tuple[int, int, int] = (128, 128, 48)  # voxels (x, y, z)
    # Candidates per scan that are not nodules, before removing those too close to one.
    lookalikes: int = 34
    seed: int = 2016  # seed of the data, not of the run: another seed gives another data set

    @property
    def what(self) -> str:
        """See `Cohort.what`."""
        return f"a LUNA16-like cohort of {self.hospitals * self.each} scans"

    def write(self, folder: Path) -> None:
        """Writes the subsets, ``annotations.csv``, ``candidates.csv`` and ``centres.json``."""
        owners = self.owners(CtHospital, self.seed)
        seed, each = self.patients_seed(self.seed), enumerate(owners)
        series = [_series(seed, hospital.name, n % self.each) for n, hospital in each]
        for subset in range(min(_SUBSETS, len(series))):
            (folder / f"subset{subset}").mkdir()
        with ThreadPoolExecutor(max_workers=2) as pool:  # each scan has its generator
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
        # Rounded as in headers.
        pixel = round(rng.uniform(*_FIELD_OF_VIEW) / max(self.shape[:2]), 4)
        thickness = np.clip(hospital.thickness * rng.uniform(0.85, 1.15), 1.0, 2.5)
        spacing = pixel, pixel, round(float(thickness), 2)
        chest = make_chest(rng, self.shape, spacing, hospital)
        add_nodules(chest)
        others = add_lookalikes(chest, self.lookalikes)
        voxels = acquire(rng, chest.canvas, hospital)
        middle = np.append(rng.uniform(-30, 30, size=2), rng.uniform(-250, -100))
        # One scan in four is stored from left to right and back to front, like some of LUNA16.
        flipped = number % 4 == 3
        origin = middle + chest.canvas.half * ([1, 1, -1] if flipped else [-1, -1, -1])
        place = folder / f"subset{number % _SUBSETS}"
        stored = (voxels[:, ::-1, ::-1], FLIPPED) if flipped else (voxels, _IDENTITY)
        write_scan(place, series, stored[0], spacing, origin.tolist(), stored[1])
        annotations = [_row(series, n.centre + middle, f"{n.diameter:.4f}") for n in chest.nodules]
        # A detector finds some nodules twice.
        hits = ((n, _) for n in chest.nodules for _ in range(1 + int(rng.random() < 0.15)))
        near = [_near(rng, n.centre, 0.1 * n.diameter) for n, _ in hits]
        candidates = [(_row(series, p + middle, "1"), rng.random()) for p in near]
        far = (_near(rng, p, 0.7) for p in others)
        candidates += [(_row(series, p + middle, "0"), rng.random()) for p in far]
        return annotations, [row for row, _ in sorted(candidates, key=lambda c: c[1])]


def write_scan(
    folder: Path,
    series: str,
    voxels: NDArray[np.int16],
    spacing: Sequence[float] = (1.0, 1.0, 1.0),
    origin: Sequence[float] = (0.0, 0.0, 0.0),
    direction: Sequence[float] = _IDENTITY,
) -> Path:
    """Writes (z, y, x) voxels as ``<series>.mhd`` and ``<series>.raw``, by SimpleITK."""
    import SimpleITK as sitk

    image, header = sitk.GetImageFromArray(voxels), folder / f"{series}.mhd"
    image.SetSpacing([*map(float, spacing)])
    image.SetOrigin([*map(float, origin)])
    image.SetDirection([*map(float, direction)])
    try:
        sitk.WriteImage(image, str(header), useCompression=False)
    except RuntimeError as error:
        raise OSError(f"{header} cannot be written: {error}") from error
    return header


def acquire(rng: Rng, canvas: Canvas, hospital: CtHospital) -> NDArray[np.int16]:
    """Scans a chest: blur of kernel and slice, noise as fine as the kernel is sharp, offset."""
    blur = hospital.blur / canvas.spacing[0]
    image = gaussian_filter(canvas.hu, (0.4, blur, blur), truncate=3)
    noise = rng.standard_normal(image.shape, dtype=np.float32)
    noise = gaussian_filter(noise, (0, 0.7 * blur, 0.7 * blur), truncate=3)
    image += hospital.noise * rng.uniform(0.8, 1.25) / noise.std() * noise + hospital.offset
    return np.asarray(np.rint(np.clip(image, -1024, 3071)), dtype=np.int16)


def _series(seed: int, hospital: str, number: int) -> str:
    """A DICOM UID under the root 2.25, which is free for all."""
    parts = [derive_seed(seed, "series", hospital, number, part) for part in range(3)]
    return "2.25." + ".".join(map(str, parts))


def _near(rng: Rng, place: Point, spread: float) -> Point:
    """A detector's position of an object: close to its middle."""
    return place + np.clip(rng.normal(0, spread, size=3), -1.5, 1.5)


def _row(series: str, world: Point, last: str) -> str:
    return f"{series},{','.join(f'{mm:.4f}' for mm in world)},{last}"


def _write_csv(path: Path, last: str, tables: Iterable[list[str]]) -> None:
    rows = [f"seriesuid,coordX,coordY,coordZ,{last}", *(row for table in tables for row in table)]
    path.write_text("\n".join(rows) + "\n")
