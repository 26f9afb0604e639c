"""What became of every file of a folder: taken, or left out, and why."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_SYSTEM = {"thumbs.db", "desktop.ini", "__macosx", "lost+found"}


@dataclass(frozen=True)
class Left:
    """Files that were left out for one reason.

    Attributes:
        reason: Why, in words.
        ending: What their names end with; empty without an ending.
        files: How many they are.
        example: The first of them, from the folder of the data.
    """

    reason: str
    ending: str
    files: int
    example: str


@dataclass(frozen=True)
class Account:
    """What became of the files of a data set; hidden files and folders do not count.

    Attributes:
        seen: Number of files.
        taken: Number of those that were used.
        left: The others, by reason and ending, the most first.
    """

    seen: int
    taken: int
    left: Sequence[Left]

    def line(self) -> str:
        """Returns the account as one sentence, without what the reader of the data knows anyway.

        Example:
            >>> Account(3, 1, [Left("no image", ".txt", 2, "a.txt")]).line()
            'Files: 3 seen, 1 taken, 2 left out: 2 .txt (no image), such as a.txt.'
        """
        text = f"Files: {self.seen:,} seen, {self.taken:,} taken"
        if not self.left:
            return f"{text}, none left out."
        parts = [
            f"{one.files:,} {one.ending or 'without ending'} ({one.reason}), such as {one.example}"
            for one in self.left[:6]
        ]
        more = sum(one.files for one in self.left[6:])
        parts += [f"{more:,} of other kinds"] if more else []
        return f"{text}, {self.seen - self.taken:,} left out: {'; '.join(parts)}."

    def record(self) -> dict[str, Any]:
        """Returns the account as JSON."""
        left = [asdict(one) for one in self.left]
        return {"seen": self.seen, "taken": self.taken, "left": left}


def visible_files(folder: Path) -> list[Path]:
    """Lists the files below a folder, sorted; hidden files and folders do not count.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> (folder / ".git").mkdir()
        >>> for name in (".git/a.png", "b.png", ".c.png"):
        ...     (folder / name).touch()
        >>> [file.name for file in visible_files(folder)]
        ['b.png']
    """
    return sorted(_walked(folder))


def _walked(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if is_visible(name)]
        yield from (Path(place, name) for name in names if is_visible(name))


def is_visible(name: str) -> bool:
    """Says whether a name is of no hidden file or folder, nor one of the system's.

    Example:
        >>> is_visible("a.png"), is_visible(".a.png"), is_visible("Thumbs.db")
        (True, False, False)
    """
    return not name.startswith(".") and name.lower() not in _SYSTEM


def account_of(
    path: Path,
    taken: Iterable[Path],
    endings: Collection[str],
    reasons: Mapping[Path, str],
) -> Account:
    """Counts the files of a data set.

    Args:
        path: Its folder; of a table or list, the folders of the files that it names are looked at.
        taken: The files that were used.
        endings: The endings, in small letters, of files that the reader can read.
        reasons: Why some files were left out; for others their ending decides.

    Returns:
        The account, in which every visible file is taken or left out.
    """
    used = {*taken}
    if path.is_dir():
        seen = visible_files(path)
    else:
        beside = {file.parent for file in used} - {path.parent}
        seen = sorted({f for folder in beside for f in folder.glob("*") if f.is_file()} | {path})
        seen = [file for file in seen if is_visible(file.name)]
        used.add(path)
    whole = {os.path.normpath(file) for file in used}
    groups: dict[tuple[str, str], list[Path]] = {}
    for file in seen:
        if os.path.normpath(file) not in whole:
            ending = "".join(file.suffixes[-2:]).lower() if file.suffix == ".gz" else file.suffix
            known = any(file.name.lower().endswith(one) for one in endings)
            usual = "the data set does not name it" if known else "another kind of file"
            groups.setdefault((reasons.get(file, usual), ending.lower()), []).append(file)
    base = path if path.is_dir() else path.parent
    left = [
        Left(reason, ending, len(files), os.path.relpath(files[0], base))
        for (reason, ending), files in groups.items()
    ]
    left.sort(key=lambda one: (-one.files, one.reason, one.ending))
    return Account(len(seen), len(seen) - sum(one.files for one in left), left)
