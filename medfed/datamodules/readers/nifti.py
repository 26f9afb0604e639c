"""NIfTI files for :mod:`medfed.datamodules.readers.volumes`: header and voxels as stored.

nibabel reads them and applies slope and intercept. This module also checks a file's length and a
compressed file's checksum, which no library does.
"""

from __future__ import annotations

import gzip
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medfed.common.errors import DataError, first_line

_INFLATION = 1032  # the most bytes that deflate unpacks from one
_PADDING = 1 << 20  # zeros that may follow the voxels


def header(path: Path) -> tuple[tuple[int, ...], int, NDArray[np.float64]]:
    """Reads the header only.

    Args:
        path: ``.nii`` or ``.nii.gz`` of shape (i, j, k) or (i, j, k, C).

    Returns:
        The three spatial sizes as they are stored, C, and the affine (4, 4) to mm in RAS.

    Raises:
        DataError: If the file is missing, unreadable, or has another number of axes.
    """
    image = _opened(path)
    shape = image.shape
    if len(shape) < 3:
        raise DataError(f"{path} has shape {shape}; a volume needs three dimensions.")
    if len(shape) > 4:
        raise DataError(f"{path} has shape {shape}; a volume has three axes, or four.")
    return tuple(shape[:3]), shape[3] if len(shape) == 4 else 1, image.affine


def voxels(path: Path) -> NDArray[Any]:
    """Reads all voxels, with slope and intercept applied.

    A compressed file is unpacked as a whole, so that its checksum is verified: nibabel stops at the
    last voxel and would accept flipped bits. No memory is allocated for a size that a file of this
    length cannot hold.

    Args:
        path: See :func:`header`.

    Returns:
        (i, j, k) or (i, j, k, C).

    Raises:
        DataError: If the file is truncated or corrupt.
    """
    image = _opened(path)
    try:
        length = _check_length(path, image)
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                data = file.read(length + _PADDING)
                if file.read(1):
                    raise ValueError(f"it unpacks to more than the {length} bytes of its header")
            if len(data) < length or any(data[length:]):
                raise ValueError(f"{len(data)} bytes are packed in it; its header says {length}")
            image = type(image).from_bytes(data)
        return np.asanyarray(image.dataobj)
    except DataError:
        raise
    except Exception as error:  # all errors that a library raises on bad bytes
        raise corrupt(path, error) from error


def _check_length(path: Path, image: Any) -> int:
    """The number of bytes that the header states, which the file must be able to hold."""
    if not image.shape or min(image.shape) < 1:
        raise DataError(f"{path} has shape {image.shape}, which holds no voxels; write it again.")
    stored = image.dataobj
    wanted: int = int(stored.offset) + math.prod(image.shape) * int(stored.dtype.itemsize)
    size = path.stat().st_size
    most = size * _INFLATION if path.suffix == ".gz" else size
    if path.suffix in (".gz", ".nii") and (wanted > most or wanted < 0):
        raise DataError(
            f"{path} is truncated or corrupt ({size} bytes cannot hold the {wanted} of its "
            "header); copy it again or leave the patient out."
        )
    return wanted


def _opened(path: Path) -> Any:
    """A file whose header has been read."""
    from nibabel import load  # imported here, as it takes a while

    try:
        return load(path)
    except FileNotFoundError:
        raise missing(path) from None
    except Exception as error:  # all errors that a library raises on bad bytes
        raise corrupt(path, error) from error


def missing(path: Path) -> DataError:
    """The sentence about a missing file.

    Example:
        >>> str(missing(Path("a.nii")))
        'a.nii is missing; copy it there or leave the patient out.'
    """
    return DataError(f"{path} is missing; copy it there or leave the patient out.")


def corrupt(path: Path, error: Exception) -> DataError:
    """The sentence about a file that cannot be read.

    Example:
        >>> str(corrupt(Path("a.nii"), ValueError("it ends too early")))
        'a.nii is truncated or corrupt (it ends too early); copy it again or leave the patient out.'
    """
    why = first_line(error)
    return DataError(
        f"{path} is truncated or corrupt ({why}); copy it again or leave the patient out."
    )
