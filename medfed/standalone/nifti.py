"""NIfTI and Analyze files, read by nibabel: torn ones, which SimpleITK misses, are refused."""

from __future__ import annotations

import gzip
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import DataError, first_line
from .files import refuse_special
from .itk import SIDE, corrupt, missing, say_once

_APART = 0.1  # voxels by which a file's two affines may differ
_PADDING = 1 << 20  # zeros that may follow the voxels


def header(path: Path) -> tuple[tuple[int, ...], int, NDArray[np.float64]]:
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
                say_once(path, "has a sform and a qform that differ; the sform counts")
    if not any(coded):
        say_once(path, SIDE)
    affine = image.affine * np.array([scale, scale, scale, 1.0])[:, None]
    return tuple(shape[:3]), shape[3] if len(shape) == 4 else 1, affine


def voxels(path: Path) -> NDArray[Any]:
    """Returns all voxels in the order of the file, with slope and intercept applied."""
    array: NDArray[Any] = _opened(path, with_voxels=True)
    return array


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
        raise (DataError(mixed) if path.exists() else missing(path)) from None
    except HeaderDataError as error:
        raise DataError(f"{path} has a bad header ({first_line(error)}); convert it.") from error
    except Exception as error:  # all errors that a library raises on bad bytes
        raise corrupt(path, error) from error


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
