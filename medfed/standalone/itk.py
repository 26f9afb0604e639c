"""NRRD and MetaImage files for :mod:`medfed.standalone.volumes`, by SimpleITK.

SimpleITK crashes on some headers, reads voxels that a file lacks as zeros or noise, and verifies no
checksum. So this module first checks the header's text, the file's length and the checksum.
"""

from __future__ import annotations

import gzip
import logging
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .errors import DataError, first_line
from .files import GZIP, kind_of, refuse_special

_LINE = 256  # characters of a field; only NRRD's user-defined pairs may be longer
_HEADER_BYTES = 1 << 16  # longer than any header, which the voxels may follow
_INFLATION = 1032  # the most bytes that deflate unpacks from one
_MILLIMETRES = {  # by NRRD's names of units
    **dict.fromkeys(("mm", "millimeter", "millimetre", ""), 1.0),
    **dict.fromkeys(("m", "meter", "metre"), 1e3),
    **dict.fromkeys(("um", "µm", "μm", "micron", "micrometer", "micrometre"), 1e-3),
    "cm": 10.0,
}
_SIDES = re.compile(r"(l|r|left|right)(-?(a|p)|-(anterior|posterior))", re.IGNORECASE)
SIDE = "does not say which side is left, which is guessed; compare a picture with the original"
SIZE = "does not say the size of its voxels, which is taken as 1 mm"
LPS = np.diag([-1.0, -1.0, 1.0, 1.0])  # ITK's axes run to the left and to the back


def _numbers(count: int, number: str = r"[+-]?[\d.]+([eE][+-]?\d+)?") -> str:
    return rf"({number}(\s+|$)){{{count}}}"


_MATRIX, _PLACE = (_numbers(9) + "|", "9 numbers"), (_numbers(3) + "|", "3 numbers")
# The form of MetaImage's fields: with others SimpleITK crashes, or reads something else.
_FORMS = {
    "NDims": ("3", "3"),
    "DimSize": (_numbers(3, r"[1-9]\d{0,8}"), "3 whole numbers of at least 1"),
    "ElementSpacing": (_numbers(3, r"[\d.]+([eE][+-]?\d+)?") + "|", "3 numbers above 0"),
    **dict.fromkeys(("TransformMatrix", "Rotation", "Orientation"), _MATRIX),
    **dict.fromkeys(("Offset", "Position", "Origin"), _PLACE),
    "HeaderSize": (r"(-1|\d{1,9})?", "a whole number of at least -1"),
    "BinaryData": (r"([Tt1].*)?", "True: voxels written as text are not read"),
}


_VECTOR = r"\( *[^ ,()]+( *, *[^ ,()]+)* *\)"
_NRRD_FORMS = {  # values in small letters
    "dimension": (r"\d+", "a whole number"),
    "encoding": ("raw|ascii|text|txt|hex|gz|gzip", "raw, ascii, hex or gzip"),
    "sizes": (r"\d+( +\d+)*", "whole numbers"),
    "space origin": (f"({_VECTOR})?", "a vector such as (0,0,0)"),
    "space directions": (f"((none|{_VECTOR}) *)*", "vectors such as (1,0,0)"),
}


Forms = Mapping[str, tuple[str, str]]


class Source(NamedTuple):
    """The voxels of a file that nobody has read yet."""

    reader: Any  # SimpleITK's ``ImageFileReader``, which has read the header
    file: Path  # the file with the voxels: the header itself, or one next to it
    start: int  # bytes of `file` before the voxels
    packed: bool  # whether the voxels are one zlib or gzip stream
    plain: bool  # whether the voxels lie in `file` as a little-endian processor has them
    exact: bool = True  # whether nothing follows them
    unit: float = 1.0  # the mm of the header's unit of length


log = logging.getLogger(__name__)
_WARNED: dict[tuple[Path, str], set[Path]] = {}
_NAMED = 3  # folders that lines name: data with a folder per patient have thousands


def say_once(path: Path, what: str) -> None:
    """Says what is odd about a file, for one file of a folder and the first folders of the data."""
    folders = _WARNED.setdefault((path.absolute().parents[:3][-1], what), set())
    if path.parent not in folders and len(folders) < _NAMED:
        folders.add(path.parent)
        last = " Further such files are not named." if len(folders) == _NAMED else ""
        log.warning("%s %s.%s", path, what, last)


