"""DICOM series for :mod:`medfed.standalone.volumes`: a folder of slices, by SimpleITK.

SimpleITK would skip a damaged file, only warn about a missing slice and read a tilted gantry as
upright, so this module first compares the slices' headers.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .errors import DataError
from .itk import affine_of, corrupt, itk_header, missing, reason

_SERIES = "0020|000e"
_UNEVEN = 0.05  # of the distance of two slices
_TILT = 0.01  # tangent of the angle between the line through the slices and their normal


class _Slice(NamedTuple):
    """The header of one file.

    Attributes:
        path: The file.
        series: Its series.
        size: (3,) voxels; the third is above 1 if the file holds a whole volume.
        channels: Values per voxel.
        affine: (4, 4) to mm in RAS.
    """

    path: Path
    series: str
    size: tuple[int, int, int]
    channels: int
    affine: NDArray[np.float64]


def is_series(folder: Path) -> bool:
    """Says whether a folder holds DICOM files, by their names or first bytes."""
    return any(_is_dicom(path) for path in sorted(folder.iterdir()))


def files(folder: Path) -> list[Path]:
    """Lists the DICOM files of a folder, sorted by name.

    Raises:
        DataError: If there is none.
    """
    if not folder.is_dir():
        raise missing(folder)
    slices = sorted(path for path in folder.iterdir() if _is_dicom(path))
    if not slices:
        raise DataError(
            f"{folder} holds no DICOM files; name a volume's file, or the folder of one series."
        )
    return slices


def in_order(folder: Path) -> list[Path]:
    """Lists the files of a series in the order of the slices that :func:`voxels` returns.

    Raises:
        DataError: See :func:`header`.
    """
    return [one.path for one in _checked(folder)[0]]


def series_uid(folder: Path) -> str:
    """Returns the SeriesInstanceUID; empty where the files have none.

    Raises:
        DataError: See :func:`header`.
    """
    return _checked(folder)[0][0].series


def header(folder: Path) -> tuple[tuple[int, ...], int, NDArray[np.float64]]:
    """Reads no voxels.

    Args:
        folder: Holds the slices of one series, or one file with a whole volume.

    Returns:
        The sizes along the rows, the columns and the slices, values per voxel, and the affine
        (4, 4) to mm in RAS.

    Raises:
        DataError: If a file is damaged, a slice is missing, the slices are sheared or of different
            sizes, or there are several series or a single slice.
    """
    slices, step = _checked(folder)
    first = slices[0]
    if len(slices) == 1:
        return first.size, first.channels, first.affine
    affine = first.affine.copy()
    affine[:3, 2] = step
    return (*first.size[:2], len(slices)), first.channels, affine


def voxels(folder: Path) -> NDArray[Any]:
    """Reads all voxels, with slope and intercept applied.

    Returns:
        (i, j, k) or (i, j, k, C) float32.

    Raises:
        DataError: See :func:`header`.
    """
    import SimpleITK as sitk

    reader = sitk.ImageSeriesReader()
    reader.SetFileNames([str(path) for path in in_order(folder)])
    reader.SetOutputPixelType(sitk.sitkFloat32)  # slices may differ in slope
    try:
        array = sitk.GetArrayFromImage(reader.Execute())
    except RuntimeError as error:
        raise corrupt(folder, reason(error)) from error
    return np.asarray(array.transpose(2, 1, 0, *range(3, array.ndim)))


def _checked(folder: Path) -> tuple[list[_Slice], NDArray[np.float64]]:
    """The slices in spatial order, and the step from one to the next."""
    listed = files(folder)
    times = tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in listed)
    return _compared(folder, times)


@lru_cache(maxsize=64)
def _compared(
    folder: Path, times: tuple[tuple[Path, int, int], ...]
) -> tuple[list[_Slice], NDArray[np.float64]]:
    slices = [_header(path) for path, _, _ in times]
    series = Counter(one.series for one in slices)
    if len(series) > 1:
        raise DataError(
            f"{folder} holds {len(series)} DICOM series (of {', '.join(map(str, series.values()))} "
            "files); keep one series per folder."
        )
    first = slices[0]
    if any(one.channels != 1 for one in slices):
        raise DataError(f"{folder} holds colour images; a scan has one value per voxel.")
    if len(slices) == 1 and first.size[2] > 1:
        return slices, first.affine[:3, 2]
    if len(slices) == 1:
        raise DataError(f"{folder} holds a single slice; a volume needs several.")
    for one in slices[1:]:
        if one.size != first.size or not np.allclose(
            one.affine[:3, :2], first.affine[:3, :2], atol=1e-3
        ):
            raise DataError(
                f"{one.path} has another size, spacing or direction than {first.path.name}; keep "
                "the slices of one volume in the folder."
            )
    return _in_order(folder, slices)


def _in_order(folder: Path, slices: list[_Slice]) -> tuple[list[_Slice], NDArray[np.float64]]:
    normal = np.cross(slices[0].affine[:3, 0], slices[0].affine[:3, 1])
    normal /= np.linalg.norm(normal)
    height = {one.path: float(normal @ one.affine[:3, 3]) for one in slices}
    slices = sorted(slices, key=lambda one: height[one.path])
    gaps = np.diff([height[one.path] for one in slices])
    usual = float(np.median(gaps))
    for lower, upper, gap in zip(slices, slices[1:], gaps.tolist(), strict=False):
        if abs(gap - usual) <= max(_UNEVEN * usual, 0.01):
            continue
        names = f"{lower.path.name} and {upper.path.name}"
        if gap < 0.5 * usual:
            raise DataError(
                f"{folder}: the slices {names} are {gap:.3g} mm apart, the others {usual:.3g} mm; "
                "keep each slice once."
            )
        raise DataError(
            f"{folder}: a slice is missing between {names} ({gap:.3g} mm apart, the others "
            f"{usual:.3g} mm); export the series again or leave the patient out."
        )
    way = slices[-1].affine[:3, 3] - slices[0].affine[:3, 3]
    along = float(normal @ way)
    if along <= 0:
        raise DataError(f"{folder}: all slices are at the same place; export the series again.")
    tilt = float(np.linalg.norm(way - along * normal)) / along
    if tilt > _TILT:
        raise DataError(
            f"{folder} is sheared (a gantry tilted by {np.degrees(np.arctan(tilt)):.3g} degrees); "
            "convert it to an upright volume, such as by dcm2niix, or leave the patient out."
        )
    return slices, way / (len(slices) - 1)


def _header(path: Path) -> _Slice:
    reader = itk_header(path, "GDCMImageIO")
    size = (*reader.GetSize(), 1)[:3]
    if reader.GetDimension() != 3:
        raise DataError(f"{path} has {reader.GetDimension()} dimensions; a slice has three.")
    uid = reader.GetMetaData(_SERIES) if reader.HasMetaDataKey(_SERIES) else ""
    return _Slice(path, uid.strip(), size, reader.GetNumberOfComponents(), affine_of(reader))


def _is_dicom(path: Path) -> bool:
    if path.name.startswith(".") or path.name.upper() == "DICOMDIR" or not path.is_file():
        return False
    if path.suffix.lower() in (".dcm", ".ima"):
        return True
    with path.open("rb") as file:
        return file.read(132)[128:] == b"DICM"
