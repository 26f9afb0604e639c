"""NRRD and MetaImage files for :mod:`medfed.standalone.volumes`, by SimpleITK.

SimpleITK crashes on some headers, reads voxels that a file lacks as zeros or noise, and verifies no
checksum. So this module first checks the header's text, the file's length and the checksum.
"""

from __future__ import annotations

import math
import re
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .errors import DataError, first_line
from .files import refuse_special

_LINE = 256  # characters of a field; only NRRD's user-defined pairs may be longer
_HEADER_BYTES = 1 << 16  # longer than any header, which the voxels may follow
_INFLATION = 1032  # the most bytes that deflate unpacks from one
MILLIMETRES = {"meter": 1e3, "mm": 1.0, "micron": 1e-3}  # by NIfTI's names of units
_UNITS = {  # by the names that NRRD files have
    **dict.fromkeys(("mm", "millimeter", "millimetre", ""), "mm"),
    **dict.fromkeys(("m", "meter", "metre"), "meter"),
    **dict.fromkeys(("um", "µm", "μm", "micron", "micrometer", "micrometre"), "micron"),
}
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


class Source(NamedTuple):
    """The voxels of a file that nobody has read yet.

    Attributes:
        reader: SimpleITK's ``ImageFileReader``, which has read the header.
        file: The file with the voxels: the header itself, or one next to it.
        start: Bytes of `file` before the voxels.
        packed: Whether the voxels are one zlib or gzip stream.
        plain: Whether the voxels lie in `file` as a little-endian processor has them.
    """

    reader: Any
    file: Path
    start: int
    packed: bool
    plain: bool


def source_of(path: Path) -> Source:
    """Reads a header, and checks the length of the file with the voxels.

    Args:
        path: A ``.nrrd``, ``.mhd`` or ``.mha`` file.

    Raises:
        DataError: If the header cannot be used, or voxels are missing, too few or too many.
    """
    nrrd = path.suffix.lower() == ".nrrd"
    file, start, packed, plain = (_nrrd if nrrd else _metaimage)(path)
    reader = itk_header(path, "NrrdImageIO" if nrrd else "MetaImageIO")
    if len(shape := reader.GetSize()) != 3 or min(shape) < 1:
        raise DataError(
            f"{path} has shape {shape}; a volume needs three dimensions, and a separate file for "
            "every channel."
        )
    if not file.is_file():
        raise DataError(
            f"{file} is missing, but {path.name} names it; copy it there or leave the scan out."
        )
    size, wanted = file.stat().st_size, _length(reader)
    if start == -1:  # the voxels are the end of the file
        start = max(size - wanted, 0)
    exact = not nrrd and not packed
    if size - start != wanted if exact else wanted > _INFLATION * (size - start):
        raise DataError(
            f"{file} has {size - start} bytes, but {path.name} says {wanted}; copy it again or "
            "leave the patient out."
        )
    return Source(reader, file, start, packed, plain)


def header(path: Path) -> tuple[tuple[int, ...], int, NDArray[np.float64]]:
    """Reads the header only.

    Returns:
        The three spatial sizes as they are stored, values per voxel, and the affine (4, 4) to mm
        in RAS.

    Raises:
        DataError: See :func:`source_of`.
    """
    reader = source_of(path).reader
    affine = np.diag([*[_millimetres(path)] * 3, 1.0]) @ affine_of(reader)
    return tuple(reader.GetSize()), reader.GetNumberOfComponents(), affine


def _millimetres(path: Path) -> float:
    """The mm of one unit of a NRRD file's space; MetaImage has no other unit."""
    if path.suffix.lower() != ".nrrd":
        return 1.0
    head = _head(path).split(b"\n\n")[0].decode("utf-8", "replace")
    line = re.search(r"^space units: *(.*?)\s*$", head, re.MULTILINE | re.IGNORECASE)
    units = {name.strip().lower() for name in re.findall(r'"(.*?)"', line[1])} if line else {"mm"}
    if len(units) != 1 or not units <= {*_UNITS, "cm"}:
        raise DataError(
            f"{path} has the space units {line[1][:60] if line else ''}, which are not one of mm, "
            "cm, um and m; mend the header."
        )
    unit = units.pop()
    return 10.0 if unit == "cm" else MILLIMETRES[_UNITS[unit]]


def voxels(path: Path) -> NDArray[Any]:
    """Reads all voxels; int16 ones that are not packed are read from disk on access.

    Returns:
        (i, j, k) or (i, j, k, C).

    Raises:
        DataError: See :func:`source_of`; also if the voxels are corrupt.
    """
    import SimpleITK as sitk

    reader, file, start, packed, plain = source_of(path)
    if plain and reader.GetPixelID() == sitk.sitkInt16:
        # Of a checked length; a disk that fails meanwhile ends the process.
        mapped = np.memmap(file, "<i2", "r", offset=start, shape=reader.GetSize()[::-1])
        return np.asarray(mapped).T
    try:
        if packed:
            check_packed(file.read_bytes()[start:], _length(reader))
        array = sitk.GetArrayFromImage(reader.Execute())
    except zlib.error as error:
        raise corrupt(file, error) from error
    except RuntimeError as error:
        raise corrupt(file, reason(error)) from error
    return np.asarray(array.transpose(2, 1, 0, *range(3, array.ndim)))


