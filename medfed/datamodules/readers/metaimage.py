"""MetaImage files (``.mhd``, ``.mha``): headers checked by field, voxels by length and checksum.

SimpleITK fills voxels with zeros or noise if a compressed file is damaged, and crashes on some
headers. So this module reads and checks both itself.

A `Scan` is a file on the *patient grid*: its voxels with the axes permuted and reversed such that x
runs from the patient's right to left, y from front to back and z from foot to head (LPS, as ITK
calls it). Nothing is resampled: oblique axes count as the patient's nearest axes.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medfed.common.errors import DataError, first_line

_HEADER_BYTES = 1 << 16  # longer than any header; in a .mha the voxels follow
_INFLATION = 1032  # the most bytes that deflate unpacks from one
_INT16 = np.iinfo(np.int16)
_SYNONYMS = {
    "Position": "Offset",
    "Origin": "Offset",
    "Rotation": "TransformMatrix",
    "Orientation": "TransformMatrix",
    "ElementSize": "ElementSpacing",
    "ElementByteOrderMSB": "BinaryDataByteOrderMSB",
}
_DTYPES = {
    "MET_CHAR": "i1",
    "MET_UCHAR": "u1",
    "MET_SHORT": "i2",
    "MET_USHORT": "u2",
    "MET_INT": "i4",
    "MET_UINT": "u4",
    "MET_FLOAT": "f4",
    "MET_DOUBLE": "f8",
}


@dataclass(frozen=True)
class Storage:
    """The storage of voxels, as stated in a header.

    Attributes:
        header: The header.
        file: The file with the voxels; the header itself if they follow it.
        size: (3,) voxels along the file's axes, the fastest first.
        spacing: (3,) mm along them.
        origin: (3,) mm, the place of the first voxel.
        direction: (9,) the matrix whose columns are the directions of the axes, row by row.
        dtype: NumPy's name of the numbers.
        start: Bytes of `file` before the voxels.
        compressed: Whether they are one zlib or gzip stream.
    """

    header: Path
    file: Path
    size: tuple[int, int, int]
    spacing: tuple[float, ...]
    origin: tuple[float, ...]
    direction: tuple[float, ...]
    dtype: str
    start: int
    compressed: bool

    @property
    def plain(self) -> bool:
        """Whether the file holds only int16 numbers, so that parts of it can be read."""
        return self.dtype[1:] == "i2" and not self.start and not self.compressed

    @property
    def length(self) -> int:
        """Bytes of all voxels."""
        return math.prod(self.size) * np.dtype(self.dtype).itemsize

    def voxels(self) -> NDArray[Any]:
        """Reads all voxels, (k, j, i).

        Raises:
            DataError: If the file's length contradicts the header, or its checksum is wrong.
        """
        try:
            with self.file.open("rb") as file:
                file.seek(self.start)
                data = file.read()
            if self.compressed:
                data = inflated(data, self.length)
        except (OSError, zlib.error) as error:
            raise corrupt(self.file, error, "scan") from error
        if len(data) != self.length:
            raise _other_length(self.file, len(data), self.header, self.length)
        return np.frombuffer(data, self.dtype).reshape(self.size[::-1])


def inflated(data: bytes, length: int) -> bytes:
    """Unpacks at most `length` bytes of a zlib or gzip stream and checks its checksum.

    Raises:
        zlib.error: If it is damaged, ends too early or late, or holds more.

    Example:
        >>> inflated(zlib.compress(b"ab"), 2)
        b'ab'
        >>> inflated(zlib.compress(b"ab")[:-1], 2)
        Traceback (most recent call last):
        ...
        zlib.error: the compressed data end too early
    """
    stream = zlib.decompressobj(wbits=47)
    voxels = stream.decompress(data, length + 1)
    if len(voxels) > length:
        raise zlib.error("it unpacks to more bytes than the header says")
    # zlib reads the checksum, too, only if there is room for more bytes.
    voxels += stream.decompress(stream.unconsumed_tail, 1)
    if not stream.eof:
        raise zlib.error("the compressed data end too early")
    if stream.unused_data:
        raise zlib.error("something follows the compressed data")
    return voxels


def storage_of(header: Path) -> Storage:
    """Reads a header and checks the size of the voxel file, without reading voxels.

    Args:
        header: A ``.mhd`` or ``.mha`` file of a 3-D scan.

    Returns:
        The storage.

    Raises:
        DataError: If a field is missing or invalid, or voxels are missing, too few or too many.
    """
    fields, end = _fields(header)
    name = fields.get("ElementDataFile", "")
    if not name:
        raise DataError(f"{header} is no MetaImage header; copy it again or leave the scan out.")
    axes, values = fields.get("NDims", ""), fields.get("ElementNumberOfChannels", "1")
    if (axes, values) != ("3", "1"):
        raise DataError(
            f"{header} has {axes or 'no'} dimensions and {values} values per voxel; a scan has "
            "3 and 1: leave the file out."
        )
    size = tuple(int(n) for n in _numbers(header, fields, "DimSize", 3, least=1, whole=True))
    matrix = _numbers(header, fields, "TransformMatrix", 9, "1 0 0 0 1 0 0 0 1")
    if abs(np.linalg.det(np.reshape(matrix, (3, 3)))) < 1e-3:
        raise _bad(header, fields, "TransformMatrix", "three directions")
    if (kind := fields.get("ElementType", "")) not in _DTYPES:
        raise _bad(header, fields, "ElementType", f"one of {', '.join(_DTYPES)}")
    if not _is_true(fields.get("BinaryData", "True")):
        raise _bad(header, fields, "BinaryData", "True: voxels written as text are not read")
    start = int(_numbers(header, fields, "HeaderSize", 1, "0", least=-1, whole=True)[0])
    file = header if name == "LOCAL" else _beside(header, name)
    big = _is_true(fields.get("BinaryDataByteOrderMSB", "False"))
    storage = Storage(
        header=header,
        file=file,
        size=(size[0], size[1], size[2]),
        spacing=_numbers(header, fields, "ElementSpacing", 3, "1 1 1", least=1e-6),
        origin=_numbers(header, fields, "Offset", 3, "0 0 0"),
        direction=tuple(np.reshape(matrix, (3, 3)).T.ravel().tolist()),
        dtype=(">" if big else "<") + _DTYPES[kind],
        start=end if name == "LOCAL" else max(start, 0),
        compressed=_is_true(fields.get("CompressedData", "False")),
    )
    return _of_right_length(storage, from_end=start == -1 and name != "LOCAL")


def _of_right_length(storage: Storage, from_end: bool) -> Storage:
    """Checks the file's size; for compressed voxels, whether it can hold so many."""
    file, header, wanted = storage.file, storage.header, storage.length
    try:
        size = file.stat().st_size - storage.start
    except OSError:
        raise DataError(
            f"{file} is missing, but {header.name} names it; copy it there or leave the scan out."
        ) from None
    if not file.is_file():
        raise DataError(f"{file} is no file, but {header.name} names it; mend the header.")
    if storage.compressed:
        if wanted > _INFLATION * size:
            raise _other_length(file, size, header, wanted)
    elif from_end and size > wanted:
        return Storage(**{**vars(storage), "start": size - wanted})
    elif size != wanted:
        raise _other_length(file, size, header, wanted)
    return storage


