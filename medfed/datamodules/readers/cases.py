"""The base of the readers of cases: images and a mask whose label values make up regions."""

from __future__ import annotations

from abc import abstractmethod
from operator import attrgetter
from typing import get_args

import torch
from torch import Tensor

from medfed.datamodules.extending import *
from medfed.datamodules.readers.centres import Origins
from medfed.standalone import volumes
from medfed.standalone.preparation import Preparation
from medfed.standalone.voxels import among, check_finite, check_varied, masks_of, zscore

_ONE = ("hospital: give different people different ids", "split: mend the lists")


class CaseReader(VolumeReader):
    """Base of the readers of volumes, of any format; a subclass finds the files of every case.

    A case's files are its images in channel order (one file with all channels, or one each), and
    its mask under the role ``"label"``. `hospitals`: into how many blocks cases without a hospital
    are cut. `series`: description or UID of the DICOM series to read, where a folder has several.
    `sites`: a table of cases, and the columns that name case, hospital and split.
    """

    normalize: object = "zscore_nonzero"

    def __init__(
        self,
        path: Path,
        channels: Sequence[str],
        regions: Mapping[str, Sequence[int]],
        known_labels: Sequence[int],
        hospitals: int | None = None,
        missing: Missing = "error",
        patient_pattern: str | None = None,
        series: str | Sequence[str] | None = None,
        centre_pattern: str | None = None,
        sites: Mapping[str, str | None] | None = None,
    ) -> None:
        check_known("data.reader.missing", missing, get_args(Missing))
        self.path = path
        self.missing = missing
        self.hospitals = hospitals
        self.channels = tuple(channels)
        self.regions = tuple(regions)
        self._region_labels = {name: tuple(values) for name, values in regions.items()}
        self._known_labels = (0, *known_labels)
        self.in_file = len(self.channels)  # of a file that holds all
        self._select: list[int] | None = None  # which of the file's channels, where not all
        self._cases: dict[str, list[Patient]] = {}  # of patients with several
        self._pattern = patient_pattern
        self.origins = Origins(path, sites or {}, centre_pattern)
        self.series = as_names(series)
        self._person: dict[str, str] = {}  # by case, where a subclass knows whose it is

    @abstractmethod
    def cases(self) -> list[Patient]:
        """Finds the files of all cases."""

    def indices(self) -> list[Path]:
        """See `Reader.indices`."""
        return self.origins.files

    def patients(self) -> list[Patient]:
        """See `Reader.patients`."""
        cases = sorted(self.cases(), key=lambda case: case.id)
        placed = self.origins.of([case.id for case in cases])
        of = ((case, *placed[case.id]) for case in cases if case.id in placed)
        cases = [replace(c, centre=at or c.centre, split=split or c.split) for c, at, split in of]
        ids = [case.id for case in cases if case.id not in self._person]
        self._person |= zip(ids, persons_of(ids, self._pattern, self.path), strict=True)
        for case in cases:
            if set(case.lacks) == set(self.channels):
                raise DataError(next(iter(case.lacks.values())))
        return with_hospitals(self._persons(cases), self.hospitals)

    def _persons(self, cases: Sequence[Patient]) -> list[Patient]:
        """Joins the cases of each patient that has several."""
        by_person: dict[str, list[Patient]] = {}
        for case in cases:
            by_person.setdefault(self._person[case.id], []).append(case)
        self._cases = {n: of for n, of in by_person.items() if [c.id for c in of] != [n]}
        return [_joined(name, by_person[name]) for name in sorted(by_person)]

    def cases_of(self, patient: Patient) -> list[Patient]:
        """See `VolumeReader.cases_of`."""
        return self._cases.get(patient.id, [patient])

    def read(self, patient: Patient) -> dict[str, Tensor]:
        """See `VolumeReader.read`: in RAS, each channel z-scored over its non-zero voxels."""
        if patient.lacks and self.missing == "error":
            raise DataError(next(iter(patient.lacks.values())))
        return self.prepared(patient, None)

    def prepared(self, patient: Patient, preparation: Preparation | None) -> dict[str, Tensor]:
        """See `VolumeReader.prepared`."""
        there, raw = [c not in patient.lacks for c in self.channels], self.raw(patient)
        if preparation is None:
            return {**raw, "image": among(zscore(raw["image"]), there)}
        chosen = preparation.of(there)
        chosen.doubt(raw["image"], next(iter(patient.files.values())))
        image, grid = chosen.apply(raw["image"], raw["spacing"].tolist())
        prepared = {**raw, "image": among(image, there)}
        return prepared if preparation.keeps_grid else {**prepared, "grid": grid}

    def raw(self, patient: Patient) -> dict[str, Tensor]:
        """Reads one case with the grey values of its files, and its spacing; no absent channels."""
        images = [path for role, path in patient.files.items() if role != "label"]
        mask = patient.files["label"]
        select = self._select if "image" in patient.files else None
        names = [channel for channel in self.channels if channel not in patient.lacks]
        *loaded, label = volumes.read_together([*images, mask], select, self.series)
        spacing = torch.tensor(loaded[0].geometry.spacing, dtype=torch.float64)
        for path, volume in zip(images, loaded, strict=True):
            wanted = self.in_file if "image" in patient.files else 1
            if (count := volume.geometry.channels) > wanted:
                raise DataError(
                    f"{path} holds {count} volumes (channels or points in time), but "
                    f"{wanted} {'is' if wanted == 1 else 'are'} named; name each as a channel of "
                    "the list, in one file per case (data=datalist), or save one volume per file."
                )
        image = loaded[0].voxels
        if len(loaded) > 1:
            image = torch.cat([volume.voxels for volume in loaded])
        check_finite(image, names, images)
        check_varied(image, names, images)
        masks = masks_of(label.voxels, self._region_labels.values(), self._known_labels, mask)
        return {"image": image, "label": masks, "spacing": spacing}

    def shape(self, patient: Patient) -> tuple[int, ...]:
        """See `VolumeReader.shape`."""
        return self.shapes([patient])[0]

    def shapes(self, patients: Sequence[Patient]) -> list[tuple[int, ...]]:
        """See `VolumeReader.shapes`: those of the masks."""
        masks = [patient.files["label"] for patient in patients]
        return [each.shape for each in volumes.read_geometries(masks, self.series)]

    def spacings(self, patients: Sequence[Patient]) -> list[tuple[float, ...]]:
        """See `Reader.spacings`: those of the first file of each patient."""
        first = [next(iter(patient.files.values())) for patient in patients]
        return list(map(attrgetter("spacing"), volumes.read_geometries(first, self.series)))

    @property
    def exclusive(self) -> bool:
        """See `VolumeReader.exclusive`."""
        return are_exclusive(self._region_labels)

    def layout(self) -> dict[str, object]:
        """See `VolumeReader.layout`."""
        return {"files": None, "file_channels": list(self.channels), **self._labels()}

    def record(self) -> dict[str, object]:
        """See `Reader.record`."""
        series = {"series": list(self.series)} if self.series else {}
        return {"channels": list(self.channels), **self._labels(), **series}

    def _labels(self) -> dict[str, object]:
        return {"regions": {name: list(values) for name, values in self._region_labels.items()}}


def as_names(names: str | Sequence[str] | None) -> tuple[str, ...]:
    """Returns a name, or several, as a tuple."""
    return (names,) if isinstance(names, str) else tuple(map(str, names or ()))


def check_one_place(name: str, uses: Sequence[tuple[str, str | None, Split | None]]) -> None:
    """Refuses a patient at two hospitals or in two splits; `uses`: places in the data, and both."""
    for where, *of in uses:
        for here, there, word, mend in zip(uses[0][1:], of, ("at", "in"), _ONE, strict=True):
            if here != there:
                both = f"{here} ({uses[0][0]}) and {word} {there} ({where})"
                raise DataError(
                    f"Patient {name} is {word} {both}; a patient belongs to one {mend}."
                )


def _joined(name: str, cases: Sequence[Patient]) -> Patient:
    """One patient of all its cases, at one hospital and in one split."""
    first = cases[0]
    check_one_place(name, [(f"case {case.id}", case.centre, case.split) for case in cases])
    if len(cases) == 1:
        return replace(first, id=name)
    files = {f"{case.id} {role}": file for case in cases for role, file in case.files.items()}
    return replace(first, id=name, files=files, lacks={})
