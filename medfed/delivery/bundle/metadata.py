"""What a bundle says: ``configs/metadata.json``.

The metadata have MONAI's own entries, and under ``medfed`` all facts. The pages for people are made
of these, too (:mod:`medfed.delivery.bundle.documents`).

================  ==================================================================================
``medfed`` entry
================  ==================================================================================
format_version    6
task              ``segmentation``, ``classification``, ``findings``, ``risk``, ``regression`` or
                  ``survival``
client, method    the hospital, and the algorithm that made its model
network           ``_target_`` and arguments, plain data; see
                  :mod:`medfed.delivery.bundle.networks`
code              source of the network in ``scripts/plugins``: hashes of its ``files``, the
                  ``hash`` of all, packages that they ``require``; ``null`` for a library's network
packages          versions of the libraries that the network is of
spatial_dims      2 or 3; ``null`` for tables
slices            whether a 2-D model runs over the axial slices of a volume (those without any
                  non-zero voxel are background, as training never saw one)
channels          all input channels (or features) in order
present           those that the hospital was trained with; the others are zero after normalisation
channels_of_cases  how many of its cases have a channel, of how many, where some lack it: a scan may
                  come without it
labels            regions or classes in the order of the output, the outcome of a regression, or
                  the times until which survival is predicted
annotated         those of them that the hospital annotates, where some hospital leaves some out
normalization, input, orientation, spacing, spacing_range, resampled_to, crop_foreground
                  what training did to the data: ``FederatedDataModule.preprocessing``
site              the simulated scanner of the hospital's training data, or ``null``
patch_size        window of the inference; ``null``: whole slices or volumes
overlap, window_batch
                  of the segmentation, else ``null``
threshold         of a segmentation's regions; of two classes that of the probability of the second
                  one, which validation chose; else ``null``
calibration       of a classification: logarithms of probabilities are multiplied by the first
                  number, and the second one is added to that of the second class; or ``null``
activation        ``sigmoid``: regions may overlap, an output for each; ``softmax``: they are
                  exclusive, the first output is the background; ``null`` of other tasks
outcome_scale     of a regression: the network's output times the second number plus the first is
                  the outcome; ``null``: it is the outcome
largest_part      regions of which only the largest connected part is kept, or ``null``
bits              bits per weight of the quantised tensors, by name
sizes             bytes: ``fp32`` (a plain file of the same weights), ``packed`` (models/model.pt),
                  ``entropy_bound``; ``onnx`` (models/model.onnx) where there is one
data_hash         SHA-256 over the hashes of the data files and the hospital's patients
test_metrics      of this bundle's weights; ``null`` where they could not be measured
run_test_metrics  of the model as trained, before it was quantised for the bundle
quantization      what was done at export, with validation metrics before and after
card              patients, hospitals, round, intervals and hashes for ``docs/model_card.md``
training_config   the run's configuration, without the paths of its machine
commit, versions  of the code and its packages at training
================  ==================================================================================

The hashes of all files, these among them, are in ``configs/manifest.json``. What an entry must be
is checked before a prediction goes by it. Bundles of other versions are not read.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, get_args, get_type_hints

import torch
from msgspec import Meta

from medfed.common.errors import CheckpointError
from medfed.common.schemas import fit
from medfed.datamodules.preparation import Preparation, rules_from
from medfed.datamodules.tables.columns import Columns
from medfed.delivery.bundle.networks import ordinary
from medfed.delivery.bundle.source_code import has_modules

Plain = dict[str, Any]
METADATA = "configs/metadata.json"
FORMAT_VERSION = 6
_SCHEMA = (
    "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/"
    "meta_schema_20240725.json"
)


def monai_metadata(facts: Plain) -> Plain:
    """Wraps the facts into what MONAI asks of a bundle's metadata.

    Args:
        facts: All of the part ``medfed``.

    Returns:
        ``configs/metadata.json``.
    """
    many = len(facts["labels"])
    what = " and ".join(facts["labels"]) if many <= 3 else f"{many} classes"
    segments = facts["task"] == "segmentation"
    exclusive = facts.get("activation") == "softmax"
    named = {
        # Logits: of exclusive classes the largest counts, else each by itself.
        "segmentation": ("image", "labels" if exclusive else "classes"),
        "regression": ("tuples", "raw"),
    }
    images = "image" if facts["spatial_dims"] else "tuples", "magnitude"
    answers = named.get(facts["task"], ("probabilities", "classes"))
    outputs = ["background"] * exclusive + facts["labels"]
    image = _tensor(facts, images, _read(facts), _shape(facts))
    pred = _tensor(facts, answers, outputs, _shape(facts) if segments else [])
    return {
        "schema": _SCHEMA,
        "version": "1.0.0",
        "changelog": {"1.0.0": "exported from a federated run"},
        "monai_version": version("monai"),
        "pytorch_version": str(torch.__version__).partition("+")[0],
        "numpy_version": version("numpy"),
        "required_packages_version": {
            "nibabel": version("nibabel"),
            "fire": "0.6.0",
            **further(facts),
        },
        "task": f"{facts['task'].capitalize()} of {what}",
        "description": f"The personal model of {facts['client']}, trained by {facts['method']} in "
        "a federation of hospitals.",
        "authors": facts["client"],
        "copyright": "See the hospital that trained it.",
        "intended_use": "Research. Not a medical device; not for diagnosis or treatment.",
        "network_data_format": {"inputs": {"image": image}, "outputs": {"pred": pred}},
        "medfed": facts,
    }


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


def _shape(facts: Plain) -> list[Any]:
    return input_size(facts) or ["*"] * (facts["spatial_dims"] or 0)


def _tensor(facts: Plain, kind: tuple[str, str], names: Sequence[str], shape: list[Any]) -> Plain:
    return {
        "type": kind[0],
        "format": kind[1],
        "modality": "n/a",
        "num_channels": len(names),
        "spatial_shape": shape,
        "dtype": "float32",
        "value_range": [],
        "is_patch_data": facts["patch_size"] is not None,
        "channel_def": {str(i): name for i, name in enumerate(names)},
    }


def further(facts: Mapping[str, Any]) -> dict[str, str]:
    """Returns packages and versions that a bundle needs in addition to PyTorch and MONAI.

    Example:
        >>> further({"packages": {"monai": "1.6", "einops": "0.8"}, "code": None})
        {'einops': '0.8'}
    """
    code = facts.get("code") or {"require": {}}
    every = {**(facts.get("packages") or {}), **code["require"]}
    patches = facts.get("input", {}).get("patches") or {}  # of CT scans, which are MetaImage
    every |= {"SimpleITK": version("SimpleITK")} if patches else {}
    if facts.get("largest_part") or patches.get("spacing"):
        every["scipy"] = version("scipy")
    return {name: known for name, known in every.items() if name not in ("monai", "numpy")}


_REQUIRED = ("task", "network", "channels", "present", "labels", "input")
Text = Annotated[str, Meta(min_length=1)]
Names = Annotated[list[Text], Meta(min_length=1)]
Length = Annotated[float, Meta(gt=0)]
Lengths = tuple[Length, Length, Length]
Share = Annotated[float, Meta(ge=0, lt=1)]
Above0 = Annotated[int, Meta(ge=1, le=1 << 20)]
Size = Annotated[list[Above0], Meta(min_length=2, max_length=3)]
Codes = Annotated[list[Annotated[int, Meta(ge=-(1 << 31), le=1 << 31)]], Meta(min_length=1)]
Color = Literal["rgb", "grey"]
_LARGEST = 1 << 27  # voxels or pixels of one window, image or patch


def _distinct(names: Sequence[str]) -> bool:
    return len(set(names)) == len(names)


def _fits_memory(size: Sequence[int]) -> bool:
    return math.prod(size) <= _LARGEST


def _ascending(ends: Sequence[float]) -> bool:
    return ends[0] < ends[1]


_TASK = Literal["segmentation", "classification", "findings", "risk", "regression", "survival"]
_KIND = Literal["volumes", "pictures", "images", "ct_patches", "table"]
_SIZE = "two or three whole numbers above 0, of a size that fits into memory"
_DIFFERENT = "a list of different names"
_REGIONS = "lists of label values by region"


class Kind(TypedDict):
    """What every input says."""

    kind: _KIND


class Sized(TypedDict):
    """What is said of patches."""

    size: Size


class Code(TypedDict):
    """Source of a network; see `source_code.describe_code`."""

    files: Annotated[dict[str, str], Meta(min_length=1)]
    hash: str
    require: dict[str, str]


class Facts(TypedDict):
    """The entries of every bundle: a type, what the sentence calls it, what else must be true."""

    task: Annotated[_TASK, f"one of {', '.join(get_args(_TASK))}"]
    client: Annotated[Text | None, "a name"]
    method: Annotated[Text | None, "a name"]
    network: Annotated[dict[str, Any], "an object"]
    spatial_dims: Annotated[Literal[2, 3, None], "2, 3 or null"]
    slices: Annotated[bool | None, "true or false"]
    channels: Annotated[Names, _DIFFERENT, _distinct]
    present: Annotated[Names, _DIFFERENT, _distinct]
    channels_of_cases: Annotated[
        dict[str, tuple[int, int]] | None, "two numbers of cases by channel, or null"
    ]
    labels: Annotated[Names, _DIFFERENT, _distinct]
    annotated: Annotated[Names | None, f"{_DIFFERENT}, or null", _distinct]
    normalization: Annotated[dict[str, Any] | None, "an object or null"]
    input: Annotated[Kind, f"an object whose kind is {', '.join(get_args(_KIND))}"]
    code: Annotated[Code | None, "files of Python with their hashes, or null", has_modules]
    packages: Annotated[dict[str, Text] | None, "versions by package, or null"]
    orientation: Annotated[Text | None, "a text or null"]
    spacing: Annotated[Lengths | None, "three lengths or null"]
    spacing_range: Annotated[
        tuple[Lengths, Lengths] | None,
        "least and greatest of three lengths, or null",
        lambda ends: all(low <= high for low, high in zip(*ends, strict=True)),
    ]
    patch_size: Annotated[Size | None, f"null, or {_SIZE}", _fits_memory]
    overlap: Annotated[Share | None, "a number in [0, 1) or null"]
    window_batch: Annotated[Above0 | None, "a whole number above 0, or null"]
    threshold: Annotated[Share | None, "a number in [0, 1) or null"]
    calibration: Annotated[tuple[Length, float] | None, "two numbers, the first above 0, or null"]
    activation: Annotated[Literal["sigmoid", "softmax", None], "sigmoid, softmax or null"]
    outcome_scale: Annotated[tuple[float, Length] | None, "a mean and a deviation above 0, or null"]
    card: Annotated[dict[str, Any] | None, "an object or null"]
    largest_part: Annotated[Names | None, f"{_DIFFERENT}, or null", _distinct]
    bits: Annotated[
        dict[str, Annotated[int, Meta(ge=1, le=8)]], "whole numbers from 1 to 8 by name"
    ]
    sizes: Annotated[dict[str, Annotated[int, Meta(ge=0, le=1 << 60)]], "bytes by name"]
    test_metrics: Annotated[dict[str, float | None] | None, "numbers by name, or null"]
    run_test_metrics: Annotated[dict[str, float | None] | None, "numbers by name, or null"]


class Volumes(TypedDict):
    """The entry ``input`` of volumes."""

    files: Annotated[dict[str, Text | Names] | None, "patterns of file names by channel, or null"]
    file_channels: Annotated[Names | None, _DIFFERENT, _distinct]
    adjacent_slices: Annotated[
        Annotated[int, Meta(ge=1, le=99)] | None,
        "an odd number of slices, or null",
        lambda count: count % 2 == 1,
    ]
    regions: Annotated[dict[str, Codes] | None, _REGIONS]


class Pictures(TypedDict):
    """The entry ``input`` of pictures."""

    color: Annotated[Color, "rgb or grey"]
    scale: Annotated[Annotated[float, Meta(gt=0, le=1)], "a number in (0, 1]"]
    regions: Annotated[Annotated[dict[str, Codes], Meta(min_length=1)], _REGIONS]


class Images(TypedDict):
    """The entry ``input`` of images."""

    size: Annotated[Size, _SIZE, _fits_memory]
    color: Annotated[Color, "rgb or grey"]
    converted: Annotated[bool | None, "true or false"]


class CTPatches(TypedDict):
    """The entry ``input`` of CT patches."""

    patches: Annotated[Sized, f"an object whose size is {_SIZE}", lambda p: _fits_memory(p["size"])]


class Table(TypedDict):
    """The entry ``input`` of a table."""

    features: Annotated[Names, _DIFFERENT, _distinct]
    categories: Annotated[
        dict[str, list[Text]] | None,
        "lists of different names by column",
        lambda lists: all(map(_distinct, lists.values())),
    ]
    indicators: Annotated[list[Text] | None, _DIFFERENT, _distinct]


_INPUTS = {
    "volumes": Volumes,
    "pictures": Pictures,
    "images": Images,
    "ct_patches": CTPatches,
    "table": Table,
}
_ENDS = tuple[float, float], "two numbers, the lower one first", _ascending
_NORMALIZATIONS: dict[str, dict[str, Any]] = {
    "pictures": {"name": Annotated[Literal["zscore", "unit"], "zscore or unit"]},
    "images": {"range": Annotated[_ENDS]},
    "ct_patches": {"hu": Annotated[_ENDS]},
}


def _of_columns(count: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a table with so many columns of numbers says of all of them, and in its input."""
    row = Annotated[list[float], Meta(min_length=count, max_length=count)]
    ends = Annotated[list[float | None], Meta(min_length=count, max_length=count)]
    slopes: Any = dict[Literal[tuple(map(str, range(count)))], row] if count else dict[str, row]  # type: ignore[misc]

    def scales(scaling: Mapping[str, Any]) -> bool:
        standard = scaling.get("name") == "standard"
        names = ("low", "high", "median", "mean", "sd") if standard else ("minimum", "maximum")
        low, high, *rest = (fit(scaling[name], row) for name in names)
        fit(scaling.get("slopes", {}), slopes)
        ordered = all(a <= b for a, b in zip(low, high, strict=True))
        return ordered and (not standard or min(rest[-1], default=1) > 0)

    what = f"null, or minimum and maximum of {count} numbers each"
    scaling = Annotated[dict[str, Any] | None, f"{what}, or low, high, median, mean and sd", scales]
    end = Annotated[ends | None, f"{count} numbers or nulls"]
    return {"normalization": scaling}, {"lowest": end, "highest": end}


