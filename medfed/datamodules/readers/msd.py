"""The layout of the Medical Segmentation Decathlon, task 1: brain tumours.

``dataset.json`` lists the cases; ``imagesTr/BRATS_*.nii.gz`` are 4-D with the channels FLAIR, T1w,
T1gd and T2w; ``labelsTr`` has 1 oedema, 2 non-enhancing and 3 enhancing tumour.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from medfed.common.errors import DataError
from medfed.datamodules.readers.base import Patient, check_names
from medfed.datamodules.readers.centres import read_json
from medfed.datamodules.readers.volume_cases import CaseReader

REGIONS = {"whole": (1, 2, 3), "core": (2, 3), "enhancing": (3,)}


class MSDReader(CaseReader):
    """Reads MSD Task01_BrainTumour and what is generated in its layout.

    Args:
        path: The folder with ``dataset.json``. A ``centres.json`` or ``centres.csv`` beside it
            names the hospitals, see `readers.centres.named_centres`.
        channels: Channels to read, in this order.
        regions: Any of ``whole``, ``core`` and ``enhancing``.
        hospitals: Where no hospital is named: into how many contiguous blocks of cases to cut.

    Raises:
        ConfigError: If a region or channel is unknown.
        DataError: If ``dataset.json`` is missing or unreadable.
    """

    def __init__(
        self,
        path: Path,
        channels: Sequence[str] = ("FLAIR", "T1w", "T1gd", "T2w"),
        regions: Sequence[str] = ("whole",),
        hospitals: int | None = None,
    ) -> None:
        chosen = check_names("region", regions, list(REGIONS))
        self._file = path / "dataset.json"
        if not self._file.exists():
            raise DataError(
                f"{self._file} does not exist; set data.path to a folder in the layout of MSD "
                "Task01_BrainTumour, or use data=brats_challenge or data=brats_folder for one "
                "folder per case."
            )
        self._index = read_json(self._file)
        modality = {int(k): str(v) for k, v in self._index.get("modality", {}).items()}
        known = [modality[k] for k in sorted(modality)]
        values = {name: REGIONS[name] for name in chosen}
        super().__init__(path, channels, values, (1, 2, 3), hospitals)
        self._select = [known.index(name) for name in check_names("channel", channels, known)]
        self._file_channels = known

    def layout(self) -> dict[str, object]:
        """See `VolumeReader.layout`."""
        return {**super().layout(), "file_channels": list(self._file_channels)}

    def cases(self) -> list[Patient]:
        """See `CaseReader.cases`."""
        patients = [self._patient(entry) for entry in self._index.get("training", [])]
        if not patients:
            raise DataError(f"{self._file} lists no training cases.")
        return patients

    def _patient(self, entry: object) -> Patient:
        try:
            files = {role: self.path / entry[role] for role in ("image", "label")}  # type: ignore[index]
        except (TypeError, KeyError):
            raise DataError(
                f"{self._file}: the training case {entry} is no pair of image and label."
            ) from None
        return Patient(files["image"].name.removesuffix(".gz").removesuffix(".nii"), files)
