"""Masks of scans: read as in training, segmented, written on the scan's own grid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from torch import Tensor

from medfed.datamodules.spacing import ras_spacing
from medfed.delivery.geometry import save_like
from medfed.delivery.label_map import label_codes, label_map
from medfed.delivery.outputs import beside, check_folder, check_targets, mask_path
from medfed.delivery.predictor import Predictor
from medfed.delivery.request import Request, attempt
from medfed.delivery.scans import ScanFiles, find_scans, read_scan
from medfed.errors import ConfigError
from medfed.models.pictures import prediction_row, slice_with_most
from medfed.models.segmentation import SegmentationTask
from medfed.reports.pictures import save_figures


@dataclass(frozen=True)
class Segmented:
    """What was found in one scan.

    Attributes:
        scan: Its name.
        mask: The file that was written; of several, the first.
        volumes: Millilitres per region.
    """

    scan: str
    mask: Path
    volumes: dict[str, float]


def segment_all(predictor: Predictor, request: Request, console: Console) -> list[Segmented]:
    """Segments a scan, or every scan of a folder, one at a time.

    Args:
        predictor: A segmentation model.
        request: What is wanted; `Request.output` is a file for one scan, a folder for several.
        console: Where the table of volumes is printed.

    Returns:
        What was found, scan by scan.

    Raises:
        MedfedError: If nothing can be done, or some scans could not be segmented.
    """
    output = Path(request.output)
    scans = find_scans(Path(request.input), predictor.facts, output)
    targets = _targets(scans, request)
    for folder in {target.parent for target in targets.values()}:
        check_folder(folder, is_made=folder == output)
    found: list[Segmented] = []

    def one(scan: ScanFiles) -> None:
        found.append(segment(predictor, scan, targets[scan.id], request))

    attempt(scans, one, lambda scan: scan.id, "scans", lambda: _print(found, predictor, console))
    return found


def segment(predictor: Predictor, scan: ScanFiles, target: Path, request: Request) -> Segmented:
    """Segments one scan and writes what was asked for.

    Args:
        predictor: A segmentation model.
        scan: The scan.
        target: The mask's file.
        request: What is wanted.

    Returns:
        What was found.

    Raises:
        MedfedError: If the scan cannot be read or used, or the mask not be written.
    """
    task = predictor.task
    assert isinstance(task, SegmentationTask)
    masks = _mask_files(predictor, target)
    inputs = list(scan.path.iterdir()) if scan.path.is_dir() else [scan.path]
    check_targets(_all_files(masks, target, request), request.overwrite, inputs)
    image, brain, source = read_scan(scan, predictor.facts, request.spacing_tolerance)
    probabilities = predictor.regions(image, brain, scan.path)
    target.parent.mkdir(exist_ok=True)
    inside = probabilities > task.threshold
    by_name = dict(zip(predictor.labels, inside, strict=True))
    for path, codes in masks.items():
        note = ", ".join(f"{code} {name}" for name, code in codes.items())
        save_like(label_map(by_name, codes).numpy(), source, path, note)
    if request.probabilities:
        maps = np.moveaxis(probabilities.numpy(), 0, -1)
        note = "probabilities of " + ", ".join(predictor.labels)
        save_like(maps, source, beside(target, "_probabilities.nii.gz"), note)
    spacing = ras_spacing(source)
    if request.picture:
        _draw(predictor, scan, image, probabilities, spacing, beside(target, ".png"))
    millilitres = float(np.prod(spacing)) / 1000
    volumes = {name: int(mask.sum()) * millilitres for name, mask in by_name.items()}
    return Segmented(scan.id, next(iter(masks)), volumes)


def _mask_files(predictor: Predictor, target: Path) -> dict[Path, dict[str, int]]:
    """The files of the masks with their label values: one, or one per region that does not nest."""
    regions = predictor.facts["input"].get("regions") or {}
    regions = {name: regions.get(name, [1]) for name in predictor.labels}
    codes = label_codes(regions)
    if codes is not None:
        return {target: codes}
    suffix = target.name[target.name.lower().rindex(".nii") :]
    return {beside(target, f"_{name}{suffix}"): {name: 1} for name in regions}


def _all_files(masks: dict[Path, Any], target: Path, request: Request) -> list[Path]:
    files = list(masks)
    if request.probabilities:
        files.append(beside(target, "_probabilities.nii.gz"))
    if request.picture:
        files.append(beside(target, ".png"))
    return files


def _targets(scans: Sequence[ScanFiles], request: Request) -> dict[str, Path]:
    """The mask's file per scan: the output itself, or ``<scan>.nii.gz`` in it."""
    output, input_ = Path(request.output), Path(request.input)
    single = len(scans) == 1 and (not input_.is_dir() or scans[0].path == input_)
    if single and not output.is_dir():
        return {scans[0].id: mask_path(output)}
    if output.resolve() == input_.resolve():
        raise ConfigError(f"output={output} is the folder of the scans; choose another one.")
    if twice := [name for name, count in Counter(s.id for s in scans).items() if count > 1]:
        raise ConfigError(f"{input_} has two scans of the name {twice[0]}; rename one.")
    return {scan.id: output / f"{scan.id}.nii.gz" for scan in scans}


def _draw(
    predictor: Predictor,
    scan: ScanFiles,
    image: Tensor,
    probabilities: Tensor,
    spacing: Sequence[float],
    path: Path,
) -> None:
    """The axial slice with most foreground, once per contrast that the client has."""
    assert isinstance(predictor.task, SegmentationTask)
    threshold = predictor.task.threshold
    foreground = probabilities.permute(3, 0, 1, 2) > threshold
    number = slice_with_most(foreground.float())
    if not foreground.any():
        number = int((image != 0).any(dim=0).sum((0, 1)).argmax())
    shown = predictor.present
    figure = prediction_row(
        image[shown][..., number],
        probabilities[..., number],
        [name for name, has in zip(predictor.channels, shown.tolist(), strict=True) if has],
        predictor.labels,
        title=f"{scan.id}, axial slice {number + 1} of {image.shape[-1]}",
        threshold=threshold,
        aspect=spacing[1] / spacing[0],
    )
    save_figures(path.parent, {path.stem: figure})


def _print(found: Sequence[Segmented], predictor: Predictor, console: Console) -> None:
    if not found:
        return
    table = Table("scan", *(f"{name} (ml)" for name in predictor.labels), "mask")
    for column in table.columns[1:-1]:
        column.justify = "right"
    table.columns[-1].overflow = "fold"  # a path is to be copied
    for one in found:
        table.add_row(one.scan, *(f"{ml:.1f}" for ml in one.volumes.values()), str(one.mask))
    console.print(table)
