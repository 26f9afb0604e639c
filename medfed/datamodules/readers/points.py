"""CSV files of points in scans: one row per point, with the series, mm, and one more number."""

from __future__ import annotations

import csv
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from medfed.errors import DataError

_WORLD = ("coordX", "coordY", "coordZ")


@dataclass(frozen=True)
class Points:
    """A CSV of points in scans.

    Attributes:
        series: Series ids, each once, in the order of the file.
        scan: (n,) int64 index into `series`.
        world: (n, 3) mm x y z.
        value: (n,) the last column: a class or a diameter in mm.
        row: (n,) int64 row in the file; the first data row is 1.
    """

    series: tuple[str, ...]
    scan: NDArray[np.int64]
    world: NDArray[np.float64]
    value: NDArray[np.float64]
    row: NDArray[np.int64]


def read_points(path: Path, last: str | None) -> Points:
    """Reads a CSV with the columns ``seriesuid, coordX, coordY, coordZ`` and one more.

    Args:
        path: The file.
        last: Name of the further column, ``class`` or ``diameter_mm``; None reads the points
            alone, and their values are 0.

    Returns:
        The points; the 754,975 rows of ``candidates_V2.csv`` take some three seconds.

    Raises:
        DataError: Naming the row and column that cannot be used.
    """
    names: dict[str, int] = {}
    scan, numbers = array("q"), array("d")
    wanted = ("seriesuid", *_WORLD, *([last] if last else []))
    with _rows(path) as rows:
        header = [cell.strip() for cell in next(rows, [])]
        if any(name not in header for name in wanted):
            raise DataError(
                f"{path} needs the columns {', '.join(wanted)}, but has {', '.join(header)}; give "
                "it the header line of LUNA16."
            )
        series_at, *number_at = (header.index(name) for name in wanted)
        for number, row in enumerate(rows, start=1):
            try:
                numbers.extend([float(row[at]) for at in number_at])
                scan.append(names.setdefault(row[series_at], len(names)))
            except (ValueError, IndexError):
                raise _bad_row(path, number, row, header, wanted) from None
    table = np.array(numbers).reshape(-1, len(wanted) - 1)
    if not len(table):
        raise DataError(f"{path} has no data rows.")
    if not np.isfinite(table).all():
        at = int((~np.isfinite(table)).any(axis=1).argmax())
        cells = ", ".join(f"{value:g}" for value in table[at])
        raise DataError(f"{path}, data row {at + 1}: {cells} are not all finite; mend the row.")
    return Points(
        series=tuple(name.strip() for name in names),
        scan=np.array(scan, dtype=np.int64),
        world=table[:, :3],
        value=table[:, 3] if last else np.zeros(len(table)),
        row=np.arange(1, len(table) + 1),
    )


def read_annotations(path: Path) -> Points:
    """Reads LUNA16's ``annotations.csv``: one row per nodule.

    Args:
        path: The file.

    Returns:
        The nodules; `Points.value` is the diameter in mm.

    Raises:
        DataError: Naming the row and column that cannot be used.
    """
    return read_points(path, "diameter_mm")


@contextmanager
def _rows(path: Path) -> Iterator[Iterator[list[str]]]:
    """The rows of a CSV, without empty lines."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            yield (row for row in csv.reader(file) if row)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; copy it there.") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as CSV ({error}); save it as UTF-8 CSV.") from error


def _bad_row(
    path: Path, number: int, row: Sequence[str], header: Sequence[str], wanted: Sequence[str]
) -> DataError:
    """The sentence about a row whose cells are too few or not numbers."""
    if len(row) != len(header):
        return DataError(
            f"{path}, data row {number}: {len(row)} cells, but {len(header)} columns; mend the row."
        )
    for name in wanted[1:]:
        try:
            float(row[header.index(name)])
        except ValueError:
            break
    return DataError(
        f"{path}, data row {number}, column {name}: {row[header.index(name)]!r} is not a number; "
        "mend the row."
    )
