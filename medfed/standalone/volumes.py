"""The one reader of volumes: NIfTI, NRRD, MetaImage and DICOM series, axes to right, front, head.

A volume is (C, H, W, D) float32 whose axes run towards the patient's right, front and head: RAS.
Nothing is interpolated; axes oblique to the patient's are taken for the nearest ones, and
:func:`as_stored` turns a result back, so that a mask lies on its scan in any viewer. SimpleITK
reads NRRD, MetaImage and DICOM, nibabel NIfTI and Analyze, of which torn files are refused.
"""

from __future__ import annotations

import gzip
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import dicom, itk
from .errors import DataError, first_line
from .files import refuse_special

if TYPE_CHECKING:
    from torch import Tensor

# Of a file: its sizes, how many values a voxel has, and (4, 4) from its voxels to mm in RAS.
Header = tuple[tuple[int, ...], int, NDArray[np.float64]]
_SHEAR = 0.01  # cosine between two axes, about half a degree
_APART = 0.1  # voxels by which the corners of two grids may differ, or a file's two affines
_PADDING = 1 << 20  # zeros that may follow the voxels of a packed file


@dataclass(frozen=True, eq=False)
class Geometry:
    """Where the voxels of a volume lie."""

    shape: tuple[int, int, int]  # (3,) voxels to the right, to the front and to the head
    affine: NDArray[np.float64]  # (4, 4) from these voxels to mm in RAS
    channels: int  # how many values a voxel has
    stored: NDArray[np.float64]  # (4, 4) from the voxels as the file has them to mm in RAS
    # (3, 2) how the file's axes become these, as nibabel's orientations write it.
    turn: NDArray[np.float64]

    @property
    def spacing(self) -> tuple[float, float, float]:
        """(3,) mm between voxels, to the right, to the front and to the head."""
        x, y, z = np.sqrt((self.affine[:3, :3] ** 2).sum(axis=0)).tolist()
        return x, y, z


class Volume(NamedTuple):
    """A volume in memory."""

    voxels: Tensor  # (C, H, W, D) float32, contiguous, RAS
    geometry: Geometry  # where they lie


def read_geometry(path: Path, towards: str = "RAS", series: Sequence[str] = ()) -> Geometry:
    """Reads the header of a volume, and no voxel; its axes run `towards`, the affine to RAS."""
    return _geometry(path, _by_format(path, series)[0](), towards)


def _geometry(path: Path, header: Header, towards: str = "RAS") -> Geometry:
    from nibabel.orientations import axcodes2ornt, inv_ornt_aff, io_orientation, ornt_transform

    shape, channels, stored = header
    steps = np.linalg.norm(stored[:3, :3], axis=0)
    if not np.isfinite(stored).all() or steps.min() < 1e-9:
        raise DataError(f"{path} has no valid affine; its orientation is unknown: convert it anew.")
    axes = stored[:3, :3] / steps
    if np.abs(axes.T @ axes - np.eye(3)).max() > _SHEAR:
        what = f"{path} is sheared (its axes are not at right angles)"
        raise DataError(f"{what}; resample it to an upright grid or leave the patient out.")
    # Each stored axis goes to the nearest one of the patient: voxels are moved, never interpolated.
    turn = io_orientation(stored)
    if sorted(turn[:, 0].tolist()) != [0, 1, 2]:  # voxels of which one side is next to nothing
        raise DataError(f"{path} has no valid affine; its orientation is unknown: convert it anew.")
    turn = ornt_transform(turn, axcodes2ornt(towards))
    x, y, z = (int(shape[at]) for at in np.argsort(turn[:, 0]))
    affine = np.asarray(stored @ inv_ornt_aff(turn, shape), dtype=np.float64)
    return Geometry((x, y, z), affine, channels, stored, turn)


def read_geometries(paths: Sequence[Path], series: Sequence[str] = ()) -> list[Geometry]:
    """Reads the headers of several volumes."""
    reads = [_by_format(path, series)[0] for path in paths]
    return list(map(_geometry, paths, [read() for read in reads]))


def read_volume(
    path: Path, channels: Sequence[int] | None = None, series: Sequence[str] = ()
) -> Volume:
    """Reads a volume, (C, H, W, D) float32, or some of its values per voxel."""
    return read_together([path], channels, series)[0]


def _volume(
    path: Path, array: NDArray[Any], geometry: Geometry, channels: Sequence[int] | None
) -> Volume:
    import torch  # here: the processes that cut patches need none of it
    from nibabel.orientations import apply_orientation

    if array.dtype.kind not in "buif":
        raise DataError(f"{path} has voxels of type {array.dtype}; write real numbers.")
    array = apply_orientation(array.reshape(*array.shape[:3], -1), geometry.turn)
    if array.shape != (wanted := (*geometry.shape, geometry.channels)):
        what = f"{path} holds voxels of shape {array.shape}, but its header says {wanted}"
        raise DataError(f"{what}; convert it anew, or leave the patient out.")
    taken = range(array.shape[3]) if channels is None else channels
    if max(taken) >= array.shape[3]:
        what = f"{path} has {array.shape[3]} channels, but {max(taken) + 1} are needed"
        raise DataError(f"{what}; mend the file or name its channels.")
    loaded = np.empty((len(taken), *array.shape[:3]), dtype=np.float32)
    for target, channel in zip(loaded, taken, strict=True):
        target[:] = array[..., channel]
    return Volume(torch.from_numpy(loaded), geometry)


def stored_voxels(path: Path) -> NDArray[Any]:
    """Returns all voxels of a volume, (i, j, k) or (i, j, k, C), in the order of the file."""
    return _by_format(path)[1]()


