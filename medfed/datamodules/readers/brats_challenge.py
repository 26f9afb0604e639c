"""The folders of the BraTS challenges, 2017 to 2021 and, by name, those of 2023.

``<case>/<case>_flair.nii.gz``, ``_t1``, ``_t1ce``, ``_t2`` and ``_seg`` (2023: ``-t2f``, ``-t1n``,
``-t1c``, ``-t2w``, ``-seg``), packed or not. The cases of 2017 to 2019 lie in ``HGG`` and ``LGG``.
Labels: 1 necrotic and non-enhancing tumour, 2 oedema, 4 enhancing tumour (3 since 2023). MSD, which
was made of the same scans, has 1 for oedema and 2 for the non-enhancing tumour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from medfed.common.errors import ConfigError, DataError
from medfed.datamodules.readers.base import check_names
from medfed.datamodules.readers.case_folders import FolderReader, is_visible_folder
from medfed.datamodules.readers.centres import institutions

# The channels have the names that MSD gives them, so that a partition fits both layouts.
FILES = {
    "FLAIR": ("*_flair.nii.gz", "*_flair.nii", "*-t2f.nii.gz", "*-t2f.nii"),
    "T1w": ("*_t1.nii.gz", "*_t1.nii", "*-t1n.nii.gz", "*-t1n.nii"),
    "T1gd": ("*_t1ce.nii.gz", "*_t1ce.nii", "*-t1c.nii.gz", "*-t1c.nii"),
    "T2w": ("*_t2.nii.gz", "*_t2.nii", "*-t2w.nii.gz", "*-t2w.nii"),
}
MASK = ("*_seg.nii.gz", "*_seg.nii", "*-seg.nii.gz", "*-seg.nii")


class BratsChallengeReader(FolderReader):
    """Reads the training folder of a BraTS challenge.

    The hospital of a case is that of ``centres.json`` or ``centres.csv`` beside the cases; else the
    institution in its name (2017 to 2019) or in ``name_mapping.csv`` (2020); else a block of cases.

    Args:
        path: The folder that holds the case folders, or ``HGG`` and ``LGG`` with the case folders.
        channels: Channels to read, in this order.
        regions: Any of ``whole``, ``core`` and ``enhancing``.
        hospitals: Where no hospital is known: into how many contiguous blocks of cases to cut.
        enhancing: Label value of the enhancing tumour: 4, and 3 since 2023.

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
    ) -> None:
        if enhancing not in (3, 4):
            raise ConfigError(
                f"data.reader.enhancing={enhancing} must be 4 (BraTS 2017 to 2021) or 3 (since "
                "2023); 1 is the necrotic and non-enhancing tumour and 2 the oedema."
            )
        values = {"whole": (1, 2, enhancing), "core": (1, enhancing), "enhancing": (enhancing,)}
        chosen = {name: values[name] for name in check_names("region", regions, list(values))}
        super().__init__(path, FILES, MASK, chosen, channels, hospitals, values["whole"])

    def case_folders(self) -> list[Path]:
        """Lists the folders here; of one without images, such as ``HGG``, the folders in it."""
        cases: list[Path] = []
        for folder in super().case_folders():
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
