"""Scans, pictures and images in a folder of inputs: found, checked, and read as in training."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import contrasts, dicom, pictures, volume_files, volumes
from .errors import DataError, few
from .files import is_visible, walk
from .itk import say_once
from .masks import SEG, Facts, label_map, mask_files, named_after, save_like, save_picture
from .predictor import Predictor, channels_of
from .preparation import BLANK, Preparation, millimetres, one_thread
from .voxels import check_finite, check_varied

_log = logging.getLogger(__name__)
_NONZERO = "zscore_nonzero"
_NO_ZEROS = (
    "has a contrast without a voxel of 0, so all that surrounds the body counts as body in its "
    f"normalisation ({_NONZERO}); set it to 0 if it is 0 in the training scans"
)


def _say_left_out(root: Path, others: Sequence[Path], what: str) -> None:
    """Says in one line which files were found that are none of what is wanted."""
    if others:
        names = few([p.relative_to(root).as_posix() for p in others], 3)
        _log.warning("No %s, and left out, below %s: %s.", what, root, names)


def _stem_below(path: Path, root: Path, stem: str) -> str:
    """Returns the name of an input: its path below the folder of all, without its suffix.

    Example:
        >>> _stem_below(Path("in/p1/scan.nii.gz"), Path("in"), "scan")
        'p1/scan'
    """
    return (path.relative_to(root).parent / stem).as_posix()


@dataclass(frozen=True)
class ScanFiles:
    """One scan before it is read."""

    what: ClassVar = "scans"
    unit: ClassVar = "ml"
    id: str  # its name, from which that of its mask is made
    # A volume: a file, with one or several values per voxel, or the folder of a DICOM series; or a
    # folder with a volume per contrast.
    path: Path
    # In a folder with the contrasts of several scans, as of nnU-Net: what the names of this one
    # begin with.
    stem: str = ""
    contrasts: Mapping[str, Path] = field(default_factory=dict)  # there: its volumes

    @property
    def parts(self) -> Sequence[Path]:
        """Its files, and folders of DICOM series."""
        if not self.path.is_dir() or dicom.is_series(self.path):
            return [self.path]
        return sorted(self.contrasts.values()) or _volumes_in(self.path)

    def files(self) -> list[Path]:
        """Lists the files that it is made of."""
        return volume_files.files_of_case(self.parts)

    def target(self, folder: Path, wanted: str | None = None) -> Path:
        """Returns the file of its masks in a folder: NIfTI, or a DICOM SEG."""
        return folder / f"{self.id}{SEG if wanted == 'dicomseg' else '.nii.gz'}"

    def maps(self, labels: Sequence[str], target: Path) -> list[Path]:
        """Lists the files of all regions' probabilities: one."""
        return [named_after(target, "_probabilities")]

    def contours(self, target: Path) -> Path:
        """Returns the file of a picture of it."""
        return named_after(target, "", ".png")

    def segment(self, predictor: Predictor, tolerance: float | None) -> SegmentedScan:
        """Reads and segments it."""
        read = read_scan(self, predictor.facts, tolerance)
        grid = read.grid, read.geometry.shape
        return SegmentedScan(read, predictor.regions(read.image, read.body, self.path, *grid))


class Scan(NamedTuple):
    """One scan as a network sees it."""

    # ``(C, h, w, d)`` float32 in RAS, prepared as in training; channels that the client lacks are
    # 0.
    image: Tensor
    body: Tensor  # ``(h, w, d)`` bool, where any channel of the scan is not 0
    # (4, 4) from the scan's voxels to those of the image; None where they are the same.
    grid: Tensor | None
    geometry: volumes.Geometry  # where the scan's voxels lie
    source: Path  # a volume with this geometry
    channels: Sequence[str]  # those that the scan has and the network sees


class SegmentedScan(NamedTuple):
    """A scan and what a model says of it."""

    scan: Scan
    regions: Tensor  # ``(R, H, W, D)`` float32 probabilities on its own voxels

    @property
    def factor(self) -> float:
        """Millilitres of a voxel."""
        return float(np.prod(self.scan.geometry.spacing)) / 1000

    def save(self, facts: Facts, masks: Tensor, target: Path) -> None:
        """Writes masks ``(R, H, W, D)``."""
        inside = dict(zip(facts["labels"], masks, strict=True))
        for path, codes in mask_files(facts, target).items():
            note = ", ".join(f"{code} {name}" for name, code in codes.items())
            values = label_map(inside, codes).numpy()
            save_like(values, self.scan.geometry, self.scan.source, path, note)

    def save_maps(self, labels: Sequence[str], values: Tensor, files: Sequence[Path]) -> None:
        """Writes the probabilities ``(R, H, W, D)`` of all regions."""
        note = f"probabilities of {', '.join(labels)}"
        last = np.moveaxis(values.numpy(), 0, -1)
        save_like(last, self.scan.geometry, self.scan.source, files[0], note)