def _of_volumes(count: int) -> dict[str, Any]:
    """What was done to volumes of so many channels."""
    return {
        "normalization": Annotated[
            dict[str, Any] | None,
            f"the normalisation of {count} channels",
            lambda record: len(rules_from(record, count)) == count,
        ],
        "resampled_to": Annotated[
            list[float] | None,
            "two or three lengths in mm, or null",
            lambda mm: bool(Preparation((), tuple(mm))),
        ],
        "crop_foreground": Annotated[bool | None, "true or false"],
    }


def check_facts(facts: Mapping[str, Any], path: Path) -> None:
    """Refuses metadata of which a prediction could not be made, or would be another one.

    Args:
        facts: The part ``medfed`` of the metadata, see :mod:`medfed.delivery.bundle.metadata`.
        path: Their file.

    Raises:
        CheckpointError: Naming the file and the first entry that cannot be used.
    """
    for key in _REQUIRED:
        if facts.get(key) is None:
            raise CheckpointError(f"{path} lacks {key}; export the bundle anew.")
    _check(facts, get_type_hints(Facts, include_extras=True), "", path)
    source, kind = facts["input"], facts["input"]["kind"]
    _check(source, get_type_hints(_INPUTS[kind], include_extras=True), "input.", path)
    if kind == "table":
        _refuse(_misfits(source), path)
        scaling, ends = _of_columns(len(Columns.from_facts(source).numeric))
        _check(facts, scaling, "", path)
        _check(source, ends, "input.", path)
    elif kind == "volumes":
        _check(facts, _of_volumes(len(facts["channels"])), "", path)
    else:
        _check(facts.get("normalization") or {}, _NORMALIZATIONS[kind], "normalization.", path)
    _refuse(_contradictions(facts, kind), path)


