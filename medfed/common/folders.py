"""Folders for results: what was there before, and what goes again where nothing came of it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from medfed.common.errors import ConfigError
from medfed.common.files import PARTIAL

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