def _beside(header: Path, name: str) -> Path:
    """The file of voxels, in the header's folder or below it."""
    if name.split()[0] == "LIST" or "%" in name:
        raise DataError(
            f"{header} keeps its voxels in several files ({name[:60]}); write the scan as one "
            "file, such as by SimpleITK.WriteImage, or leave it out."
        )
    path = Path(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name or len(name) > 255:
        raise DataError(
            f"{header} names voxels outside of its folder ({name[:60]!r}); put the file next to "
            "the header and correct ElementDataFile."
        )
    return header.parent / name


def _numbers(
    header: Path,
    fields: dict[str, str],
    key: str,
    count: int,
    default: str = "",
    least: float = -math.inf,
    whole: bool = False,
) -> tuple[float, ...]:
    """The numbers of a field."""
    try:
        numbers = tuple(map(int if whole else float, fields.get(key, default).split()))
    except ValueError:
        numbers = ()
    if len(numbers) != count or not all(abs(x) < 1e9 and x >= least for x in numbers):
        kind = "whole numbers" if whole else "numbers"
        above = f" of at least {least:g}" if math.isfinite(least) else ""
        raise _bad(header, fields, key, f"{count} {kind}{above}")
    return numbers


def _bad(header: Path, fields: dict[str, str], key: str, wanted: str) -> DataError:
    return DataError(
        f"{header} has {key} = {fields.get(key, '')[:60]!r}, which must be {wanted}; mend the "
        "header or leave the scan out."
    )


def _fields(header: Path) -> tuple[dict[str, str], int]:
    """The header's lines ``Key = value`` up to the one that names the voxels, and its length."""
    try:
        with header.open("rb") as file:
            text = file.read(_HEADER_BYTES)
    except OSError as error:
        raise corrupt(header, error, "scan") from error
    fields: dict[str, str] = {}
    end = 0
    for line in text.splitlines(keepends=True):
        end += len(line)
        key, equals, value = (part.strip() for part in line.decode("latin-1").partition("="))
        key = _SYNONYMS.get(key, key)
        if equals and fields.setdefault(key, value) != value:
            raise DataError(f"{header} has the field {key} twice; mend the header.")
        if key == "ElementDataFile":
            break
    return fields, end


def _is_true(text: str) -> bool:
    return text[:1] in ("T", "t", "1")


def _other_length(file: Path, size: int, header: Path, wanted: int) -> DataError:
    return DataError(
        f"{file} has {size} bytes, but {header.name} says {wanted}; copy it again or leave the "
        "scan out."
    )


def corrupt(file: Path, error: Exception, what: str = "patient") -> DataError:
    """The sentence about a file that cannot be read, and what to leave out.

    Example:
        >>> str(corrupt(Path("a.nii"), ValueError("it ends too early")))
        'a.nii is truncated or corrupt (it ends too early); copy it again or leave the patient out.'
    """
    return DataError(
        f"{file} is truncated or corrupt ({first_line(error)}); copy it again or leave the {what} "
        "out."
    )


def missing(path: Path) -> DataError:
    """The sentence about a missing file.

    Example:
        >>> str(missing(Path("a.nii")))
        'a.nii is missing; copy it there or leave the patient out.'
    """
    return DataError(f"{path} is missing; copy it there or leave the patient out.")


def header(path: Path) -> tuple[tuple[int, ...], int, NDArray[np.float64]]:
    """Reads the header only, for :mod:`medfed.datamodules.readers.volumes`.

    Returns:
        The three sizes as they are stored, 1 value per voxel, and the affine (4, 4) to mm in RAS.

    Raises:
        DataError: See :func:`storage_of`.
    """
    stored = storage_of(path)
    affine = np.diag([-1.0, -1.0, 1.0, 1.0])  # MetaImage's axes run to the left and to the back
    place = np.c_[np.reshape(stored.direction, (3, 3)) * stored.spacing, stored.origin]
    return stored.size, 1, np.vstack([affine[:3, :3] @ place, affine[3]])


def voxels(path: Path) -> NDArray[Any]:
    """Reads all voxels, (i, j, k); see :meth:`Storage.voxels`."""
    return storage_of(path).voxels().T


@dataclass(frozen=True)
class Scan:
    """One CT scan on the patient grid. Made by `open_scan`.

    Attributes:
        storage: How its voxels are stored.
        turn: (3, 2) how the file's axes become the patient's, as nibabel's orientations write it.
        affine: (4, 4) from voxels x, y, z of the patient grid to mm in LPS, as headers have them.
        size: (3,) voxels along x, y, z.
    """

    storage: Storage
    turn: NDArray[np.float64]
    affine: NDArray[np.float64]
    size: NDArray[np.int64]

    @property
    def spacing(self) -> tuple[float, float, float]:
        """(3,) mm along x, y, z."""
        x, y, z = np.sqrt((self.affine[:3, :3] ** 2).sum(axis=0)).tolist()
        return x, y, z

    def locate(self, world: NDArray[np.float64]) -> NDArray[np.float64]:
        """Transforms points.

        Args:
            world: (n, 3) mm x y z, in the physical space of the header.

        Returns:
            (n, 3) continuous index x, y, z; an integer is the middle of a voxel.
        """
        inverse = np.linalg.inv(self.affine)
        return np.asarray(world @ inverse[:3, :3].T + inverse[:3, 3])

    @cached_property
    def voxels(self) -> NDArray[Any]:
        """(z, y, x) HU; uncompressed voxels are read from disk on access.

        Raises:
            DataError: If the voxels cannot be read, or are not finite.
        """
        from nibabel.orientations import apply_orientation

        stored = self.storage
        if stored.plain:
            try:
                # Its length was compared with the header; a disk that fails meanwhile ends the
                # process, which `cache.store` reports.
                voxels: NDArray[Any] = np.memmap(
                    stored.file, stored.dtype, "r", shape=stored.size[::-1]
                )
            except (OSError, ValueError) as error:
                raise corrupt(stored.file, error, "scan") from error
        else:
            voxels = stored.voxels()
            if not np.isfinite(voxels).all():
                raise DataError(
                    f"{stored.file} has NaN or infinite voxels; repair the file or leave the scan "
                    "out."
                )
            voxels = np.rint(np.clip(voxels, _INT16.min, _INT16.max)).astype(np.int16)
        return np.asarray(apply_orientation(np.asarray(voxels).T, self.turn)).T


def open_scan(path: Path) -> Scan:
    """Reads a header; no voxel is read.

    Args:
        path: A ``.mhd`` or ``.mha`` file of a 3-D scan.

    Raises:
        DataError: If the header cannot be read, or the number of voxels is wrong.
    """
    from nibabel.orientations import axcodes2ornt, inv_ornt_aff, io_orientation, ornt_transform

    stored, (shape, _, affine) = storage_of(path), header(path)
    turn = ornt_transform(io_orientation(affine), axcodes2ornt("LPS"))
    # The affine of `header` leads to RAS; coordinates of candidates are in LPS, as in the file.
    upright = np.diag([-1.0, -1.0, 1.0, 1.0]) @ affine @ inv_ornt_aff(turn, shape)
    size = np.empty(3, dtype=np.int64)
    size[turn[:, 0].astype(int)] = shape
    return Scan(stored, turn, upright, size)
