"""Probabilities of candidates of CT scans and of rows of tables: a table of them in a CSV file.

What of a row training has not seen the like of, cell by cell.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medfed.common.errors import CheckpointError, ConfigError, DataError
from medfed.datamodules.ct_patches import PatchSpec, extract, to_unit
from medfed.datamodules.readers.luna16 import Candidates, Points, find_scans, read_points
from medfed.datamodules.readers.metaimage import open_scan
from medfed.datamodules.readers.table import read_features
from medfed.datamodules.tables.columns import Columns, from_facts
from medfed.delivery.predict.options import attempt
from medfed.delivery.predict.outputs import table_path, write_csv
from medfed.delivery.predict.predictor import Committee, Predictor
from medfed.delivery.predict.scans import check_spacing


def unusual_cells(
    rows: NDArray[np.float64],
    columns: Columns,
    facts: Mapping[str, Any],
    texts: Mapping[str, Sequence[str | None]],
) -> dict[int, list[str]]:
    """Names the cells of which a model has learnt nothing.

    Args:
        rows: (N, F), see `readers.table.read_cells`.
        columns: What the columns are.
        facts: Of the bundle.
        texts: (N) cells of the columns with categories.

    Returns:
        Sentences without a stop by row, counted from 1; rows without any are left out.

    Example:
        >>> columns = Columns(("age", "sex"), {"sex": ("f", "m")}, ("sex",))
        >>> facts = {"input": {"indicators": ["sex"], "lowest": [40], "highest": [60]}}
        >>> rows = np.array([[50.0, 0.0], [130.0, -1.0], [np.nan, np.nan]])
        >>> found = unusual_cells(rows, columns, facts, {"sex": ["f", "x", None]})
        >>> for row, cells in found.items():
        ...     print(row, cells)
        2 ['age is 130, outside of 40 to 60 in training', "sex is 'x', unknown in training"]
        3 ['age is missing, which it never was in training']
    """
    source, found = facts["input"], dict[int, list[str]]()
    lowest, highest = source.get("lowest"), source.get("highest")
    place = {at: number for number, at in enumerate(columns.numeric)}
    for at, name in enumerate(columns.names):
        for row, value in enumerate(rows[:, at].tolist()):
            said = None
            if np.isnan(value):
                if name not in columns.indicators:
                    said = "is missing, which it never was in training"
            elif name in columns.categories:
                if value < 0:
                    said = f"is {texts[name][row]!r:.60}, unknown in training"
            elif lowest is not None and highest is not None:
                said = _outside(value, lowest[place[at]], highest[place[at]])
            if said:
                found.setdefault(row + 1, []).append(f"{name} {said}")
    return dict(sorted(found.items()))


def _outside(value: float, low: float | None, high: float | None) -> str | None:
    if low is None or high is None:
        return f"is {value:g}, but training had no value of it"
    if low <= value <= high:
        return None
    return f"is {value:g}, outside of {low:g} to {high:g} in training"


_log = logging.getLogger(__name__)
_MOST_WARNED = 10  # rows that are named


def predict_candidates(committee: Committee) -> Path:
    """Classifies the candidates of one scan, or of all scans in a folder, into one CSV file.

    The rows are those of the candidates' CSV, in its order, without those of scans that are not
    given or could not be used.

    Args:
        committee: Models of CT patches; their options name the ``candidates``.

    Returns:
        The CSV file.

    Raises:
        MedfedError: If nothing can be done, or some scans could not be used; a candidate outside of
            its scan makes the scan one of these, because then the coordinates are of another frame.
    """
    options = committee.options
    output, given = table_path(options), Path(options.input)
    if options.candidates is None:
        raise ConfigError(
            "This model classifies candidates; name them in candidates=FILE.csv, with the columns "
            "seriesuid, coordX, coordY, coordZ."
        )
    source = Path(options.candidates)
    points = read_points(source, None)
    scans = find_scans(given) if given.is_dir() else _one_scan(given, points, source)
    chances = np.full((len(points.row), len(committee.columns)), np.nan)

    def one(series: str) -> None:
        rows = np.flatnonzero(points.scan == points.series.index(series))
        if series not in scans:
            raise DataError(
                f"{source}, data row {points.row[rows[0]]}: series {series} has no scan below "
                f"{given}; copy it there, or remove its rows."
            )
        chosen = Candidates(
            points.world[rows], np.zeros(len(rows), np.int64), points.row[rows], str(source)
        )
        file = scans[series]
        found = committee.classify(lambda member: _patches(member, file, chosen), file)
        chances[rows] = found.double().numpy()

    def save() -> None:
        done = np.flatnonzero(~np.isnan(chances).any(axis=1))
        names, world = [points.series[k] for k in points.scan], points.world.tolist()
        # Coordinates as they were read, to the last digit.
        rows = [[names[r], *map(repr, world[r]), *chances[r].tolist()] for r in done]
        if rows:
            write_csv(output, ["seriesuid", "coordX", "coordY", "coordZ", *committee.columns], rows)

    attempt(points.series if given.is_dir() else list(scans), one, str, "scans", save)
    return output


def predict_table(committee: Committee) -> Path:
    """Classifies the rows of a CSV file, or predicts their outcome.

    Cells that training has not seen the like of are named, a line each, and in the row's
    ``warning``: a value outside of the range in training, a category that was not there, a missing
    cell where none was missing.

    Args:
        committee: Models of features.

    Returns:
        The CSV file: ``row``, counted from 1, the cells of all columns that are no features,
        ``warning``, and a probability per class, or of a regression ``prediction`` in the outcome's
        unit.

    Raises:
        MedfedError: If a column is missing, a cell is no number, or nothing can be written.
    """
    output, source = table_path(committee.options), Path(committee.options.input)
    if source.is_dir():
        raise DataError(f"{source} is a folder; name one CSV file in input.")
    seen = committee.ask(lambda member: _features(member, source))
    tensors = {id(m): s.tensor for m, s in zip(committee.members, seen, strict=True)}
    unusual: dict[int, list[str]] = {}
    for each in seen:
        for row, cells in each.unusual.items():
            known = unusual.setdefault(row, [])
            known += [cell for cell in cells if cell not in known]
    _warn(dict(sorted(unusual.items())), source, output)
    chances = committee.classify(lambda member: tensors[id(member)], source).tolist()
    # What is a feature of any of the models is none of the others.
    shared = [name for name in seen[0].others if all(name in each.others for each in seen)]
    others = [seen[0].others[name] for name in shared]
    header = ["row", *shared, "warning", *committee.columns]
    numbers = range(1, len(chances) + 1)
    said = ["; ".join(unusual.get(n, ())) for n in numbers]
    beside = zip(numbers, *others, said, strict=True)
    write_csv(output, header, ([*a, *b] for a, b in zip(beside, chances, strict=True)))
    return output


class _Seen(NamedTuple):
    """The rows of a table as a model sees them, ``(N, F)``."""

    tensor: Tensor
    others: Mapping[str, Sequence[str | None]]
    unusual: Mapping[int, list[str]]


def _features(predictor: Predictor, source: Path) -> _Seen:
    columns = Columns.from_facts(predictor.facts["input"])
    rows, others, texts = read_features(source, columns.names, columns.categories)
    unusual = unusual_cells(rows, columns, predictor.facts, texts)
    tensor = torch.from_numpy(_scaled(rows, columns, predictor.facts)) * predictor.present
    return _Seen(tensor, others, unusual)


def _warn(unusual: Mapping[int, list[str]], source: Path, output: Path) -> None:
    """Names the first rows with cells that training has not seen the like of."""
    for number, cells in [*unusual.items()][:_MOST_WARNED]:
        more = f"; and {len(cells) - 3} more" * (len(cells) > 3)
        _log.warning("%s, data row %d: %s%s.", source, number, "; ".join(cells[:3]), more)
    if len(unusual) > _MOST_WARNED:
        _log.warning(
            "%d rows in all have such cells; the column warning of %s names them.",
            len(unusual),
            output,
        )


def _one_scan(path: Path, points: Points, source: Path) -> Mapping[str, Path]:
    if not path.exists():
        raise DataError(f"{path} does not exist; name a scan, or a folder of scans, in input.")
    if path.suffix.lower() not in (".mhd", ".mha"):
        raise DataError(f"{path} is no MetaImage scan (.mhd, .mha), in which LUNA16 has its CTs.")
    series = path.name[: -len(path.suffix)]
    if series not in points.series:
        raise DataError(
            f"{source} has no candidates of series {series}; the scan's file must be named by its "
            "series id."
        )
    return {series: path}


def _patches(predictor: Predictor, header: Path, candidates: Candidates) -> Tensor:
    """(n, C, *spatial) patches of the candidates of one scan, as in training."""
    try:
        spec = PatchSpec(**predictor.facts["input"]["patches"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"The bundle does not say how patches are cut ({error}); export it anew."
        ) from error
    resampled = range(0 if spec.spacing is None else len(spec.size))  # may be of any spacing
    axes = [axis for axis in range(3) if axis not in resampled]
    tolerance = predictor.options.spacing_tolerance
    check_spacing(open_scan(header).spacing, predictor.facts, tolerance, header, axes)
    patches = extract(header, candidates, spec)
    return torch.from_numpy(to_unit(patches, spec.window, predictor.present.numpy()))


def _scaled(
    rows: NDArray[np.float64], columns: Columns, facts: Mapping[str, Any]
) -> NDArray[np.float32]:
    """The inputs of rows, as in training."""
    scaling, numbers = facts["normalization"], rows[:, columns.numeric]
    return columns.encode(rows, numbers if scaling is None else from_facts(scaling).scale(numbers))
