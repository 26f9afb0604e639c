"""Files that are whole or not there, checksums, and a lock.

A folder that is whole or not there, in the place of an older one without losing it, or new.

While ``NAME`` is written, its parent holds ``.NAME.new``, which is not whole, and for the moment
between two renames ``.NAME.old``, which is. A process that is killed leaves them behind; the next
one that writes or reads ``NAME`` puts the older folder back where the new one is missing, and
removes what is left over. ``.NAME.lock`` keeps two processes from doing so at once; the lock is the
system's, so it ends with its process however that ends.

Folders for results: what was there before, and what goes again where nothing came of it.
"""

from __future__ import annotations

import csv
import errno
import functools
import hashlib
import io
import json
import logging
import math
import os
import platform
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from medfed.common.errors import ConfigError, MedfedError, WriteError

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


def json_text(content: object) -> str:
    """Returns JSON that every parser reads, which Python's own NaN and Infinity are not.

    Args:
        content: What JSON can hold, and numbers that are not finite: NaN becomes null, and infinity
            a number that is larger than any other.

    Example:
        >>> print(json_text({"iou": math.nan, "loss": math.inf}))
        {
         "iou": null,
         "loss": 1e999
        }
        >>> json.loads("1e999")
        inf
    """
    text = json.dumps(_plain(content), indent=1, allow_nan=False)
    return text.replace(json.dumps(_INFINITE), "1e999").replace(
        json.dumps(f"-{_INFINITE}"), "-1e999"
    )


_INFINITE = "\0infinite"  # no other text in JSON of ours has such a character


def _plain(content: object) -> object:
    if isinstance(content, float) and not math.isfinite(content):
        return None if math.isnan(content) else f"{'-' * (content < 0)}{_INFINITE}"
    if isinstance(content, Mapping):
        return {key: _plain(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_plain(value) for value in content]
    return content


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


def make_private(folder: Path) -> None:
    """Takes from all others than the owner the right to a folder and all that it holds.

    Args:
        folder: Of keys; links in it stay as they are.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> (folder / "kit").mkdir(mode=0o755)
        >>> (folder / "kit" / "key.pem").touch(mode=0o644)
        >>> make_private(folder)
        >>> [oct(path.stat().st_mode & 0o777) for path in sorted(folder.rglob("*"))]
        ['0o700', '0o600']
    """
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & 0o700)


def refuse_links(*paths: Path) -> None:
    """Refuses to write where a received folder holds links, which may lead anywhere.

    Args:
        paths: Files and folders that are to be written, without the user having named them.

    Raises:
        ConfigError: If one is a symbolic link.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> (folder / "pictures").symlink_to("/tmp")
        >>> refuse_links(folder / "pictures")
        Traceback (most recent call last):
        ...
        medfed.common.errors.ConfigError: /tmp/.../pictures is a link, and nothing is written \
through it; remove it, or put the file or folder itself there.
    """
    if link := next((path for path in paths if path.is_symlink()), None):
        raise ConfigError(
            f"{link} is a link, and nothing is written through it; remove it, or put the file or "
            "folder itself there."
        )


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
        ConfigError: If another process holds it, and it is not to be waited for; also if the lock
            or the other file is a link.
    """
    holder = folder / f"{name}.pid"
    refuse_links(folder / name, holder)
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


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Gives a folder its name only when all of it is written; until then an older one stays.

    Args:
        folder: The folder's name in the end; its parents are made.

    Yields:
        An empty folder to write into.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp()) / "a"
        >>> for text in ("old", "new"):
        ...     with replacing_folder(folder) as made:
        ...         _ = (made / "text").write_text(text)
        >>> (folder / "text").read_text(), [p.name for p in folder.parent.iterdir()]
        ('new', ['a'])
    """
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    made, old = _beside(folder, "new"), _beside(folder, "old")
    with _alone(folder):
        try:
            made.mkdir()
            yield made
            if folder.exists():
                folder.rename(old)
            made.rename(folder)
        finally:
            _tidy(folder)


@contextmanager
def made_once(folder: Path) -> Iterator[Path | None]:
    """Makes a folder that is whole or not there; of several processes the first one makes it.

    Args:
        folder: The folder's name in the end; its parents are made.

    Yields:
        An empty folder to write into, or None where the folder is there.
    """
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        if folder.exists():
            yield None
            return
        made = _beside(folder, "new")
        try:
            made.mkdir()
            yield made
            made.rename(folder)
        finally:
            _tidy(folder)


