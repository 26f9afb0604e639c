"""The UCI Heart Disease data: four hospitals, one file each, 920 patients.

Source: A. Janosi, W. Steinbrunn, M. Pfisterer, R. Detrano, "Heart Disease", UCI Machine Learning
Repository, 1989, doi:10.24432/C52P4X: the files ``processed.{centre}.data``.
"""

from __future__ import annotations

from medfed.datamodules.extending import *
from medfed.datamodules.readers import looks
from medfed.datamodules.readers.table import Table, counted, join_tables, read_csv

log = logging.getLogger(__name__)

FEATURES = (
    *("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg"),
    *("thalach", "exang", "oldpeak", "slope", "ca", "thal"),
)
TARGET = "num"
# Rows, and rows without disease, as published.
PUBLISHED = {
    "cleveland": (303, 164),
    "hungarian": (294, 188),
    "switzerland": (123, 8),
    "va": (200, 51),
}
# No living patient has these; all of Switzerland's cholesterol, for one, is 0.
_NEVER_ZERO = ("trestbps", "chol")


def read_heart(
    path: Path,
    centres: Sequence[str] = tuple(PUBLISHED),
    features: Sequence[str] = FEATURES,
    complete: bool = False,
    zeros_missing: bool = True,
) -> Table:
    """Reads the hospitals' files from one folder.

    A cell is missing if it is ``?``, ``NaN``, empty, ``-9``, or a blood pressure or cholesterol of
    0 (unless `zeros_missing` is False). Class 1 is any disease (``num`` from 1 to 4).
    """
    names = check_names("centre", centres, tuple(PUBLISHED))
    taken = [FEATURES.index(f) for f in check_names("feature", features, FEATURES)]
    if not path.is_dir():
        what = f"{path} is not a folder; set data.path to the folder"
        raise DataError(f"{what} of processed.cleveland.data and its like.")
    tables = {name: _read_centre(path / f"processed.{name}.data", name) for name in names}
    parts = {}
    for name, table in tables.items():
        file = table.files[0]
        never_zero = np.isin(FEATURES, _NEVER_ZERO) & zeros_missing
        missing = (table.features == -9) | ((table.features == 0) & never_zero)
        cells = np.where(missing, np.nan, table.features)[:, taken]
        rows = np.full(len(cells), not complete) | ~np.isnan(cells).any(axis=1)
        parts[name] = Table(
            tuple(FEATURES[at] for at in taken),
            cells[rows],
            table.labels[rows],
            ("no disease", "disease"),
            patients=[f"{name}_{row}" for row in (1 + np.flatnonzero(rows)).tolist()],
            files=[file] * int(rows.sum()),
            accounts=counted(file, cells[rows], int((~rows).sum())),
        )
    return join_tables(parts)


def _read_centre(file: Path, centre: str) -> Table:
    if not file.is_file():
        mend = f"add it, or leave {centre} out of data.reader.centres"
        raise DataError(f"{file} does not exist; {mend}.")
    labels: dict[str, Any] = {"positive": (1, 2, 3, 4), "negative": (0,)}
    table = read_csv(file, TARGET, features=FEATURES, header=_header(file), **labels)
    rows, healthy = PUBLISHED[centre]
    count = int((table.labels == 0).sum())
    if len(table.labels) != rows:
        log.warning("%s has %d rows, the published file %d.", file, len(table.labels), rows)
    elif count != healthy:
        raise DataError(
            f"{file} has {count} patients without disease, the published file {healthy} of its "
            f"{rows}; the target seems to be recoded (there are inverted copies); use UCI's file."
        )
    return table


def _header(file: Path) -> tuple[str, ...] | None:
    """The published columns, or None if the file names its columns."""
    cells = [cell.strip().lower() for cell in next(csv_rows(file), [])]
    if any(as_number(cell) < np.inf for cell in cells):
        return (*FEATURES, TARGET)  # perhaps with a bad cell, which a later error names
    if lacking := [c for c in (*FEATURES, TARGET) if c not in cells]:
        raise DataError(
            f"{file}: the header lacks {', '.join(lacking)}; name the columns as published "
            f"({', '.join((*FEATURES, TARGET))}), or remove the header line."
        )
    return None


def looks_like(path: Path, answers: looks.Answers) -> looks.Guess | None:
    """Guesses the hospitals by the names of the files; see `looks`."""
    centres = sorted(f.name.split(".")[1] for f in path.glob("processed.*.data"))
    known = [name for name in centres if name in PUBLISHED]
    return looks.Guess("heart", path, {"data.reader.centres": known}) if known else None
