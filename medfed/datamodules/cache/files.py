"""Files that are whole or not there, arrays without pickle, checksums, and a lock."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from medfed.errors import DataError

log = logging.getLogger(__name__)
Arrays = Mapping[str, NDArray[Any]]
PARTIAL = ".partial-"


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Turns what goes wrong while writing into one sentence.

    Args:
        place: What is written, for the sentence.

    Raises:
        DataError: If the disk is full, the folder cannot be written, or the like.

    Example:
        >>> with writing(Path("/data/cache")):
        ...     raise OSError(28, "No space left on device")
        Traceback (most recent call last):
        ...
        medfed.errors.DataError: Cannot write /data/cache (No space left on device); make room \
there, or set data.cache to another folder.
    """
    try:
        yield
    except OSError as error:
        raise DataError(
            f"Cannot write {place} ({error.strerror or error}); make room there, or set data.cache "
            "to another folder."
        ) from error


@contextmanager
def atomic(path: Path, sync: bool = True) -> Iterator[BinaryIO]:
    """Opens a file that gets its name only when all of it is written.

    It is written beside its place under another name, synchronised and renamed, so a process that
    is killed, or a machine that loses power, leaves the whole file or none.

    Args:
        path: The file's name in the end; an older file of that name is replaced.
        sync: Whether to wait for the disk. Without, a machine that loses power may leave a torn
            file under the name: for files that are never used without comparing a checksum.

    Yields:
        The file, open for writing.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a"
        >>> with atomic(path) as file:
        ...     _ = file.write(b"1")
        ...     path.exists()
        False
        >>> path.read_bytes()
        b'1'
    """
    partial = path.with_name(f"{PARTIAL}{os.getpid()}-{path.name}")
    try:
        with partial.open("wb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if sync:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Puts the names in a folder on the disk.

    Args:
        folder: The folder.

    Example:
        >>> sync_folder(Path("."))
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_partial(folder: Path) -> None:
    """Removes what killed processes left half-written; call it under the lock.

    Args:
        folder: Where to look; sub-folders are not searched.
    """
    for path in folder.glob(f"{PARTIAL}*"):
        path.unlink(missing_ok=True)


def write_array(path: Path, array: NDArray[Any], sync: bool = True) -> None:
    """Writes a ``.npy`` file, atomically and without pickle.

    Args:
        path: The file.
        array: Any array of numbers.
        sync: See `atomic`.
    """
    with atomic(path, sync) as file:
        np.lib.format.write_array(file, array, allow_pickle=False)


def map_array(path: Path) -> NDArray[Any]:
    """Maps a ``.npy`` file, read-only and without pickle.

    Args:
        path: The file.

    Returns:
        An array whose values are read from the disk when they are touched.

    Raises:
        DataError: If the file is missing or no such array.
    """
    try:
        mapped = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} cannot be read ({error}); prepare the data again.") from error
    return np.asarray(mapped)  # without the memmap class, whose indexing is slow


class Payload(NamedTuple):
    """What a ``.npy`` file holds, unread."""

    path: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int

    def data(self) -> bytes:
        """Returns the array's bytes.

        Raises:
            DataError: If the file is not as long as its header says.
        """
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.offset)
            data = file.readall()
        if len(data) != self.dtype.itemsize * math.prod(self.shape):
            raise DataError(f"{self.path} is torn; prepare the data again.")
        return data


def read_payload(path: Path) -> Payload:
    """Reads the header of a ``.npy`` file in C order; of thousands, faster than mapping each.

    Args:
        path: The file.

    Raises:
        DataError: If the file is missing or no such array.
    """
    try:
        with path.open("rb") as file:
            begin = file.read(10)
            return Payload(path, *_header(begin + file.read(int.from_bytes(begin[8:], "little"))))
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} cannot be read ({error}); prepare the data again.") from error


@lru_cache(maxsize=64)
def _header(begin: bytes) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    file = io.BytesIO(begin)
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("another version of the format")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    if fortran or dtype.hasobject:
        raise ValueError("no plain array")
    return dtype, shape, file.tell()


def write_json(path: Path, content: Mapping[str, Any], sync: bool = True) -> None:
    """Writes JSON, atomically.

    Args:
        path: The file.
        content: What JSON can hold.
        sync: See `atomic`.
    """
    with atomic(path, sync) as file:
        file.write((json.dumps(content, indent=1) + "\n").encode())


def digest(content: object) -> str:
    """Hashes what JSON can hold; the order of keys does not matter.

    Args:
        content: Numbers, text, lists and dicts of them.

    Returns:
        The SHA-256 in hexadecimal.

    Example:
        >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
        True
    """
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def checksum(arrays: Arrays) -> str:
    """Hashes arrays with their names, types and shapes.

    Args:
        arrays: Arrays by name.

    Returns:
        The SHA-256 in hexadecimal.

    Example:
        >>> one = checksum({"image": np.zeros((1, 2), np.int16)})
        >>> one == checksum({"image": np.zeros((1, 2), np.int16)})
        True
        >>> one == checksum({"image": np.zeros((2, 1), np.int16)})
        False
    """
    found = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        found.update(json.dumps([name, array.dtype.str, list(array.shape)]).encode())
        found.update(array.data)
    return found.hexdigest()


def sha256(path: Path) -> str:
    """Hashes a file, in a module that worker processes can import without PyTorch.

    Args:
        path: The file.

    Returns:
        The SHA-256 in hexadecimal.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds a folder's lock, waiting for another process that holds it.

    The lock is the kernel's (``flock``), so it ends with its process however that ends; nothing
    stale is left to be cleared. The file keeps the process id, only for the sentence.

    Args:
        folder: An existing folder.
    """
    with (folder / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            log.warning("Waiting for process %s, which prepares %s.", file.read(), folder)
            fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        file.truncate()
        file.write(str(os.getpid()))
        file.flush()
        yield