def source_of(path: Path) -> Source:
    """Reads a header, and checks the length of the file with the voxels."""
    nrrd = path.suffix.lower() in (".nrrd", ".nhdr")
    layout = (_nrrd if nrrd else _metaimage)(path)
    reader, file, start = itk_header(path, f"{'Nrrd' if nrrd else 'Meta'}ImageIO"), *layout[1:3]
    if len(shape := reader.GetSize()) != 3 or min(shape) < 1:
        what = f"{path} has shape {shape}"
        mend = "a volume needs three dimensions, and a separate file for every channel"
        raise DataError(f"{what}; {mend}.")
    if not file.is_file():
        mend = "copy it there or leave the scan out"
        raise DataError(f"{file} is missing, but {path.name} names it; {mend}.")
    size, wanted = file.stat().st_size, _length(reader)
    if start == -1:  # the voxels are the end of the file
        start = max(size - wanted, 0)
    if size - start != wanted if layout.exact else wanted > _INFLATION * (size - start):
        what = f"{file} has {size - start} bytes, but {path.name} says {wanted}"
        raise DataError(f"{what}; copy it again or leave the patient out.")
    return layout._replace(reader=reader, start=start)


def header(path: Path) -> tuple[tuple[int, ...], int, NDArray[np.float64]]:
    """Reads the stored sizes, values per voxel and the affine to mm in RAS."""
    source = source_of(path)
    reader, affine = source.reader, affine_of(source.reader)
    affine[:3] *= source.unit
    return tuple(reader.GetSize()), reader.GetNumberOfComponents(), affine


def voxels(path: Path) -> NDArray[Any]:
    """Reads all voxels (i, j, k[, C]); int16 ones that are not packed are read on access."""
    import SimpleITK as sitk

    reader, file, start, packed, plain, *_ = source_of(path)
    if plain and reader.GetPixelID() == sitk.sitkInt16:
        # Of a checked length; a disk that fails meanwhile ends the process.
        return np.asarray(np.memmap(file, "<i2", "r", offset=start, shape=reader.GetSize()[::-1])).T
    with intact(file):
        if packed:
            _check_packed(file.read_bytes()[start:], _length(reader))
        array = sitk.GetArrayFromImage(reader.Execute())
    return np.asarray(array.transpose(2, 1, 0, *range(3, array.ndim)))


def _check_packed(data: bytes, length: int) -> None:
    """Unpacks a zlib or gzip stream of `length` bytes, and checks its checksum.

    Example:
        >>> _check_packed(zlib.compress(b"ab"), 2)
        >>> _check_packed(zlib.compress(b"ab")[:-1], 2)
        Traceback (most recent call last):
        ...
        zlib.error: the packed data end too early
    """
    stream = zlib.decompressobj(wbits=47)
    unpacked = len(stream.decompress(data, length + 1))
    # zlib reads the checksum, too, only if there is room for more bytes.
    unpacked += len(stream.decompress(stream.unconsumed_tail, 1))
    if unpacked != length:
        many = "more" if unpacked > length else "fewer"
        raise zlib.error(f"it unpacks to {many} bytes than {length}")
    if not stream.eof:
        raise zlib.error("the packed data end too early")
    if stream.unused_data:
        raise zlib.error("something follows the packed data")


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
    """Lets SimpleITK read a header."""
    import SimpleITK as sitk  # imported here, as it takes a while

    reader = sitk.ImageFileReader()
    reader.SetImageIO(kind)
    reader.SetFileName(str(path))
    with intact(path):
        reader.ReadImageInformation()
    return reader


def _length(reader: Any) -> int:
    """Bytes of all voxels."""
    import SimpleITK as sitk

    bits = re.search(r"8|16|32|64", sitk.GetPixelIDValueAsString(reader.GetPixelID()))
    each = int(bits[0]) // 8 if bits else 1
    return int(math.prod(reader.GetSize()) * reader.GetNumberOfComponents() * each)


def _head(path: Path) -> bytes:
    """The beginning of a file."""
    if not path.is_file():
        refuse_special(path)
    with intact(path), path.open("rb") as file:
        return file.read(_HEADER_BYTES)


def _nrrd(path: Path) -> Source:
    """What the header's text says, without a reader."""
    text = _head(path)
    if not text.startswith(b"NRRD"):
        raise corrupt(path, ValueError("it has no header of NRRD"))
    end = re.search(rb"\r?\n\r?\n", text)
    head = text[: end.start() if end else None].decode("utf-8", "replace")
    for line in head.splitlines():
        if len(line) > _LINE and ":=" not in line:  # SimpleITK would crash on it
            raise corrupt(path, ValueError(f"a header line has {len(line)} characters"))
    if re.search(r"^data ?file:", head, re.MULTILINE | re.IGNORECASE):
        raise DataError(f"{path} names voxels in other files; write the volume as one .nrrd file.")
    fields = dict(re.findall(r"^([a-z ]+): *(.*?) *\r?$", head.lower(), re.MULTILINE))
    _check_fields(path, fields, _NRRD_FORMS)
    directions = fields.get("space directions", "")
    if "space" in fields and directions.count("(") != 3:
        raise DataError(f"{path} has a space, but not three space directions; mend the header.")
    if not directions and "spacings" not in fields:
        say_once(path, SIZE)
    if not _SIDES.match(fields.get("space", "")):
        say_once(path, SIDE)
    line = fields.get("space units", '""')
    units = {name.strip() for name in re.findall(r'"(.*?)"', line)}
    if len(units) != 1 or not units <= {*_MILLIMETRES}:
        what = f"{path} has the space units {line[:60]}, which are not one of mm, cm, um and m"
        raise DataError(f"{what}; mend the header.")
    how = fields.get("encoding", "")[:2]
    exact = how == "ra" and not fields.keys() & {"byte skip", "line skip"}
    start, unit = end.end() if end else len(text), _MILLIMETRES[units.pop()]
    return Source(None, path, start, how == "gz", False, exact, unit)


