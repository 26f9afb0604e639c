"""Masks of scans: read as in training, segmented, written on the scan's own grid."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from medfed.common.errors import CheckpointError, ConfigError
from medfed.common.names import cell
from medfed.datamodules.readers.volumes import read_geometry
from medfed.delivery.predict import outputs
from medfed.delivery.predict.options import PredictOptions, attempt
from medfed.delivery.predict.predictor import Predictor
from medfed.delivery.predict.scans import ScanFiles, find_scans, read_scan

_MAPS = "_probabilities.nii.gz"


def segment_all(predictor: Predictor, console: Console) -> None:
    """Segments a scan, or every scan of a folder, one at a time.

    Args:
        predictor: A segmentation model; its options' ``output`` is a file for one scan, a folder
            for several.
        console: Where the table of volumes is printed.

    Raises:
        MedfedError: If nothing can be done, or some scans could not be segmented.
    """
    options = predictor.options
    output = Path(options.output)
    scans = find_scans(Path(options.input), predictor.facts, output)
    targets = _targets(scans, options)
    _check_apart(predictor, targets)
    for folder in {target.parent for target in targets.values()}:
        outputs.check_folder(folder, is_made=folder == output)
    table = Table("scan", *(f"{cell(name)} (ml)" for name in predictor.labels), "mask")
    for column in table.columns[1:-1]:
        column.justify = "right"
    table.columns[-1].overflow = "fold"  # a path is to be copied

    def one(scan: ScanFiles) -> None:
        mask, volumes = segment(predictor, scan, targets[scan.id])
        table.add_row(cell(scan.id), *(f"{ml:.1f}" for ml in volumes), escape(str(mask)))

    def report() -> None:
        if table.rows:
            console.print(table)

    attempt(scans, one, lambda scan: scan.id, "scans", report)


def segment(predictor: Predictor, scan: ScanFiles, target: Path) -> tuple[Path, list[float]]:
    """Segments one scan and writes what was asked for.

    Args:
        predictor: A segmentation model.
        scan: The scan.
        target: The mask's file.

    Returns:
        The mask's file, of several the first, and the millilitres of every region.

    Raises:
        MedfedError: If the scan cannot be read or used, or the mask not be written.
    """
    options, masks = predictor.options, _mask_files(predictor, target)
    maps, picture = outputs.beside(target, _MAPS), outputs.beside(target, ".png")
    files = _files(predictor, target)
    inputs = list(scan.path.iterdir()) if scan.path.is_dir() else [scan.path]
    outputs.check_targets(files, options.overwrite, inputs)
    image, brain, source = read_scan(scan, predictor.facts, options.spacing_tolerance)
    probabilities = predictor.regions(image, brain, scan.path)
    target.parent.mkdir(exist_ok=True)
    inside = dict(zip(predictor.labels, probabilities > predictor.threshold, strict=True))
    for path, codes in masks.items():
        note = ", ".join(f"{code} {name}" for name, code in codes.items())
        outputs.save_like(label_map(inside, codes).numpy(), source, path, note)
    if options.probabilities:
        note = "probabilities of " + ", ".join(predictor.labels)
        outputs.save_like(np.moveaxis(probabilities.numpy(), 0, -1), source, maps, note)
    spacing = read_geometry(source).spacing
    if options.picture:
        _draw(predictor, scan.id, image, probabilities, spacing[1] / spacing[0], picture)
    millilitres = float(np.prod(spacing)) / 1000
    return next(iter(masks)), [int(mask.sum()) * millilitres for mask in inside.values()]


def label_codes(regions: Mapping[str, Sequence[int]]) -> dict[str, int] | None:
    """Chooses the label value of every region, where the regions nest.

    The zone of a region is what none of the regions within it takes. Where each zone was exactly
    one label value of the training masks, it keeps that value, so that prediction and truth
    compare; otherwise the zones are numbered from outside to inside.

    Args:
        regions: Label values of the training masks that make up every region.

    Returns:
        Value by region, the outermost first; None where two regions overlap without nesting, or
        are the same.

    Example:
        >>> label_codes({"whole": [1, 2, 4], "core": [1, 4], "enhancing": [4]})  # BraTS
        {'whole': 2, 'core': 1, 'enhancing': 4}
        >>> label_codes({"enhancing": [3], "whole": [1, 2, 3]})
        {'whole': 1, 'enhancing': 2}
        >>> label_codes({"a": [1, 2], "b": [2, 3]}) is None
        True
    """
    names = sorted(regions, key=lambda name: -len(set(regions[name])))
    values = [set(regions[name]) for name in names]
    inner = [*values[1:], set()]
    if any(not inside < outside for outside, inside in zip(values, inner, strict=True)):
        return None
    zones = [sorted(outside - inside) for outside, inside in zip(values, inner, strict=True)]
    if all(len(zone) == 1 for zone in zones):
        return {name: int(zone[0]) for name, zone in zip(names, zones, strict=True)}
    return {name: number for number, name in enumerate(names, start=1)}


def label_map(masks: Mapping[str, Tensor], codes: Mapping[str, int]) -> Tensor:
    """Writes regions over each other, the innermost last: one label per voxel, as viewers show it.

    A voxel that is predicted to lie in a region but not in the one around it gets the inner
    region's label; the outer region is then the union of both.

    Args:
        masks: ``(H, W, D)`` bool per region.
        codes: From :func:`label_codes`, the outermost region first.

    Returns:
        ``(H, W, D)`` uint8.

    Example:
        >>> masks = {"whole": torch.tensor([1, 1, 0]) > 0, "core": torch.tensor([0, 1, 0]) > 0}
        >>> label_map(masks, {"whole": 2, "core": 1})
        tensor([2, 1, 0], dtype=torch.uint8)
    """
    labels = torch.zeros(next(iter(masks.values())).shape, dtype=torch.uint8)
    for name, code in codes.items():
        labels[masks[name]] = code
    return labels


def _mask_files(predictor: Predictor, target: Path) -> dict[Path, dict[str, int]]:
    """The files of the masks with their label values: one, or one per region that does not nest."""
    regions = predictor.facts["input"].get("regions") or {}
    regions = {name: regions.get(name, [1]) for name in predictor.labels}
    codes = label_codes(regions)
    if codes is not None:
        return {target: codes}
    suffix = target.name.removeprefix(outputs.stem_of(target))
    for name in regions:
        if re.search(r"[/\\\x00-\x1f]", name):
            raise CheckpointError(
                f"The bundle's label {name!r} cannot be part of a file's name; export it anew."
            )
    return {outputs.beside(target, f"_{name}{suffix}"): {name: 1} for name in regions}


def _files(predictor: Predictor, target: Path) -> list[Path]:
    """All files that are written for a scan."""
    options = predictor.options
    maps, picture = outputs.beside(target, _MAPS), outputs.beside(target, ".png")
    masks = _mask_files(predictor, target)
    return [*masks, *[maps] * options.probabilities, *[picture] * options.picture]


def _check_apart(predictor: Predictor, targets: Mapping[str, Path]) -> None:
    """Refuses scans of which one would be written over another's files."""
    owners: dict[Path, str] = {}
    for scan, target in targets.items():
        for file in _files(predictor, target):
            if owners.setdefault(file, scan) != scan:
                raise ConfigError(
                    f"Scans {owners[file]} and {scan} would share {file}; rename one."
                )


