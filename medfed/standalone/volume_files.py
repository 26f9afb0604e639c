"""Which files and folders are volumes, by their names, and which files make up a volume."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from . import dicom, itk

SUFFIXES = (".nii.gz", ".nii", ".nrrd", ".mha", ".mhd")
_PAIR = {".hdr": [".img"], ".img": [".hdr"]}


def is_volume(path: Path) -> bool:
    """Says whether a path is, by its name, a volume: a file, or the folder of a DICOM series."""
    return bool(suffix_of(path)) or (path.is_dir() and dicom.is_series(path))


def suffix_of(path: Path) -> str:
    """Returns the suffix of a volume's file, both parts of ``.nii.gz``; empty for other files.

    Example:
        >>> suffix_of(Path("a.b.nii.gz")), suffix_of(Path("a.mha")), suffix_of(Path("a.png"))
        ('.nii.gz', '.mha', '')
    """
    return next((s for s in SUFFIXES if path.name.lower().endswith(s)), "")


def stem_of(path: Path) -> str:
    """Returns the name of a volume without its suffix."""
    return path.name[: len(path.name) - len(suffix_of(path))]


def existing(paths: Iterable[Path]) -> list[Path]:
    """Returns the volumes that exist: files, and folders that hold anything.

    Example:
        >>> existing([Path("no_such_scan.nii.gz")])
        []
    """
    return [p for p in paths if (any(p.iterdir()) if p.is_dir() else p.exists())]


def files_of(path: Path, series: Sequence[str] = ()) -> list[Path]:
    """Lists the files that make up a volume: those of a DICOM series, a header and its voxels."""
    return files_of_case([path], series)


def files_of_case(files: Iterable[Path], series: Sequence[str] = ()) -> list[Path]:
    """Lists all files that the volumes of a case are made of."""
    every: list[Path] = []
    for path in files:
        if path.is_dir():
            every += dicom.files(path, series)
        elif path.suffix.lower() == ".mhd":
            every += dict.fromkeys([path, itk.source_of(path).file])
        else:
            every += [path, *map(path.with_suffix, _PAIR.get(path.suffix, ()))]
    return every
