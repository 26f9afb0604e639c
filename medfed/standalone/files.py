"""Writes files and folders atomically; checksums, locks, templates, and folders for results.

A file or folder is complete or does not exist, even if a process is killed. While a folder ``NAME``
is written, its parent holds the incomplete ``.NAME.new`` and, between two renames, the complete
``.NAME.old``. A killed process leaves them behind; the next one that writes or reads ``NAME``
restores the older folder if the new one is missing, and removes the rest. ``.NAME.lock``, which the
system releases when its process ends, keeps two from doing so at once.
"""

from __future__ import annotations

import csv
import errno
import functools
import hashlib
import json
import logging
import os
import platform
import re
import shutil
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, BinaryIO

from .errors import ConfigError, DataError, MedfedError, WriteError, first_line

if TYPE_CHECKING:
    from jinja2 import Environment

_log = logging.getLogger(__name__)
PARTIAL = ".partial-"
RECORD = "prediction.json"  # in a folder of predictions
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # errors that only writing gives
_FORMULA = r"""(?=['" ]*[=+\-@\t\r＝＋－＠])"""  # also by semicolons or tabs, a cell begins so
_BEFORE, _GUARDED = (re.compile(rf"(?<![^;\t\r\n]){quote}{_FORMULA}") for quote in ("", "'"))
# Pictures of the characters that control a terminal; a cell keeps tabs and line breaks.
_DRAWN = {n: 0x2400 + n for n in range(32) if n not in b"\t\n\r"} | {127: 0x2421}
_DRAWN |= {n: 0xE000 + n for n in range(128, 160)}
_UNDRAWN = {picture: n for n, picture in _DRAWN.items()}
_HOST = f"{zlib.crc32(platform.node().encode()):08x}"  # process ids are unique only on one machine

_NO_NUMBER = re.compile(r'"(?:[^"\\]|\\.)*"|NaN|-?Infinity')  # or a text, which stays
_JSON = {"NaN": "null", "Infinity": "1e999", "-Infinity": "-1e999"}
_SYSTEM = {"thumbs.db", "desktop.ini", "__macosx", "lost+found"}
GZIP = "a gzip file"
_KINDS = (  # by their first bytes
    (rb"\x89PNG", "a PNG picture"),
    (rb"\xff\xd8\xff", "a JPEG picture"),
    (rb"II\*\0|MM\0\*", "a TIFF picture"),
    (rb"\s*<(!doctype|html|\?xml)", "a web page or XML"),
    (rb"version https://git-lfs", "a pointer of Git LFS, without the data"),
    (rb"NRRD\d", "a NRRD file"),
    (rb"(ObjectType|NDims|Comment) *=", "a MetaImage file"),
    (rb"\x1f\x8b", GZIP),
    (rb"PK\x03\x04", "an Excel or zip file"),
    (rb"\xd0\xcf\x11\xe0", "an old Excel file"),
    (rb"PAR1", "a Parquet file"),
    (rb"\xff\xfe|\xfe\xff", "UTF-16 text"),
    (rb"(?s:.{128})DICM", "a DICOM file"),
    (rb"(?s:.{344})n[i+]1\0", "a NIfTI file that is not packed"),
    (rb"\x5c\x01\0\0|\0\0\x01\x5c", "a NIfTI file that is not packed"),
)


def kind_of(file: Path, opener: Callable[..., Any] = open) -> str | None:
    """What a file is by its first bytes."""
    with suppress(OSError, EOFError, zlib.error), opener(file, "rb") as opened:
        head = opened.read(352)
        return next((k for begin, k in _KINDS if re.match(begin, head, re.IGNORECASE)), None)
    return None


