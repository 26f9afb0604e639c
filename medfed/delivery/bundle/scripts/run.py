"""What configs/inference.json calls: ``medfed predict`` with one bundle, without its options."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from medfed.common.errors import DataError
from medfed.delivery.bundle.scripts import samples, scans
from medfed.delivery.bundle.scripts.masks import (
    check_apart,
    mask_files,
    mask_suffix,
    picture_files,
    save_masks,
    save_picture_masks,
)
from medfed.delivery.bundle.scripts.predictor import Predictor, regions_of_picture

TABLE = "predictions.csv"


def run(
    network: nn.Module,
    facts: Mapping[str, Any],
    dataset_dir: str,
    output_dir: str,
    candidates: str | None = None,
    spacing_tolerance: float | None = None,
) -> None:
    """Predicts every input, and writes masks or a table into a folder.

    Args:
        network: From images or features to logits.
        facts: The part of the metadata under ``medfed``.
        dataset_dir: A file, or the folder of the inputs.
        output_dir: The folder for the results.
        candidates: The CSV file with the candidates of CT scans.
        spacing_tolerance: See :func:`scans.check_spacing`.

    Raises:
        MedfedError: If an input cannot be used, or a result not be written.
    """
    source, output = Path(dataset_dir), Path(output_dir)
    if source.resolve() == output.resolve():
        raise DataError(f"{output} is the folder of the input; choose another output_dir.")
    predictor = Predictor.of(network, facts)
    root = source if source.is_dir() else source.parent
    kind = facts["input"]["kind"]

    def classify(images: Any, file: object) -> Tensor:
        return predictor.classify(images(predictor), file)

    if kind == "volumes":
        cases = scans.find_scans(source, [facts], output)
        targets = [output / f"{scan.id}{mask_suffix(scan.volume)}" for scan in cases]
        files = [mask_files(facts, target) for target in targets]
        check_apart(zip((scan.id for scan in cases), files, strict=True), "scans")
        for scan, target in zip(cases, targets, strict=True):
            read = scans.read_scan(scan, facts, spacing_tolerance)
            masks = predictor.masks(scans.regions_of_scan(predictor, read, scan.path))
            target.parent.mkdir(parents=True, exist_ok=True)
            save_masks(facts, masks, read.geometry, read.source, target)
    elif kind == "pictures":
        pictures = scans.find_pictures(source, output)
        names = [scans.stem_below(file, root, file.stem) for file in pictures]
        targets = [output / f"{name}.png" for name in names]
        check_apart(
            zip(names, (picture_files(facts, target) for target in targets), strict=True),
            "pictures",
        )
        for file, target in zip(pictures, targets, strict=True):
            masks = predictor.masks(regions_of_picture(predictor, file).full)
            target.parent.mkdir(parents=True, exist_ok=True)
            save_picture_masks(facts, masks, target)
    elif kind == "table":
        rows = samples.read_rows(predictor, source)
        answers = predictor.classify(rows.tensor, source)
        samples.save_rows([rows], answers, predictor.columns, source, output / TABLE)
    elif kind == "images":
        images: list[list[object]] = []
        for file in scans.find_images(source):
            images += samples.rows_of_image(file, root, classify)
        samples.save_images(images, predictor.columns, output / TABLE)
    else:
        if candidates is None:
            raise DataError("This model classifies candidates; name their CSV file in candidates.")
        points = samples.ScanCandidates(
            source, Path(candidates), predictor.columns, spacing_tolerance
        )
        for series in points.series:
            points.classify(series, classify)
        points.save(output / TABLE)
