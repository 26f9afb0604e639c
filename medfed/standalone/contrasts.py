"""Which file of a case's folder is which contrast, by patterns of their names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .errors import DataError
from .files import is_visible
from .volume_files import existing


class AbsentFileError(DataError):
    """A case has no file for a channel."""


Pattern = str | Sequence[str]  # alternatives: the first that matches a file is taken


def alternatives(pattern: Pattern) -> list[str]:
    """Returns the alternatives of a pattern, of which it may have one."""
    return [pattern] if isinstance(pattern, str) else list(pattern)


def find_file(folder: Path, role: str, pattern: Pattern, mend: str = "mend data.reader") -> Path:
    """Finds the one file that matches; of alternative patterns, the first with a match counts.

    `mend`: what to do if not one matches, beside adding the file and removing the case.
    """
    patterns = alternatives(pattern)
    # Archives made on a Mac hold a hidden shadow of every file.
    visible = sorted(f for f in folder.iterdir() if is_visible(f.name))
    matches: list[Path] = []
    for one in patterns:
        inner = folder.glob("[!.]*/[!.]*") if "/" in one else visible
        matches = matches or existing(f for f in sorted(inner) if f.match(one))
    if len(matches) != 1:
        what = "mask" if role == "label" else f"modality {role}"
        names = ", ".join(f.name for f in visible[:8])
        count = f"{len(matches)} files match {' or '.join(patterns)} ({what}), but exactly one must"
        what = f"{count}; the folder has: {names or 'nothing'}"
        text = f"{folder}: {what}. Add the file, {mend}, or remove the case."
        raise DataError(text) if matches else AbsentFileError(text)
    return matches[0]


# The channels have the names that MSD gives them, so that a partition fits both layouts.
_ENDS = {"FLAIR": "_flair -t2f", "T1w": "_t1 -t1n", "T1gd": "_t1ce -t1c", "T2w": "_t2 -t2w"}
FILES = {
    name: tuple(f"*{end}{suffix}" for end in ends.split() for suffix in (".nii.gz", ".nii"))
    for name, ends in _ENDS.items()
}
