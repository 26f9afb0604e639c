"""The hospitals of cases: from a file next to the data, or from the names of the cases."""

from __future__ import annotations

from medfed.datamodules.extending import *

_INSTITUTION = re.compile(r"^BraTS1[789]_([A-Za-z0-9]+)_", re.IGNORECASE)


def named_centres(folder: Path, cases: Iterable[str]) -> dict[str, str]:
    """Reads ``centres.json`` ({case: hospital}) or ``centres.csv``, which must name every case."""
    cases = list(cases)
    known = {fold(case) for case in cases}
    if (path := folder / "centres.json").exists():
        named = {_case_named(name, known): place for name, place in read_json(path).items()}
        if not all(isinstance(name, str) for name in named.values()):
            raise DataError(f'{path} must be an object of {{"case": "hospital"}}.')
    elif (path := folder / "centres.csv").exists():
        named = _from_csv(path, known)
    else:
        return {}
    ids = same(list(named), f"{path}, cases", "entry {}".format)
    where = f"{path}, hospitals"
    centres = same(list(named.values()), where, lambda at: f"case {ids[at]}")
    folded = dict(zip(ids, centres, strict=True))
    for case in cases:
        if not folded.get(fold(case)):
            hint = did_you_mean(fold(case), folded)
            what = f"{path} names no hospital for case {case}{hint}"
            raise DataError(f"{what}; add it, or move the file.")
    return {case: folded[fold(case)] for case in cases}


def hospitals_of(folder: Path, cases: Sequence[str]) -> list[str]:
    """Returns the hospital of each case that `named_centres` names; none if it cannot be read."""
    try:
        return [*named_centres(folder, cases).values()]
    except DataError:
        return []  # which the reader refuses, with the sentence


def institutions(folder: Path, cases: Sequence[str]) -> dict[str, str]:
    """Takes the institution from the names of BraTS cases, or their older ones (2020).

    Example:
        >>> institutions(Path("."), ["Brats18_TCIA08_242_1", "BraTS20_Training_001"])
        {'Brats18_TCIA08_242_1': 'TCIA08'}
    """
    centres: dict[str, str] = {}
    mapping = folder / "name_mapping.csv"
    for row in _rows(mapping) if mapping.exists() else []:
        if older := [match[1] for name in row if (match := _INSTITUTION.match(name))]:
            centres |= dict.fromkeys(row, older[0])
    centres |= {case: match[1] for case in cases if (match := _INSTITUTION.match(case))}
    return {case: centres[case] for case in cases if case in centres}


def _case_named(name: str, cases: Collection[str]) -> str:
    """The case that a cell means, also by the name of its file.

    Example:
        >>> [_case_named(name, {"a"}) for name in ("a_0000.nii.gz", "a.png", "b.png")]
        ['a', 'a', 'b.png']
    """
    if fold(name) in cases:
        return name
    stem = stem_of(Path(name))
    forms = (stem, stem.removesuffix("_0000"), Path(name).stem)
    return next((form for form in forms if fold(form) in cases), name)


def _from_csv(path: Path, cases: Collection[str]) -> dict[str, str]:
    named: dict[str, str] = {}
    rows = _rows(path)
    known = [
        any(_case_named(cell, cases) in cases for cell in of) for of in zip(*rows, strict=False)
    ]
    if known == [False, True]:  # the hospital is first, as in FeTS' partitioning_1.csv
        rows = [row[::-1] for row in rows]
    rows = [[_case_named(name, cases), *others] for name, *others in rows]
    header = not rows or fold(rows[0][0]) not in cases
    for number, row in enumerate(rows[header:], start=1 + header):
        if len(row) != 2:
            raise DataError(f"{path}, line {number}: {len(row)} columns; give case and hospital.")
        if named.setdefault(row[0], row[1]) != row[1]:
            raise DataError(f"{path}, line {number}: case {row[0]} is already at {named[row[0]]}.")
    return named


def _rows(path: Path) -> list[list[str]]:
    return [[cell.strip() for cell in row] for row in csv_rows(path)]


def read_json(path: Path) -> dict[str, Any]:
    """Reads an index file."""
    try:
        content: Any = parse_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not readable JSON ({error}); save it as UTF-8.") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} must hold a JSON object.")
    return content