def as_stored(array: NDArray[Any], geometry: Geometry) -> NDArray[Any]:
    """Turns (H, W, D[, n]) in RAS onto the file's axes, whose affine is ``geometry.stored``."""
    from nibabel.orientations import apply_orientation, axcodes2ornt, ornt_transform

    back = ornt_transform(axcodes2ornt("RAS"), geometry.turn)
    return np.ascontiguousarray(apply_orientation(array, back))


def check_same_grid(paths: Sequence[Path], geometries: Sequence[Geometry]) -> None:
    """Checks that all volumes of a patient lie on one grid."""
    first, geometry = paths[0], geometries[0]
    for path, other in zip(paths[1:], geometries[1:], strict=True):
        if other.shape != geometry.shape:
            what = f"{path} has shape {other.shape}, but {first} has {geometry.shape}"
            raise DataError(f"{what}; images and mask of a patient must agree.")
        # Of the corners, where two grids that differ by a small turn are farthest apart.
        ends = np.array([*product(*((0, n - 1) for n in geometry.shape))])
        apart = (other.affine - geometry.affine) @ np.c_[ends, np.ones(len(ends))].T
        if np.linalg.norm(apart[:3], axis=0).max() > _APART * min(geometry.spacing):
            mend = "resample images and mask of the patient to one grid"
            raise DataError(f"{path} has another affine than {first}; {mend}.")


def read_together(
    paths: Sequence[Path], channels: Sequence[int] | None = None, series: Sequence[str] = ()
) -> list[Volume]:
    """Reads all volumes of a patient, which must lie on one grid; `channels` of the first."""
    reads = [_by_format(path, series) for path in paths]
    stored = [(header(), voxels()) for header, voxels in reads]
    geometries = [_geometry(path, header) for path, (header, _) in zip(paths, stored, strict=True)]
    check_same_grid(paths, geometries)
    # Each is taken off the list: its array is free as soon as it is float32.
    return [
        _volume(path, stored.pop(0)[1], geometry, None if n else channels)
        for n, (path, geometry) in enumerate(zip(paths, geometries, strict=True))
    ]


def _by_format(
    path: Path, series: Sequence[str] = ()
) -> tuple[Callable[[], Header], Callable[[], NDArray[Any]]]:
    """What reads the header and what reads the voxels of a file, or of a folder of DICOM."""
    if path.is_dir():
        return partial(dicom.header, path, series), partial(dicom.voxels, path, series)
    if path.suffix.lower() in (".mha", ".mhd", ".nrrd", ".nhdr"):
        return partial(itk.header, path), partial(itk.voxels, path)
    return partial(nifti_header, path), partial(_opened, path, with_voxels=True)


def nifti_header(path: Path) -> Header:
    """Reads the stored sizes, values per voxel and the affine to mm in RAS."""
    image = _opened(path)
    shape = image.shape
    if len(shape) not in (3, 4) or min(shape) < 1:
        raise DataError(f"{path} has shape {shape}; a volume has three axes, or four.")
    scale, coded = 1.0, [not hasattr(image.header, "default_x_flip")]  # but in Analyze
    if hasattr(image, "get_sform"):
        scale = {1: 1e3, 3: 1e-3}.get(int(image.header["xyzt_units"]) & 7, 1.0)  # metre, micron
        coded = [image.header[f"{form}_code"] > 0 for form in ("sform", "qform")]
        if all(coded):
            with np.errstate(invalid="ignore"):  # infinite ones are refused later
                apart = np.abs(image.affine - image.get_qform()).max()
            if apart > _APART * min(image.header.get_zooms()[:3]):
                itk.say_once(path, "has a sform and a qform that differ; the sform counts")
    if not any(coded):
        itk.say_once(path, itk.SIDE)
    affine = image.affine * np.array([scale, scale, scale, 1.0])[:, None]
    return tuple(shape[:3]), shape[3] if len(shape) == 4 else 1, affine


def _opened(path: Path, with_voxels: bool = False) -> Any:
    """A file whose header has been read, or all its voxels, with slope and intercept applied."""
    from nibabel import load  # imported here, as it takes a while
    from nibabel.spatialimages import HeaderDataError

    if not os.path.isfile(path):
        refuse_special(path)
    try:
        image = load(path)
        if hasattr(image, "get_qform"):
            image.get_qform()  # may have numbers of no turn
            if image.header.is_single and image.dataobj.offset < image.header.single_vox_offset:
                raise HeaderDataError("it says that the voxels begin within it")
        return np.asanyarray(_unpacked(path, image).dataobj) if with_voxels else image
    except FileNotFoundError:
        mixed = f"{path} has an ending of small and capital letters; name it {path.name.lower()}."
        raise (DataError(mixed) if path.exists() else itk.missing(path)) from None
    except HeaderDataError as error:
        raise DataError(f"{path} has a bad header ({first_line(error)}); convert it.") from error
    except Exception as error:  # all errors that a library raises on bad bytes
        raise itk.corrupt(path, error) from error


def _unpacked(path: Path, image: Any) -> Any:
    """An image of which a packed file is unpacked as a whole, so that its checksum is verified."""
    if path.suffix.lower() != ".gz":
        return image
    stored = image.dataobj
    length = int(stored.offset) + math.prod(image.shape) * int(stored.dtype.itemsize)
    with gzip.open(path) as file:
        data = file.read(length + _PADDING)
        if file.read(1):
            raise ValueError(f"it unpacks to more than the {length} bytes of its header")
    if len(data) < length or any(data[length:]):
        raise ValueError(f"{len(data)} bytes are packed in it; its header says {length}")
    return type(image).from_bytes(data)
