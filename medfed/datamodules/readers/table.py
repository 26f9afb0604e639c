"""Tables: one row per sample, numeric features, a label column; a centre and a patient column."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from medfed.datamodules.readers.base import check_names
from medfed.errors import ConfigError, DataError

Outcome = Literal["classes", "continuous"]
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
        centres: (N) centre of every row, or None.
        files: (N) the file of every row; empty where there is none.
    """

    names: tuple[str, ...]
    features: NDArray[np.float64]
    labels: NDArray[Any]
    classes: tuple[str, ...]
    patients: tuple[str, ...]
    centres: tuple[str, ...] | None = None
    files: tuple[Path, ...] = ()


def read_csv(
    path: Path,
    label: str,
    features: Sequence[str] | None = None,
    centre: str | None = None,
    patient: str | None = None,
    positive: Sequence[str | int | float] | None = None,
    header: Sequence[str] | None = None,
    negative: Sequence[str | int | float] | None = None,
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
    columns, rows = _rows(path, header)
    try:
        used = check_names("column", [c for c in (label, centre, patient) if c], columns)
        names = tuple(c for c in columns if c not in used)
        if features is not None:
            names = check_names("column", features, columns)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    at = {name.lower(): i for i, name in enumerate(columns)}
    cells = _column(path, rows, at, label)
    labels, classes = (
        (_outcomes(path, cells, label), (label,))
        if outcome == "continuous"
        else _classes(path, cells, positive, negative)
    )
    return Table(
        names=names,
        features=_features(path, rows, at, names),
        labels=labels,
        classes=classes,
        patients=tuple(
            _column(path, rows, at, patient) if patient else (f"row_{i}" for i in range(len(rows)))
        ),
        centres=tuple(_column(path, rows, at, centre)) if centre else None,
        files=(path,) * len(rows),
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
    columns, rows = _rows(path, None)
    at = {name.lower(): i for i, name in enumerate(columns)}
    if lacking := [name for name in names if name.lower() not in at]:
        raise DataError(
            f"{path} lacks the column{'s' * (len(lacking) > 1)} {', '.join(lacking)}; it needs "
            f"{', '.join(names)}."
        )
    used = {name.lower() for name in names}
    others = {c: [row[i] for row in rows] for i, c in enumerate(columns) if c.lower() not in used}
    return _features(path, rows, at, names), others


def rows_at(rows: Sequence[list[str]]) -> list[tuple[int, list[str]]]:
    """Numbers data rows from 1, as a person counts them.

    Args:
        rows: The rows without the header.

    Returns:
        Pairs of number and row.

    Example:
        >>> rows_at([["3.1", "0"]])
        [(1, ['3.1', '0'])]
    """
    return list(enumerate(rows, start=1))


def _rows(path: Path, header: Sequence[str] | None) -> tuple[list[str], list[list[str]]]:
    """Column names and data rows, all of one length."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.reader(file) if any(cell.strip() for cell in row)]
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; set data.path to a CSV file.") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as CSV ({error}); save it as UTF-8 CSV.") from error
    columns = [c.strip() for c in (rows.pop(0) if header is None and rows else header or [])]
    if not rows:
        raise DataError(f"{path} has no data rows.")
    if twice := {c for c in columns if [x.lower() for x in columns].count(c.lower()) > 1}:
        raise DataError(
            f"{path}: column {min(twice)} occurs twice; give every column a name of its own."
        )
    for number, row in rows_at(rows):
        if len(row) != len(columns):
            raise DataError(
                f"{path}, data row {number}: {len(row)} cells, but {len(columns)} columns; "
                "mend the row or data.header."
            )
    return columns, rows


def _column(path: Path, rows: Sequence[list[str]], at: dict[str, int], name: str) -> list[str]:
    """The cells of a column that may not be missing: label, patient or centre."""
    cells = [row[at[name.lower()]].strip() for row in rows]
    for number, text in enumerate(cells, start=1):
        if text.lower() in MISSING:
            raise DataError(
                f"{path}, data row {number}, column {name}: the cell is missing; fill it in or "
                "remove the row."
            )
    return cells


def _features(
    path: Path, rows: Sequence[list[str]], at: dict[str, int], names: Sequence[str]
) -> NDArray[np.float64]:
    """(N, F) feature cells."""
    return np.array([[_cell(path, r, row, at, n) for n in names] for r, row in rows_at(rows)])


def _cell(path: Path, number: int, row: list[str], at: dict[str, int], name: str) -> float:
    """One feature cell; NaN where missing."""
    text = row[at[name.lower()]].strip()
    if text.lower() in MISSING:
        return float("nan")
    try:
        value = float(text)
    except ValueError:
        value = float("inf")
    if not np.isfinite(value):
        raise DataError(
            f"{path}, data row {number}, column {name}: {text!r} is not a number; write a number, "
            "leave it empty, or leave the column out with data.features."
        )
    return value


def _outcomes(path: Path, cells: Sequence[str], name: str) -> NDArray[np.float64]:
    """One number per row."""
    found = np.array([_number(text) for text in cells])
    if not np.isfinite(found).all():
        worst = int(np.flatnonzero(~np.isfinite(found))[0])
        raise DataError(
            f"{path}, data row {worst + 1}, column {name}: the outcome {cells[worst]!r} is not a "
            "number; mend the row or set data.outcome=classes."
        )
    return found


def _classes(
    path: Path,
    raw: Sequence[str],
    positive: Sequence[str | int | float] | None,
    negative: Sequence[str | int | float] | None,
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Class index per row, and the class names."""
    values = [_tidy(text) for text in raw]
    if positive is not None:
        wanted = {_tidy(str(p)) for p in positive}
        known = set(values) if negative is None else {_tidy(str(n)) for n in negative}
        _check_labels(path, values, wanted, known | wanted)
        return np.array([v in wanted for v in values], dtype=np.int64), ("negative", "positive")
    names = sorted(set(values), key=lambda v: (_number(v), v))
    if len(names) < 2 or len(names) > 50:
        raise DataError(
            f"{path}: the label column has {len(names)} distinct value(s); 2 to 50 classes are "
            "possible. Name the column in data.label, or the values of class 1 in data.positive."
        )
    index = {name: i for i, name in enumerate(names)}
    return np.array([index[v] for v in values], dtype=np.int64), tuple(names)


def _check_labels(path: Path, values: Sequence[str], wanted: set[str], known: set[str]) -> None:
    """Refuses labels that are neither positive nor negative, and positives that never occur."""
    for number, value in enumerate(values, start=1):
        if value not in known:
            raise DataError(
                f"{path}, data row {number}: the label {value} is none of "
                f"{', '.join(sorted(known))}; mend the row."
            )
    if not wanted & set(values):
        raise DataError(
            f"{path}: no row has a label of data.positive ({', '.join(sorted(wanted))}); the "
            f"labels are {', '.join(sorted(set(values))[:10])}."
        )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("inf")


def _tidy(text: str) -> str:
    """``"1.0"`` and ``"1"`` are the same label."""
    number = _number(text)
    return str(int(number)) if np.isfinite(number) and number == int(number) else text