@contextmanager
def reading(
    path: Path, what: str, mend: str, absent: str = "copy it there", usual: str = ""
) -> Iterator[None]:
    """Turns every error while a file is read, also of libraries on bad bytes, into one sentence.

    `usual`: how the words for the right kinds of files end, in `kind_of`.

    Example:
        >>> with reading(Path("a.npy"), "an array", "write it again"):
        ...     raise ValueError("it ends too early.")
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.DataError: a.npy cannot be read as an array (it ends too early); \
write it again.
    """
    refuse_special(path)
    try:
        yield
    except MedfedError:
        raise
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; {absent}.") from None
    except Exception as error:
        kind = kind_of(path) or usual
        why = first_line(error) if kind.endswith(usual) else f"it is {kind}"
        raise DataError(f"{path} cannot be read as {what} ({why}); {mend}.") from error


def visible_files(folder: Path) -> list[Path]:
    """Lists the files below a folder and its links, sorted; hidden ones do not count.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> (folder / ".git").mkdir()
        >>> for name in (".git/a.png", "b.png", ".c.png"):
        ...     (folder / name).touch()
        >>> [file.name for file in visible_files(folder)]
        ['b.png']
    """
    return sorted(walk(folder)) if folder.is_dir() else []


def walk(
    root: Path, apart_from: Path | None = None, is_one: Callable[[Path], bool] = lambda _: False
) -> Iterator[Path]:
    """Yields the files below a folder and the folders that are one input each; no predictions."""
    left_out = None if apart_from is None else apart_from.resolve()
    visited: set[Path] = set()  # links may lead in circles

    def visit(folder: Path) -> Iterator[Path]:
        if folder.resolve() in visited:
            return
        visited.add(folder.resolve())
        for path in sorted(folder.iterdir()):
            if not is_visible(path.name):
                continue
            try:
                if path.is_dir() and path.resolve() == left_out:
                    continue
                if path.is_dir() and (path / RECORD).is_file():
                    _log.warning("%s is left out: it holds predictions.", path)
                elif not path.is_dir() or is_one(path):
                    yield path
                else:
                    yield from visit(path)
            except PermissionError as error:
                _log.warning("%s is left out (%s).", path, error.strerror)

    yield from visit(root)


def slashed(folder: Path, names: Iterable[str]) -> list[str]:
    r"""Returns the names of files in a list; those of a list from Windows get slashes.

    Example:
        >>> slashed(Path("."), [r"images\a.png", "b.png"])
        ['images/a.png', 'b.png']
    """
    pairs = [(name, name.replace("\\", "/")) for name in names]
    return [old if old == new or (folder / old).exists() else new for old, new in pairs]


def is_visible(name: str) -> bool:
    """Says whether a name is of no hidden file or folder, nor one of the system's.

    Example:
        >>> is_visible("a.png"), is_visible(".a.png"), is_visible("Thumbs.db")
        (True, False, False)
    """
    return not name.startswith(".") and name.lower() not in _SYSTEM


@contextmanager
def replacing(path: Path, sync: bool = False) -> Iterator[Path]:
    """Gives a file, written under another name of the same ending, its name when it is complete."""
    _remove_stale(path.parent)
    partial = path.with_name(f"{PARTIAL}{_HOST}-{os.getpid()}-{path.name}")
    with whole_or_none(path, partial):
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        if sync:
            _synchronise(partial)
        partial.replace(path)
        if sync and os.name == "posix":  # Windows cannot write a folder's names to the disk
            _synchronise(path.parent)


@contextmanager
def whole_or_none(path: Path, partial: Path) -> Iterator[None]:
    """Removes a file that could not be finished, and says in one sentence why."""
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
    """Opens a file for writing that gets its name by :func:`replacing`."""
    with replacing(path, sync) as partial, partial.open("wb") as file:
        yield file


def write_text(path: Path, text: str) -> None:
    """Writes a file atomically; makes its folder if missing."""
    with atomic(path, sync=False) as file:
        file.write(text.encode())


def json_text(content: object) -> str:
    """Returns JSON that every parser reads, unlike Python's NaN and Infinity.

    Example:
        >>> print(json_text({"iou": float("nan"), "loss": float("inf")}))
        {
         "iou": null,
         "loss": 1e999
        }
        >>> json.loads("1e999")
        inf
    """
    text = json.dumps(content, indent=1, default=dict)  # of other mappings than dict
    return _NO_NUMBER.sub(lambda match: _JSON.get(match[0], match[0]), text)


