"""NRRD files for :mod:`medfed.datamodules.readers.volumes`, by SimpleITK.

SimpleITK does not verify a compressed file's checksum, so this module does.
"""

from __future__ import annotations

import math
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medfed.common.errors import DataError
from medfed.datamodules.readers.metaimage import corrupt, inflated, missing

_LINE = 256  # characters of a field; only user-defined pairs may be longer
_HEADER_BYTES = 1 << 16  # longer than any header; in a .nrrd the voxels follow
_INFLATION = 1032  # the most bytes that deflate unpacks from one
LPS = np.diag([-1.0, -1.0, 1.0, 1.0])  # ITK's axes run to the left and to the back


def header(path: Path) -> tuple[tuple[int, ...], int, NDArray[np.float64]]:
    """Reads the header only.

    Args:
        path: A ``.nrrd`` file.

    Returns:
        The three spatial sizes as they are stored, values per voxel, and the affine (4, 4) to mm
        in RAS.

    Raises:
        DataError: If the file is missing or unreadable, or is not a volume.
    """
    _head(path)
    reader = itk_header(path, "NrrdImageIO")
    size, channels = reader.GetSize(), reader.GetNumberOfComponents()
    wanted = _length(reader)
    if len(size) != 3 or min(size) < 2:
        raise DataError(
            f"{path} has shape {size}; a volume needs three dimensions, and a separate file for "
            "every channel."
        )
    available = path.stat().st_size
    if wanted > available * _INFLATION:
        raise DataError(
            f"{path} is truncated or corrupt ({available} bytes cannot hold the {wanted} of its "
            "header); copy it again or leave the patient out."
        )
    return tuple(size), channels, affine_of(reader)


def voxels(path: Path) -> NDArray[Any]:
    """Reads all voxels.

    Returns:
        (i, j, k) or (i, j, k, C).

    Raises:
        DataError: If the file is truncated or corrupt.
    """
    import SimpleITK as sitk

    text, start = _head(path)
    reader = itk_header(path, "NrrdImageIO")
    try:
        if re.search(r"^encoding: *gz", text, re.MULTILINE | re.IGNORECASE):
            inflated(path.read_bytes()[start:], _length(reader))
        array = sitk.GetArrayFromImage(reader.Execute())
    except zlib.error as error:
        raise corrupt(path, error) from error
    except RuntimeError as error:
        raise corrupt(path, reason(error)) from error
    return np.asarray(array.transpose(2, 1, 0, *range(3, array.ndim)))


def affine_of(image: Any) -> NDArray[np.float64]:
    """Returns the affine of a SimpleITK image or reader of three dimensions, to mm in RAS."""
    affine = np.eye(4)
    affine[:3, :3] = np.reshape(image.GetDirection(), (3, 3)) * image.GetSpacing()
    affine[:3, 3] = image.GetOrigin()
    return np.asarray(LPS @ affine)


def reason(error: Exception) -> ValueError:
    r"""The last line of SimpleITK's message, which holds the reason.

    Example:
        >>> reason(RuntimeError("Exception thrown in SimpleITK\nITK ERROR: R(0x1): no data\n"))
        ValueError('no data')
    """
    lines = [line for line in str(error).splitlines() if line.strip()] or ["no reason given"]
    return ValueError(lines[-1].split("): ")[-1].removeprefix("sitk::ERROR: ").strip(" ."))


def itk_header(path: Path, kind: str) -> Any:
    """Lets SimpleITK read a header.

    Args:
        path: The file.
        kind: The name of ITK's reader of the format, such as ``"NrrdImageIO"``.

    Returns:
        SimpleITK's ``ImageFileReader``, which has read no voxel yet.

    Raises:
        DataError: If the file is truncated or corrupt.
    """
    import SimpleITK as sitk  # imported here, as it takes a while

    reader = sitk.ImageFileReader()
    reader.SetImageIO(kind)
    reader.SetFileName(str(path))
    try:
        reader.ReadImageInformation()
    except RuntimeError as error:
        raise corrupt(path, reason(error)) from error
    return reader


def _length(reader: Any) -> int:
    """Bytes of all voxels."""
    import SimpleITK as sitk

    bits = re.search(r"8|16|32|64", sitk.GetPixelIDValueAsString(reader.GetPixelID()))
    each = int(bits[0]) // 8 if bits else 1
    return int(math.prod(reader.GetSize()) * reader.GetNumberOfComponents() * each)


def _head(path: Path) -> tuple[str, int]:
    """The lines of the header, and the start of the voxels if they follow it."""
    try:
        with path.open("rb") as file:
            text = file.read(_HEADER_BYTES)
    except FileNotFoundError:
        raise missing(path) from None
    except OSError as error:
        raise corrupt(path, error) from error
    end = re.search(rb"\r?\n\r?\n", text)
    head = text[: end.start() if end else None].decode("latin-1")
    for line in head.splitlines():
        if len(line) > _LINE and ":=" not in line:  # SimpleITK would crash on it
            raise corrupt(path, ValueError(f"a header line has {len(line)} characters"))
    if re.search(r"^data ?file:", head, re.MULTILINE | re.IGNORECASE):
        raise DataError(f"{path} names voxels in other files; write the volume as one .nrrd file.")
    return head, end.end() if end else len(text)
