"""Probabilities of candidates of CT scans and of rows of tables: a table of them in a CSV file."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from medfed.common.errors import CheckpointError, ConfigError, DataError
from medfed.datamodules.ct_patches import PatchSpec, extract, to_unit
from medfed.datamodules.readers.luna16 import Candidates, Points, find_scans, read_points
from medfed.datamodules.readers.metaimage import open_scan
from medfed.datamodules.readers.table import read_features
from medfed.datamodules.tables.columns import Columns
from medfed.delivery.bundle.scripts.predictor import Predictor
from medfed.delivery.bundle.scripts.tables import inputs_of, unusual_cells
from medfed.delivery.predict.committee import Committee
from medfed.delivery.predict.options import attempt
from medfed.delivery.predict.outputs import table_path, write_csv
from medfed.delivery.predict.scans import check_spacing

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
        cut = partial(_patches, file, chosen, options.spacing_tolerance)
        chances[rows] = committee.classify(cut, file).double().numpy()

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
    tensor = torch.from_numpy(inputs_of(rows, columns, predictor.facts)) * predictor.present
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


def _patches(
    header: Path, candidates: Candidates, tolerance: float | None, predictor: Predictor
) -> Tensor:
    """(n, C, *spatial) patches of the candidates of one scan, as in training."""
    try:
        spec = PatchSpec(**predictor.facts["input"]["patches"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"The bundle does not say how patches are cut ({error}); export it anew."
        ) from error
    resampled = range(0 if spec.spacing is None else len(spec.size))  # may be of any spacing
    axes = [axis for axis in range(3) if axis not in resampled]
    check_spacing(open_scan(header).spacing, predictor.facts, tolerance, header, axes)
    patches = extract(header, candidates, spec)
    return torch.from_numpy(to_unit(patches, spec.window, predictor.present.numpy()))