def restore_folder(folder: Path) -> None:
    """Puts an older folder back where a process was killed before the new one had its name.

    Args:
        folder: The folder's name; nothing is done where it is there.
    """
    folder = folder.resolve()
    if not folder.exists() and _beside(folder, "old").is_dir():
        with _alone(folder):
            pass


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Waits for others that write the folder, then clears what killed ones left of it."""
    name = _beside(folder, "lock")
    with FileLock(name):
        _tidy(folder)
        try:
            yield
        finally:
            name.unlink(missing_ok=True)


def _tidy(folder: Path) -> None:
    """What is named old is whole at any moment: before it is removed, it is renamed."""
    made, old = _beside(folder, "new"), _beside(folder, "old")
    shutil.rmtree(made, ignore_errors=True)
    if old.is_dir() and folder.exists():
        old.rename(made)
        shutil.rmtree(made, ignore_errors=True)
    elif old.is_dir():
        old.rename(folder)


def _beside(folder: Path, ending: str) -> Path:
    return folder.with_name(f".{folder.name}.{ending}")


SWEEP = "multirun.yaml"  # by which the folder of a sweep is known
LOCK, LOG = ".lock", "train.log"
# What a run writes before the first round, the last of it last.
FIRST_FILES = (
    *("versions.json", "splits.json", "preprocessing.json", "cohort.json", "overrides.yaml"),
    "config.yaml",
)
# What a run makes before it is opened, which its last file does.
_BEGUN = {LOCK, f"{LOCK}.pid", LOG, *FIRST_FILES[:-1]}


def refuse_full(folder: Path, known_by: str | None = None, otherwise: str | None = None) -> None:
    """Refuses a folder for new results that holds anything, whoever it is from.

    Args:
        folder: Where results are to go; need not exist.
        known_by: A file that makes a folder with something in it fit all the same.
        otherwise: What else may be done, for the sentence; by default, to resume a run.

    Raises:
        ConfigError: If it is a file, or not empty.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> refuse_full(folder)
        >>> (folder / "thesis.tex").touch()
        >>> refuse_full(folder)
        Traceback (most recent call last):
        ...
        medfed.common.errors.ConfigError: The folder /tmp/... is not empty; name one that is, or \
resume=FOLDER.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; name a folder that is new or empty.")
    if known_by is not None and (folder / known_by).is_file():
        return
    if folder.is_dir() and any(folder.iterdir()) and not was_killed_early(folder):
        if otherwise is None:
            otherwise = "" if known_by else ", or resume=FOLDER"
        raise ConfigError(f"The folder {folder} is not empty; name one that is{otherwise}.")


def was_killed_early(folder: Path) -> bool:
    """Returns whether a folder holds only what a run leaves that is killed before it is opened.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> for name in (".lock", ".lock.pid", "versions.json"):
        ...     (folder / name).touch()
        >>> was_killed_early(folder)
        True
        >>> (folder / "thesis.tex").touch()
        >>> was_killed_early(folder)
        False
    """
    names = _names(folder)
    others = [n for n in names if n not in _BEGUN and not n.startswith(PARTIAL)]
    return (f"{LOCK}.pid" in names or names == [LOCK]) and not others


@dataclass(frozen=True)
class Before:
    """What was there before anything was made, so that nothing else is removed later.

    Attributes:
        top: Below which folders will be made; those above it may be made, too.
        there: The folders that were there: above ``top``, itself, and below.
        swept: Whether an earlier sweep had left its record in ``top``.
    """

    top: Path
    there: frozenset[Path] = field(repr=False)
    swept: bool

    @classmethod
    def of(cls, top: Path) -> Before:
        """Looks at a folder that may not exist yet."""
        top = Path(os.path.abspath(top))
        below = [Path(folder) for folder, _, _ in os.walk(top)]
        there = frozenset([*below, *(p for p in top.parents if p.exists())])
        return cls(top, there, (top / SWEEP).exists())

    def remove_made(self, folder: Path, files: Iterable[str]) -> None:
        """Removes files of a folder, and folders made since that are empty then.

        Args:
            folder: Where nothing came of what was begun.
            files: Names of files in it; they must not have been there before.
        """
        folder = Path(os.path.abspath(folder))
        for name in files:
            with suppress(OSError):
                (folder / name).unlink()
        for place in (folder, *folder.parents):
            inside = place.is_relative_to(self.top) or self.top.is_relative_to(place)
            only_record = place == self.top and not self.swept and _names(place) == [SWEEP]
            if only_record:
                (place / SWEEP).unlink()
            if not inside or place in self.there or _names(place):
                return
            with suppress(OSError):
                place.rmdir()


def _names(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir()] if folder.is_dir() else []
