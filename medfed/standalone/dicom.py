"""DICOM series for :mod:`medfed.standalone.volumes`: a folder of slices, by SimpleITK.

SimpleITK would skip a damaged file, only warn about a missing slice, read a tilted gantry as
upright, and guess where the frames of one file lie, so this module first compares the headers of
slices and frames. pydicom tells which files are images.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .errors import DataError, few, first_line
from .files import is_visible
from .itk import LPS, affine_of, corrupt, intact, itk_header, missing
from .names import fold

log = logging.getLogger(__name__)
Affine = NDArray[np.float64]  # (4, 4) to mm in RAS
Times = tuple[tuple[Path, int, int], ...]  # files, their sizes and times of change
# A file without the preamble begins with a group of the header, of either spelling.
_BEGINS = re.compile(
    rb"\x02\x00[\x00-\x02]\x00UL\x04\x00|\x08\x00[\x00-\x18]\x00(UI|CS|UL|..\x00\x00)", re.DOTALL
)
_INVERTED = "MONOCHROME1"
_TAGS = ("SeriesInstanceUID", "ModalityLUTSequence", "PhotometricInterpretation")
_OF_SERIES = ("SeriesInstanceUID", "SeriesDescription")
_SCALE = ("RescaleSlope", "RescaleIntercept")
_PLACE = {"ImagePositionPatient": 3, "ImageOrientationPatient": 6, "PixelSpacing": 2}
_FRAMES = ("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence")
_UNREAD = ("HTJ2K", "High-Throughput", "MPEG", "HEVC", "JPIP", "SMPTE")  # compressions, by name
_UNEVEN = 0.05  # of the distance of two slices
_FORMAT = "GDCMImageIO"
_TILT = 0.01  # tangent of the angle between the line through the slices and their normal


class _Slice(NamedTuple):
    """The header of one file, or of one frame of a file."""

    path: Path  # the file
    series: str
    size: tuple[int, int, int]  # (3,) voxels; the third is the number of frames
    channels: int  # values per voxel
    affine: Affine  # (4, 4) to mm in RAS
    inverted: bool  # whether white is 0
    frame: int | None = None  # the number of the frame from 0, where a file has several

    @property
    def name(self) -> str:
        """The file's name, with the number of the frame."""
        return self.path.name if self.frame is None else f"frame {self.frame + 1}"


def is_series(folder: Path) -> bool:
    """Says whether a folder holds DICOM files, by their names or first bytes."""
    return any(_is_dicom(path) for path in sorted(folder.iterdir()))


def files(folder: Path, series: Sequence[str] = ()) -> list[Path]:
    """Lists the images of a folder, or of the series named there; other objects are left out."""
    images = _times(path for path, other in _kinds(folder).items() if other is None)
    return [time[0] for time in images if not series or _is_named(_summary(*time)[1], series)]


def others(folder: Path) -> dict[Path, str]:
    """Lists the DICOM objects of a folder that are no images, such as structures and reports."""
    return {path: other for path, other in _kinds(folder).items() if other is not None}


def _kinds(folder: Path) -> dict[Path, str | None]:
    """The DICOM files of a folder: None for images, and the kind of object for others."""
    if not folder.is_dir():
        raise missing(folder)
    times = _times(path for path in sorted(folder.iterdir()) if _is_dicom(path))
    kinds = {time[0]: _summary(*time)[0] for time in times}
    if None not in kinds.values():
        only = f" but {few(sorted({str(kind) for kind in kinds.values()}))}" if kinds else ""
        what = f"{folder} holds no DICOM {'images' + only if kinds else 'files'}"
        raise DataError(f"{what}; name a volume's file, or the folder of one series.")
    return kinds


def _is_named(series: tuple[str, str], names: Sequence[str]) -> bool:
    """Says whether the UID or the title of a series is among names."""
    return bool({*map(fold, map(str.casefold, names))} & {*map(str.casefold, series)})


def _times(paths: Iterable[Path]) -> Times:
    return tuple((path, (at := path.stat()).st_size, at.st_mtime_ns) for path in paths)