def check_packed(data: bytes, length: int) -> None:
    """Unpacks a zlib or gzip stream of `length` bytes, and checks its checksum.

    Raises:
        zlib.error: If it is damaged, ends too early or late, or holds another number of bytes.

    Example:
        >>> check_packed(zlib.compress(b"ab"), 2)
        >>> check_packed(zlib.compress(b"ab")[:-1], 2)
        Traceback (most recent call last):
        ...
        zlib.error: the packed data end too early
    """
    stream = zlib.decompressobj(wbits=47)
    found = len(stream.decompress(data, length + 1))
    # zlib reads the checksum, too, only if there is room for more bytes.
    found += len(stream.decompress(stream.unconsumed_tail, 1))
    if found != length:
        raise zlib.error(
            f"it unpacks to {'more' if found > length else 'fewer'} bytes than {length}"
        )
    if not stream.eof or stream.unused_data:
        raise zlib.error(
            "something follows the packed data" if stream.eof else "the packed data end too early"
        )


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


def _head(path: Path) -> bytes:
    """The beginning of a file."""
    refuse_special(path)
    try:
        with path.open("rb") as file:
            return file.read(_HEADER_BYTES)
    except FileNotFoundError:
        raise missing(path) from None
    except OSError as error:
        raise corrupt(path, error) from error


def _nrrd(path: Path) -> tuple[Path, int, bool, bool]:
    """File, start, whether packed and whether plain, see `Source`; checks the header's text."""
    text = _head(path)
    end = re.search(rb"\r?\n\r?\n", text)
    head = text[: end.start() if end else None].decode("latin-1")
    for line in head.splitlines():
        if len(line) > _LINE and ":=" not in line:  # SimpleITK would crash on it
            raise corrupt(path, ValueError(f"a header line has {len(line)} characters"))
    if re.search(r"^data ?file:", head, re.MULTILINE | re.IGNORECASE):
        raise DataError(f"{path} names voxels in other files; write the volume as one .nrrd file.")
    packed = re.search(r"^encoding: *gz", head, re.MULTILINE | re.IGNORECASE) is not None
    return path, end.end() if end else len(text), packed, False


def _metaimage(path: Path) -> tuple[Path, int, bool, bool]:
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
    for key, (form, words) in _FORMS.items():
        if not re.fullmatch(form, value := fields.get(key, "")):
            raise DataError(
                f"{path} has {key} = {value[:60]!r}, which must be {words}; mend the header or "
                "leave the scan out."
            )
    if name.split()[0] == "LIST" or "%" in name:
        raise DataError(
            f"{path} keeps its voxels in several files ({name[:60]}); write the scan as one "
            "file, such as by SimpleITK.WriteImage, or leave it out."
        )
    if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name or len(name) > 255:
        raise DataError(
            f"{path} names voxels outside of its folder ({name[:60]!r}); put the file next to "
            "the header and correct ElementDataFile."
        )
    switches = ("CompressedData", "BinaryDataByteOrderMSB", "ElementByteOrderMSB")
    packed, *big = (fields.get(key, "")[:1] in ("T", "t", "1") for key in switches)
    local, start = name == "LOCAL", int(fields.get("HeaderSize") or 0)
    file = path if local else path.parent / name
    return file, end if local else start, packed, not (packed or any(big))


_KINDS = (  # by their first bytes
    (rb"\x89PNG", "a PNG picture"),
    (rb"\xff\xd8\xff", "a JPEG picture"),
    (rb"II\*\0|MM\0\*", "a TIFF picture"),
    (rb"\s*<(!doctype|html|\?xml)", "a web page or XML"),
    (rb"version https://git-lfs", "a pointer of Git LFS, without the data"),
    (rb"NRRD\d", "a NRRD file"),
    (rb"ObjectType|NDims|Comment *=", "a MetaImage file"),
    (rb"\x1f\x8b", "a gzip file"),
    (rb"PK\x03\x04", "a zip file"),
    (rb"(?s:.{128})DICM", "a DICOM file"),
    (rb"(?s:.{344})n[i+]1\0", "a NIfTI file that is not packed"),
    (rb"\x5c\x01\0\0|\0\0\x01\x5c", "a NIfTI file that is not packed"),
)
_MEANT = {".nrrd": "a NRRD", ".mha": "a MetaImage", ".mhd": "a MetaImage", ".gz": "a gzip"}


def _other_kind(file: Path) -> str | None:
    """What a file is by its first bytes, if its name says something else."""
    try:
        with file.open("rb") as opened:
            head = opened.read(352)
    except OSError:
        return None
    kind = next((k for begin, k in _KINDS if re.match(begin, head, re.IGNORECASE)), None)
    suffix = file.suffix.lower()
    meant = _MEANT.get(suffix, "a DICOM" if suffix in ("", ".dcm", ".ima") else "a NIfTI")
    return None if kind is None or kind.startswith(meant) else kind


def corrupt(file: Path, error: Exception) -> DataError:
    """The sentence about a file that cannot be read, and what to leave out.

    Example:
        >>> str(corrupt(Path("a.nii"), ValueError("it ends too early")))
        'a.nii is truncated or corrupt (it ends too early); copy it again or leave the patient out.'
    """
    if file.is_file() and (kind := _other_kind(file)):
        return DataError(
            f"{file} is {kind}, which its name does not say; name it by its format, convert it, or "
            "leave the patient out."
        )
    return DataError(
        f"{file} is truncated or corrupt ({first_line(error)}); copy it again or leave the patient "
        "out."
    )


def missing(path: Path) -> DataError:
    """The sentence about a missing file.

    Example:
        >>> str(missing(Path("a.nii")))
        'a.nii is missing; copy it there or leave the patient out.'
    """
    return DataError(f"{path} is missing; copy it there or leave the patient out.")
