"""NIfTI files as arrays in RAS orientation, checked; z-scores over the voxels that are not zero.

By nibabel alone: its ``as_closest_canonical`` is what MONAI's ``Orientation`` does, and MONAI's
transforms spend half of their time on tensors that carry metadata along.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medfed.common.errors import DataError, first_line

_INFLATION = 1032  # deflate makes no more bytes out of one
_PADDING = 1 << 20  # zeros that may follow the voxels


def load_ras(path: Path, channels: Sequence[int] | None = None) -> Tensor:
    """Reads a volume, or the volumes of a 4-D file, with axes towards right, anterior, superior.

    A compressed file is unpacked as a whole, so that its own checksum is compared: nibabel reads
    no further than the last voxel, and would take flipped bits for voxels. Nothing is allocated
    for what a header claims and a file of this length cannot hold.

    Args:
        path: ``.nii`` or ``.nii.gz`` of shape (H, W, D) or (H, W, D, C).
        channels: Which of a 4-D file's volumes to return, in this order; None returns all.

    Returns:
        (C, H, W, D) float32, contiguous, with the file's slope and intercept applied.

    Raises:
        DataError: If the file cannot be read, has another number of axes, or lacks a channel.
    """
    from nibabel import as_closest_canonical

    image = _opened(path)
    try:
        length = _check_length(path, image)
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                data = file.read(length + _PADDING)
                if file.read(1):
                    raise ValueError(f"more is packed in it than the {length} bytes of its header")
            if len(data) < length or any(data[length:]):
                raise ValueError(f"{len(data)} bytes are packed in it, its header says {length}")
            image = type(image).from_bytes(data)
        array = np.asanyarray(as_closest_canonical(image).dataobj)
    except DataError:
        raise
    except Exception as error:  # whatever a library raises on bad bytes
        raise _corrupt(path, error) from error
    if array.dtype.kind not in "buif":
        raise DataError(f"{path} has voxels of type {array.dtype}; write real numbers.")
    if array.ndim not in (3, 4):
        raise DataError(f"{path} has shape {array.shape}; a volume has three axes, or four.")
    array = array.reshape(*array.shape[:3], -1)
    taken = range(array.shape[3]) if channels is None else channels
    if max(taken) >= array.shape[3]:
        raise DataError(
            f"{path} has {array.shape[3]} channels, but {max(taken) + 1} are needed; mend the "
            "file or name the channels as they are."
        )
    loaded = np.empty((len(taken), *array.shape[:3]), dtype=np.float32)
    for target, channel in zip(loaded, taken, strict=True):
        target[:] = array[..., channel]
    return torch.from_numpy(loaded)


def _check_length(path: Path, image: Any) -> int:
    """The bytes that the header speaks of, which the file must be able to hold."""
    if not image.shape or min(image.shape) < 1:
        raise DataError(f"{path} has shape {image.shape}, in which nothing can be; write it anew.")
    voxels = image.dataobj
    wanted: int = int(voxels.offset) + math.prod(image.shape) * int(voxels.dtype.itemsize)
    found = path.stat().st_size
    most = found * _INFLATION if path.suffix == ".gz" else found
    if path.suffix in (".gz", ".nii") and (wanted > most or wanted < 0):
        raise DataError(
            f"{path} is truncated or corrupt ({found} bytes cannot hold the {wanted} of its "
            "header); copy it again or leave the patient out."
        )
    return wanted


def zscore(image: Tensor) -> Tensor:
    """Normalises each channel over its voxels that are not zero; zero stays zero.

    Args:
        image: (C, *spatial) float32; changed in place.

    Returns:
        The same tensor. A channel of one value, or without any, becomes zero.

    Example:
        >>> zscore(torch.tensor([[0.0, 1.0, 3.0]]))
        tensor([[ 0., -1.,  1.]])
    """
    for channel in image:
        inside = channel != 0
        voxels = channel[inside]
        if len(voxels):
            mean, std = voxels.mean().item(), voxels.std(correction=0).item()
            channel[inside] = (voxels - mean) / (std or 1.0)
    return image


def check_geometry(paths: Sequence[Path]) -> None:
    """Checks, from the headers alone, that all files of a patient lie on one grid.

    Args:
        paths: Images and mask.

    Raises:
        DataError: Naming the first file that is missing, unreadable, or on another grid.
    """
    (first, shape, affine), *others = [(path, *read_header(path)) for path in paths]
    for path, other_shape, other_affine in others:
        if other_shape != shape:
            raise DataError(
                f"{path} has shape {other_shape}, but {first} has {shape}; images and mask of a "
                "patient must agree."
            )
        if not np.allclose(other_affine, affine, atol=1e-3):
            raise DataError(
                f"{path} has another affine than {first}; resample images and mask of the "
                "patient to one grid."
            )


def read_header(path: Path) -> tuple[tuple[int, ...], np.ndarray]:
    """Reads no voxels.

    Args:
        path: A NIfTI file.

    Returns:
        The three spatial sizes as they are stored, and the affine (4, 4).

    Raises:
        DataError: If the file is missing, unreadable, flat, or has no valid affine.
    """
    image = _opened(path)
    if len(image.shape) < 3:
        raise DataError(f"{path} has shape {image.shape}; a volume needs three dimensions.")
    affine = image.affine
    if not np.isfinite(affine).all() or abs(np.linalg.det(affine[:3, :3])) < 1e-9:
        raise DataError(f"{path} has no valid affine; its orientation is unknown: convert it anew.")
    return tuple(image.shape[:3]), affine


def ras_spacing(path: Path) -> tuple[float, float, float]:
    """Reads the spacing of a NIfTI file from its header alone.

    Args:
        path: A NIfTI file of any orientation.

    Returns:
        mm along the axes to the right, to the front and to the head, as `load_ras` turns them.

    Raises:
        DataError: If the header cannot be read.
    """
    from nibabel.affines import voxel_sizes
    from nibabel.orientations import io_orientation

    affine = read_header(path)[1]
    sizes = voxel_sizes(affine)
    towards = io_orientation(affine)[:, 0].astype(int).tolist()
    x, y, z = (float(sizes[towards.index(axis)]) for axis in range(3))
    return x, y, z


def _opened(path: Path) -> Any:
    """A file whose header has been read."""
    from nibabel import load  # late, as it takes a while

    try:
        return load(path)
    except FileNotFoundError:
        raise DataError(f"{path} is missing; copy it there or leave the patient out.") from None
    except Exception as error:  # whatever a library raises on bad bytes
        raise _corrupt(path, error) from error


def _corrupt(path: Path, error: Exception) -> DataError:
    why = first_line(error)
    return DataError(
        f"{path} is truncated or corrupt ({why}); copy it again or leave the patient out."
    )