@lru_cache(maxsize=1 << 16)
def _summary(path: Path, size: int, changed: int) -> tuple[str | None, tuple[str, str]]:
    """The kind of an object that is no image, else None; its series' UID and title."""
    tags = _tags(path, "SOPClassUID", *_OF_SERIES)
    name = getattr(kind := tags.get("SOPClassUID"), "name", "")
    is_image = "Image Storage" in name or name in ("", kind)
    uid, title = (fold(str(tags.get(element) or "")) for element in _OF_SERIES)
    return None if is_image else str(name.removesuffix(" Storage")), (uid, title)


def _tags(path: Path, *names: str) -> Any:
    """Some elements of a header; none of a damaged one, which SimpleITK then refuses."""
    from pydicom import Dataset, config, dcmread

    try:
        with config.disable_value_validation():
            tags = dcmread(path, stop_before_pixels=True, force=True, specific_tags=list(names))
            [*tags.iterall()]  # converts the elements
            return tags
    except Exception:  # all errors that a library raises on bad bytes
        return Dataset()


def in_order(folder: Path) -> list[Path]:
    """Lists the files of a series in the order of the slices that :func:`voxels` returns."""
    return list(dict.fromkeys(one.path for one in _checked(folder)[0]))


def series_uid(folder: Path) -> str:
    """Returns the SeriesInstanceUID; empty where the files have none."""
    return _checked(folder)[0][0].series


def header(folder: Path, series: Sequence[str] = ()) -> tuple[tuple[int, ...], int, Affine]:
    """Reads the sizes, values per voxel and affine to mm in RAS of a folder's series."""
    slices, step = _checked(folder, series)
    first = slices[0]
    affine = first.affine.copy()
    affine[:3, 2] = step
    return (*first.size[:2], len(slices)), first.channels, affine


def voxels(folder: Path, series: Sequence[str] = ()) -> NDArray[Any]:
    """Reads all voxels, with slope and intercept applied: (i, j, k) or (i, j, k, C) float32."""
    import SimpleITK as sitk

    slices, _ = _checked(folder, series)
    for path in {one.path for one in slices}:
        _check_pixels(path)
    if slices[0].frame is None:
        reader = sitk.ImageSeriesReader()
        reader.SetFileNames([str(one.path) for one in slices])
    else:
        reader = itk_header(slices[0].path, _FORMAT)
    reader.SetOutputPixelType(sitk.sitkFloat32)  # slices may differ in slope
    with intact(folder):
        array = sitk.GetArrayFromImage(reader.Execute())
    if slices[0].frame is not None:
        array = array[[one.frame for one in slices]]
    return np.asarray(array.transpose(2, 1, 0, *range(3, array.ndim)))


