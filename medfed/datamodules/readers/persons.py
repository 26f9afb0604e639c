"""Whose a case or picture is, by its name: its patient, where one has several."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from medfed.standalone.errors import ConfigError, DataError
from medfed.standalone.names import fold

log = logging.getLogger(__name__)
# Patients in the names of public data sets, by what tells their cases apart.
KNOWN = {
    "time points of BraTS": r"^(BraTS(?:-[A-Za-z]+)+-\d{4,5})-\d{1,3}(?!\d)",
    "scans of LIDC": r"^(LIDC-IDRI-\d{4})(?!\d)",
    "sessions of OASIS": r"^((?:sub-)?OAS\d_?\d{4})(?!\d)",
    "sessions of BIDS": r"^(sub-[A-Za-z0-9]+)_",
    "images of ADNI": r"^(\d{3}_S_\d{4})(?!\d)",
    "slides or images of TCGA": r"^(TCGA-\w\w-\w{4})(?!\w)",
    "time points of ISBI 2015": r"^((?:training|test)\d\d)_\d\d(?!\d)",
}
BEGINNINGS = (r"^(.*?\d+)[_-]", r"^(.+)[_-][^_-]+$")  # of names, that may be the patient
_ENOUGH = 10  # different beginnings of names, however many names there are
_SIDE = re.compile(r"^(.*[^a-z]|)(left|right|od|os|l|r)$", re.IGNORECASE)
_OTHER = {"left": "right", "od": "os", "l": "r"}
_OTHER |= {there: here for here, there in _OTHER.items()}


def persons_of(names: Sequence[str], pattern: str | None, at: Path, mend: str = "") -> list[str]:
    """Returns the patient of every case or picture, by a pattern's group or known names.

    `mend`: what to do if each is a patient of its own and that is wrong.
    """
    files = [PurePosixPath(name) for name in names]
    if pattern is not None:
        pairs = zip(files, names, strict=True)
        return [fold(search_name("patient", pattern, f.name, Path(n))) for f, n in pairs]
    kind, folded = "left and right", list(map(fold, names))
    for what, known in KNOWN.items():
        matches = [re.match(known, file.name, re.IGNORECASE) for file in files]
        persons = [fold(m[1]) if m else n for m, n in zip(matches, folded, strict=True)]
        if persons != folded:
            kind = what
            break
    else:
        persons = _pairs(files, folded)
    if len(set(persons)) < len(names):
        twice = next(person for person, count in Counter(persons).items() if count > 1)
        first, second, *_ = (n for n, p in zip(names, persons, strict=True) if p == twice)
        log.warning(
            "%s: %d names are those of %d patients (%s), such as %s and %s of %s; "
            "'data.reader.patient_pattern=\"(.*)\"' makes each a patient of its own.",
            *(at, len(names), len(set(persons)), kind, first, second, twice),
        )
    else:
        _say_alone([file.name for file in files], at, mend)
    return persons


def _say_alone(names: Sequence[str], where: Path, mend: str) -> None:
    """Says that each name counts as a patient, and where they seem to be of fewer."""
    for pattern in BEGINNINGS:
        begins = [match[1] for name in names if (match := re.match(pattern, name))]
        people = Counter(begins)
        if len(begins) == len(names) > len(people) and are_patients(begins, [""] * len(names)):
            person = people.most_common(1)[0][0]
            of_all = zip(names, begins, strict=True)
            first, second, *_ = (name for name, begin in of_all if begin == person)
            log.warning(
                "%s: each of %d names counts as a patient. If %s and %s are of one patient, %s, "
                "set 'data.reader.patient_pattern=\"%s\"'.",
                *(where, len(names), first, second, person, pattern),
            )
            return
    if mend:
        log.warning("%s: every picture counts as a patient. %s", where, mend)


def _pairs(files: Sequence[PurePosixPath], persons: list[str]) -> list[str]:
    """Gives the left and the right of a pair one name; equal names in two folders are no pair."""
    unique = len({file.name for file in files}) == len(files)
    sides: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for n, file in enumerate(files):
        if (match := _SIDE.match(file.stem)) and (name := match[1].rstrip("_- .")):
            folder = "" if unique else f"{file.parent}/"
            sides.setdefault((folder, name), []).append((n, match[2].lower()))
    for (folder, name), members in sides.items():
        there = {side for _, side in members}
        if any(_OTHER[side] in there for side in there):
            for n, _ in members:
                persons[n] = fold(f"{folder}{name}")
    return persons


def are_patients(people: Sequence[str], places: Sequence[str]) -> bool:
    """Says whether beginnings of names are patients, no hospitals: numbered, and enough."""
    groups = Counter(place for place, _ in {*zip(places, people, strict=True)})
    enough = all(groups[place] >= min(3, n) for place, n in Counter(places).items())
    numbered = all(any(map(str.isdigit, person)) for person in people)
    return enough and numbered and len({*people}) >= min(_ENOUGH, len(people) / 4)


def search_name(what: str, pattern: str | None, text: str, file: Path) -> str:
    """Finds the one group of a pattern in a name; empty without a pattern.

    Example:
        >>> search_name("patient", "^(p[0-9]+)_", "p12_left.png", Path("p12_left.png"))
        'p12'
    """
    if pattern is None:
        return ""
    key = f"data.reader.{what}_pattern={pattern}"
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{key} is no regular expression ({error}).") from error
    if (groups := expression.groups) != 1:
        raise ConfigError(f"{key} has {groups} groups; it needs one, such as ^(p[0-9]+)_.")
    match = expression.search(text)
    if match is None or not match[1]:
        raise DataError(f"{file}: {key} finds no {what} in {text}; mend the pattern or the name.")
    return str(match[1])