def _targets(scans: Sequence[ScanFiles], options: PredictOptions) -> dict[str, Path]:
    """The mask's file per scan: the output itself, or ``<scan>.nii.gz`` in it."""
    output, input_ = Path(options.output), Path(options.input)
    single = len(scans) == 1 and (not input_.is_dir() or scans[0].path == input_)
    if single and not output.is_dir():
        if not outputs.suffix_of(output):
            raise ConfigError(
                f"output={output} must be a NIfTI file (.nii.gz, .nii) where the input is one scan."
            )
        return {scans[0].id: output}
    if output.resolve() == input_.resolve():
        raise ConfigError(f"output={output} is the folder of the scans; choose another one.")
    if twice := [name for name, count in Counter(s.id for s in scans).items() if count > 1]:
        raise ConfigError(f"{input_} has two scans of the name {twice[0]}; rename one.")
    return {scan.id: output / f"{scan.id}.nii.gz" for scan in scans}


def _draw(
    predictor: Predictor, scan: str, image: Tensor, probabilities: Tensor, aspect: float, path: Path
) -> None:
    """The axial slice with most foreground, once per contrast that the client has."""
    # Imported on first use: most predictions are without pictures.
    from medfed.common.figures import save_figures
    from medfed.models.contours import prediction_row
    from medfed.models.regions import slice_with_most

    foreground = probabilities.permute(3, 0, 1, 2) > predictor.threshold
    number = slice_with_most(foreground.float())
    if not foreground.any():
        number = int((image != 0).any(dim=0).sum((0, 1)).argmax())
    figure = prediction_row(
        image[predictor.present][..., number],
        probabilities[..., number],
        [name for name in predictor.facts["channels"] if name in predictor.facts["present"]],
        predictor.labels,
        title=f"{scan}, axial slice {number + 1} of {image.shape[-1]}",
        threshold=predictor.threshold,
        aspect=aspect,
    )
    save_figures(path.parent, {path.stem: figure})