def _check_pixels(path: Path) -> None:
    """Refuses voxels that contradict the header, which SimpleITK would cut or fill up."""
    from pydicom import config, dcmread
    from pydicom.pixels.decoders.base import DecodeRunner
    from pydicom.uid import ExplicitVRLittleEndian

    try:
        with config.disable_value_validation(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of padding
            one = dcmread(path, force=True)
            runner = DecodeRunner(one.file_meta.get("TransferSyntaxUID", ExplicitVRLittleEndian))
            runner.set_source(one)
            frames = runner.number_of_frames
            runner.set_option("allow_excess_frames", True)
            runner.validate()
            if runner.number_of_frames != frames:
                raise ValueError(f"there are {runner.number_of_frames} frames, instead of {frames}")
    except Exception as error:  # all errors that a library raises on bad bytes
        raise corrupt(path, ValueError(first_line(error).partition(" - ")[0])) from error


def _checked(folder: Path, wanted: Sequence[str] = ()) -> tuple[list[_Slice], Affine]:
    """The slices in spatial order, and the step from one to the next."""
    of = {time: _summary(*time)[1] for time in _times(files(folder))}
    count, titles = Counter(of.values()), Counter(title for _, title in {*of.values()})
    names = {one: one[titles[one[1]] == 1 and one[1] != ""] for one in count}
    chosen = [one for one in count if not wanted or _is_named(one, wanted)]
    if len(chosen) != 1:
        for path in (time[0] for time, one in of.items() if not any(one)):
            _header(path)  # which refuses a damaged one
        listed = few([f"{names[one]} ({n} files)" for one, n in count.items()], 6)
        which = f", of which {len(chosen)} are named {' or '.join(wanted)}" if wanted else ""
        raise DataError(
            f"{folder} holds {len(count)} DICOM series{which}: {listed}. Keep one series per "
            "folder, or choose one for training by its description or UID, "
            f"'data.reader.series=\"{names[next(iter(count))]}\"'."
        )
    return _compared(folder, tuple(time for time, one in of.items() if one == chosen[0]))


@lru_cache(maxsize=64)
def _compared(folder: Path, times: Times) -> tuple[list[_Slice], Affine]:
    slices = [_header(path) for path, _, _ in times]
    first = slices[0]
    if any(one.channels != 1 for one in slices):
        raise DataError(f"{folder} holds colour images; a scan has one value per voxel.")
    if several := [one for one in slices if one.size[2] > 1]:
        if len(slices) > 1:
            raise DataError(
                f"{several[0].path} holds {several[0].size[2]} frames, a volume of its own, beside "
                f"{len(slices) - 1} other files; keep one volume per folder."
            )
        slices = _frames(first)
        first = slices[0]
    if len(slices) == 1:
        raise DataError(f"{folder} holds a single slice; a volume needs several.")
    if inverted := [one for one in slices if one.inverted]:
        text = "%s: %d of %d images store white as 0 (%s); their values are turned round."
        log.warning(text, folder, len(inverted), len(slices), _INVERTED)
    for one in slices[1:]:
        turned = not np.allclose(one.affine[:3, :2], first.affine[:3, :2], atol=1e-3)
        if one.size != first.size or turned:
            what = f"{one.name} has another size, spacing or direction than {first.name}"
            raise DataError(f"{folder}: {what}; keep the slices of one volume in the folder.")
    return _in_order(folder, slices)


def _frames(file: _Slice) -> list[_Slice]:
    """The frames of a file, which must say where each one lies."""
    from pydicom import Dataset

    tags = _tags(file.path, *_FRAMES)
    shared, each = (getattr(tags, name, None) or [] for name in _FRAMES)
    if len(each) != file.size[2]:
        why = f"has {file.size[2]} frames and says of {len(each)} where they lie"
        raise _not_read(file.path, why)
    frames, scales = [], set()
    for number, frame in enumerate(each):
        elements = Dataset()
        for group in (group for of in (*shared, frame) for group in of if group.VR == "SQ"):
            for item in group.value:
                elements.update(item)
        _check_usable(f"{file.path}, frame {number + 1},", elements, _PLACE)
        scales.add(tuple(elements.get(name) for name in _SCALE))
        place, turn, steps = (np.array(elements[name].value, dtype=np.float64) for name in _PLACE)
        affine = np.eye(4)
        affine[:3, 0], affine[:3, 1] = turn[:3] * steps[1], turn[3:] * steps[0]
        affine[:3, 2] = np.cross(turn[:3], turn[3:])
        affine[:3, 3] = place
        frames.append(file._replace(affine=LPS @ affine, frame=number))
    if len(scales) > 1:
        raise _not_read(file.path, f"has frames of {len(scales)} different slopes or intercepts")
    return frames


def _in_order(folder: Path, slices: list[_Slice]) -> tuple[list[_Slice], Affine]:
    normal = np.cross(slices[0].affine[:3, 0], slices[0].affine[:3, 1])
    normal /= np.linalg.norm(normal)
    slices = sorted(slices, key=lambda one: float(normal @ one.affine[:3, 3]))
    ways = np.array([one.affine[:3, 3] - slices[0].affine[:3, 3] for one in slices])
    gaps = np.diff(heights := ways @ normal)
    if gaps.max() <= 0.01:
        raise DataError(f"{folder}: all slices are at the same place; export the series again.")
    if (gaps <= 0.01).mean() > 0.4:  # volume upon volume: phases, echoes, directions
        raise DataError(
            f"{folder} holds {len(slices)} slices at {1 + int((gaps > 0.01).sum())} places, as of "
            "several phases, echoes or repetitions; keep one image per place in the folder."
        )
    usual = float(np.median(gaps))
    odd = np.abs(gaps - usual) > max(_UNEVEN * usual, 0.01)
    turns = np.flatnonzero(np.abs(np.diff(gaps)) > max(_UNEVEN * usual, 0.01))
    if len(turns) == 1 and 2 <= turns[0] < len(gaps) - 3:  # three gaps or more on either side
        place = f"up to {slices[turns[0] + 1].name}, and {gaps[-1]:.3g} mm from there on"
        what = f"{folder} has two spacings: the slices are {gaps[0]:.3g} mm apart {place}"
        raise DataError(f"{what}; keep one of them, or resample the scan.")
    if odd.any():
        at = int(odd.argmax())
        gap, names = float(gaps[at]), f"{slices[at].name} and {slices[at + 1].name}"
        apart = f"{gap:.3g} mm apart, the others {usual:.3g} mm"
        if gap < 0.5 * usual:
            raise DataError(f"{folder}: the slices {names} are {apart}; keep each slice once.")
        whole = abs(gap / usual - round(gap / usual)) < 0.1 or abs(usual / gap - 2) < 0.1
        what = "a slice is missing" if whole else "the distance is uneven"
        raise DataError(
            f"{folder}: {what} between {names} ({apart}); export the series again or leave the "
            "patient out."
        )
    aside = np.linalg.norm(ways - np.outer(heights, normal), axis=1)
    tilt = aside[-1] / heights[-1]
    if (bent := np.abs(aside - tilt * heights)).max() > 0.2:  # mm
        name = slices[int(bent.argmax())].name
        raise DataError(f"{folder}: {name} lies beside the other slices; export the series again.")
    if tilt > _TILT:
        what = f"{folder} is sheared (a gantry tilted by {np.degrees(np.arctan(tilt)):.3g} degrees)"
        mend = "convert it to an upright volume, such as by dcm2niix, or leave the patient out"
        raise DataError(f"{what}; {mend}.")
    return slices, ways[-1] / (len(slices) - 1)


def _header(path: Path) -> _Slice:
    tags = _tags(path, *_TAGS, *_SCALE, *_PLACE, *_FRAMES)
    syntax = getattr(getattr(tags, "file_meta", None), "TransferSyntaxUID", None)
    name = getattr(syntax, "name", "")
    if name and (name == str(syntax) or any(word in name for word in _UNREAD)):
        raise _not_read(path, f"is compressed as {name}, which is not read")
    if "ModalityLUTSequence" in tags:
        raise _not_read(path, "has a look-up table of its values (Modality LUT Sequence)")
    reader = itk_header(path, _FORMAT)
    size = (*reader.GetSize(), 1)[:3]
    if reader.GetDimension() != 3:
        raise DataError(f"{path} has {reader.GetDimension()} dimensions; a slice has three.")
    counts = {n: 1 for n in _SCALE if n in tags} | ({} if _FRAMES[0] in tags else _PLACE)
    _check_usable(path, tags, counts)
    uid, channels = str(tags.get(_TAGS[0]) or "").strip(), reader.GetNumberOfComponents()
    return _Slice(path, uid, size, channels, affine_of(reader), tags.get(_TAGS[2]) == _INVERTED)


def _not_read(where: object, why: str) -> DataError:
    return DataError(f"{where} {why}; convert it to NIfTI, such as by dcm2niix, or leave it out.")


def _check_usable(where: object, tags: Any, counts: Mapping[str, int]) -> None:
    """Refuses elements that have not as many numbers as they must."""
    if bad := [name for name, count in counts.items() if not _is_usable(tags, name, count)]:
        raise _not_read(where, f"has no usable {few(bad)}, without which value or place is unknown")


def _is_usable(tags: Any, name: str, count: int) -> bool:
    """Says whether an element has as many numbers as it must, and none that is absurd."""
    try:
        values = np.ravel(tags.get(name)).astype(np.float64)
    except ValueError:
        return False
    if len(values) != count or not (np.abs(values) < 1e9).all():
        return False
    if name == "ImageOrientationPatient":
        axes = values.reshape(2, 3)
        return np.allclose(axes @ axes.T, np.eye(2), atol=_TILT)
    return name not in ("PixelSpacing", "RescaleSlope") or 0 not in values


def _is_dicom(path: Path) -> bool:
    if not is_visible(path.name) or path.name.upper() == "DICOMDIR" or not path.is_file():
        return False
    if path.suffix.lower() in (".dcm", ".ima"):
        return True
    with path.open("rb") as file:
        head = file.read(132)
    # Voxels may begin as a header does; names of DICOM have no ending, or end with a number's part.
    bare = path.suffix.lower() in ("", ".dicom") or path.suffix[1:].isdigit()
    return head[128:] == b"DICM" or (bare and _BEGINS.match(head) is not None)
