"""Masks of scans and pictures: read as in training, segmented, written on the grid of the file.

A DICOM SEG holds the masks of a DICOM series as an object of the same study; highdicom writes it.

Every region is a binary segment of its name, on the slices of the series; regions may overlap. The
codes of category and type are private (99MEDFED), as the training data name the regions and no
dictionary does.

Source: C. P. Bridge et al., "Highdicom: a Python library for standardized encoding of image
annotations and machine learning model outputs in pathology and radiology", J Digit Imaging 35,
2022; DICOM PS3.3, A.51.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medfed.common.errors import ConfigError, DataError, first_line
from medfed.common.files import replacing, writing
from medfed.datamodules.readers import dicom, pictures
from medfed.datamodules.readers.volumes import Geometry, as_stored
from medfed.delivery.bundle.scripts.masks import (
    SEG,
    mask_files,
    mask_suffix,
    named_after,
    named_after_picture,
    picture_files,
    save_like,
    save_masks,
    save_picture,
    save_picture_masks,
)
from medfed.delivery.bundle.scripts.predictor import PictureRegions, Predictor, regions_of_picture
from medfed.delivery.bundle.scripts.scans import (
    Scan,
    ScanFiles,
    find_pictures,
    find_scans,
    read_scan,
    regions_of_scan,
    stem_below,
)
from medfed.delivery.predict.cases import Case
from medfed.delivery.predict.committee import Committee, segmented
from medfed.delivery.predict.options import check_writable
from medfed.functional.grids import on_grid

_log = logging.getLogger(__name__)
_SCHEME = "99MEDFED"
_NAME = 64  # characters of a segment's label


def highdicom() -> ModuleType:
    """Imports highdicom, which is an extra.

    Raises:
        ConfigError: If it is not installed.
    """
    try:
        module = import_module("highdicom")
    except ImportError as error:
        raise ConfigError(
            "DICOM SEG needs the package highdicom: pip install medfed[dicom]."
        ) from error
    logging.getLogger("highdicom").setLevel(logging.WARNING)  # it reports every copied attribute
    return module


def save_segments(
    masks: Mapping[str, NDArray[np.bool_]],
    geometry: Geometry,
    series: Path,
    target: Path,
    title: str,
) -> None:
    """Writes masks as one DICOM SEG, with the patient, study and frame of reference of the scan.

    Args:
        masks: ``(H, W, D)`` in RAS, by the name of the region.
        geometry: Of the series.
        series: Its folder.
        target: The file to write; whole, or not at all.
        title: What made them, for the description of the new series.

    Raises:
        ConfigError: If highdicom is not installed.
        DataError: If the series lacks what a DICOM SEG must refer to, or holds all slices in one
            file; or the file cannot be written.
    """
    hd, pydicom = highdicom(), import_module("pydicom")
    files = dicom.in_order(series)
    if len(files) == 1:
        raise DataError(
            f"{series} holds its slices in one file; leave format out to get a NIfTI mask."
        )
    slices = [pydicom.dcmread(file, stop_before_pixels=True) for file in files]
    step = float(np.linalg.norm(geometry.stored[:3, 2]))
    for one in slices:  # anonymisers remove the thickness, which highdicom reads
        one.SliceThickness = getattr(one, "SliceThickness", None) or step
    turned = as_stored(np.stack([*masks.values()], -1), geometry)  # columns, rows, slices, regions
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of names and numbers in the scan's own header
            segmentation = hd.seg.Segmentation(
                source_images=slices,
                pixel_array=np.ascontiguousarray(turned.transpose(2, 1, 0, 3)).astype(np.uint8),
                segmentation_type=hd.seg.SegmentationTypeValues.BINARY,
                segment_descriptions=[
                    _description(hd, n, name) for n, name in enumerate(masks, start=1)
                ],
                series_instance_uid=hd.UID(),
                series_number=_next_number(slices),
                sop_instance_uid=hd.UID(),
                instance_number=1,
                manufacturer="medfed",
                manufacturer_model_name="medfed",
                software_versions=version("medfed"),
                device_serial_number="0",
                series_description=title[:_NAME],
            )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{series} cannot be referred to by a DICOM SEG ({first_line(error)}); leave format "
            "out to get a NIfTI mask."
        ) from error
    with writing(target, "choose another output"), replacing(target) as partial:
        segmentation.save_as(partial)


def _description(hd: ModuleType, number: int, name: str) -> Any:
    def code(value: str, meaning: str) -> Any:
        return hd.sr.CodedConcept(value, _SCHEME, meaning[:_NAME])

    learnt = hd.sr.CodedConcept("123110", "DCM", "Artificial Intelligence")
    return hd.seg.SegmentDescription(
        segment_number=number,
        segment_label=name[:_NAME],
        segmented_property_category=code("region", "Region of a trained model"),
        segmented_property_type=code(f"region-{number}", name),
        algorithm_type=hd.seg.SegmentAlgorithmTypeValues.AUTOMATIC,
        algorithm_identification=hd.AlgorithmIdentificationSequence(
            name="medfed", version=version("medfed"), family=learnt
        ),
    )


def _next_number(slices: list[Any]) -> int:
    """A number for the new series: after that of the scan."""
    number = getattr(slices[0], "SeriesNumber", None)
    return int(number) + 1000 if number is not None else 1000


_MAPS, _SPREAD = "_probabilities", "_uncertainty"


def scan_cases(committee: Committee) -> list[Case]:
    """Returns a case for a scan, or for every scan of a folder.

    Args:
        committee: Segmentation models; the options' ``output`` is a file for one scan, or a folder.

    Raises:
        MedfedError: If there is no scan, or the output cannot be used.
    """
    options = committee.options
    if options.format == "dicomseg" or Path(options.output).suffix.lower() == SEG:
        highdicom()
    facts = [member.facts for member in committee.members]
    scans = find_scans(Path(options.input), facts, Path(options.output))
    return [_case(committee, scan, len(scans) == 1) for scan in scans]


def segment(committee: Committee, scan: ScanFiles, target: Path) -> dict[str, float | str]:
    """Segments one scan and writes what was asked for.

    Args:
        committee: Segmentation models.
        scan: The scan.
        target: The mask's file.

    Returns:
        What `cases.columns` names: the millilitres of every region and more; and the ``channels``
        that the networks saw.

    Raises:
        MedfedError: If the scan cannot be read or used, or the mask not be written.
    """
    options, first = committee.options, committee.first
    reads: list[Scan] = []
    used: dict[str, None] = {}

    def answer(member: Predictor) -> Tensor:
        read = read_scan(scan, member.facts, options.spacing_tolerance)
        reads[1:] = []  # the first one says where its voxels lie
        reads.append(read)
        used.update(dict.fromkeys(read.channels))
        return committee.in_order(member, regions_of_scan(member, read, scan.path), 0)

    decided = segmented(committee, committee.ask(answer))
    read, probabilities = reads[0], decided.probabilities
    like = read.geometry, read.source
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.suffix.lower() == SEG:
        title = f"medfed, {first.facts['method']}"
        planes = {n: m.numpy() for n, m in zip(first.labels, decided.masks, strict=True)}
        save_segments(planes, read.geometry, _series(read), target, title)
    else:
        save_masks(first.facts, decided.masks, *like, target)
    maps = {_MAPS: probabilities} if options.probabilities else {}
    if options.uncertainty and decided.spread is not None:
        maps[_SPREAD] = decided.spread
    for postfix, values in maps.items():
        note = f"{postfix[1:]} of " + ", ".join(first.labels)
        path = named_after(target, postfix)
        save_like(np.moveaxis(values.numpy(), 0, -1), *like, path, note)
    spacing = read.geometry.spacing
    if options.picture:
        image = read.image
        if read.grid is not None:
            image = on_grid(image, read.grid, read.geometry.shape)
        picture = named_after(target, "", ".png")
        _draw_scan(first, scan.id, image, probabilities, spacing[1] / spacing[0], picture)
    measured = decided.measured("ml", float(np.prod(spacing)) / 1000)
    return {**measured, "channels": "+".join(used)}


def _case(committee: Committee, scan: ScanFiles, alone: bool) -> Case:
    """A scan with all files that are written for it: the output itself, or in it, by its name."""
    options, first = committee.options, committee.first
    output, wanted = Path(options.output), options.format
    if options.into_folder:
        target = output / f"{scan.id}{mask_suffix(scan.volume, wanted)}"
    elif not alone:
        raise ConfigError(
            f"{options.input} holds several scans, so output={output} must be a folder: a name "
            "without a suffix."
        )
    else:
        check_writable(output, wanted)
        target = output
    is_seg = target.suffix.lower() == SEG
    if is_seg and alone and not scan.path.is_dir():
        raise ConfigError(f"{scan.path} is no DICOM series, which a DICOM SEG needs; {_OTHER}.")
    masks = [target] if is_seg else [*mask_files(first.facts, target)]
    more = {_MAPS: options.probabilities, _SPREAD: options.uncertainty}
    maps = [named_after(target, postfix) for postfix, wanted in more.items() if wanted]
    picture = [named_after(target, "", ".png")] * options.picture
    write = partial(segment, committee, scan, target)
    return Case(scan.id, scan.path, scan.files, write, (*masks, *maps, *picture))


def _series(read: Scan) -> Path:
    """The DICOM series that a scan is, or of which its first contrast is."""
    if not read.source.is_dir():
        raise DataError(f"{read.source} is no DICOM series, which a DICOM SEG needs; {_OTHER}.")
    return read.source


_OTHER = "leave format=dicomseg out to get a mask of the scan's own format"


def _draw_scan(
    predictor: Predictor, scan: str, image: Tensor, probabilities: Tensor, aspect: float, path: Path
) -> None:
    """Draws the axial slice with most foreground."""
    from medfed.models.segmentation_meter import slice_with_most  # few predictions draw

    foreground = predictor.masks(probabilities).permute(3, 0, 1, 2)
    number = slice_with_most(foreground.float())
    if not foreground.any():
        number = int((image != 0).any(dim=0).sum((0, 1)).argmax())
    title = f"{scan}, axial slice {number + 1} of {image.shape[-1]}"
    _draw(predictor, image[..., number], probabilities[..., number], path, title, aspect)


def _draw(
    predictor: Predictor,
    image: Tensor,
    probabilities: Tensor,
    path: Path,
    title: str,
    aspect: float = 1.0,
) -> None:
    """Draws the contours of all regions, once per channel that the client has."""
    from medfed.common.figures import save_figures  # few predictions draw
    from medfed.models.contours import prediction_row

    figure = prediction_row(
        image[predictor.present],
        predictor.of_regions.outlines(probabilities),
        [name for name in predictor.facts["channels"] if name in predictor.facts["present"]],
        predictor.labels,
        title=title,
        threshold=predictor.of_regions.level,
        aspect=aspect,
    )
    save_figures(path.parent, {path.stem: figure})


def _segment_picture(committee: Committee, file: Path, target: Path) -> dict[str, float]:
    """Writes what was asked for; returns the share of every region and more."""
    first, options = committee.first, committee.options
    width, height, color = pictures.picture_header(file)
    seen: list[PictureRegions] = []

    def answer(member: Predictor) -> Tensor:
        if (color, member.facts["input"]["color"]) == ("grey", "rgb"):
            _log.warning("%s is grey, but the model was trained on colours.", file)
        seen.append(regions_of_picture(member, file))
        return committee.in_order(member, seen[-1].full, 0)

    decided = segmented(committee, committee.ask(answer))
    target.parent.mkdir(parents=True, exist_ok=True)
    save_picture_masks(first.facts, decided.masks, target)
    maps = {"probability": decided.probabilities} if options.probabilities else {}
    if options.uncertainty and decided.spread is not None:
        maps["uncertainty"] = decided.spread
    for what, shares in maps.items():
        for name, share in zip(first.labels, shares.numpy(), strict=True):
            save_picture(share, named_after_picture(target, f"{name}_{what}", ".tif"))
    if options.picture:
        image, small, _ = seen[0]
        if committee.several:
            size = image.shape[2], image.shape[1]
            mean = pictures.upright(pictures.resized(decided.probabilities.numpy(), size))
            small = torch.from_numpy(mean)
        _draw(first, image, small, named_after_picture(target, "contours"), file.stem)
    return decided.measured("percent", 100 / (width * height))


def picture_cases(committee: Committee) -> list[Case]:
    """Returns a case for a picture, or for every picture of a folder.

    Args:
        committee: Segmentation models of pictures; the options' ``output`` is a PNG file for one
            picture, or a folder.

    Raises:
        MedfedError: If there is no picture, or the output cannot be used.
    """
    options = committee.options
    if options.format is not None:
        raise ConfigError("format is for masks of scans; those of pictures are PNG: leave it out.")
    source, output = Path(options.input), Path(options.output)
    files = find_pictures(source, output)
    if not options.into_folder and (source.is_dir() or output.suffix.lower() != ".png"):
        raise ConfigError(
            f"output={output} must be a folder (a name without a suffix), or a .png file where "
            "input is one picture."
        )
    root = source if source.is_dir() else source.parent
    return [_picture_case(committee, file, stem_below(file, root, file.stem)) for file in files]


def _picture_case(committee: Committee, file: Path, name: str) -> Case:
    """A picture with all files that are written: the output itself, or in it, by their names."""
    first, options = committee.first, committee.options
    output = Path(options.output)
    target = output / f"{name}.png" if options.into_folder else output
    maps = [
        named_after_picture(target, f"{label}_{what}", ".tif")
        for what in ["probability"] * options.probabilities + ["uncertainty"] * options.uncertainty
        for label in first.labels
    ]
    contours = [named_after_picture(target, "contours")] * options.picture
    write = partial(_segment_picture, committee, file, target)
    targets = (*picture_files(first.facts, target), *maps, *contours)
    return Case(name, file, lambda: [file], write, targets)
