"""Further columns of patients, such as age and sex, in the table or list of a cohort of files."""

from __future__ import annotations

from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.cache.volumes import CachedDataModule
from medfed.datamodules.extending import *
from medfed.datamodules.images import ImageDataModule
from medfed.datamodules.readers import looks
from medfed.datamodules.readers.centres import read_json
from medfed.datamodules.segmentation import SegmentationDataModule

_ROLES = {"centre", "split", "label", "fold"}  # what readers take from other columns
LACKING = (
    "A cohort of files has the columns of its table (images.csv, the CSV of data.path) or of the "
    "entries of its dataset.json, beside a patient, image or mask."
)


def patient_columns(data: FederatedDataModule) -> dict[str, dict[str, str]]:
    """Returns by column the text of each patient whose id, case or file a cell of the row names."""
    named, values = _named(data), dict[str, dict[str, str]]()
    settings: Mapping[str, object] = getattr(getattr(data, "reader", None), "keywords", {})
    others = {str(settings.get(role) or role) for role in _ROLES} | {*data.class_names}
    for sheet in _sheets(data):
        folder, owners, rest = sheet.path.parent, [""] * len(sheet), list[str]()
        for column, cells in sheet.cells.items():
            known = [named.get(name) or named.get(str(folder / name)) for name in map(fold, cells)]
            if any(known):
                owners = [one or other for one, other in zip(known, owners, strict=True)]
            elif column not in others:
                rest.append(column)
        for column in rest:
            pairs = zip(owners, sheet.texts(column), strict=True)
            values.setdefault(column, {}).update((who, text) for who, text in pairs if who and text)
    return values


def _named(data: FederatedDataModule) -> dict[str, str]:
    """The patient by every name of his: his id, his cases and his files."""
    names = {patient: patient for patient in data.patients}
    if isinstance(data, ImageDataModule):
        samples = data.data.samples
        names |= zip(map(str, samples.files), samples.patients, strict=False)
    if isinstance(data, SegmentationDataModule):
        ids = [*data.patients]
        for case, n in data.cases_among(ids):
            names |= dict.fromkeys([case, *map(str, data.cases[case].files.values())], ids[n])
    return names


def _sheets(data: FederatedDataModule) -> Iterator[Sheet]:
    files: list[Path] = []
    if isinstance(data, ImageDataModule) and data.source is not None:
        files = [data.source]
    elif isinstance(data, CachedDataModule):
        files = data.scans.indices()
    for file in files:
        if not file.is_file() or file.name == "centres.csv":  # has hospitals alone, and no header
            continue
        if file.suffix.lower() == ".csv":
            yield looks.sheet_of(file)
        elif file.suffix.lower() == ".json":
            lists = [of for of in read_json(file).values() if isinstance(of, list)]
            if entries := [entry for of in lists for entry in of if isinstance(entry, Mapping)]:
                yield looks.sheet_of_entries(file, entries)
