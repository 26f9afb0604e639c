"""What a bundle says: ``configs/metadata.json``.

The metadata have MONAI's own entries, and under ``medfed`` all facts. The pages for people are made
of these, too (:mod:`medfed.delivery.bundle.bundle`).

What a prediction goes by is :class:`Facts`, which is checked before; the rest is for people
(:meth:`medfed.delivery.export.run_record.RunRecord.facts`). The hashes of all files, these
among them, are in ``configs/manifest.json``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from msgspec import Meta, Struct
from msgspec.structs import asdict

from medfed.common.schemas import fit
from medfed.delivery.bundle.networks import ordinary
from medfed.standalone.columns import Columns, from_facts
from medfed.standalone.errors import CheckpointError
from medfed.standalone.files import filled
from medfed.standalone.normalization import rules_from
from medfed.standalone.preparation import Preparation

Plain = dict[str, Any]
FORMAT_VERSION = 7
ANY_SIDE = 64
"""Voxels along an axis that a network takes where whole slices or volumes go in, and multiples."""
_TEMPLATE = Path(__file__).parent / "templates" / "metadata.json"


def monai_metadata(facts: Plain) -> Plain:
    """Wraps the facts into what MONAI asks of a bundle's metadata."""
    outputs = ["background"] * (facts.get("activation") == "softmax") + facts["labels"]
    if facts["task"] == "detection":  # a map of anchors: their logits, then what moves each box
        anchors = [f"anchor {'x'.join(map(str, sides))}" for sides in facts["anchors"]]
        moves = [f"{what} {axis}" for what in ("centre", "size") for axis in "hwd"]
        outputs = [*anchors, *(f"{anchor}, {move}" for anchor in anchors for move in moves)]
    content: Plain = json.loads(
        filled(
            _TEMPLATE,
            facts={"activation": None, **facts},
            version=version,
            torch=str(torch.__version__).partition("+")[0],
            needs={"nibabel": version("nibabel"), "fire": "0.6.0", **further(facts)},
            inputs=_read(facts),
            outputs=outputs,
            shape=input_size(facts) or [f"{ANY_SIDE}*n"] * (facts["spatial_dims"] or 0),
        )
    )
    return {**content, "medfed": facts}


def input_size(facts: Mapping[str, Any]) -> list[int] | None:
    """Returns the window, image or patch that goes into the network; None where any size does.

    Example:
        >>> input_size({"patch_size": None, "input": {"patches": {"size": (32, 32)}}})
        [32, 32]
    """
    source = facts["input"]
    size = facts["patch_size"] or source.get("size") or source.get("patches", {}).get("size")
    return [int(s) for s in size] if size else None