def write_json(path: Path, content: object, sync: bool = False) -> None:
    """Writes JSON atomically; makes its folder if missing."""
    with atomic(path, sync) as file:
        file.write((json_text(content) + "\n").encode())


def csv_text(header: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    r"""Returns a table as the text of a CSV file, in which spreadsheets find no formulas.

    Example:
        >>> csv_text(["client", "iou"], [["a", 0.5], ["=1+1", -0.5]])
        "client,iou\na,0.5\n'=1+1,-0.5\n"
    """
    # Python quotes a carriage return only if lines end with one; the ends are replaced afterwards.
    lines: list[str] = []
    writer = csv.writer(SimpleNamespace(write=lines.append), lineterminator="\r\n")
    writer.writerows(map(_inert, row) for row in (header, *rows))
    return "".join(line.removesuffix("\r\n") + "\n" for line in lines)


def original(cell: str) -> str:
    r"""Returns the text from which :func:`csv_text` made a cell.

    Example:
        >>> original("'=1+1"), original("'a'"), original("-0.5"), original("\u241b[1m")
        ('=1+1', "'a'", '-0.5', '\x1b[1m')
    """
    cell = _GUARDED.sub("", cell) if "'" in cell else cell
    return cell if cell.isascii() else cell.translate(_UNDRAWN)


def _inert(cell: object) -> object:
    """Puts a quote before text that a spreadsheet would compute, and draws control characters."""
    if cell is None or isinstance(cell, int | float):
        return cell
    try:
        float(text := str(cell))
    except ValueError:
        return _BEFORE.sub("'", text.translate(_DRAWN))
    return cell


@contextmanager
def writing(place: Path, mend: str) -> Iterator[None]:
    """Turns an error while writing into one sentence.

    Example:
        >>> with writing(Path("/data/cache"), "set data.cache to another folder"):
        ...     raise OSError(28, "No space left on device")
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.WriteError: Cannot write /data/cache (No space left on device); \
make room there, or set data.cache to another folder.
    """
    try:
        yield
    except OSError as error:
        within = isinstance(error, WriteError) and isinstance(error.__cause__, OSError)
        cause = error.__cause__ if within else error
        raise cannot_write(place, cause, mend) from error  # type: ignore[arg-type]


def cannot_write(place: Path, error: OSError, mend: str = "choose another folder") -> WriteError:
    """Returns the error for something that could not be written.

    Example:
        >>> print(cannot_write(Path("/data"), PermissionError(13, "Permission denied")))
        Cannot write /data (Permission denied); choose another folder.
    """
    forbidden = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
    room = "" if forbidden else "make room there, or "
    return WriteError(f"Cannot write {place} ({error.strerror or error}); {room}{mend}.")


def _synchronise(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@functools.cache
def _remove_stale(folder: Path) -> None:
    """Removes, once per process, the leftovers of processes of this machine that have ended."""
    for path in folder.glob(f"{PARTIAL}{_HOST}-*"):
        process = path.name.removeprefix(f"{PARTIAL}{_HOST}-").partition("-")[0]
        if process.isdecimal() and not _is_running(int(process)):
            path.unlink(missing_ok=True)


def _is_running(process: int) -> bool:
    try:
        if os.name == "posix":  # on Windows, asking would end the process
            os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def remove_partial(folder: Path) -> None:
    """Removes the incomplete files of killed processes; call it under the lock."""
    for path in folder.glob(f"{PARTIAL}*"):
        path.unlink(missing_ok=True)


def digest(content: object) -> str:
    """Hashes content that JSON can hold; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def sha256(path: Path) -> str:
    """Hashes a file; here, because worker processes import this module without PyTorch."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_private(folder: Path) -> None:
    """Takes from all others than the owner the right to a folder and all that it holds.

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

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> (folder / "pictures").symlink_to("/tmp")
        >>> refuse_links(folder / "pictures")
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.ConfigError: /tmp/.../pictures is a link, and nothing is written \
through it; remove it, or put the file or folder itself there.
    """
    if link := next((path for path in paths if path.is_symlink()), None):
        what = f"{link} is a link, and nothing is written through it"
        raise ConfigError(f"{what}; remove it, or put the file or folder itself there.")


def refuse_special(path: str | Path, named: str = "") -> None:
    """Refuses what is neither a file nor a folder, as reading a device or a pipe may never end."""
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    except (OSError, ValueError) as error:  # links in a circle, very long names
        why = getattr(error, "strerror", None) or error
        raise DataError(f"{named or path!s:.200} is no path here ({why}); name another.") from error
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise DataError(f"{named or path} is a device, pipe or socket; name a file or folder.")


@contextmanager
def locked(folder: Path, name: str = "lock", wait: bool = True) -> Iterator[None]:
    """Holds a folder's lock, which the system releases; a file beside it names the process."""
    from filelock import FileLock, Timeout  # bundles carry this file and need no locks

    holder = folder / f"{name}.pid"
    refuse_links(folder / name, holder)
    lock = FileLock(folder / name)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        who = holder.read_text() if holder.is_file() else "unknown"
        if not wait:
            busy = f"Process {who} already works in {folder}; wait until it ends"
            raise ConfigError(f"{busy}, or choose another folder.") from None
        _log.warning("Waiting for process %s, which prepares %s.", who, folder)
        lock.acquire()
    try:
        holder.write_text(str(os.getpid()))
        yield
    finally:
        lock.release()


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Gives a folder its name only when it is complete; until then an older one stays."""
    with _alone(folder) as (place, made):
        yield made
        if place.exists():
            place.rename(_beside(place, "old"))
        made.rename(place)


@contextmanager
def made_once(folder: Path) -> Iterator[Path | None]:
    """Makes a folder atomically; of several processes the first one makes it."""
    with _alone(folder) as (place, made):
        if place.exists():
            yield None
            return
        yield made
        made.rename(place)


def restore_folder(folder: Path) -> None:
    """Restores an older folder if a process was killed before the new one had its name."""
    folder = folder.resolve()
    if not folder.exists() and _beside(folder, "old").is_dir():
        with _alone(folder):
            pass


@contextmanager
def _alone(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Waits for other processes that write the folder, then clears what killed processes left."""
    from filelock import FileLock  # as above

    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    made, name = _beside(folder, "new"), _beside(folder, "lock")
    with FileLock(name):
        _tidy(folder)
        try:
            made.mkdir()
            yield folder, made
        finally:
            _tidy(folder)
            name.unlink(missing_ok=True)


def _tidy(folder: Path) -> None:
    """Removes the old folder; renames it first, so that a folder named old is always complete."""
    made, old = _beside(folder, "new"), _beside(folder, "old")
    shutil.rmtree(made, ignore_errors=True)
    if old.is_dir() and folder.exists():
        old.rename(made)
        shutil.rmtree(made, ignore_errors=True)
    elif old.is_dir():
        old.rename(folder)


def _beside(folder: Path, ending: str) -> Path:
    return folder.with_name(f".{folder.name}.{ending}")


@functools.cache  # an environment keeps what it has compiled
def text_templates(folder: Path) -> Environment:
    """Returns the environment of the templates of a folder; it escapes nothing."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # late: few commands write

    blocks = dict.fromkeys(("trim_blocks", "lstrip_blocks", "keep_trailing_newline"), True)
    loader = FileSystemLoader(folder)
    return Environment(loader=loader, undefined=StrictUndefined, **blocks)  # type: ignore[arg-type]


def filled(template: Path, **words: Any) -> str:
    """Returns the text of a template."""
    return text_templates(template.parent).get_template(template.name).render(words)
