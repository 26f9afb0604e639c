"""The one reader of volumes: NIfTI, NRRD, MetaImage and DICOM series, axes to right, front, head.

Whatever the format and however a scanner stored it, a volume is (C, H, W, D) float32 whose axes run
towards the patient's right, front (anterior) and head (superior): RAS. Nothing is interpolated;
axes oblique to the patient's are taken for the nearest ones. :func:`read_geometry` reads a header
alone, :func:`read_volume` the voxels too, and :func:`as_stored` turns a result back onto the axes
of the file, so that a mask lies on its scan in any viewer.

SimpleITK reads NRRD and DICOM. NIfTI is read by nibabel, as SimpleITK gives other voxels without a
word where a packed file is torn; MetaImage by :mod:`~medfed.datamodules.readers.metaimage`, for the
same reason.

The readers of cases share their base class here: label values make up regions.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medfed.common.errors import DataError
from medfed.datamodules.preparation import zscore
from medfed.datamodules.readers import dicom, metaimage, nifti, nrrd
from medfed.datamodules.readers.base import Patient, VolumeReader, are_exclusive, with_hospitals
from medfed.datamodules.readers.csv_files import named_centres

SUFFIXES = (".nii.gz", ".nii", ".nrrd", ".nhdr", ".mha", ".mhd")
_SHEAR = 0.01  # cosine between two axes, about half a degree
_APART = 0.1  # voxels by which the corners of two grids may differ


@dataclass(frozen=True, eq=False)
class Geometry:
    """Where the voxels of a volume lie.

    Attributes:
        shape: (3,) voxels to the right, to the front and to the head.
        affine: (4, 4) from these voxels to mm in RAS.
        channels: How many values a voxel has.
        stored: (4, 4) from the voxels as the file has them to mm in RAS.
        turn: (3, 2) how the file's axes become these, as nibabel's orientations write it.
    """

    shape: tuple[int, int, int]
    affine: NDArray[np.float64]
    channels: int
    stored: NDArray[np.float64]
    turn: NDArray[np.float64]

    @property
    def spacing(self) -> tuple[float, float, float]:
        """(3,) mm between voxels, to the right, to the front and to the head."""
        x, y, z = np.sqrt((self.affine[:3, :3] ** 2).sum(axis=0)).tolist()
        return x, y, z


class Volume(NamedTuple):
    """A volume in memory.

    Attributes:
        voxels: (C, H, W, D) float32, contiguous, RAS.
        geometry: Where they lie.
    """

    voxels: Tensor
    geometry: Geometry


def is_volume(path: Path) -> bool:
    """Says whether a path is, by its name, a volume: a file, or the folder of a DICOM series.

    Example:
        >>> is_volume(Path("scan.NII.GZ")), is_volume(Path("scan.txt"))
        (True, False)
    """
    return bool(suffix_of(path)) or (path.is_dir() and dicom.is_series(path))


def suffix_of(path: Path) -> str:
    """Returns the suffix of a volume's file, both parts of ``.nii.gz``; empty for other files.

    Example:
        >>> suffix_of(Path("a.b.nii.gz")), suffix_of(Path("a.mha")), suffix_of(Path("a.png"))
        ('.nii.gz', '.mha', '')
    """
    return next((s for s in SUFFIXES if path.name.lower().endswith(s)), "")


def stem_of(path: Path) -> str:
    """Returns the name of a volume without its suffix.

    Example:
        >>> stem_of(Path("1.2.840.nii.gz")), stem_of(Path("series_1.2"))
        ('1.2.840', 'series_1.2')
    """
    return path.name[: len(path.name) - len(suffix_of(path))]


def files_of(path: Path) -> list[Path]:
    """Lists the files that make up a volume: those of a DICOM folder, a header and its voxels.

    Raises:
        DataError: If the folder or the header cannot be read.
    """
    if path.is_dir():
        return dicom.files(path)
    if path.suffix.lower() == ".mhd":
        return list(dict.fromkeys([path, metaimage.storage_of(path).file]))
    if path.suffix.lower() == ".nhdr":
        return [path, nrrd.data_file(path)]
    return [path]


def read_geometry(path: Path) -> Geometry:
    """Reads the header of a volume, and no voxel.

    Args:
        path: A NIfTI, NRRD or MetaImage file, or the folder of one DICOM series.

    Returns:
        Where its voxels lie.

    Raises:
        DataError: If it is missing, unreadable, flat, sheared, of no valid affine, or a series with
            a slice missing.
    """
    from nibabel.orientations import inv_ornt_aff, io_orientation

    shape, channels, stored = _format(path).header(path)
    if not np.isfinite(stored).all() or abs(np.linalg.det(stored[:3, :3])) < 1e-9:
        raise DataError(f"{path} has no valid affine; its orientation is unknown: convert it anew.")
    axes = stored[:3, :3] / np.linalg.norm(stored[:3, :3], axis=0)
    if np.abs(axes.T @ axes - np.eye(3)).max() > _SHEAR:
        raise DataError(
            f"{path} is sheared (its axes are not at right angles); resample it to an upright grid "
            "or leave the patient out."
        )
    # Each stored axis goes to the nearest one of the patient: voxels are moved, never interpolated.
    turn = io_orientation(stored)
    if sorted(turn[:, 0].tolist()) != [0, 1, 2]:  # voxels of which one side is next to nothing
        raise DataError(f"{path} has no valid affine; its orientation is unknown: convert it anew.")
    size = [0, 0, 0]
    for n, axis in zip(shape, turn[:, 0].astype(int), strict=True):
        size[axis] = int(n)
    affine = np.asarray(stored @ inv_ornt_aff(turn, shape), dtype=np.float64)
    return Geometry((size[0], size[1], size[2]), affine, channels, stored, turn)


def read_volume(path: Path, channels: Sequence[int] | None = None) -> Volume:
    """Reads a volume.

    Args:
        path: A NIfTI, NRRD or MetaImage file, or the folder of one DICOM series.
        channels: Which of several values per voxel to return, in this order; None returns all.

    Returns:
        Voxels (C, H, W, D) float32, with slope and intercept applied, and where they lie.

    Raises:
        DataError: See :func:`read_geometry`; also if the voxels are torn, no real numbers, or lack
            a channel.
    """
    from nibabel.orientations import apply_orientation

    geometry = read_geometry(path)
    array = _format(path).voxels(path)
    if array.dtype.kind not in "buif":
        raise DataError(f"{path} has voxels of type {array.dtype}; write real numbers.")
    array = apply_orientation(array.reshape(*array.shape[:3], -1), geometry.turn)
    taken = range(array.shape[3]) if channels is None else channels
    if max(taken) >= array.shape[3]:
        raise DataError(
            f"{path} has {array.shape[3]} channels, but {max(taken) + 1} are needed; mend the "
            "file or name its channels."
        )
    loaded = np.empty((len(taken), *array.shape[:3]), dtype=np.float32)
    for target, channel in zip(loaded, taken, strict=True):
        target[:] = array[..., channel]
    return Volume(torch.from_numpy(loaded), geometry)


def as_stored(array: NDArray[Any], geometry: Geometry) -> NDArray[Any]:
    """Turns an array back onto the axes of the file, where ``geometry.stored`` is its affine.

    Args:
        array: (H, W, D) or (H, W, D, n) in RAS.
        geometry: Of the volume that it belongs to.

    Returns:
        The same voxels as the file orders them, contiguous.
    """
    from nibabel.orientations import apply_orientation, axcodes2ornt, ornt_transform

    back = ornt_transform(axcodes2ornt("RAS"), geometry.turn)
    return np.ascontiguousarray(apply_orientation(array, back))


def check_same_grid(paths: Sequence[Path]) -> Geometry:
    """Checks, from the headers alone, that all volumes of a patient lie on one grid.

    Formats and the order of the stored axes may differ.

    Args:
        paths: Images and mask.

    Returns:
        Where the voxels of the first one lie.

    Raises:
        DataError: Naming the first one that cannot be read, or lies on another grid.
    """
    (first, geometry), *others = [(path, read_geometry(path)) for path in paths]
    for path, other in others:
        if other.shape != geometry.shape:
            raise DataError(
                f"{path} has shape {other.shape}, but {first} has {geometry.shape}; images and "
                "mask of a patient must agree."
            )
        # Of the corners, where two grids that differ by a small turn are farthest apart.
        ends = np.array([*product(*((0, n - 1) for n in geometry.shape))])
        apart = (other.affine - geometry.affine) @ np.c_[ends, np.ones(len(ends))].T
        if np.linalg.norm(apart[:3], axis=0).max() > _APART * min(geometry.spacing):
            raise DataError(
                f"{path} has another affine than {first}; resample images and mask of the "
                "patient to one grid."
            )
    return geometry


def check_finite(image: Tensor, channels: Sequence[str], paths: Sequence[Path]) -> None:
    """Refuses NaN and infinity.

    Args:
        image: (C, H, W, D).
        channels: Their names.
        paths: The file of every channel, or the one of all.

    Raises:
        DataError: Naming the file and the channel.
    """
    for n, (name, voxels) in enumerate(zip(channels, image, strict=True)):
        # One pass without a mask; NumPy sums in float64 seven times faster than PyTorch.
        if not np.isfinite(voxels.numpy().sum(dtype=np.float64)):
            raise DataError(
                f"{paths[n] if len(paths) > 1 else paths[0]}: channel {name} has NaN or infinite "
                "voxels; repair the file or leave the patient out."
            )


def _format(path: Path) -> Any:
    """The module that reads a file: ``header`` gives shape, channels and affine."""
    if path.is_dir():
        return dicom
    suffix = suffix_of(path)
    if suffix in (".mha", ".mhd"):
        return metaimage
    return nrrd if suffix in (".nrrd", ".nhdr") else nifti


log = logging.getLogger(__name__)


class CaseReader(VolumeReader):
    """Base of the readers of volumes, of any format; a subclass finds the files of every case.

    A case's files are its images in channel order (one file with all channels, or one each), and
    its mask under the role ``"label"``. A patient is a case; where several cases are one patient's,
    see `person`, they come to the same client and split.

    Args:
        path: The data. A ``centres.json`` or ``centres.csv`` there names the hospitals, see
            `readers.csv_files.named_centres`.
        channels: Channel names.
        regions: Label values of every region, by region name, in the order of the output.
        known_labels: Label values that may occur beside 0; another one stops the run.
        hospitals: Where no hospital is named: into how many contiguous blocks of cases to cut.
    """

    normalize: object = "zscore_nonzero"

    def __init__(
        self,
        path: Path,
        channels: Sequence[str],
        regions: Mapping[str, Sequence[int]],
        known_labels: Sequence[int],
        hospitals: int | None,
    ) -> None:
        self.path = path
        self.hospitals = hospitals
        self.channels = tuple(channels)
        self.regions = tuple(regions)
        self._region_labels = {name: tuple(values) for name, values in regions.items()}
        self._known_labels = (0, *known_labels)
        self._select: list[int] | None = None  # which of the file's channels, where not all
        self._cases: dict[str, list[Patient]] = {}  # of patients with several

    @abstractmethod
    def cases(self) -> list[Patient]:
        """Finds the files of all cases.

        Raises:
            DataError: If there are none.
        """

    def centres(self, cases: Sequence[str]) -> Mapping[str, str]:
        """Returns the hospital of each case that is known to come from one."""
        return named_centres(self.path, cases)

    def person(self, case: Patient) -> str:
        """Returns whose case it is: by itself, a patient of its own."""
        return case.id

    def patients(self) -> list[Patient]:
        """See `Reader.patients`."""
        cases = sorted(self.cases(), key=lambda case: case.id)
        centres = self.centres([case.id for case in cases])
        placed = [replace(case, centre=centres.get(case.id, case.centre)) for case in cases]
        return with_hospitals(self._persons(placed), self.hospitals)

    def _persons(self, cases: Sequence[Patient]) -> list[Patient]:
        """Joins the cases of each patient that has several."""
        by_person: dict[str, list[Patient]] = {}
        for case in cases:
            by_person.setdefault(self.person(case), []).append(case)
        self._cases = {n: held for n, held in by_person.items() if [c.id for c in held] != [n]}
        return [_joined(name, by_person[name]) for name in sorted(by_person)]

    def cases_of(self, patient: Patient) -> list[Patient]:
        """See `VolumeReader.cases_of`."""
        return self._cases.get(patient.id, [patient])

    def read(self, patient: Patient) -> dict[str, Tensor]:
        """See `VolumeReader.read`.

        Returns:
            ``image`` (C, H, W, D) float32 in RAS, each channel z-scored over its non-zero voxels
            (0 stays 0); ``label`` (R, H, W, D) uint8.

        Raises:
            DataError: See `raw`.
        """
        raw = self.raw(patient)
        return {**raw, "image": zscore(raw["image"])}

    def raw(self, patient: Patient) -> dict[str, Tensor]:
        """See `VolumeReader.raw`.

        Raises:
            DataError: For a file that is missing, torn, of another shape or affine, or that holds
                NaN, infinity or an unknown label value.
        """
        images = [path for role, path in patient.files.items() if role != "label"]
        mask = patient.files["label"]
        check_same_grid([*images, mask])
        image = self._load_images(images, whole="image" in patient.files)
        check_finite(image, self.channels, images)
        self._check_varied(image, images)
        label = self._to_regions(read_volume(mask).voxels, mask)
        return {"image": image, "label": label}

    def shape(self, patient: Patient) -> tuple[int, ...]:
        """See `VolumeReader.shape`."""
        return read_geometry(patient.files["label"]).shape

    def spacing(self, patient: Patient) -> tuple[float, ...]:
        """See `Reader.spacing`."""
        return read_geometry(next(iter(patient.files.values()))).spacing

    @property
    def exclusive(self) -> bool:
        """See `VolumeReader.exclusive`."""
        return are_exclusive(self._region_labels)

    def layout(self) -> dict[str, object]:
        """See `VolumeReader.layout`."""
        return {"files": None, "file_channels": list(self.channels), **self._labels()}

    def record(self) -> dict[str, object]:
        """See `Reader.record`."""
        return {"channels": list(self.channels), **self._labels()}

    def _labels(self) -> dict[str, object]:
        return {"regions": {name: list(values) for name, values in self._region_labels.items()}}

    def _load_images(self, paths: Sequence[Path], whole: bool) -> Tensor:
        """(C, H, W, D) float32, the chosen channels; `whole` says that a file has all of them."""
        if whole and self._select is not None:
            return read_volume(paths[0], self._select).voxels
        loaded = [read_volume(path).voxels for path in paths]
        for path, image in zip(paths, loaded, strict=True):
            if len(image) > 1:
                raise DataError(
                    f"{path} has {len(image)} channels, but needs 1; use the layout of MSD for "
                    "files that hold all modalities."
                )
        return torch.cat(loaded) if len(loaded) > 1 else loaded[0]

    def _check_varied(self, image: Tensor, paths: Sequence[Path]) -> None:
        """Refuses a channel of one value; zeros stand for a missing scan, and are said."""
        for channel, (name, voxels) in enumerate(zip(self.channels, image, strict=True)):
            first = voxels.view(-1)[0].item()
            if voxels.numel() == 1 or voxels.view(-1)[-1] != first or not (voxels == first).all():
                continue
            path = paths[channel] if len(paths) > 1 else paths[0]
            if first:
                raise DataError(
                    f"{path}: channel {name} has the value {first:g} in every voxel; copy the file "
                    "again or leave the patient out."
                )
            log.warning("%s: channel %s is 0 in every voxel, as if it were missing.", path, name)

    def _to_regions(self, label: Tensor, path: Path) -> Tensor:
        """(1, H, W, D) label values to (R, H, W, D) uint8."""
        if len(label) > 1:
            raise DataError(f"{path} holds {len(label)} masks; a patient has one, of label values.")
        values = label[0]
        codes = values.to(torch.uint8)
        strange = (codes != values) | ~_is_one_of(codes, self._known_labels)
        if strange.any():
            raise DataError(
                f"{path}: unknown label value {values[strange][0].item():g}; known: "
                f"{', '.join(map(str, self._known_labels))}. Check the mask, or name the values in "
                "data.reader."
            )
        masks = [_is_one_of(codes, values) for values in self._region_labels.values()]
        return torch.stack(masks).to(torch.uint8)


def _joined(name: str, cases: Sequence[Patient]) -> Patient:
    """One patient of all its cases, at one hospital and in one split."""
    first = cases[0]
    for case in cases[1:]:
        if case.centre != first.centre:
            raise DataError(
                f"Patient {name} is at {first.centre} (case {first.id}) and at {case.centre} (case "
                f"{case.id}); a patient belongs to one hospital: give different people different "
                "ids."
            )
        if case.split != first.split:
            raise DataError(
                f"Patient {name} is in {first.split} (case {first.id}) and in {case.split} (case "
                f"{case.id}); a patient belongs to one split: mend the lists."
            )
    if len(cases) == 1:
        return replace(first, id=name)
    files = {f"{case.id} {role}": file for case in cases for role, file in case.files.items()}
    return replace(first, id=name, files=files)


def _is_one_of(codes: Tensor, values: Sequence[int]) -> Tensor:
    """As torch.isin, several times faster for uint8: by a table of all 256 values."""
    table = np.zeros(256, dtype=bool)
    table[list(values)] = True
    return torch.from_numpy(table.take(codes.numpy()))