@dataclass(frozen=True)
class PictureFile:
    """One picture before it is read."""

    what: ClassVar = "pictures"
    unit: ClassVar = "percent"
    id: str  # its name, from which that of its mask is made
    path: Path  # the file

    def files(self) -> list[Path]:
        """Lists the file."""
        return [self.path]

    def target(self, folder: Path, wanted: str | None = None) -> Path:
        """Returns the file of its masks in a folder."""
        return folder / f"{self.id}.png"

    def maps(self, labels: Sequence[str], target: Path) -> list[Path]:
        """Lists the files of all regions' probabilities: one for each."""
        return [named_after(target, f"_{name}_probability", ".tif") for name in labels]

    def contours(self, target: Path) -> Path:
        """Returns the file of a picture of its contours."""
        return named_after(target, "_contours")

    def segment(self, predictor: Predictor, tolerance: float | None) -> SegmentedPicture:
        """Reads and segments it."""
        source, rule = predictor.facts["input"], predictor.facts["normalization"]["name"]
        width, height, _ = pictures.picture_header(self.path)
        pictures.say_other_color(self.path, source["color"])
        loaded = pictures.load_picture(self.path, source["color"], source["scale"], rule)
        image = torch.from_numpy(loaded)
        image[~predictor.present] = 0
        everywhere = torch.ones(1, dtype=torch.bool).expand(*image.shape[1:], 1)
        small = predictor.regions(image[..., None], everywhere, self.path)[..., 0]
        full = pictures.resized(pictures.rows_from_top(small.numpy()), (height, width))
        return SegmentedPicture(image, small, torch.from_numpy(full))


class SegmentedPicture(NamedTuple):
    """A picture and what a model says of it."""

    image: Tensor  # ``(C, w, h)`` as the network sees it; channels that the client lacks are 0
    small: Tensor  # ``(R, w, h)`` probabilities, of the same size
    # ``(R, height, width)`` probabilities, rows from the top, of the picture's own size.
    regions: Tensor

    @property
    def factor(self) -> float:
        """The share of a pixel in percent."""
        return 100 / self.regions[0].numel()

    def save(self, facts: Facts, masks: Tensor, target: Path) -> None:
        """Writes masks ``(R, height, width)``: label values, or 0 and 255 in a file per region."""
        inside, files = dict(zip(facts["labels"], masks, strict=True)), mask_files(facts, target)
        for path, codes in files.items():
            values = label_map(inside, codes).numpy() * (255 if len(files) > 1 else 1)
            save_picture(values if values.dtype == np.uint8 else values.astype(np.uint16), path)

    def save_maps(self, labels: Sequence[str], values: Tensor, files: Sequence[Path]) -> None:
        """Writes a map of each region."""
        for value, file in zip(values.numpy(), files, strict=True):
            save_picture(value, file)


def find_cases(path: Path, facts: Facts, apart_from: Path) -> Sequence[ScanFiles | PictureFile]:
    """Lists the scans or pictures that an input names, for a model that segments them."""
    if facts["input"]["kind"] != "pictures":
        return find_scans(path, facts, apart_from)
    files = _files_of_kind(path, "a picture", "pictures", pictures.SUFFIXES, apart_from)
    root = path if path.is_dir() else path.parent
    return [PictureFile(_stem_below(file, root, file.stem), file) for file in files]


def find_scans(path: Path, facts: Facts, apart_from: Path | None = None) -> list[ScanFiles]:
    """Lists the scans that an input names.

    `path`: a volume (a file, or the folder of a DICOM series); a folder with one volume per
    contrast, of one scan or of several whose names begin differently; or a folder of all these.
    """
    if not path.exists():
        raise DataError(f"{path} does not exist; name a scan, or a folder of scans, in input.")
    kinds = ", ".join(volume_files.SUFFIXES)
    if not path.is_dir() and not volume_files.suffix_of(path):
        what = f"{path} is no volume ({kinds}, or the folder of a DICOM series)"
        raise DataError(f"{what}; convert the scan.")

    def is_one(place: Path) -> bool:
        return volume_files.is_volume(place) or _is_case(place, facts)

    def scans_in(place: Path, name: str) -> list[ScanFiles]:
        below = place.relative_to(path)
        flat = _flat(place, facts).items()
        cases = [ScanFiles((below / stem).as_posix(), place, stem, of) for stem, of in flat]
        return cases or [ScanFiles(name.removesuffix("_0000"), place)]  # nnU-Net's only contrast

    if is_one(path):
        return scans_in(path, volume_files.stem_of(path.resolve()))
    inside = [*walk(path, apart_from, is_one)]
    volume_paths = [p for p in inside if p.is_dir() or volume_files.suffix_of(p)]
    if not volume_paths:
        what = f"{path} has no volumes ({kinds}, folders of DICOM series) and no folders of them"
        raise DataError(f"{what}; name the folder with the scans in input.")
    of_headers = {".raw", ".zraw", ".gz"}
    others = [p for p in inside if p not in volume_paths and p.suffix.lower() not in of_headers]
    _say_left_out(path, others, "volumes")
    stems = {p: p.name if p.is_dir() else volume_files.stem_of(p) for p in volume_paths}
    scans = [s for p in volume_paths for s in scans_in(p, _stem_below(p, path, stems[p]))]
    return sorted(scans, key=lambda scan: (scan.id, scan.path.is_dir(), scan.path))


