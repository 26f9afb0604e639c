"""What configs/inference.json calls: ``medfed predict`` with one bundle, without its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from .detections import boxes_file, detect, find_ct, save_detections
from .errors import DataError
from .masks import check_apart, mask_files
from .predictor import Predictor
from .samples import predict_table
from .scans import find_cases

TABLE = "predictions.csv"


def run(
    network: nn.Module,
    facts: Mapping[str, Any],
    dataset_dir: str,
    output_dir: str,
    candidates: str | None = None,
    spacing_tolerance: float | None = None,
) -> None:
    """Predicts every input, and writes masks, boxes or a table into a folder."""
    source, output = Path(dataset_dir), Path(output_dir)
    if source.resolve() == output.resolve():
        raise DataError(f"{output} is the folder of the input; choose another output_dir.")
    bundle, kind = str(Path(__file__).parents[1]), facts["input"]["kind"]
    predictor = Predictor.of(network, facts, name=bundle)
    if kind == "ct_scans":
        scans = find_ct(source, output)
        targets = [boxes_file(scan, output) for scan in scans.values()]
        for (name, scan), target in zip(scans.items(), targets, strict=True):
            detect(predictor, name, scan.path, target)
        save_detections(targets, output)
        return
    if kind not in ("volumes", "pictures"):
        file = None if candidates is None else Path(candidates)
        predict_table(predictor, kind, source, output / TABLE, _each, file, spacing_tolerance)
        return
    cases = find_cases(source, facts, output)
    check_apart([(c.id, mask_files(facts, c.target(output))) for c in cases], cases[0].what)
    for case in cases:
        segmented = case.segment(predictor, spacing_tolerance)
        segmented.save(facts, predictor.masks(segmented.regions), case.target(output))


def _each(
    items: Sequence[Any], work: Callable[[Any], None], what: str, save: Callable[[], None]
) -> None:
    for item in items:
        work(item)
    save()
