"""One folder per case, one NIfTI file per modality, found by patterns from configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from medfed.datamodules.readers.base import Patient, check_names, with_hospitals
from medfed.datamodules.readers.nifti import NiftiReader
from medfed.errors import DataError


class FolderReader(NiftiReader):
    """Reads folders such as ``case_0/FLAIR.nii.gz``, ``case_0/T1.nii.gz``, ``case_0/GT_W.nii.gz``.

    Args:
        path: The folder that holds the case folders.
        modalities: File name or glob pattern per channel, such as ``{FLAIR: "*_flair.nii.gz"}``.
        label: File name or glob pattern of the mask.
        regions: Label values of every region, such as ``{whole: [1, 2, 4], enhancing: [4]}``. These
            values and 0 are the only ones that may occur.
        channels: Which of the modalities to read, in this order; None reads all.
        hospitals: Into how many hospitals, contiguous in sorted order, to cut the cases.

    Raises:
        ConfigError: If a channel is unknown.
    """

    def __init__(
        self,
        path: Path,
        modalities: Mapping[str, str],
        label: str,
        regions: Mapping[str, Sequence[int]],
        channels: Sequence[str] | None = None,
        hospitals: int | None = None,
    ) -> None:
        names = check_names("channel", channels or list(modalities), list(modalities))
        values = sorted({value for region in regions.values() for value in region})
        super().__init__(names, regions, values)
        self.path = path
        self.hospitals = hospitals
        self._patterns = {**{name: modalities[name] for name in names}, "label": label}

    def patients(self) -> list[Patient]:
        """See `readers.base.Reader.patients`; the id is the folder's name."""
        if not self.path.is_dir():
            raise DataError(f"{self.path} is not a folder; set data.path to the folder of cases.")
        folders = [f for f in self.path.iterdir() if f.is_dir() and not f.name.startswith(".")]
        if not folders:
            raise DataError(f"{self.path} has no case folders; set data.path to their parent.")
        patients = [
            Patient(folder.name, {r: _find(folder, r, p) for r, p in self._patterns.items()})
            for folder in sorted(folders)
        ]
        return with_hospitals(patients, self.hospitals)


def _find(folder: Path, role: str, pattern: str) -> Path:
    """The one file that a pattern matches."""
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        what = "mask" if role == "label" else f"modality {role}"
        names = ", ".join(sorted(f.name for f in folder.iterdir())[:8])
        raise DataError(
            f"{folder}: {len(found)} files match {pattern} ({what}), but exactly one must; the "
            f"folder has: {names or 'nothing'}. Add the file, mend data.reader, or remove the case."
        )
    return found[0]
