"""Files that are whole or not there, checksums, and a lock."""

from __future__ import annotations

import csv
import errno
import functools
import hashlib
import io
import json
import logging
import os
import platform
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from medfed.common.errors import ConfigError, MedfedError, WriteError
from medfed.common.strict_json import json_text

_log = logging.getLogger(__name__)
PARTIAL = ".partial-"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # only writing fails so
_FORMULA = re.compile(r"'*[=+\-@\t\r]")
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
        path: The file's name in the end; an older file of that name is replaced, and the folder is
            made where there is none.
        sync: Whether to wait for the disk, so that a machine that loses power leaves no torn file
            either: for files that are used without comparing a checksum.

    Yields:
        Where to write.

    Raises:
        WriteError: If the disk is full, the folder cannot be written, or the like.

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
    with whole_or_none(path, partial):
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        if sync:
            _synchronise(partial)
        partial.replace(path)
        if sync:
            sync_folder(path.parent)


@contextmanager
def whole_or_none(path: Path, partial: Path) -> Iterator[None]:
    """Removes a file that could not be finished, and says in one sentence why.

    Args:
        path: The file's name in the end, for the sentence.
        partial: Where it is written.

    Raises:
        WriteError: If the disk is full, the folder cannot be written, or the like.
    """
    try:
        yield
    except BaseException as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and not isinstance(error, MedfedError):
            raise cannot_write(path, error) from error
        raise


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
    with atomic(path, sync=False) as file:
        file.write(text.encode())


def write_json(path: Path, content: object, sync: bool = False) -> None:
    """Writes JSON that is whole or not there, in a folder that is made for it."""
    with atomic(path, sync) as file:
        file.write((json_text(content) + "\n").encode())


def csv_text(header: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    r"""Returns a table as the text of a CSV file, in which spreadsheets find no formulas.

    Args:
        header: Names of the columns.
        rows: A cell for each column.

    Example:
        >>> csv_text(["client", "iou"], [["a", 0.5], ["=1+1", -0.5]])
        "client,iou\na,0.5\n'=1+1,-0.5\n"
    """
    text = io.StringIO()
    # Python quotes a carriage return only where lines end with one; afterwards they do not.
    writer = csv.writer(text, lineterminator="\r\n")
    lines = []
    for row in (header, *rows):
        writer.writerow(map(_inert, row))
        lines.append(text.getvalue().removesuffix("\r\n"))
        text.seek(0)
        text.truncate()
    return "\n".join([*lines, ""])


def original(cell: str) -> str:
    """Returns what :func:`csv_text` was given for a cell.

    Example:
        >>> original("'=1+1"), original("'a'"), original("-0.5")
        ('=1+1', "'a'", '-0.5')
    """
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


def _inert(cell: object) -> object:
    """A quote before text that a spreadsheet would compute, or that has such a quote already."""
    if cell is None or isinstance(cell, int | float) or not _FORMULA.match(text := str(cell)):
        return cell
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return cell


@contextmanager
def writing(place: Path, otherwise: str) -> Iterator[None]:
    """Turns what goes wrong while writing into one sentence.

    Args:
        place: What is written.
        otherwise: What helps beside making room.

    Raises:
        WriteError: If the disk is full, the folder cannot be written, or the like.

    Example:
        >>> with writing(Path("/data/cache"), "set data.cache to another folder"):
        ...     raise OSError(28, "No space left on device")
        Traceback (most recent call last):
        ...
        medfed.common.errors.WriteError: Cannot write /data/cache (No space left on device); make \
room there, or set data.cache to another folder.
    """
    try:
        yield
    except OSError as error:
        within = isinstance(error, WriteError) and isinstance(error.__cause__, OSError)
        cause = error.__cause__ if within else error
        raise cannot_write(place, cause, otherwise) from error  # type: ignore[arg-type]


def cannot_write(
    place: Path, error: OSError, otherwise: str = "choose another folder"
) -> WriteError:
    """Returns the sentence on something that could not be written.

    Example:
        >>> print(cannot_write(Path("/data"), PermissionError(13, "Permission denied")))
        Cannot write /data (Permission denied); choose another folder.
    """
    forbidden = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
    room = "" if forbidden else "make room there, or "
    return WriteError(f"Cannot write {place} ({error.strerror or error}); {room}{otherwise}.")


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
def locked(folder: Path, name: str = "lock", wait: bool = True) -> Iterator[None]:
    """Holds a folder's lock.

    The lock is the system's, so it ends with its process however that ends; nothing stale is left
    to be cleared. A file beside it keeps the process id, only for the sentence.

    Args:
        folder: An existing folder.
        name: The lock's file.
        wait: Whether to wait for another process that holds it.

    Raises:
        ConfigError: If another process holds it, and it is not to be waited for.
    """
    holder = folder / f"{name}.pid"
    lock = FileLock(folder / name)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        who = holder.read_text() if holder.is_file() else "unknown"
        if not wait:
            raise ConfigError(
                f"Process {who} works in {folder} already; let it end first, or choose another "
                "folder."
            ) from None
        _log.warning("Waiting for process %s, which prepares %s.", who, folder)
        lock.acquire()
    try:
        holder.write_text(str(os.getpid()))
        yield
    finally:
        lock.release()
