"""Probabilities of nodule candidates: patches of CT scans cut as in training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from medfed.datamodules.ct_patches import PatchSpec, extract
from medfed.datamodules.luna16_patches import convert_patches
from medfed.datamodules.readers.luna16 import Candidates, find_scans
from medfed.datamodules.readers.metaimage import open_scan
from medfed.datamodules.readers.points import Points, read_points
from medfed.delivery.geometry import check_spacing
from medfed.delivery.outputs import (
    check_folder,
    check_targets,
    csv_path,
    probability_columns,
    write_csv,
)
from medfed.delivery.predictor import Predictor
from medfed.delivery.request import Request, attempt
from medfed.errors import CheckpointError, ConfigError, DataError


def predict_candidates(predictor: Predictor, request: Request) -> Path:
    """Classifies the candidates of one scan, or of all scans in a folder, into one CSV file.

    The rows are those of the candidates' CSV, in its order, without those of scans that are not
    given or could not be used.

    Args:
        predictor: A model of CT patches.
        request: What is wanted; ``candidates`` is needed.

    Returns:
        The CSV file.

    Raises:
        MedfedError: If nothing can be done, or some scans could not be used; a candidate outside of
            its scan makes the scan one of these, because then the coordinates are of another frame.
    """
    output = csv_path(Path(request.output))
    if request.candidates is None:
        raise ConfigError(
            "This model classifies candidates; name them in candidates=FILE.csv, with the columns "
            "seriesuid, coordX, coordY, coordZ."
        )
    source = Path(request.candidates)
    check_folder(output.parent)
    check_targets([output], request.overwrite, [source])
    points = read_points(source, None)
    scans = _scans(Path(request.input), points, source)
    chances = np.full((len(points.row), len(predictor.labels)), np.nan)

    def one(series: str) -> None:
        rows = np.flatnonzero(points.scan == points.series.index(series))
        if series not in scans:
            raise DataError(
                f"{source}, data row {points.row[rows[0]]}: series {series} has no scan below "
                f"{request.input}; copy it there, or remove its rows."
            )
        chosen = Candidates(
            points.world[rows], np.zeros(len(rows), np.int64), points.row[rows], str(source)
        )
        chances[rows] = _classify(predictor, scans[series], chosen, request)

    def save() -> None:
        _write(output, points, chances, predictor)

    attempt(_series(points, scans, Path(request.input)), one, str, "scans", save)
    return output


def _scans(path: Path, points: Points, source: Path) -> Mapping[str, Path]:
    if path.is_dir():
        return find_scans(path)
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


def _series(points: Points, scans: Mapping[str, Path], path: Path) -> list[str]:
    """The series to do: those of the candidates; of one scan, that one."""
    return list(points.series) if path.is_dir() else list(scans)


def _classify(
    predictor: Predictor, header: Path, candidates: Candidates, request: Request
) -> NDArray[np.float64]:
    """(n, K) probabilities of the candidates of one scan."""
    spec = _spec(predictor.facts["input"])
    resampled = range(0 if spec.spacing is None else len(spec.size))  # may be of any spacing
    axes = [axis for axis in range(3) if axis not in resampled]
    spacing = open_scan(header).spacing
    check_spacing(spacing, predictor.facts, request.spacing_tolerance, header, axes)
    patches = extract(header, candidates, spec)
    images = convert_patches(patches, spec.window, predictor.present.numpy())
    chances = predictor.classify(torch.from_numpy(images), header)
    return chances.double().numpy()


def _spec(facts: Mapping[str, Any]) -> PatchSpec:
    try:
        return PatchSpec(**facts["patches"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"The bundle does not say how patches are cut ({error}); export it anew."
        ) from error


def _write(path: Path, points: Points, chances: NDArray[np.float64], predictor: Predictor) -> None:
    done = np.flatnonzero(~np.isnan(chances).any(axis=1))
    if not len(done):
        return
    header = ["seriesuid", "coordX", "coordY", "coordZ", *probability_columns(predictor.labels)]
    rows = [
        # Coordinates as they were read, to the last digit.
        [points.series[points.scan[r]], *map(repr, points.world[r].tolist()), *chances[r].tolist()]
        for r in done
    ]
    write_csv(path, header, rows)
