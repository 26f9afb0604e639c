"""Volumes in one folder per case, one file per contrast, such as those of the BraTS challenges.

BraTS challenges, 2017 to 2021 and, by name, 2023: ``<case>/<case>_flair.nii.gz``, ``_t1``,
``_t1ce``, ``_t2`` and ``_seg`` (2023: ``-t2f``, ``-t1n``, ``-t1c``, ``-t2w``, ``-seg``), packed or
not. The cases of 2017 to 2019 lie in ``HGG`` and ``LGG``. Labels: 1 necrotic and non-enhancing
tumour, 2 oedema, 4 enhancing tumour (3 since 2023).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from medfed.common.errors import ConfigError, DataError
from medfed.datamodules.readers.base import Missing, Patient, check_names
from medfed.datamodules.readers.cases import CaseReader, institutions
from medfed.datamodules.readers.volumes import FILES, AbsentFileError, Pattern, find_file

_FILES, _WHOLE = {"FLAIR": "FLAIR.nii.gz", "T1": "T1.nii.gz"}, {"whole": [1]}


class FolderReader(CaseReader):
    """Reads folders such as ``case_0/FLAIR.nii.gz``, ``case_0/T1.nii.gz``, ``case_0/GT_W.nii.gz``.

    Args:
        path: The folder that holds the case folders. A ``centres.json`` or ``centres.csv`` in it
            names the hospitals, see `readers.csv_files.named_centres`.
        modalities: File name or glob pattern per channel, such as ``{FLAIR: "*_flair.nii.gz"}``, or
            a list of alternatives; None: the two above.
        label: File name or glob pattern of the mask, or alternatives.
        regions: Label values of every region, such as ``{whole: [1, 2, 4], enhancing: [4]}``. These
            values and 0 are the only ones that may occur. None: ``{whole: [1]}``.
        channels: Which of the modalities to read, in this order; None reads all.
        hospitals: If no hospital is named: the number of contiguous blocks of cases.
        known_labels: Values that may occur in addition to those of the regions.
        missing: See `VolumeReader`.

    Raises:
        ConfigError: If a channel is unknown.
    """

    def __init__(
        self,
        path: Path,
        modalities: Mapping[str, Pattern] | None,
        label: Pattern,
        regions: Mapping[str, Sequence[int]] | None,
        channels: Sequence[str] | None = None,
        hospitals: int | None = None,
        known_labels: Sequence[int] = (),
        missing: Missing = "error",
    ) -> None:
        modalities, regions = modalities or _FILES, regions or _WHOLE
        for key, given, such in (("modalities", modalities, _FILES), ("regions", regions, _WHOLE)):
            if not isinstance(given, Mapping):
                what = str(such).replace("'", "")
                raise ConfigError(f"data.reader.{key} is a map; write data.reader.{key}='{what}'.")
        names = check_names("channel", channels or list(modalities), list(modalities))
        values = {value for region in regions.values() for value in region}
        super().__init__(
            path, names, regions, sorted(values.union(known_labels)), hospitals, missing
        )
        self._patterns = {**{name: modalities[name] for name in names}, "label": label}

    def cases(self) -> list[Patient]:
        """See `CaseReader.cases`; the id is the folder's name."""
        if not self.path.is_dir():
            raise DataError(f"{self.path} is not a folder; set data.path to the folder of cases.")
        folders = self.case_folders()
        if not folders:
            raise DataError(f"{self.path} has no case folders; set data.path to their parent.")
        return [self._case(folder) for folder in sorted(folders, key=lambda folder: folder.name)]

    def _case(self, folder: Path) -> Patient:
        files, lacks = {}, {}
        for role, pattern in self._patterns.items():
            try:
                files[role] = find_file(folder, role, pattern)
            except AbsentFileError as error:
                if role == "label":
                    raise
                lacks[role] = str(error)
        return Patient(folder.name, files, lacks=lacks)

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


MASK = ("*_seg.nii.gz", "*_seg.nii", "*-seg.nii.gz", "*-seg.nii")


class BratsChallengeReader(FolderReader):
    """Reads the training folder of a BraTS challenge.

    The hospital of a case comes from ``centres.json`` or ``centres.csv`` in the folder; else it is
    the institution in its name (2017 to 2019) or in ``name_mapping.csv`` (2020); else a block of
    cases.

    Args:
        path: The folder that holds the case folders, or ``HGG`` and ``LGG`` with the case folders.
        channels: Channels to read, in this order.
        regions: Any of ``whole``, ``core`` and ``enhancing``.
        hospitals: If no hospital is known: the number of contiguous blocks of cases.
        enhancing: Label value of the enhancing tumour: 4, and 3 since 2023.
        missing: See `VolumeReader`.

    Raises:
        ConfigError: If a region or channel is unknown, or `enhancing` is 0, 1 or 2.
    """

    def __init__(
        self,
        path: Path,
        channels: Sequence[str] = ("FLAIR", "T1w", "T1gd", "T2w"),
        regions: Sequence[str] = ("whole",),
        hospitals: int | None = None,
        enhancing: int = 4,
        missing: Missing = "error",
    ) -> None:
        if enhancing not in (3, 4):
            raise ConfigError(
                f"data.reader.enhancing={enhancing} must be 4 (BraTS 2017 to 2021) or 3 (since "
                "2023); 1 is the necrotic and non-enhancing tumour and 2 the oedema."
            )
        values = {"whole": (1, 2, enhancing), "core": (1, enhancing), "enhancing": (enhancing,)}
        chosen = {name: values[name] for name in check_names("region", regions, list(values))}
        super().__init__(path, FILES, MASK, chosen, channels, hospitals, values["whole"], missing)

    def case_folders(self) -> list[Path]:
        """Lists the folders here; of one without images, such as ``HGG``, the folders in it."""
        cases: list[Path] = []
        for folder in super().case_folders():
            # A case has images; a folder that holds only folders, such as HGG, is a group of cases.
            inner = [f for f in folder.iterdir() if is_visible_folder(f)]
            cases += [folder] if any(folder.glob("[!.]*.nii*")) or not inner else inner
        names: dict[str, Path] = {}
        for folder in cases:
            if (first := names.setdefault(folder.name, folder)) != folder:
                raise DataError(f"Case {folder.name} is in {first} and in {folder}; remove one.")
        return cases

    def centres(self, cases: Sequence[str]) -> Mapping[str, str]:
        """See `CaseReader.centres`."""
        return super().centres(cases) or institutions(self.path, cases)
