"""Nodule candidates: CSV files of points in scans, and which of the many non-nodules to keep."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from medfed.common.errors import DataError
from medfed.common.seeding import derive_seed
from medfed.datamodules.readers.csv_rows import csv_rows
from medfed.datamodules.readers.ct_scan import Scan

RULE = (
    "all nodules; of the other candidates those that rank first by a hash of seed, series and "
    "place among the rows of their series, negatives_per_positive for every nodule of the data set"
)
Mask = NDArray[np.bool_]
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


@dataclass(frozen=True)
class Candidates:
    """The candidates of one scan.

    Attributes:
        world: (n, 3) mm x y z, as in the CSV.
        label: (n,) int64, 1 = nodule.
        row: (n,) int64 row in the CSV; the first data row is 1.
        source: The CSV, for error sentences.
    """

    world: NDArray[np.float64]
    label: NDArray[np.int64]
    row: NDArray[np.int64]
    source: str = "candidates"

    def __len__(self) -> int:
        return len(self.row)


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
    with csv_rows(path) as rows:
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


def subsample(points: Points, usable: Mask, ratio: float | None, seed: int) -> Mask:
    """Chooses candidates; see `readers.luna16.Luna16Reader`.

    Args:
        points: n candidates, whose value is 1 for nodules.
        usable: (n,) bool, whether a candidate's scan is there; nodules are counted among these.
        ratio: Other candidates per nodule; None keeps all.
        seed: Seed of the choice.

    Returns:
        (n,) bool.

    Example:
        >>> value = np.array([1.0, 0.0, 0.0, 0.0, 0.0])
        >>> points = Points(("1.2",), np.zeros(5, int), np.zeros((5, 3)), value, np.arange(1, 6))
        >>> subsample(points, np.ones(5, bool), 2.0, seed=0).sum()
        np.int64(3)
    """
    positive = points.value == 1
    if ratio is None:
        return np.ones(len(positive), dtype=bool)
    negatives = np.flatnonzero(usable & ~positive)
    count = round(ratio * int((usable & positive).sum()))
    seeds = np.array([derive_seed(seed, "negatives", s) for s in points.series], dtype=np.uint64)
    starts = np.concatenate([[0], np.cumsum(np.bincount(points.scan))[:-1]])
    place = np.empty(len(positive), dtype=np.int64)  # of a row among the rows of its series
    order = np.argsort(points.scan, kind="stable")
    place[order] = np.arange(len(order)) - starts[points.scan[order]]
    keys = mix((seeds[points.scan] << np.uint64(32)) | place.astype(np.uint64))
    kept = np.array(positive, dtype=bool)
    kept[negatives[np.argsort(keys[negatives], kind="stable")[:count]]] = True
    return kept


def mix(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scrambles 64-bit numbers one to one (SplitMix64's finalizer): neighbours end far apart.

    Source: G. L. Steele et al., "Fast splittable pseudorandom number generators", OOPSLA 2014.

    Args:
        keys: (n,) uint64.

    Returns:
        (n,) uint64.

    Example:
        >>> [f"{key:x}" for key in mix(np.array([0x9E3779B97F4A7C15], dtype=np.uint64))]
        ['e220a8397b1dcdaf']
    """
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))


def centre_voxels(scan: Scan, candidates: Candidates) -> NDArray[np.int64]:
    """Finds the voxels that hold the candidates.

    Args:
        scan: The scan.
        candidates: n points.

    Returns:
        (n, 3) x, y, z of the patient grid. On the border of two voxels the one further to the
        left, back or head is taken, whichever way the scan is stored.

    Raises:
        DataError: If one lies outside the scan; names its row.
    """
    # The transform's rounding errors must not decide on which side of a border a point lies.
    voxels = np.floor(np.round(scan.locate(candidates.world), 6) + 0.5).astype(np.int64)
    outside = ((voxels < 0) | (voxels >= scan.size)).any(axis=1)
    if outside.any():
        at = int(outside.argmax())
        point = ", ".join(f"{mm:g}" for mm in candidates.world[at])
        raise DataError(
            f"{candidates.source}, data row {candidates.row[at]}: ({point}) mm lies outside scan "
            f"{scan.header}; mend or remove the row."
        )
    return voxels


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