def _read(facts: Plain) -> list[str]:
    """Names what the network reads; of neighbouring slices as channels each one."""
    slices = facts["input"].get("adjacent_slices") or 1
    if slices == 1:
        return list(facts["channels"])
    offsets = range(-(slices // 2), slices // 2 + 1)
    return [f"{name}, slice {n:+d}" for name in facts["channels"] for n in offsets]


def further(facts: Mapping[str, Any]) -> dict[str, str]:
    """Returns packages and versions that a bundle needs in addition to PyTorch and MONAI.

    Example:
        >>> further({"packages": {"monai": "1.6", "einops": "0.8"}})
        {'einops': '0.8'}
    """
    every = dict(facts.get("packages") or {})
    source = facts.get("input", {})
    patches, scans = source.get("patches") or {}, source.get("kind") == "ct_scans"
    if patches or scans:  # of CT, which is MetaImage
        every["SimpleITK"] = version("SimpleITK")
    if facts.get("largest_part") or patches.get("spacing") or scans:
        every["scipy"] = version("scipy")
    return {name: known for name, known in every.items() if name not in ("monai", "numpy")}


Text = Annotated[str, Meta(min_length=1)]
Names = Annotated[list[Text], Meta(min_length=1)]
Length = Annotated[float, Meta(gt=0)]
Lengths = tuple[Length, Length, Length]
Share = Annotated[float, Meta(ge=0, lt=1)]
Level = Annotated[float, Meta(ge=0, lt=1.01)]  # above 1: of no case
Above0 = Annotated[int, Meta(ge=1, le=1 << 20)]
Size = Annotated[list[Above0], Meta(min_length=2, max_length=3)]
Codes = Annotated[list[Annotated[int, Meta(ge=-(1 << 31), le=1 << 31)]], Meta(min_length=1)]
Color = Literal["rgb", "grey"]
Kind = Literal[
    "segmentation", "classification", "findings", "risk", "regression", "survival", "detection"
]
_LARGEST = 1 << 27  # voxels or pixels of one window, image or patch


class Volumes(Struct, tag_field="kind", tag="volumes"):
    """The entry ``input`` of volumes."""

    files: dict[str, Text | Names] | None = None
    file_channels: Names | None = None
    adjacent_slices: Annotated[int, Meta(ge=1, le=99)] | None = None
    regions: dict[str, Codes] | None = None


class Pictures(Struct, tag_field="kind", tag="pictures"):
    """The entry ``input`` of pictures."""

    color: Color
    scale: Annotated[float, Meta(gt=0, le=1)]
    regions: Annotated[dict[str, Codes], Meta(min_length=1)]


class Images(Struct, tag_field="kind", tag="images"):
    """The entry ``input`` of images."""

    size: Size
    color: Color
    converted: bool | None = None


class Sized(Struct):
    """What is said of patches."""

    size: Size


class CTPatches(Struct, tag_field="kind", tag="ct_patches"):
    """The entry ``input`` of CT patches."""

    patches: Sized


Resolution = Annotated[float, Meta(ge=0.1, le=20)]  # as data.scan.spacing


class CTScans(Struct, tag_field="kind", tag="ct_scans"):
    """The entry ``input`` of whole CT scans."""

    spacing: tuple[Resolution, Resolution, Resolution]


class Table(Struct, tag_field="kind", tag="table"):
    """The entry ``input`` of a table."""

    features: Names
    categories: dict[str, list[Text]] | None = None
    indicators: list[Text] | None = None
    lowest: list[float | None] | None = None
    highest: list[float | None] | None = None
    missing: list[Text] | None = None
    limits: Literal["half", "value"] | None = None


NotNegative = Annotated[float, Meta(ge=0)]


class Coverage(Struct):
    """The level at which sets of classes and intervals hold the truth, and what bounds them."""

    level: Annotated[float, Meta(ge=0.5, lt=1)]
    quantiles: Annotated[dict[str, NotNegative], Meta(min_length=1)]
    patients: dict[str, Annotated[int, Meta(ge=0)]]  # behind each; 0 if of all hospitals


class Facts(Struct, kw_only=True):
    """The entries of every bundle that a prediction goes by."""

    task: Kind
    network: dict[str, Any]  # ``_target_`` and arguments, see `medfed.delivery.bundle.networks`
    channels: Names  # all input channels (or features) in order
    # Those that the hospital was trained with; the others are zero after normalisation.
    present: Names
    # Regions or classes in the order of the output, the outcome of a regression, or the times until
    # which survival is predicted.
    labels: Names
    input: Volumes | Pictures | Images | CTPatches | CTScans | Table
    client: Text | None = None  # the hospital
    method: Text | None = None  # the algorithm that made its model
    spatial_dims: Literal[2, 3, None] = None  # none for tables
    # Whether a 2-D model runs over the axial slices of a volume (those without any non-zero voxel
    # are background, as training never saw one).
    slices: bool | None = None
    # How many of its cases have a channel, of how many, where some lack it: a scan may lack it.
    channels_of_cases: dict[str, tuple[int, int]] | None = None
    # Those of the labels that the hospital annotates, where some hospital leaves some out.
    annotated: Names | None = None
    # What training did to the data: ``FederatedDataModule.preprocessing``; so the next ones.
    normalization: dict[str, Any] | None = None
    packages: dict[str, Text] | None = None  # versions of the libraries that the network is of
    spacing: Lengths | None = None
    spacing_range: tuple[Lengths, Lengths] | None = None
    resampled_to: list[float] | None = None
    crop_foreground: bool | None = None
    patch_size: Size | None = None  # window of the inference; none: whole slices or volumes
    overlap: Share | None = None  # of windows of a segmentation or detection, as the next one
    window_batch: Above0 | None = None
    # Of a segmentation's regions, one for all or one for each, or of two classes, which validation
    # chose; or of a detection's boxes.
    threshold: Level | list[Level] | None = None
    # Of a detection: sides in voxels of the boxes at each cell, and the most boxes of a scan.
    anchors: Annotated[list[tuple[Above0, Above0, Above0]], Meta(min_length=1)] | None = None
    boxes: Above0 | None = None
    # Logarithms of probabilities are multiplied by the first number, and the second one is added to
    # that of the second class.
    calibration: tuple[Length, float] | None = None
    coverage: Coverage | None = None
    # ``sigmoid``: regions may overlap, an output for each; ``softmax``: they are exclusive, the
    # first output is the background; none of other tasks.
    activation: Literal["sigmoid", "softmax", None] = None
    # Of a regression: the output times the second number plus the first is the outcome.
    outcome_scale: tuple[float, Length] | None = None
    largest_part: Names | None = None  # regions of which only the largest connected part is kept


def check_facts(facts: Mapping[str, Any], path: Path, then: str = "export the bundle anew") -> None:
    """Refuses metadata of which a prediction could not be made, or would be another one."""
    try:
        wrong = next((what for holds, what in _rules(fit(facts, Facts)) if not holds), None)
    except ValueError as error:
        wrong = str(error)
    if wrong:
        raise CheckpointError(f"{path}: {wrong}; {then}.")


def _rules(facts: Facts) -> Iterator[tuple[bool, str]]:
    """What entries say together: whether it holds, and what is wrong where it does not."""
    source, channels, labels = facts.input, facts.channels, facts.labels
    inside = {f"input.{name}": value for name, value in asdict(source).items()}
    for name, value in (asdict(facts) | inside).items():
        if isinstance(value, list) and value and isinstance(value[0], str):
            yield len({*value}) == len(value), f"{name} names something twice"
    for size in (facts.patch_size, getattr(getattr(source, "patches", source), "size", None)):
        yield math.prod(size or ()) <= _LARGEST, f"a size of {size} does not fit into memory"
    ends = zip(*(facts.spacing_range or ()), strict=True)
    yield all(low <= high for low, high in ends), "spacing_range has its greatest lengths first"
    yield {*facts.present} <= {*channels}, "present names what channels does not"
    yield {*(facts.largest_part or ())} <= {*labels}, "largest_part names what labels does not"
    numbers = columns = len(channels)
    if isinstance(source, Table):
        categories = source.categories or {}
        for name, named in (("categories", categories), ("indicators", source.indicators or ())):
            yield {*named} <= {*source.features}, f"input.{name} names what features does not"
        holds = all(len({*texts}) == len(texts) for texts in categories.values())
        yield holds, "input.categories names a category twice"
        known = Columns.from_facts(asdict(source))
        columns, numbers = len(known.inputs()), len(known.numeric)
        for name, each in (("lowest", source.lowest), ("highest", source.highest)):
            yield each is None or len(each) == numbers, f"input.{name} must be {numbers} numbers"
    yield columns == len(channels), f"{columns} columns have {len(channels)} channels"
    try:
        prepared = _is_prepared(facts, numbers)
    except (ValueError, LookupError, TypeError, AttributeError):
        prepared = False
    yield prepared, "normalization or resampled_to is not as medfed export writes it"
    yield from _rules_of_network(facts)


def _rules_of_network(facts: Facts) -> Iterator[tuple[bool, str]]:
    task, source, inner = facts.task, facts.input, ordinary(facts.network)
    segments, exclusive = task == "segmentation", facts.activation == "softmax"
    masked = isinstance(source, Volumes | Pictures)
    detects, anchors = isinstance(source, CTScans), facts.anchors or ()
    fits = segments == masked and (task == "detection") == detects
    yield fits, f"a model of {task} does not take {source.__struct_config__.tag}"
    levels = facts.threshold if isinstance(facts.threshold, list) else None
    yield not (segments or detects) or facts.threshold is not None, "threshold is missing"
    fits = levels is None or (segments and len(levels) == len(facts.labels))
    yield fits, "threshold must be one number, or of a segmentation one for each region"
    known = anchors and facts.boxes and len(facts.patch_size or ()) == 3
    yield not detects or bool(known), "anchors, boxes or patch_size is missing"
    yield not any(side % 2 for sides in anchors for side in sides), "anchors has an odd number"
    if facts.coverage is not None:
        of = {*facts.labels} if segments else {""}
        holds = task in ("classification", "risk", "regression", "segmentation")
        yield holds and {*facts.coverage.quantiles} <= of, "coverage is not of this task"
    yield segments or not exclusive, f"a model of {task} has no activation"
    scaled = facts.outcome_scale is not None
    yield task == "regression" or not scaled, f"a model of {task} has no outcome_scale"
    wanted = len(facts.labels) + exclusive  # the background has an output of its own
    # Of the user's own networks only those that name them as MONAI does.
    single = str(inner.get("_target_")).endswith(".LinearRegression")
    outputs = inner.get("out_channels", 1 if single else wanted)
    yield outputs == wanted, f"{outputs!r:.40} outputs have {len(facts.labels)} labels"
    slices = (source.adjacent_slices if isinstance(source, Volumes) else None) or 1
    yield slices % 2 == 1, "input.adjacent_slices must be an odd number"
    planes = slices * len(facts.channels)
    inputs = inner.get("in_channels", planes)
    yield inputs == planes, f"{inputs!r:.40} inputs have {planes} channels"


def _is_prepared(facts: Facts, count: int) -> bool:
    """Whether normalisation and resampling are of so many channels or columns of numbers."""
    record, source = facts.normalization, facts.input
    if isinstance(source, Volumes):
        mm = None if facts.resampled_to is None else tuple(facts.resampled_to)
        rules = () if record is None else rules_from(record, count)
        return bool(Preparation(rules, mm)) and len(rules) in (0, count)
    if isinstance(source, Table):
        if record is None:
            return True
        scaling = from_facts(record)
        low, high, *rest = (v for v in vars(scaling).values() if isinstance(v, np.ndarray))
        slopes: Mapping[int, np.ndarray[Any, Any]] = getattr(scaling, "slopes", {})
        columns = (low, high, *rest, *slopes.values())
        numbers = all(v.shape == (count,) and v.dtype.kind in "fi" for v in columns)
        ordered = numbers and {*slopes} <= {*range(count)} and bool((low <= high).all())
        return ordered and (not rest or bool(rest[-1].min(initial=1) > 0))
    if record is None:
        return False
    if isinstance(source, Pictures):
        return record["name"] in ("zscore", "unit")
    if isinstance(source, Images) and record.get("to", [-1, 1]) not in ([-1, 1], [0, 1]):
        return False
    mean, sd = (fit(record.get(name, [0.0] * count), list[float]) for name in ("mean", "sd"))
    if not len(mean) == len(sd) == count or min(sd, default=0) < 0:
        return False
    ends = fit(record["range" if isinstance(source, Images) else "hu"], list[float])
    return ends[0] < ends[1] and len(ends) == 2
