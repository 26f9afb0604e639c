"""What each entry of a bundle's metadata must be, checked before a prediction goes by it."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from medfed.common.errors import CheckpointError, ConfigError
from medfed.datamodules.normalization import rules_from
from medfed.datamodules.preparation import Preparation
from medfed.datamodules.table_columns import Columns
from medfed.delivery.bundle.network_descriptions import ordinary
from medfed.delivery.bundle.source_code import is_code

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
    """What was done to volumes of so many channels; older bundles say the normalisation alone."""

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
        "missing_indicator": (_flag, "true or false"),  # of earlier bundles
        "categories": (_optional(_by_name(_some_names)), "lists of different names by column"),
        "indicators": (_optional(_some_names), "a list of different names"),
    },
}
_RANGES: dict[Any, dict[str, tuple[Check, str]]] = {
    "pictures": {"name": (lambda v: v in ("zscore", "unit"), "zscore or unit")},
    "images": {"range": (_ascending, "two numbers, the lower one first")},
    "ct_patches": {"hu": (_ascending, "two numbers, the lower one first")},
}
