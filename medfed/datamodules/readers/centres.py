"""Which hospital a case comes from, as far as files beside the data or the case's name tell."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from medfed.common.errors import DataError
from medfed.common.strict_json import read_strict_json
from medfed.datamodules.readers.csv_rows import csv_rows

_INSTITUTION = re.compile(r"^BraTS1[789]_([A-Za-z0-9]+)_", re.IGNORECASE)


def named_centres(folder: Path, cases: Iterable[str]) -> dict[str, str]:
    """Reads ``centres.json`` ({case: hospital}) or ``centres.csv`` (case, hospital; with header).

    Args:
        folder: Where the data lie; without one of the two files no hospital is named.
        cases: Ids of all cases, each of which such a file has to name.

    Returns:
        The hospital of each case.

    Raises:
        DataError: If a file cannot be read, names a case twice with different hospitals, or leaves
            one out.
    """
    if (path := folder / "centres.json").exists():
        named = _from_json(path)
    elif (path := folder / "centres.csv").exists():
        named = _from_csv(path)
    else:
        return {}
    for case in cases:
        if not named.get(case):
            raise DataError(f"{path} names no hospital for case {case}; add it, or move the file.")
    return named


def institutions(folder: Path, cases: Sequence[str]) -> dict[str, str]:
    """Takes the institution from the names of BraTS cases.

    The names of 2017 to 2019 hold it: ``Brats18_CBICA_ABO_1`` is from CBICA. Those of 2020 and 2021
    do not, but ``name_mapping.csv`` of 2020 gives the older names in the same row.

    Args:
        folder: Where ``name_mapping.csv`` may lie.
        cases: Ids of all cases.

    Returns:
        The institution of each case that has one.

    Example:
        >>> institutions(Path("."), ["Brats18_TCIA08_242_1", "BraTS20_Training_001"])
        {'Brats18_TCIA08_242_1': 'TCIA08'}
    """
    found: dict[str, str] = {}
    mapping = folder / "name_mapping.csv"
    for row in _rows(mapping) if mapping.exists() else []:
        if older := [match[1] for name in row if (match := _INSTITUTION.match(name))]:
            found |= dict.fromkeys(row, older[0])
    found |= {case: match[1] for case in cases if (match := _INSTITUTION.match(case))}
    return {case: found[case] for case in cases if case in found}


def _from_json(path: Path) -> dict[str, str]:
    content = read_json(path)
    if not all(isinstance(name, str) for name in content.values()):
        raise DataError(f'{path} must be an object of {{"case": "hospital"}}.')
    return content


def _from_csv(path: Path) -> dict[str, str]:
    named: dict[str, str] = {}
    for number, row in enumerate(_rows(path)[1:], start=2):
        if len(row) != 2:
            raise DataError(f"{path}, line {number}: {len(row)} columns; give case and hospital.")
        if named.setdefault(row[0], row[1]) != row[1]:
            raise DataError(f"{path}, line {number}: case {row[0]} is already at {named[row[0]]}.")
    return named


def _rows(path: Path) -> list[list[str]]:
    with csv_rows(path) as rows:
        return [[cell.strip() for cell in row] for row in rows]


def read_json(path: Path) -> dict[str, Any]:
    """Reads an index file.

    Args:
        path: A JSON file that holds an object.

    Returns:
        The object.

    Raises:
        DataError: If it is missing or no such file.
    """
    try:
        content = read_strict_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not readable JSON ({error}); copy it again.") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} must hold a JSON object.")
    return content