def _check_fields(path: Path, fields: Mapping[str, str], forms: Forms) -> None:
    for key, (form, words) in forms.items():
        if not re.fullmatch(form, value := fields.get(key, "")):
            what = f"{path} has {key} = {value[:60]!r}, which must be {words}"
            raise DataError(f"{what}; mend the header or leave the scan out.")


def _metaimage(path: Path) -> Source:
    """As `_nrrd`."""
    fields: dict[str, str] = {}
    end, name = 0, ""
    for line in _head(path).splitlines(keepends=True):
        end += len(line)
        key, equals, value = (part.strip() for part in line.decode("latin-1").partition("="))
        if equals and fields.setdefault(key, value) != value:
            raise DataError(f"{path} has the field {key} twice; mend the header.")
        if key == "ElementDataFile":
            name = value
            break
    if not name:
        if _other_kind(path):
            raise corrupt(path, ValueError("it has no ElementDataFile"))
        raise DataError(f"{path} is no MetaImage header; copy it again or leave the scan out.")
    _check_fields(path, fields, _FORMS)
    if not fields.keys() & {"ElementSpacing", "ElementSize"}:
        say_once(path, SIZE)
    if name.split()[0] == "LIST" or "%" in name:
        what = f"{path} keeps its voxels in several files ({name[:60]})"
        mend = "write the scan as one file, such as by SimpleITK.WriteImage, or leave it out"
        raise DataError(f"{what}; {mend}.")
    if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name or len(name) > 255:
        what = f"{path} names voxels outside of its folder ({name[:60]!r})"
        raise DataError(f"{what}; put the file next to the header and correct ElementDataFile.")
    switches = ("CompressedData", "BinaryDataByteOrderMSB", "ElementByteOrderMSB")
    packed, *big = (fields.get(key, "")[:1] in ("T", "t", "1") for key in switches)
    start = end if name == "LOCAL" else int(fields.get("HeaderSize") or 0)
    file = path if name == "LOCAL" else path.parent / name
    return Source(None, file, start, packed, not (packed or any(big)), not packed)


_MEANT = {".nrrd": "a NRRD", ".nhdr": "a NRRD", ".mha": "a MetaImage", ".mhd": "a MetaImage"}
_MEANT |= {".gz": GZIP, **dict.fromkeys(("", ".dcm", ".ima"), "a DICOM")}


def _other_kind(file: Path) -> str | None:
    """What a file is by its first bytes, if its name says something else."""
    kind, suffix = kind_of(file), file.suffix.lower()
    if kind == GZIP and suffix == ".gz":
        kind = kind_of(file, gzip.open)
        return None if kind is None or kind.startswith("a NIfTI") else f"{kind} in a gzip file"
    return None if kind is None or kind.startswith(_MEANT.get(suffix, "a NIfTI")) else kind


@contextmanager
def intact(file: Path) -> Iterator[None]:
    """Turns the errors of libraries on a missing or damaged file into one sentence."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError:
        raise missing(file) from None
    except RuntimeError as error:  # of SimpleITK
        raise corrupt(file, reason(error)) from error
    except Exception as error:  # all others that a library raises on bad bytes
        raise corrupt(file, error) from error


def corrupt(file: Path, error: Exception) -> DataError:
    """The sentence about a file that cannot be read, and what to leave out.

    Example:
        >>> str(corrupt(Path("a.nii"), ValueError("it ends too early")))
        'a.nii is truncated or corrupt (it ends too early); copy it again or leave the patient out.'
    """
    if file.is_file() and (kind := _other_kind(file)):
        absent = kind.startswith(("a web page", "a pointer"))
        what = "download the data themselves" if absent else "name it by its format, convert it,"
        return DataError(f"{file} is {kind}; {what} or leave the patient out.")
    what = f"{file} is truncated or corrupt ({first_line(error)})"
    return DataError(f"{what}; copy it again or leave the patient out.")


def missing(path: Path) -> DataError:
    """The sentence about a missing file.

    Example:
        >>> str(missing(Path("a.nii")))
        'a.nii is missing; copy it there or leave the patient out.'
    """
    return DataError(f"{path} is missing; copy it there or leave the patient out.")
