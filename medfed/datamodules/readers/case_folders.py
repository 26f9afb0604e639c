"""One folder per case, one file per contrast: the most usual way to keep volumes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from medfed.common.errors import DataError
from medfed.datamodules.readers.base import Patient, check_names
from medfed.datamodules.readers.volume_cases import CaseReader

Pattern = str | Sequence[str]  # alternatives: the first that matches a file is taken


class FolderReader(CaseReader):
    """Reads folders such as ``case_0/FLAIR.nii.gz``, ``case_0/T1.nii.gz``, ``case_0/GT_W.nii.gz``.

    Args:
        path: The folder that holds the case folders. A ``centres.json`` or ``centres.csv`` in it
            names the hospitals, see `readers.centres.named_centres`.
        modalities: File name or glob pattern per channel, such as ``{FLAIR: "*_flair.nii.gz"}``, or
            a list of alternatives.
        label: File name or glob pattern of the mask, or alternatives.
        regions: Label values of every region, such as ``{whole: [1, 2, 4], enhancing: [4]}``. These
            values and 0 are the only ones that may occur.
        channels: Which of the modalities to read, in this order; None reads all.
        hospitals: Where no hospital is named: into how many contiguous blocks of cases to cut.
        known_labels: Values that may occur beside those of the regions.

    Raises:
        ConfigError: If a channel is unknown.
    """

    def __init__(
        self,
        path: Path,
        modalities: Mapping[str, Pattern],
        label: Pattern,
        regions: Mapping[str, Sequence[int]],
        channels: Sequence[str] | None = None,
        hospitals: int | None = None,
        known_labels: Sequence[int] = (),
    ) -> None:
        names = check_names("channel", channels or list(modalities), list(modalities))
        values = {value for region in regions.values() for value in region}
        super().__init__(path, names, regions, sorted(values.union(known_labels)), hospitals)
        self._patterns = {**{name: modalities[name] for name in names}, "label": label}

    def cases(self) -> list[Patient]:
        """See `CaseReader.cases`; the id is the folder's name."""
        if not self.path.is_dir():
            raise DataError(f"{self.path} is not a folder; set data.path to the folder of cases.")
        folders = self.case_folders()
        if not folders:
            raise DataError(f"{self.path} has no case folders; set data.path to their parent.")
        return [
            Patient(folder.name, {r: find_file(folder, r, p) for r, p in self._patterns.items()})
            for folder in sorted(folders, key=lambda folder: folder.name)
        ]

    def layout(self) -> dict[str, object]:
        """See `VolumeReader.layout`."""
        files = {n: [p] if isinstance(p, str) else list(p) for n, p in self._patterns.items()}
        return {**super().layout(), "files": {n: files[n] for n in self.channels}}

    def case_folders(self) -> list[Path]:
        """Lists the folders of the cases."""
        return [folder for folder in self.path.iterdir() if is_visible_folder(folder)]


def is_visible_folder(path: Path) -> bool:
    """Returns whether this is a folder that is not hidden.

    Example:
        >>> is_visible_folder(Path(".git"))
        False
    """
    return path.is_dir() and not path.name.startswith(".")


def find_file(folder: Path, role: str, pattern: Pattern) -> Path:
    """Finds the one file that a pattern matches; of several patterns, the first that matches any.

    Args:
        folder: The folder of a case.
        role: A channel, or ``"label"``, for the message.
        pattern: File name or glob pattern, or alternatives.

    Returns:
        The file.

    Raises:
        DataError: If there is none, or more than one.
    """
    patterns = [pattern] if isinstance(pattern, str) else list(pattern)
    # Archives made on a Mac hold a hidden shadow of every file.
    visible = sorted(f for f in folder.iterdir() if not f.name.startswith("."))
    found: list[Path] = []
    for one in patterns:
        found = found or [f for f in visible if f.match(one)]
    if len(found) != 1:
        what = "mask" if role == "label" else f"modality {role}"
        names = ", ".join(f.name for f in visible[:8])
        raise DataError(
            f"{folder}: {len(found)} files match {' or '.join(patterns)} ({what}), but exactly "
            f"one must; the folder has: {names or 'nothing'}. Add the file, mend data.reader, or "
            "remove the case."
        )
    return found[0]
