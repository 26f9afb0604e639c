"""Masks of scans and pictures: read as in training, segmented, written on the grid of the file.

A DICOM SEG holds the masks of a DICOM series as an object of the same study; highdicom writes it.

Every region is a binary segment of its name, on the slices of the series; regions may overlap. The
codes of category and type are private (99MEDFED), as the training data name the regions and no
dictionary does. Of the series' headers only `_REFERENCE` and `_PATIENT` go on, which the standard
needs, and all texts are written in UTF-8.

Source: C. P. Bridge et al., "Highdicom: a Python library for standardized encoding of image
annotations and machine learning model outputs in pathology and radiology", J Digit Imaging 35,
2022; DICOM PS3.3, A.51.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Mapping
from functools import cache, partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from medfed.delivery.bundle.onnx_file import import_extra
from medfed.delivery.predict.cases import Case, left_out
from medfed.delivery.predict.options import PredictOptions, check_writable
from medfed.functional.conformal import volumes_within
from medfed.standalone import dicom, scans
from medfed.standalone.errors import ConfigError, DataError, first_line
from medfed.standalone.files import replacing, writing
from medfed.standalone.masks import SEG, header_text, mask_files
from medfed.standalone.predictor import Predictor
from medfed.standalone.preparation import on_grid
from medfed.standalone.volumes import as_stored

_SCHEME = "99MEDFED"
_LENGTHS = {"SH": 16, "LO": 64, "PN": 64}  # characters of a text, and of each part of a name
_REFERENCE = (
    *("SOPClassUID", "SOPInstanceUID", "StudyInstanceUID", "SeriesInstanceUID", "Modality"),
    *("FrameOfReferenceUID", "Rows", "Columns", "PixelSpacing", "SliceThickness"),
    *("ImageOrientationPatient", "ImagePositionPatient"),
)
_PATIENT = (
    *("PatientName", "PatientID", "PatientBirthDate", "PatientSex", "StudyDate", "StudyTime"),
    *("AccessionNumber", "StudyID", "ReferringPhysicianName"),
)
_log = logging.getLogger(__name__)


def highdicom() -> ModuleType:
    """Imports highdicom, which is an extra."""
    module = import_extra("highdicom", "DICOM SEG needs", "medfed[dicom]")
    logging.getLogger("highdicom").setLevel(logging.WARNING)  # it reports every copied attribute
    return module


def _save_segments(
    masks: Mapping[str, NDArray[Any]], scan: scans.Scan, target: Path, title: str
) -> None:
    """Writes masks as one DICOM SEG, with the patient, study and frame of reference of the scan."""
    hd, pydicom = highdicom(), import_module("pydicom")
    series, geometry = scan.source, scan.geometry
    if not series.is_dir():
        raise DataError(f"{series} is no DICOM series, which a DICOM SEG needs; {_OTHER}.")
    files = dicom.in_order(series)
    if len(files) == 1:
        raise DataError(f"{series} is one file; {_OTHER}.")
    step = float(np.linalg.norm(geometry.stored[:3, 2]))
    labels = _labels(masks)
    turned = as_stored(np.stack([*masks.values()], -1), geometry)  # columns, rows, slices, regions
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of names and numbers in the scan's own header
            whole = [pydicom.dcmread(file, stop_before_pixels=True) for file in files]
            slices = [_referred(one, step) for one in whole]
            segmentation = hd.seg.Segmentation(
                source_images=slices,
                pixel_array=np.ascontiguousarray(turned.transpose(2, 1, 0, 3)).astype(np.uint8),
                segmentation_type=hd.seg.SegmentationTypeValues.BINARY,
                segment_descriptions=[
                    _description(hd, n, name) for n, name in enumerate(labels, start=1)
                ],
                series_instance_uid=hd.UID(),
                series_number=int(whole[0].get("SeriesNumber") or 0) + 1000,
                sop_instance_uid=hd.UID(),
                instance_number=1,
                manufacturer="medfed",
                manufacturer_model_name="medfed",
                software_versions=version("medfed"),
                device_serial_number="0",
                series_description=header_text(title, _LENGTHS["LO"]),
            )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{series} cannot be referred to by a DICOM SEG ({first_line(error)}); {_OTHER}."
        ) from error
    with writing(target, "choose another output"), replacing(target) as partial:
        segmentation.save_as(partial)


def _referred(series: Any, step: float) -> Any:
    """What a DICOM SEG takes of the header of a slice, in Unicode."""
    from pydicom import Dataset
    from pydicom.datadict import dictionary_VR
    from pydicom.multival import MultiValue

    taken = Dataset()
    taken.file_meta = series.file_meta
    taken.SpecificCharacterSet = "ISO_IR 192"
    for name in _REFERENCE:
        if name in series:
            taken[name] = series[name]
    taken.SliceThickness = series.get("SliceThickness") or step  # which anonymisers remove
    for name in _PATIENT:
        value = series.get(name) or ""
        parts = value if isinstance(value, MultiValue) else [value]
        setattr(taken, name, _inherited(name, dictionary_VR(name), "\\".join(map(str, parts))))
    return taken


@cache  # warns of each text once
def _inherited(name: str, kind: str, text: str) -> str:
    """A value that DICOM allows: of texts without what it does not, else empty."""
    from pydicom import valuerep

    if kind in _LENGTHS:
        parts = text.split("=")[:3] if kind == "PN" else [text]
        valid = "=".join(header_text(part, _LENGTHS[kind]) for part in parts)
    else:
        check = {"DA": valuerep.DA, "TM": valuerep.TM, "CS": highdicom().PatientSexValues}[kind]
        try:
            valid = text if text and check(text) else ""
        except ValueError:
            valid = ""
    if valid != text:
        _log.warning("%s %r is no valid %s of DICOM; it becomes %r.", name, text, kind, valid)
    return valid


def _labels(names: Iterable[str]) -> list[str]:
    """The labels of segments: names as DICOM allows them, each once."""
    labels: list[str] = []
    for number, name in enumerate(names, start=1):
        label = _inherited("SegmentLabel", "LO", name)
        again = not label or label in labels
        labels.append(f"{label[:58]} {number}".strip() if again else label)
    return labels


def _description(hd: ModuleType, number: int, name: str) -> Any:
    code, learnt = hd.sr.CodedConcept, ("123110", "DCM", "Artificial Intelligence")
    return hd.seg.SegmentDescription(
        segment_number=number,
        segment_label=name,
        segmented_property_category=code("region", _SCHEME, "Region of a trained model"),
        segmented_property_type=code(f"region-{number}", _SCHEME, name),
        algorithm_type=hd.seg.SegmentAlgorithmTypeValues.AUTOMATIC,
        algorithm_identification=hd.AlgorithmIdentificationSequence(
            name="medfed", version=version("medfed"), family=code(*learnt)
        ),
    )


def mask_cases(predictor: Predictor, options: PredictOptions) -> tuple[list[Case], str, str]:
    """Returns a case for a scan or picture, or for every one of a folder."""
    output, facts = Path(options.output), predictor.facts
    in_pictures = facts["input"]["kind"] == "pictures"
    if options.format is not None and in_pictures:
        raise ConfigError("format is for masks of scans; those of pictures are PNG: leave it out.")
    if options.format == "dicomseg" or (output.suffix.lower() == SEG and not in_pictures):
        highdicom()
    inputs = scans.find_cases(Path(options.input), facts, output)
    what, unit = inputs[0].what, inputs[0].unit
    if not options.into_folder:
        if len(inputs) > 1:
            raise ConfigError(
                f"{options.input} holds several {what}, so output={output} must be a folder: a "
                f"name without a suffix.{scans.names_of_contrasts(facts) * (not in_pictures)}"
            )
        check_writable(output, "png" if in_pictures else options.format, what.removesuffix("s"))
    alone = len(inputs) == 1
    return [_case(predictor, options, each, alone) for each in inputs], what, unit


def _case(
    predictor: Predictor,
    options: PredictOptions,
    scan: scans.ScanFiles | scans.PictureFile,
    alone: bool,
) -> Case:
    """An input with all files that are written for it: the output itself, or in it, by its name."""
    output, facts, labels = Path(options.output), predictor.facts, predictor.labels
    target = scan.target(output, options.format) if options.into_folder else output
    is_seg = target.suffix.lower() == SEG
    if is_seg and alone and not scan.path.is_dir():
        raise ConfigError(f"{scan.path} is no DICOM series, which a DICOM SEG needs; {_OTHER}.")
    maps = scan.maps(labels, target) if options.probabilities else []
    drawn = [scan.contours(target)] if options.picture else []

    def write(folder: Path) -> dict[str, float | str]:
        place = folder / target.name
        result = scan.segment(predictor, options.spacing_tolerance)
        masks = predictor.masks(result.regions)
        if is_seg and isinstance(result, scans.SegmentedScan):
            title = f"medfed, {facts['method']}"
            planes = {n: m.numpy() for n, m in zip(labels, masks, strict=True)}
            _save_segments(planes, result.scan, place, title)
        else:
            result.save(facts, masks, place)
        if maps:
            result.save_maps(labels, result.regions, [folder / file.name for file in maps])
        for path in drawn:
            _draw(predictor, scan, result, folder / path.name)
        channels = result.scan.channels if isinstance(result, scans.SegmentedScan) else ()
        sizes = _sizes(predictor, masks, result.regions, scan.unit, result.factor)
        return {**sizes, "channels": "+".join(channels)}

    masks = [target] if is_seg else [*mask_files(facts, target)]
    others = partial(left_out, scan) if isinstance(scan, scans.ScanFiles) else list
    return Case(scan.id, scan.path, scan.files, write, (*masks, *maps, *drawn), others)


def _sizes(
    predictor: Predictor, masks: Tensor, regions: Tensor, unit: str, factor: float
) -> dict[str, float]:
    """Of each region what :func:`medfed.delivery.predict.cases.columns` names."""
    sizes: dict[str, float] = {}
    for name, mask, probabilities in zip(predictor.labels, masks, regions, strict=True):
        voxels = int(mask.sum())
        sizes[f"{name}_{unit}"] = voxels * factor
        sizes[f"{name}_highest_probability"] = float(probabilities.max())
        if name in predictor.bounds:
            low, high = volumes_within(voxels, predictor.bounds[name])
            sizes[f"{name}_{unit}_low_{predictor.level_of_bounds}"] = low * factor
            sizes[f"{name}_{unit}_high_{predictor.level_of_bounds}"] = high * factor
    return sizes


_OTHER = "to get a NIfTI mask, leave out format=dicomseg and end output with .nii.gz"


def _draw(
    predictor: Predictor,
    scan: scans.ScanFiles | scans.PictureFile,
    segmented: scans.SegmentedScan | scans.SegmentedPicture,
    path: Path,
) -> None:
    """Draws the contours of all regions, once per channel; of a scan in one axial slice."""
    from medfed.common.figures import save_figures  # few predictions draw
    from medfed.models.contours import prediction_row
    from medfed.models.segmentation_meter import slice_with_most

    title, aspect = scan.id.rpartition("/")[2], 1.0
    if isinstance(segmented, scans.SegmentedScan):
        probabilities = segmented.regions
        (image, _, grid, geometry, *_), spacing = segmented.scan, segmented.scan.geometry.spacing
        image = image if grid is None else on_grid(image, grid, geometry.shape)
        foreground = predictor.masks(probabilities).permute(3, 0, 1, 2)
        number = slice_with_most(foreground.float())
        if not foreground.any():
            number = int((image != 0).any(dim=0).sum((0, 1)).argmax())
        title = f"{scan.id}, axial slice {number + 1} of {image.shape[-1]}"
        aspect = spacing[1] / spacing[0]
        image, probabilities = image[..., number], probabilities[..., number]
    else:
        image, probabilities = segmented.image, segmented.small
    facts, regions = predictor.facts, predictor.of_regions
    names = [name for name in facts["channels"] if name in facts["present"]]
    drawn = image[predictor.present], regions.outlines(probabilities), names, predictor.labels
    figure = prediction_row(*drawn, title=title, aspect=aspect)
    save_figures(path.parent, {path.stem: figure})
