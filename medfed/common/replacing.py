"""A folder that is whole or not there, in the place of an older one without losing it, or new.

While ``NAME`` is written, its parent holds ``.NAME.new``, which is not whole, and for the moment
between two renames ``.NAME.old``, which is. A process that is killed leaves them behind; the next
one that writes or reads ``NAME`` puts the older folder back where the new one is missing, and
removes what is left over. ``.NAME.lock`` keeps two processes from doing so at once; the lock is the
system's, so it ends with its process however that ends.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock


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