def _check(entries: Mapping[str, Any], wanted: Mapping[str, Any], prefix: str, path: Path) -> None:
    """Refuses an entry that is not of its type, or of which a rule does not hold; null has none."""
    for key, hint in wanted.items():
        notes = hint.__metadata__  # of nested annotations, too: they are flattened
        what = next(note for note in notes if isinstance(note, str))
        rules = [note for note in notes if callable(note)]
        value = entries.get(key)
        try:
            fit(value, hint)
            right = value is None or all(rule(value) for rule in rules)
        except (ValueError, LookupError, TypeError, AttributeError):
            right = False
        if not right:
            shown = reprlib.repr(value).replace("\n", " ")
            raise CheckpointError(
                f"{path}: {prefix}{key} must be {what}, not {shown}; export the bundle anew."
            )


def _refuse(contradictions: Sequence[tuple[bool, str]], path: Path) -> None:
    for wrong, what in contradictions:
        if wrong:
            raise CheckpointError(f"{path}: {what}; export the bundle anew.")


def _contradictions(facts: Mapping[str, Any], kind: Any) -> list[tuple[bool, str]]:
    """What entries say about each other."""
    segments, channels = facts["task"] == "segmentation", facts["channels"]
    source, inner = facts["input"], ordinary(facts["network"])
    table = kind == "table"
    columns = len(Columns.from_facts(source).inputs()) if table else len(channels)
    seen = len(channels) * (source.get("adjacent_slices") or 1)
    exclusive = facts.get("activation") == "softmax"
    wanted = len(facts["labels"]) + exclusive  # the background has an output of its own
    masked = kind in ("volumes", "pictures")
    # Of the user's own networks only those that name them as MONAI does.
    single = str(inner.get("_target_")).endswith(".LinearRegression")
    outputs, inputs = (
        inner.get("out_channels", 1 if single else wanted),
        inner.get("in_channels", seen),
    )
    return [
        (not set(facts["present"]) <= set(channels), "present names what channels does not"),
        (
            not {*(facts.get("largest_part") or ())} <= {*facts["labels"]},
            "largest_part names what labels does not",
        ),
        (segments != masked, f"a model of {facts['task']} does not take {kind}"),
        (segments and facts.get("threshold") is None, "threshold is not given"),
        (exclusive and not segments, f"a model of {facts['task']} has no activation"),
        (
            bool(facts.get("outcome_scale")) and facts["task"] != "regression",
            f"a model of {facts['task']} has no outcome_scale",
        ),
        (outputs != wanted, f"{outputs} outputs have {len(facts['labels'])} labels"),
        (inputs != seen, f"{inputs} inputs have {seen} channels"),
        (columns != len(channels), f"{columns} columns have {len(channels)} channels"),
    ]


def _misfits(source: Mapping[str, Any]) -> list[tuple[bool, str]]:
    """What the entries of a table's input say of columns that there are none of."""
    names = {*source["features"]}
    categories, indicators = source.get("categories") or {}, source.get("indicators") or []
    return [
        (not {*categories} <= names, "input.categories names what features does not"),
        (not {*indicators} <= names, "input.indicators names what features does not"),
    ]
