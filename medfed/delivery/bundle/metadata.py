"""What a bundle says: ``configs/metadata.json``.

The metadata have MONAI's own entries, and under ``medfed`` all facts. The pages for people are made
of these, too (:mod:`medfed.delivery.bundle.documents`).

================  ==================================================================================
``medfed`` entry
================  ==================================================================================
format_version    5
task              ``segmentation``, ``classification``, ``risk`` or ``regression``
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
labels            regions or classes in the order of the output, or the outcome of a regression
normalization, input, orientation, spacing, spacing_range, resampled_to, crop_foreground
                  what training did to the data: ``FederatedDataModule.preprocessing``
site              the simulated scanner of the hospital's training data, or ``null``
patch_size        window of the inference; ``null``: whole slices or volumes
overlap, window_batch, threshold
                  of the segmentation, else ``null``
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
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from medfed.common.errors import CheckpointError, ConfigError
from medfed.datamodules.preparation import Preparation, rules_from
from medfed.datamodules.tables.columns import Columns
from medfed.delivery.bundle.networks import ordinary
from medfed.delivery.bundle.source_code import is_code

Plain = dict[str, Any]
METADATA = "configs/metadata.json"
FORMAT_VERSION = 5
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
    type_, format_ = named.get(facts["task"], ("probabilities", "classes"))
    image = {
        "type": "image" if facts["spatial_dims"] else "tuples",
        "format": "magnitude",
        "modality": "n/a",
        **_tensor(facts, _read(facts), _shape(facts)),
    }
    background = ["background"] * exclusive
    pred = {
        "type": type_,
        "format": format_,
        "modality": "n/a",
        **_tensor(facts, [*background, *facts["labels"]], _shape(facts) if segments else []),
    }
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
        "intended_use": "Research. No medical device; not for diagnosis or treatment.",
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
    beside = range(-(slices // 2), slices // 2 + 1)
    return [f"{name}, slice {n:+d}" for name in facts["channels"] for n in beside]


def _shape(facts: Plain) -> list[Any]:
    return input_size(facts) or ["*"] * (facts["spatial_dims"] or 0)


def _tensor(facts: Plain, names: Sequence[str], shape: list[Any]) -> Plain:
    return {
        "num_channels": len(names),
        "spatial_shape": shape,
        "dtype": "float32",
        "value_range": [],
        "is_patch_data": facts["patch_size"] is not None,
        "channel_def": {str(i): name for i, name in enumerate(names)},
    }


def further(facts: Mapping[str, Any]) -> dict[str, str]:
    """Returns packages and versions that the network needs beside PyTorch and MONAI.

    Example:
        >>> further({"packages": {"monai": "1.6", "einops": "0.8"}, "code": None})
        {'einops': '0.8'}
    """
    code = facts.get("code") or {"require": {}}
    every = {**(facts.get("packages") or {}), **code["require"]}
    if facts.get("largest_part"):
        every["scipy"] = version("scipy")
    return {name: known for name, known in every.items() if name not in ("monai", "numpy")}


Check = Callable[[Any], bool]
_TASKS = ("segmentation", "classification", "risk", "regression")
_KINDS = ("volumes", "pictures", "images", "ct_patches", "table")
_REQUIRED = ("task", "network", "channels", "present", "labels", "input")
_LARGEST = 1 << 27  # voxels or pixels of one window, image or patch


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
    _check(facts, _FACTS, "", path)
    kind = facts["input"].get("kind")
    _check(facts["input"], _INPUTS.get(kind, {}), "input.", path)
    if kind == "table":
        for wrong, what in _misfits(facts["input"]):
            if wrong:
                raise CheckpointError(f"{path}: {what}; export the bundle anew.")
        scaling, count = facts.get("normalization"), len(Columns.from_facts(facts["input"]).numeric)
        _check({"normalization": scaling}, {"normalization": _scaling(count)}, "", path)
        _check(facts["input"], _ends(count), "input.", path)
    elif kind == "volumes":
        _check(facts, _volumes(len(facts["channels"])), "", path)
    else:
        _check(facts.get("normalization") or {}, _RANGES.get(kind, {}), "normalization.", path)
    for wrong, what in _contradictions(facts, kind):
        if wrong:
            raise CheckpointError(f"{path}: {what}; export the bundle anew.")


def _check(
    entries: Mapping[str, Any], wanted: Mapping[str, tuple[Check, str]], prefix: str, path: Path
) -> None:
    for key, (check, what) in wanted.items():
        try:
            right = check(entries.get(key))
        except (TypeError, ValueError, LookupError, AttributeError, OverflowError, ConfigError):
            right = False
        if not right:
            shown = reprlib.repr(entries.get(key)).replace("\n", " ")
            raise CheckpointError(
                f"{path}: {prefix}{key} must be {what}, not {shown}; export the bundle anew."
            )


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


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _whole(low: int, high: int) -> Check:
    return lambda v: isinstance(v, int) and not isinstance(v, bool) and low <= v <= high


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _names(value: Any) -> bool:
    """Distinct names, at least one."""
    return isinstance(value, list) and all(map(_text, value)) and 0 < len(value) == len({*value})


def _flag(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _optional(check: Check) -> Check:
    return lambda v: v is None or check(v)


def _list(check: Check, *lengths: int) -> Check:
    return lambda v: isinstance(v, list) and len(v) in lengths and all(map(check, v))


def _size(value: Any) -> bool:
    return _list(_whole(1, 1 << 20), 2, 3)(value) and math.prod(value) <= _LARGEST


def _ascending(value: Any) -> bool:
    return _list(_number, 2)(value) and value[0] < value[1]


def _by_name(check: Check) -> Check:
    return lambda v: isinstance(v, dict) and all(map(check, v.values()))


def _patterns(value: Any) -> bool:
    return _text(value) or _names(value)


def _limits(value: Any) -> bool:
    lengths = _list(_list(lambda mm: _number(mm) and mm > 0, 3), 2)
    return lengths(value) and all(a <= b for a, b in zip(*value, strict=True))


def _scaling(count: int) -> tuple[Check, str]:
    def check(value: Any) -> bool:
        standard = value.get("name") == "standard"
        names = ("low", "high", "median", "mean", "sd") if standard else ("minimum", "maximum")
        entries = [value[name] for name in names]
        if standard and not all(sd > 0 for sd in value["sd"]):
            return False
        return all(map(_list(_number, count), entries)) and all(
            a <= b for a, b in zip(*entries[:2], strict=True)
        )

    what = f"null, or minimum and maximum of {count} numbers each"
    return _optional(check), f"{what}, or low, high, median, mean and sd"


def _ends(count: int) -> dict[str, tuple[Check, str]]:
    end = (_optional(_list(_optional(_number), count)), f"{count} numbers or nulls")
    return {"lowest": end, "highest": end}


def _some_names(value: Any) -> bool:
    return value == [] or _names(value)


def _volumes(count: int) -> dict[str, tuple[Check, str]]:
    """What was done to volumes of so many channels."""

    def rules(value: Any) -> bool:
        return value is None or len(rules_from(value, count)) == count

    def lengths(value: Any) -> bool:
        return value is None or bool(Preparation((), tuple(value)))

    return {
        "normalization": (rules, f"the normalisation of {count} channels"),
        "resampled_to": (lengths, "two or three lengths in mm, or null"),
        "crop_foreground": (_flag, "true or false"),
    }


def _codes(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_whole(-(1 << 31), 1 << 31), value))


_share: Check = lambda v: _number(v) and 0 <= v < 1  # noqa: E731
_sizes = (_size, "two or three whole numbers above 0, of a size that fits into memory")
_FACTS: dict[str, tuple[Check, str]] = {
    "task": (lambda v: v in _TASKS, f"one of {', '.join(_TASKS)}"),
    "client": (_optional(_text), "a name"),
    "method": (_optional(_text), "a name"),
    "network": (lambda v: isinstance(v, dict), "an object"),
    "spatial_dims": (_optional(_whole(2, 3)), "2, 3 or null"),
    "slices": (_flag, "true or false"),
    "channels": (_names, "a list of different names"),
    "present": (_names, "a list of different names"),
    "labels": (_names, "a list of different names"),
    "normalization": (_optional(lambda v: isinstance(v, dict)), "an object or null"),
    "input": (lambda v: v["kind"] in _KINDS, f"an object whose kind is {', '.join(_KINDS)}"),
    "code": (_optional(is_code), "files of Python with their hashes, or null"),
    "packages": (_optional(_by_name(_text)), "versions by package, or null"),
    "orientation": (_optional(_text), "a text or null"),
    "spacing": (_optional(_list(lambda v: _number(v) and v > 0, 3)), "three lengths or null"),
    "spacing_range": (_optional(_limits), "least and greatest of three lengths, or null"),
    "patch_size": (_optional(_size), f"null, or {_sizes[1]}"),
    "overlap": (_optional(_share), "a number in [0, 1) or null"),
    "window_batch": (_optional(_whole(1, 1 << 20)), "a whole number above 0, or null"),
    "threshold": (_optional(_share), "a number in [0, 1) or null"),
    "activation": (
        lambda v: v in (None, "sigmoid", "softmax"),
        "sigmoid, softmax or null",
    ),
    "outcome_scale": (
        _optional(lambda v: _list(_number, 2)(v) and v[1] > 0),
        "a mean and a deviation above 0, or null",
    ),
    "card": (_optional(lambda v: isinstance(v, dict)), "an object or null"),
    "largest_part": (_optional(_names), "a list of different names, or null"),
    "bits": (_optional(_by_name(_whole(1, 8))), "whole numbers from 1 to 8 by name"),
    "sizes": (_optional(_by_name(_whole(0, 1 << 60))), "bytes by name"),
    "test_metrics": (_optional(_by_name(_optional(_number))), "numbers by name, or null"),
    "run_test_metrics": (_optional(_by_name(_optional(_number))), "numbers by name, or null"),
}
_INPUTS: dict[str, dict[str, tuple[Check, str]]] = {
    "volumes": {
        "files": (_optional(_by_name(_patterns)), "patterns of file names by channel, or null"),
        "file_channels": (_optional(_names), "a list of different names"),
        "adjacent_slices": (
            _optional(lambda v: _whole(1, 99)(v) and v % 2 == 1),
            "an odd number of slices, or null",
        ),
        "regions": (_optional(_by_name(_codes)), "lists of label values by region"),
    },
    "pictures": {
        "color": (lambda v: v in ("rgb", "grey"), "rgb or grey"),
        "scale": (lambda v: _number(v) and 0 < v <= 1, "a number in (0, 1]"),
        "regions": (lambda v: bool(v) and _by_name(_codes)(v), "lists of label values by region"),
    },
    "images": {
        "size": _sizes,
        "color": (lambda v: v in ("rgb", "grey"), "rgb or grey"),
        "converted": (_flag, "true or false"),
    },
    "ct_patches": {"patches": (lambda v: _size(v["size"]), f"an object whose size is {_sizes[1]}")},
    "table": {
        "features": (_names, "a list of different names"),
        "categories": (_optional(_by_name(_some_names)), "lists of different names by column"),
        "indicators": (_optional(_some_names), "a list of different names"),
    },
}
_RANGES: dict[Any, dict[str, tuple[Check, str]]] = {
    "pictures": {"name": (lambda v: v in ("zscore", "unit"), "zscore or unit")},
    "images": {"range": (_ascending, "two numbers, the lower one first")},
    "ct_patches": {"hu": (_ascending, "two numbers, the lower one first")},
}
