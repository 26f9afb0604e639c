"""Files that are whole or not there, checksums, and a lock."""

from __future__ import annotations

import csv
import functools
import hashlib
import io
import json
import logging
import os
import platform
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from medfed.common.errors import DataError

_log = logging.getLogger(__name__)
PARTIAL = ".partial-"
_HOST = f"{zlib.crc32(platform.node().encode()):08x}"  # numbers of processes are a machine's own
ExistingPath = str
"""A file or folder of the user's that must be there: the configuration is checked for it."""


@contextmanager
def replacing(path: Path, sync: bool = False) -> Iterator[Path]:
    """Gives a file its name only when all of it is written, whoever writes it.

    It is written beside its place under another name and then renamed, so that a process that is
    killed leaves the whole file or none. The other name ends as the file's own does, because some
    writers choose the format by it.

    Args:
        path: The file's name in the end; an older file of that name is replaced.
        sync: Whether to wait for the disk, so that a machine that loses power leaves no torn file
            either: for files that are used without comparing a checksum.

    Yields:
        Where to write.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.txt"
        >>> with replacing(path) as partial:
        ...     _ = partial.write_text("1")
        ...     path.exists()
        False
        >>> path.read_text()
        '1'
    """
    _remove_stale(path.parent)
    partial = path.with_name(f"{PARTIAL}{_HOST}-{os.getpid()}-{path.name}")
    try:
        yield partial
        if sync:
            _synchronise(partial)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if sync:
        sync_folder(path.parent)


@contextmanager
def atomic(path: Path, sync: bool = True) -> Iterator[BinaryIO]:
    """Opens a file as :func:`replacing` names it.

    Args:
        path: The file's name in the end.
        sync: Whether to wait for the disk.

    Yields:
        The file, open for writing bytes.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a"
        >>> with atomic(path) as file:
        ...     file.write(b"1"), path.exists()
        (1, False)
        >>> path.read_bytes()
        b'1'
    """
    with replacing(path, sync) as partial, partial.open("wb") as file:
        yield file


def write_text(path: Path, text: str) -> None:
    """Writes a file that is whole or not there, in a folder that is made for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic(path, sync=False) as file:
        file.write(text.encode())


def write_json(path: Path, content: object, sync: bool = False) -> None:
    """Writes JSON that is whole or not there, in a folder that is made for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic(path, sync) as file:
        file.write((json.dumps(content, indent=1) + "\n").encode())


def csv_text(header: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    r"""Returns a table as the text of a CSV file.

    Args:
        header: Names of the columns.
        rows: A cell for each column.

    Example:
        >>> csv_text(["client", "iou"], [["a", 0.5]])
        'client,iou\na,0.5\n'
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()


@contextmanager
def writing(place: Path, otherwise: str) -> Iterator[None]:
    """Turns what goes wrong while writing into one sentence.

    Args:
        place: What is written.
        otherwise: What helps beside making room.

    Raises:
        DataError: If the disk is full, the folder cannot be written, or the like.

    Example:
        >>> with writing(Path("/data/cache"), "set data.cache to another folder"):
        ...     raise OSError(28, "No space left on device")
        Traceback (most recent call last):
        ...
        medfed.common.errors.DataError: Cannot write /data/cache (No space left on device); make \
room there, or set data.cache to another folder.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        sentence = f"Cannot write {place} ({reason}); make room there, or {otherwise}."
        raise DataError(sentence) from error


def sync_folder(folder: Path) -> None:
    """Puts the names in a folder on the disk, where the system has that (Windows has not)."""
    if os.name == "posix":
        _synchronise(folder)


def _synchronise(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@functools.cache
def _remove_stale(folder: Path) -> None:
    """Removes, once per process, what processes of this machine left that are there no more."""
    for path in folder.glob(f"{PARTIAL}{_HOST}-*"):
        process = path.name.removeprefix(f"{PARTIAL}{_HOST}-").partition("-")[0]
        if process.isdecimal() and not _is_running(int(process)):
            path.unlink(missing_ok=True)


def _is_running(process: int) -> bool:
    if os.name != "posix":
        return True  # there, asking would end it
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def remove_partial(folder: Path) -> None:
    """Removes what killed processes left half-written; call it under the lock.

    Args:
        folder: Where to look; sub-folders are not searched.
    """
    for path in folder.glob(f"{PARTIAL}*"):
        path.unlink(missing_ok=True)


def digest(content: object) -> str:
    """Hashes what JSON can hold; the order of keys does not matter.

    Returns:
        The SHA-256 in hexadecimal.

    Example:
        >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
        True
    """
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def sha256(path: Path) -> str:
    """Hashes a file; in a module that worker processes import without PyTorch.

    Returns:
        The SHA-256 in hexadecimal.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds a folder's lock, waiting for another process that holds it.

    The lock is the system's, so it ends with its process however that ends; nothing stale is left
    to be cleared. A file beside it keeps the process id, only for the sentence.

    Args:
        folder: An existing folder.
    """
    holder = folder / "lock.pid"
    lock = FileLock(folder / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        who = holder.read_text() if holder.is_file() else "unknown"
        _log.warning("Waiting for process %s, which prepares %s.", who, folder)
        lock.acquire()
    try:
        holder.write_text(str(os.getpid()))
        yield
    finally:
        lock.release()