def find_images(path: Path) -> list[Path]:
    """Lists the images that an input names, arrays of NumPy among them."""
    return _files_of_kind(path, "an image", "images", (*pictures.SUFFIXES, ".npy", ".npz"))


def _files_of_kind(
    path: Path, one: str, what: str, endings: Sequence[str], apart_from: Path | None = None
) -> list[Path]:
    if not path.exists():
        raise DataError(f"{path} does not exist; name {one}, or a folder of {what}, in input.")
    if not path.is_dir():
        return [path]
    inside = [*walk(path, apart_from)]
    files = [f for f in inside if f.suffix.lower() in endings]
    if not files:
        raise DataError(f"{path} has no {what} ({', '.join(endings)}); name their folder in input.")
    _say_left_out(path, [f for f in inside if f not in set(files)], what)
    return files


def read_scan(scan: ScanFiles, facts: Facts, tolerance: float | None) -> Scan:
    """Reads one scan as the training data were read."""
    if scan.path.is_dir() and not dicom.is_series(scan.path):
        files = _files_by_contrast(scan, facts)
        names, paths = list(files), list(files.values())
        geometry, *_ = geometries = volumes.read_geometries(paths)
        volumes.check_same_grid(paths, geometries)
    else:
        geometry = volumes.read_geometry(scan.path)
        names, paths = channels_of(scan.path, geometry.channels, facts), [scan.path]
    check_spacing(geometry.spacing, facts, tolerance, scan.path, axes_of(facts))
    with one_thread():
        loaded = torch.cat([_load(p, len(names) // len(paths)) for p in paths])
        check_finite(loaded, names, paths)
        if not loaded.any():
            raise DataError(f"{scan.path} has only zero voxels; export the scan again.")
        there = [name for name in facts["present"] if name in names]
        at = [names.index(name) for name in there]
        of = [paths[n] for n in at] if len(paths) == len(names) else paths
        check_varied(loaded[at], there, of)
        image = prepare(loaded, names, facts, geometry.spacing, scan.path)
        return Scan(*image, geometry, paths[0], there)


def prepare(
    voxels: Tensor, names: Sequence[str], facts: Facts, spacing: Sequence[float], path: Path
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Prepares a scan ``(n, H, W, D)`` as in training; unknown channels are left out."""
    channels = list(facts["channels"])
    prepared = Preparation.from_record(facts, len(channels))
    # A scan may lack channels that the client lacks, too; each of the others keeps its rule.
    channels_there = [name for name in channels if name in names]
    rules = tuple(prepared.rules[channels.index(name)] for name in channels_there)
    chosen = voxels[[names.index(name) for name in channels_there]]
    of_these = replace(prepared, rules=rules)
    of_these.doubt(chosen, path)
    if any(rule.name == _NONZERO and of.all() for rule, of in zip(rules, chosen, strict=True)):
        say_once(path, _NO_ZEROS)
    image_part, grid = of_these.apply(chosen, spacing)
    image = torch.zeros(len(channels), *image_part.shape[1:])
    for name in set(facts["present"]) & set(channels_there):
        image[channels.index(name)] = image_part[channels_there.index(name)]
    body = (image_part != 0).any(dim=0)
    if not body.any():
        raise DataError(f"{path} {BLANK}.")
    return image, body, None if prepared.keeps_grid else grid


def axes_of(facts: Facts) -> tuple[int, ...]:
    """Returns the axes along which scans keep their spacing: slices do where pixels do not."""
    return {0: (0, 1, 2), 2: (2,), 3: ()}[len(facts.get("resampled_to") or ())]


def check_spacing(
    spacing: Sequence[float],
    facts: Facts,
    tolerance: float | None,
    source: object,
    axes: Sequence[int] = (0, 1, 2),
) -> None:
    """Refuses a scan whose voxels are of another size (mm) than those of the training scans.

    Example:
        >>> facts = {"spacing_range": [[1.0, 1.0, 2.0], [1.0, 1.0, 3.0]]}
        >>> check_spacing((1.0, 1.05, 3.2), facts, 0.1, "scan.nii.gz")
        >>> check_spacing((1.0, 1.0, 5.0), facts, 0.1, "scan.nii.gz")
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.DataError: scan.nii.gz has voxels of 1 × 1 × 5 mm, but the hospital's training scans have 1 × 1 × 2 to 1 × 1 × 3 mm; resample the scan, or set spacing_tolerance.
    """  # noqa: E501
    ends = facts.get("spacing_range") or [facts.get("spacing")] * 2
    if tolerance is None or ends[0] is None:
        return
    low, high = (np.asarray(end, dtype=float)[list(axes)] for end in ends)
    mm = np.asarray(spacing, dtype=float)[list(axes)]
    if (mm >= low * (1 - tolerance) - 1e-6).all() and (mm <= high * (1 + tolerance) + 1e-6).all():
        return
    least, greatest = millimetres(ends[0]), millimetres(ends[1])
    wanted = least if least == greatest else f"{least} to {greatest}"
    raise DataError(
        f"{source} has voxels of {millimetres(spacing)} mm, but the hospital's training scans have "
        f"{wanted} mm; resample the scan, or set spacing_tolerance."
    )


def names_of_contrasts(facts: Facts) -> str:
    """Says how files are named of which each is a contrast of one scan; empty for one contrast."""
    names = few([patterns[0] for patterns in _patterns(facts).values()])
    return f" Files that are contrasts of one scan are named {names}." * (len(facts["present"]) > 1)


def _is_case(folder: Path, facts: Facts) -> bool:
    """Whether a folder holds the volumes of one scan: any contrast's pattern matches."""
    if not folder.is_dir():
        return False
    patterns = [p for alternatives in _patterns(facts).values() for p in alternatives]
    return any(file.match(pattern) for file in _volumes_in(folder) for pattern in patterns)


def _volumes_in(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if is_visible(p.name) and volume_files.is_volume(p))


def _patterns(facts: Facts) -> dict[str, Sequence[str]]:
    """File names of the contrasts that the client has: those of the training data, or the usual."""
    known: Mapping[str, contrasts.Pattern] = facts["input"].get("files") or {}
    ends = (*volume_files.SUFFIXES, "")
    usual = {n: [*contrasts.FILES.get(n, ()), *(n + end for end in ends)] for n in facts["present"]}
    return {n: contrasts.alternatives(known.get(n, names)) for n, names in usual.items()}


def _flat(folder: Path, facts: Facts) -> dict[str, dict[str, Path]]:
    """The files of several scans in one folder, by what their names begin with and by contrast."""
    scans: dict[str, dict[str, Path]] = {}
    if not folder.is_dir() or dicom.is_series(folder):
        return scans
    there, most = _volumes_in(folder), 0
    for contrast, patterns in _patterns(facts).items():
        ends = tuple(p[1:] for p in patterns if p.startswith("*"))
        files = [(p, end) for p in there for end in ends if p.name.endswith(end)]
        most = max(most, len(files))
        for file, end in files:
            scans.setdefault(file.name.removesuffix(end), {})[contrast] = file
    return scans if most > 1 else {}


def _files_by_contrast(scan: ScanFiles, facts: Facts) -> dict[str, Path]:
    patterns, partial = _patterns(facts), facts.get("channels_of_cases") or {}
    if not scan.stem:
        listed = {}
        for contrast, pattern in patterns.items():
            try:
                mend = "give one such a name"  # a bundle's user has no data.reader
                listed[contrast] = contrasts.find_file(scan.path, contrast, pattern, mend)
            except contrasts.AbsentFileError:
                if contrast not in partial:
                    raise
        return listed
    files, known = scan.contrasts, {*scan.contrasts, *partial}
    if lacking := [f"{c} ({' or '.join(p)})" for c, p in patterns.items() if c not in known]:
        what = f"{scan.path}: {scan.stem} lacks {', '.join(lacking)}"
        raise DataError(f"{what}; add the file, or move its others elsewhere.")
    return {c: files[c] for c in patterns if c in files}


def _load(path: Path, count: int) -> Tensor:
    loaded = volumes.read_volume(path).voxels
    if len(loaded) != count:
        raise DataError(f"{path} has {len(loaded)} channels, but a file per contrast has {count}.")
    return loaded
