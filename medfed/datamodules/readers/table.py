"""Tables: one row per sample, numeric features, a label column; a centre and a patient column."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from medfed.common.checks import check_known
from medfed.common.errors import ConfigError, DataError
from medfed.datamodules.readers.base import check_names
from medfed.datamodules.readers.csv_rows import csv_rows

log = logging.getLogger(__name__)

Outcome = Literal["classes", "continuous"]
Values = Sequence[str | int | float]
_LARGEST = 1e30  # what is beyond loses its range when it is scaled
MISSING = frozenset({"", "?", "nan", "na", "none", "null"})


@dataclass(frozen=True)
class Table:
    """A table in memory.

    Attributes:
        names: (F) feature names.
        features: (N, F) float64; a missing cell is NaN.
        labels: (N,) int64 class indices, or float64: outcomes.
        classes: (K) class names, or the name of the outcome.
        patients: (N) patient id of every row.
        centres: (N) hospital of every row; empty where none is known.
        files: (N) file of every row; empty where there is none.
    """

    names: tuple[str, ...]
    features: NDArray[np.float64]
    labels: NDArray[Any]
    classes: tuple[str, ...]
    patients: Sequence[str]
    centres: Sequence[str] = ()
    files: Sequence[Path] = ()


def check_outcome(outcome: str) -> None:
    """Refuses an unknown kind of outcome by a ConfigError.

    Example:
        >>> check_outcome("continuous")
    """
    check_known("data.outcome", outcome, ("classes", "continuous"))


def read_csv(
    path: Path,
    label: str,
    features: Sequence[str] | None = None,
    centre: str | None = None,
    patient: str | None = None,
    positive: Values | None = None,
    header: Sequence[str] | None = None,
    negative: Values | None = None,
    outcome: Outcome = "classes",
) -> Table:
    """Reads a CSV file.

    Args:
        path: The file; cells such as an empty one, ``?`` or ``NaN`` are missing.
        label: Name of the label column.
        features: Names of the feature columns; None takes all that have no other role.
        centre: Name of the column with the hospital, if any.
        patient: Name of the column with the patient, if any; otherwise each row is a patient.
        positive: Label values that count as class 1, all others as 0; None makes every distinct
            label value a class, in sorted order.
        header: Column names of a file that has no header line.
        negative: Label values that count as class 0, where `positive` is given; None takes all
            others.
        outcome: What the label column holds: ``classes``, or numbers that are ``continuous``.

    Returns:
        The table.

    Raises:
        DataError: Naming the file, row and column of what cannot be used.
        ConfigError: If a column does not exist; lists those that do.
    """
    sheet = _Sheet.read(path, header)
    if features is not None and label.lower() in {f.lower() for f in features}:
        raise ConfigError(
            f"data.features names {label}, which is data.label: the answer would be given away."
        )
    try:
        used = check_names("column", [c for c in (label, centre, patient) if c], sheet.columns)
        names = tuple(c for c in sheet.columns if c not in used)
        if features is not None:
            names = check_names("column", features, sheet.columns)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    _check_features(path, names)
    labels, classes = (
        (_outcomes(sheet, label), (label,))
        if outcome == "continuous"
        else _classes(sheet, sheet.known(label), positive, negative)
    )
    count = len(sheet.rows)
    patients = sheet.known(patient) if patient else [f"row_{i}" for i in range(count)]
    centres, files = sheet.known(centre) if centre else (), [path] * count
    return Table(names, sheet.numbers(names), labels, classes, patients, centres, files)


def _check_features(path: Path, names: Sequence[str]) -> None:
    if not names:
        raise DataError(f"{path} has no feature column; there is nothing to learn from.")
    if "" in names:
        raise DataError(
            f"{path} has a column without a name, perhaps row numbers; name it in the header line, "
            "or name the others in data.features."
        )


def read_features(
    path: Path, names: Sequence[str]
) -> tuple[NDArray[np.float64], dict[str, list[str]]]:
    """Reads features alone, of a table that may lack labels.

    Args:
        path: A CSV file with a header; columns are found by name, in any order and case.
        names: F features.

    Returns:
        (N, F), NaN where a cell is missing; and the cells of all other columns by name.

    Raises:
        DataError: Naming the file, row and column of what cannot be used.
    """
    sheet = _Sheet.read(path, None)
    known = {column.lower() for column in sheet.columns}
    if lacking := [name for name in names if name.lower() not in known]:
        raise DataError(
            f"{path} lacks the column{'s' * (len(lacking) > 1)} {', '.join(lacking)}; it needs "
            f"{', '.join(names)}."
        )
    used = {name.lower() for name in names}
    others = {c: [row[i] for row in sheet.rows] for i, c in enumerate(sheet.columns)}
    return sheet.numbers(names), {c: cells for c, cells in others.items() if c.lower() not in used}


@dataclass(frozen=True)
class _Sheet:
    """The cells of a file, and sentences about the bad ones; data rows count from 1."""

    path: Path
    columns: list[str]
    rows: list[list[str]]

    @classmethod
    def read(cls, path: Path, header: Sequence[str] | None) -> _Sheet:
        with csv_rows(path, "set data.path to a CSV file") as found:
            rows = list(found)
        columns = [c.strip() for c in (rows.pop(0) if header is None and rows else header or [])]
        if not rows:
            raise DataError(f"{path} has no data rows.")
        if long := next((c for c in columns if len(c) > 200 or not c.isprintable()), None):
            raise DataError(
                f"{path}: no column can be called {long[:40]!r}…; give it a header line, or name "
                "its columns in data.header."
            )
        count = Counter(c.lower() for c in columns)
        if twice := {c for c in columns if count[c.lower()] > 1}:
            raise DataError(
                f"{path}: column {min(twice)} occurs twice; give every column a name of its own."
            )
        sheet = cls(path, columns, rows)
        for number, row in enumerate(rows, start=1):
            if len(row) != len(columns):
                raise sheet.bad(
                    number,
                    f": {len(row)} cells, but {len(columns)} columns; mend the row or data.header.",
                )
        return sheet

    @cached_property
    def places(self) -> dict[str, int]:
        """Where each column stands, by its name in lower case."""
        return {column.lower(): at for at, column in enumerate(self.columns)}

    def bad(self, number: int, what: str) -> DataError:
        return DataError(f"{self.path}, data row {number}{what}")

    def cells(self, name: str) -> list[tuple[int, str]]:
        """Number and text of every cell of a column."""
        at = self.places[name.lower()]
        return [(number, row[at].strip()) for number, row in enumerate(self.rows, start=1)]

    def known(self, name: str) -> list[str]:
        """The cells of a column that may not be missing: label, patient or centre."""
        for number, text in self.cells(name):
            if text.lower() in MISSING:
                what = f", column {name}: the cell is missing; fill it in or remove the row."
                raise self.bad(number, what)
        return [text for _, text in self.cells(name)]

    def numbers(self, names: Sequence[str]) -> NDArray[np.float64]:
        """(N, F) feature cells, NaN where one is missing."""
        found = np.empty((len(self.rows), len(names)))
        for column, name in enumerate(names):
            for number, text in self.cells(name):
                missing = text.lower() in MISSING
                found[number - 1, column] = float("nan") if missing else as_number(text)
                if not missing and not abs(found[number - 1, column]) < _LARGEST:
                    raise self.bad(
                        number,
                        f", column {name}: {text[:60]!r} is not a number (below 1e30); write a "
                        "number, leave it empty, or leave the column out with data.features.",
                    )
        return found


def _outcomes(sheet: _Sheet, name: str) -> NDArray[np.float64]:
    """One number per row."""
    cells = sheet.known(name)
    found = np.array([as_number(text) for text in cells])
    if not np.isfinite(found).all():
        worst = int(np.flatnonzero(~np.isfinite(found))[0])
        raise sheet.bad(
            worst + 1,
            f", column {name}: the outcome {cells[worst][:60]!r} is not a number; mend the row or "
            "set data.outcome=classes.",
        )
    return found


def _classes(
    sheet: _Sheet, cells: Sequence[str], positive: Values | None, negative: Values | None
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Class index per row, and the class names."""
    values = [_tidy(text) for text in cells]
    if positive is not None:
        wanted = {_tidy(str(p)) for p in positive}
        known = set(values) if negative is None else {_tidy(str(n)) for n in negative}
        _check_labels(sheet, values, wanted, known | wanted)
        return np.array([v in wanted for v in values], dtype=np.int64), ("negative", "positive")
    names = sorted(set(values), key=lambda v: (as_number(v), v))
    if len(names) < 2 or len(names) > 50:
        raise DataError(
            f"{sheet.path}: the label column has {len(names)} distinct value(s); 2 to 50 classes "
            "are possible. Name the column in data.label, or the values of class 1 in "
            "data.positive."
        )
    if len(values) >= 10 and len(names) > 2 and 2 * len(names) > len(values):
        raise DataError(
            f"{sheet.path}: the label column has {len(names)} distinct values in {len(values)} "
            "rows, so it is probably an id or a measurement; name another one in data.label, or "
            "set data.outcome=continuous."
        )
    if lone := [name for name, count in Counter(values).items() if count == 1 and len(names) > 2]:
        log.warning("%s: the class %s has a single row.", sheet.path, lone[0][:60])
    index = {name: i for i, name in enumerate(names)}
    return np.array([index[v] for v in values], dtype=np.int64), tuple(names)


def _check_labels(sheet: _Sheet, values: Sequence[str], wanted: set[str], known: set[str]) -> None:
    """Refuses labels that are neither positive nor negative, and positives that never occur."""
    for number, value in enumerate(values, start=1):
        if value not in known:
            listed = ", ".join(sorted(known))
            raise sheet.bad(number, f": the label {value[:60]} is none of {listed}; mend the row.")
    if not wanted & set(values):
        raise DataError(
            f"{sheet.path}: no row has a label of data.positive ({', '.join(sorted(wanted))}); the "
            f"labels are {', '.join(v[:40] for v in sorted(set(values))[:10])}."
        )


def as_number(text: str) -> float:
    """Reads a number; what is none is infinite.

    Example:
        >>> as_number("1.5"), as_number("old"), as_number("1_5")
        (1.5, inf, inf)
    """
    try:
        return float("inf") if "_" in text else float(text)  # Python's own spelling of 15
    except ValueError:
        return float("inf")


def _tidy(text: str) -> str:
    """``"1.0"`` and ``"1"`` are the same label."""
    number = as_number(text)
    return str(int(number)) if np.isfinite(number) and number == int(number) else text
