"""Which pictures there are, with masks, patients and hospitals: by a CSV, or by two folders."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from medfed.common.errors import ConfigError, DataError, did_you_mean
from medfed.datamodules.readers.base import few
from medfed.datamodules.readers.centres import named_centres
from medfed.datamodules.readers.csv_rows import csv_rows
from medfed.datamodules.readers.image_folder import search_name
from medfed.datamodules.readers.pictures import SUFFIXES

log = logging.getLogger(__name__)

_INDEX = "images.csv"


class Pair(NamedTuple):
    """A picture and its mask.

    Attributes:
        image: The picture.
        mask: Its mask.
        patient: Whose it is.
        centre: The hospital; None where none is named.
        place: Where it is listed, for sentences.
    """

    image: Path
    mask: Path
    patient: str
    centre: str | None
    place: str


def list_pairs(path: Path, columns: Mapping[str, str], pattern: str | None) -> list[Pair]:
    """Lists pictures and masks, all of which are there.

    Args:
        path: A CSV file, a folder with ``images.csv``, or one with ``images`` and ``masks``.
        columns: The CSV's columns by role: ``image``, ``mask``, ``patient`` and ``centre``.
        pattern: Without a CSV: what finds the patient in a picture's name, or None.

    Raises:
        DataError: If a file or column is missing, a picture is listed twice, or a patient is at two
            hospitals.
    """
    if path.suffix.lower() == ".csv" or (path / _INDEX).exists():
        pairs = _from_csv(path / _INDEX if path.is_dir() else path, columns)
    elif (path / "images").is_dir() and (path / "masks").is_dir():
        pairs = _from_folders(path, pattern)
    else:
        raise DataError(
            f"{path} is no CSV file and has neither {_INDEX} nor the folders images and masks; "
            f"write an {_INDEX} with the columns image, mask, patient and centre."
        )
    _check(pairs)
    return pairs


def by_other_reader(pairs: Sequence[Pair], others: Mapping[str, str]) -> list[Pair]:
    """Takes another reader's masks at some hospitals.

    Args:
        pairs: From `list_pairs`.
        others: By centre, what stands before the ending of the names of the other masks.

    Raises:
        ConfigError: If a centre is unknown.
        DataError: If a mask is missing.
    """
    known = {p.centre for p in pairs if p.centre is not None}
    for centre in others:
        if centre not in known:
            raise ConfigError(
                f"data.reader.other_masks names {centre}, which is no centre"
                f"{did_you_mean(centre, known)}; the centres are {few(sorted(known))}."
            )
    found = []
    for pair in pairs:
        more = others.get(pair.centre or "", "")
        found.append(pair._replace(mask=pair.mask.with_stem(pair.mask.stem + more)))
        _check_there(found[-1].mask, pair.place)
    return found


def _from_csv(index: Path, columns: Mapping[str, str]) -> list[Pair]:
    with csv_rows(index) as rows:
        header = [name.strip() for name in next(rows, [])]
        places = _places(index, header, columns)
        listed = []
        for number, row in enumerate(rows, start=2):
            if len(row) != len(header):
                raise DataError(
                    f"{index}, row {number}: {len(row)} cells, but {len(header)} columns."
                )
            cells = {role: row[at].strip() for role, at in places.items()}
            for role, cell in cells.items():
                if not cell:
                    raise DataError(
                        f"{index}, row {number}: {columns[role]} is empty; fill it in or "
                        "leave the row out."
                    )
            image, mask = index.parent / cells["image"], index.parent / cells["mask"]
            who = cells.get("patient", cells["image"])
            centre = cells.get("centre")
            listed.append(Pair(image, mask, who, centre, f"{index}, row {number}"))
    if not listed:
        raise DataError(f"{index} lists no pictures; add a row for each.")
    return listed


def _places(index: Path, header: Sequence[str], columns: Mapping[str, str]) -> dict[str, int]:
    """Finds the columns; only those of patients and centres may lack, if nobody named them."""
    found = {}
    for role, name in columns.items():
        if header.count(name) == 1:
            found[role] = header.index(name)
        elif header.count(name) > 1:
            raise DataError(f"{index} has two columns {name}; rename one.")
        elif role in ("image", "mask") or name != role:
            raise DataError(
                f"{index} has no column {name}{did_you_mean(name, header)}; it has "
                f"{few(header) or 'none'}: set data.reader.{role}=COLUMN."
            )
    if "patient" not in found:
        log.warning(
            "%s has no column patient: every picture counts as a patient. Where one has "
            "several, name the column by data.reader.patient=COLUMN.",
            index,
        )
    return found


def _from_folders(path: Path, pattern: str | None) -> list[Pair]:
    images, masks = (_by_stem(path / name) for name in ("images", "masks"))
    for one, other, what in ((images, masks, "mask"), (masks, images, "image")):
        if lacking := sorted(set(one) - set(other)):
            file = one[lacking[0]]
            raise DataError(
                f"{file} has no {what} {path / f'{what}s' / lacking[0]}.* (of "
                f"{len(lacking)} without one); add it, or remove the file."
            )
    centres = named_centres(path, sorted(images))
    if pattern is None:
        log.warning(
            "%s: every picture counts as a patient. Where one has several, set "
            'data.reader.patient_pattern, such as "^(p[0-9]+)_".',
            path,
        )
    return [
        Pair(
            images[stem],
            masks[stem],
            search_name("patient", pattern, images[stem].name, images[stem]) or stem,
            centres.get(stem),
            str(images[stem]),
        )
        for stem in sorted(images)
    ]


def _check(pairs: Sequence[Pair]) -> None:
    """Refuses what is not there, or contradicts itself."""
    seen: dict[Path, str] = {}
    first: dict[str, Pair] = {}
    for pair in pairs:
        for file in (pair.image, pair.mask):
            _check_there(file, pair.place)
        if (before := seen.setdefault(pair.image.resolve(), pair.place)) != pair.place:
            raise DataError(f"{pair.place}: {pair.image} is already in {before}; remove one.")
        if (other := first.setdefault(pair.patient, pair)).centre != pair.centre:
            raise DataError(
                f"{pair.place}: patient {pair.patient} is at {pair.centre}, but in {other.place} "
                f"at {other.centre}; a patient belongs to one hospital: give different people "
                "different ids."
            )


def _check_there(file: Path, place: str) -> None:
    if not file.is_file():
        raise DataError(
            f"{place}: {file} does not exist; add the file, mend the name, or leave the row out."
        )


def _by_stem(folder: Path) -> dict[str, Path]:
    """The pictures of a folder by their names without the ending."""
    found: dict[str, Path] = {}
    for file in sorted(folder.iterdir()):
        if file.name.startswith(".") or file.suffix.lower() not in SUFFIXES:
            continue
        if (twin := found.setdefault(file.stem, file)) != file:
            raise DataError(f"{folder} has {twin.name} and {file.name}; remove or rename one.")
    if not found:
        raise DataError(f"{folder} has no pictures ({', '.join(SUFFIXES)}); add them.")
    return found
