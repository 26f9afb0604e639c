"""The hospitals of cases: from a table, a file next to the data, or the names of the cases."""

from __future__ import annotations

from medfed.datamodules.extending import *
from medfed.datamodules.readers.base import expanded
from medfed.datamodules.readers.samples import official_splits

log = logging.getLogger(__name__)
LISTS = ("centres.json", "centres.csv")
_INSTITUTION = re.compile(r"^BraTS1[789]_([A-Za-z0-9]+)_", re.IGNORECASE)
Place = tuple[str | None, Split | None]  # hospital and official split of a case


@dataclass(frozen=True)
class Origins:
    """Where the cases of a folder come from: a table says it, or a file, or else their names."""

    folder: Path
    sites: Mapping[str, str | None]  # the file of the table, and its columns (data.reader.sites)
    pattern: str | None  # finds the hospital in the name of a case
    of_brats: bool = False  # whether cases are named as in the challenges

    def __post_init__(self) -> None:
        if any(self.sites.values()) and not all(map(self.sites.get, ("file", "case", "centre"))):
            needs = "file=PATH of a table, and the names of its columns"
            raise ConfigError(f"data.reader.sites needs {needs}: case=COLUMN, centre=COLUMN.")

    @property
    def files(self) -> list[Path]:
        """All files that may say it."""
        every = [self.folder / name for name in (*LISTS, "name_mapping.csv")]
        return every if (table := expanded(self.sites.get("file"))) is None else [*every, table]

    @cached_property
    def _columns(self) -> tuple[Sequence[str], Sequence[str], Sequence[Split | None]]:
        """Case, hospital and split of each row of the table."""
        sheet = Sheet.read(self.files[-1])
        columns = [name for key in ("case", "centre", "split") if (name := self.sites.get(key))]
        where = f"{sheet.path}, data.reader.sites: "
        case, centre, *split = check_names("column", columns, sheet.columns, where)
        splits = official_splits(sheet, split[0]) if split else ()
        return sheet.names(case), sheet.names(centre), splits or [None] * len(sheet)

    def of(self, cases: Sequence[str]) -> dict[str, Place]:
        """Returns the place of each case to read: of all, unless a table leaves some out."""
        if not self.sites.get("file"):
            centres: Mapping[str, str] = named_centres(self.folder, cases)
            if not centres and (key := self.pattern) is not None:
                centres = {c: search_name("centre", key, c, self.folder / c) for c in cases}
            elif not centres and self.of_brats:
                centres = institutions(self.folder, cases)
            return {case: (centres.get(case), None) for case in cases}
        path, listed = self.files[-1], _listed(self.files[-1], cases, *self._columns)
        placed = {case: listed[fold(case)] for case in cases if fold(case) in listed}
        left = [case for case in cases if case not in placed]
        if not placed:
            what = f"{path} lists no case of {self.folder}; it has {few(self._columns[0])}"
            raise DataError(f"{what}, and the cases are {few(left)}.")
        if left:
            log.warning("%s does not list %s, which are left out.", path, few(left))
        return placed


def named_centres(folder: Path, cases: Iterable[str]) -> dict[str, str]:
    """Reads ``centres.json`` ({case: hospital}) or ``centres.csv``, which must name every case."""
    cases = list(cases)
    path = next((folder / name for name in LISTS if (folder / name).exists()), None)
    if path is None:
        return {}
    rows = [*read_json(path).items()] if path.suffix == ".json" else _from_csv(path, cases)
    names, places = [name for name, _ in rows], [place for _, place in rows]
    if not all(isinstance(place, str) for place in places):
        raise DataError(f'{path} must be an object of {{"case": "hospital"}}.')
    listed = _listed(path, cases, names, places, [None] * len(rows))
    centres = {case: str(listed.get(fold(case), ("", None))[0]) for case in cases}
    if lost := next((case for case, centre in centres.items() if not centre), None):
        what = f"{path} names no hospital for case {lost}{did_you_mean(fold(lost), listed)}"
        raise DataError(f"{what}; add it, or move the file.")
    return centres


def _listed(
    path: Path, cases: Names, names: Names, centres: Names, splits: Sequence[Split | None]
) -> dict[str, Place]:
    """Returns what the rows of a file say of each case, by the case's folded name."""
    known = {*map(fold, cases)}
    ids = same([_case_named(name, known) for name in names], f"{path}, cases", "entry {}".format)
    centres = same(centres, f"{path}, hospitals", lambda at: f"case {ids[at]}")
    listed = dict[str, Place]()
    for case, centre, split in zip(ids, centres, splits, strict=True):
        first = listed.setdefault(case, (centre, split))
        if case in known and first != (centre, split):
            what = f"{path} has case {case} at {first[0]} and at {centre}, or in two splits"
            raise DataError(f"{what}; remove one row.")
    return listed


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


def _from_csv(path: Path, cases: Iterable[str]) -> list[tuple[str, Any]]:
    """Pairs of case and hospital, without a header."""
    rows, known = _rows(path), {*map(fold, cases)}
    means = [
        any(fold(_case_named(cell, known)) in known for cell in of)
        for of in zip(*rows, strict=False)
    ]
    if means == [False, True]:  # the hospital is first, as in FeTS' partitioning_1.csv
        rows = [row[::-1] for row in rows]
    header = not rows or fold(_case_named(rows[0][0], known)) not in known
    for number, row in enumerate(rows[header:], start=1 + header):
        if len(row) != 2:
            raise DataError(f"{path}, line {number}: {len(row)} columns; give case and hospital.")
    return [(case, centre) for case, centre in rows[header:]]


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
