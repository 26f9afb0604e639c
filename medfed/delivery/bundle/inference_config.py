"""``configs/inference.json`` of a bundle: preprocessing, inference and results in MONAI's terms.

Segmentation reads volumes (NIfTI; NRRD, MetaImage and DICOM where SimpleITK is installed) and
writes masks on the grid of the input, as NIfTI; classification reads images (``.png``, ``.npy``) or
tables (``.csv``) and writes probabilities as CSV; regression writes predictions. The configuration
follows the metadata alone, which record what training did to the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from medfed.datamodules.preparation import Preparation, Rule
from medfed.datamodules.tables.columns import Columns
from medfed.delivery.bundle.metadata import map_codes
from medfed.delivery.bundle.weights import MODEL

Plain = dict[str, Any]
_IMPORTS = ("numpy", "torch", "monai")
_CALLED: Plain = {
    "volumes": {
        "grids": ("with_neighbours",),
        "inference": ("segment", "background"),
        "volumes": ("find_scans", "find_cases"),
    },
    "pictures": {"inference": ("find_files",), "pictures": ("segment_pictures",)},
}
_OF_SAMPLES: Plain = {"inference": ("classify", "regress", "find_files", "read_table")}


def inference_config(facts: Mapping[str, Any]) -> Plain:
    """Builds the configuration that ``python -m monai.bundle run`` runs.

    Args:
        facts: The part ``medfed`` of the metadata, see :mod:`medfed.delivery.bundle.metadata`.

    Returns:
        ``configs/inference.json``, as JSON has it.
    """
    kind = facts["input"]["kind"]
    if kind == "pictures":
        return _pictures(facts)
    inputs = {"volumes": _volumes, "table": _table}.get(kind, _images)(facts)
    loader = {"batch_size": 1 if kind == "volumes" else 64, "num_workers": 0}
    dataset = {"_target_": "Dataset", "data": "@inputs", "transform": "@preprocessing"}
    return {
        **_common(facts),
        **inputs,
        "dataset": dataset,
        "dataloader": {"_target_": "DataLoader", "dataset": "@dataset", **loader},
        **(_segmentation(facts) if facts["task"] == "segmentation" else _samples(facts)),
    }


def _common(facts: Mapping[str, Any]) -> Plain:
    """What every configuration begins with: folders, device and network."""
    present = [int(name in facts["present"]) for name in facts["channels"]]
    called = _CALLED.get(facts["input"]["kind"], _OF_SAMPLES)
    return {
        "imports": [
            *(f"$import {name}" for name in _IMPORTS),
            "$from scripts.decode import load",
            *(
                f"$from scripts.{module} import {name}"
                for module, names in called.items()
                for name in names
            ),
        ],
        "bundle_root": ".",
        "dataset_dir": "$@bundle_root + '/input'",
        "output_dir": "$@bundle_root + '/eval'",
        "device": "$torch.device('cuda' if torch.cuda.is_available() else 'cpu')",
        "network_def": facts["network"],
        "network": f"$load(@network_def, @bundle_root + '/{MODEL}').to(@device)",
        "present": present,
    }


def _pictures(facts: Mapping[str, Any]) -> Plain:
    """One PNG per picture and region; all is done by a function of the bundle's own."""
    source, size = facts["input"], list(facts["patch_size"] or (-1, -1))
    inferer = _inferer(size, False, facts["overlap"], facts["window_batch"])
    how = {n: source[n] for n in ("color", "scale")}
    how |= {"normalization": facts["normalization"]["name"], "threshold": facts["threshold"]}
    exclusive = facts.get("activation") == "softmax"
    how["codes"] = list((map_codes(facts) or {}).values()) if exclusive else None
    endings = [".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp"]
    return {
        **_common(facts),
        "inputs": f"$find_files(@dataset_dir, {endings}, @output_dir)",
        "inferer": inferer,
        "how": how,
        "labels": list(facts["labels"]),
        "run": [
            "$segment_pictures(@inputs, @network, @inferer, @present, @labels, @how, @output_dir)"
        ],
    }


def _volumes(facts: Mapping[str, Any]) -> Plain:
    source = facts["input"]
    known = source["file_channels"]
    steps = [
        _step("scripts.volumes.LoadVolumesd"),
        _step("EnsureChannelFirstd"),
        _step("EnsureTyped", dtype="$torch.float32"),
        _step("Orientationd", axcodes="RAS", labels=None),
        *_preparation(Preparation.from_record(facts, len(facts["channels"]))),
    ]
    if source["files"] is None and known != facts["channels"]:
        order = [known.index(name) for name in facts["channels"]]
        steps.insert(2, _step("Lambdad", func=f"$lambda x: x[{order}]"))
    found = "find_scans(@dataset_dir, @output_dir)"
    if source["files"] is not None:
        patterns = [list(source["files"][name]) for name in facts["channels"]]
        found = f"find_cases(@dataset_dir, {patterns}, @output_dir)"
    return {
        "inputs": f"${found}",
        "preprocessing": _compose(steps),
    }


def _preparation(prepared: Preparation) -> list[Plain]:
    """Cropped, normalised, resampled: see :mod:`medfed.datamodules.preparation`."""
    rules, steps = prepared.rules, []
    if prepared.crop:
        lowest = [rule.low if rule.name == "window" else None for rule in rules]
        inside = {"_target_": "scripts.volumes.Foreground", "lowest": lowest}
        steps.append(_step("CropForegroundd", source_key="image", select_fn=inside))
    if len(set(rules)) == 1:
        name, arguments = _normalization(rules[0])
        steps.append(_step(f"{name}d", **arguments))
    else:
        each = [{"_target_": n, **arguments} for n, arguments in map(_normalization, rules)]
        func = {"_target_": "scripts.volumes.ByChannel", "steps": each}
        steps.append(_step("Lambdad", func=func))
    if prepared.spacing is not None:
        mm = [*prepared.spacing, -1.0][:3]  # slices keep their distance
        steps.append(_step("Spacingd", pixdim=mm, mode="bilinear", padding_mode="border"))
    return steps


def _normalization(rule: Rule) -> tuple[str, Plain]:
    """MONAI's transform of one channel, and its arguments."""
    if rule.name == "none":
        return "Identity", {}
    if rule.name.startswith("zscore"):
        return "NormalizeIntensity", {
            "nonzero": rule.name == "zscore_nonzero",
            "channel_wise": True,
        }
    unit = {"b_min": 0.0, "b_max": 1.0, "clip": True}
    if rule.name == "window":
        return "ScaleIntensityRange", {"a_min": rule.low, "a_max": rule.high, **unit}
    ends = {"lower": rule.low, "upper": rule.high}
    return "ScaleIntensityRangePercentiles", {**ends, **unit, "channel_wise": True}


def _images(facts: Mapping[str, Any]) -> Plain:
    """Files of one sample each: PNG, or arrays (C, *spatial) of bytes or HU."""
    scale = facts["normalization"]
    low, high = scale["hu"] if scale["name"] == "window" else scale["range"]
    bottom, top = scale["to"]
    readers = [
        "$monai.data.PILReader(reverse_indexing=False)",
        "$monai.data.NumpyReader(channel_dim=0)",
    ]
    limits = {"a_min": low, "a_max": high, "b_min": bottom, "b_max": top, "clip": True}
    steps = [
        _step("LoadImaged", reader=readers),
        _step("EnsureChannelFirstd"),
        _step("ScaleIntensityRanged", **limits, dtype="$numpy.float32"),
    ]
    return {
        "inputs": "$find_files(@dataset_dir, ['.png', '.npy'], @output_dir)",
        "preprocessing": _compose(steps),
    }


def _table(facts: Mapping[str, Any]) -> Plain:
    scale, source = facts["normalization"], Columns.from_facts(facts["input"])
    named = {"name": "minmax"} if scale is None else scale
    kept = {n: v for n, v in named.items() if n not in ("name", "to", "missing")}
    target = {"standard": "Standardise", "minmax": "ScaleFeatures"}[named.get("name", "minmax")]
    numbers = None if scale is None else {"_target_": f"scripts.inference.{target}", **kept}
    columns = {
        "features": list(source.names),
        "categories": {name: list(texts) for name, texts in source.categories.items()},
    }
    encode = {
        "_target_": "scripts.inference.EncodeColumns",
        **columns,
        "indicators": list(source.indicators),
        "scale": numbers,
    }
    ends = {name: facts["input"].get(name) for name in ("lowest", "highest")}
    return {
        **columns,
        "ranges": ends,
        "tables": "$find_files(@dataset_dir, ['.csv'], @output_dir)",
        "inputs": "$read_table(@tables, @features, @categories, @ranges)",
        "preprocessing": _compose(
            [
                _step("Lambdad", func=encode, track_meta=False),
                _step("EnsureTyped", dtype="$torch.float32", track_meta=False),
            ]
        ),
    }


def _segmentation(facts: Mapping[str, Any]) -> Plain:
    slices = bool(facts["slices"])
    inverse = {"orig_keys": "image", "nearest_interp": False, "to_tensor": True}
    small = all(0 <= code < 256 for code in (map_codes(facts) or {}).values())
    dtype = "$numpy.uint8" if small else "$numpy.int32"
    saved = {"output_dir": "@output_dir", "output_postfix": "pred", "output_dtype": dtype}
    quiet = {"resample": False, "separate_folder": False, "print_log": False}
    adjacent = facts["input"].get("adjacent_slices") or 1
    neighbours = f"lambda image: with_neighbours(image, {adjacent})"
    exclusive = facts.get("activation") == "softmax"
    activation = {"softmax": True, "dim": 0} if exclusive else {"sigmoid": True}
    steps = [
        # Logits are interpolated, as in the evaluation; what was cropped away comes back as 0.
        _step("EnsureTyped", "pred"),
        _step("Invertd", "pred", transform="@preprocessing", **inverse),
        _step("Lambdad", "pred", func=f"$lambda p: p + background(len(p), {exclusive})"),
        _step("Activationsd", "pred", **activation),
        *(_label_map(facts) if exclusive else _masks(facts)),
        *_largest(facts, exclusive),
        _step("SaveImaged", "pred", **saved, **quiet),
    ]
    arguments = "@dataloader, @network, @inferer, @postprocessing, @present"
    return {
        "inferer": _inferer(facts["patch_size"], slices, facts["overlap"], facts["window_batch"]),
        "postprocessing": _compose(steps),
        "run": [f"$segment({arguments}, {slices}, {exclusive}, {neighbours})"],
    }


def _masks(facts: Mapping[str, Any]) -> list[Plain]:
    """A channel for each region; a voxel at the threshold itself does not belong to it."""
    above = f"$lambda p: (p > {facts['threshold']}).to(torch.uint8)"
    return [_step("Lambdad", "pred", func=above)]


def _largest(facts: Mapping[str, Any], exclusive: bool) -> list[Plain]:
    """The largest connected part alone, of the regions that say so."""
    parts, labels = facts.get("largest_part"), list(facts["labels"])
    if not parts:
        return []
    codes = map_codes(facts) or {}
    which = {"codes": [codes[n] for n in parts]}
    if not exclusive:
        which = {"channels": [labels.index(n) for n in parts]}
    func = {"_target_": "scripts.volumes.LargestParts", **which}
    return [_step("Lambdad", "pred", func=func)]


def _label_map(facts: Mapping[str, Any]) -> list[Plain]:
    """Each voxel's likeliest class, by the label values of the training masks."""
    codes = list((map_codes(facts) or {}).values())
    steps = [_step("AsDiscreted", "pred", argmax=True)]
    if codes != list(range(1, len(codes) + 1)):
        numbers = {"orig_labels": [0, *range(1, len(codes) + 1)], "target_labels": [0, *codes]}
        steps.append(_step("MapLabelValued", "pred", **numbers))
    return steps


def _inferer(patch: Sequence[int] | None, slices: bool, overlap: float, batch: int) -> Plain:
    """Windows as in training, gaussian; without windows whole slices or volumes at once."""
    windows = {"sw_batch_size": batch, "overlap": overlap, "mode": "gaussian"}
    if patch is None:
        windows |= {"overlap": 0, "mode": "constant"}
    size = [-1] * (2 if slices else 3) if patch is None else list(patch)
    if slices:
        return {"_target_": "SliceInferer", "roi_size": size, "spatial_dim": 2, **windows}
    return {"_target_": "SlidingWindowInferer", "roi_size": size, **windows}


def _samples(facts: Mapping[str, Any]) -> Plain:
    arguments = "@dataloader, @network, @present"
    if facts["task"] == "regression":
        file = "@output_dir + '/predictions.csv'"
        scale = list(facts.get("outcome_scale") or (0.0, 1.0))
        return {"outcome_scale": scale, "run": [f"$regress({arguments}, @outcome_scale, {file})"]}
    file = "@output_dir + '/probabilities.csv'"
    return {
        "labels": list(facts["labels"]),
        "run": [f"$classify({arguments}, @labels, {file})"],
    }


def _step(name: str, keys: str = "image", /, **arguments: Any) -> Plain:
    return {"_target_": name, "keys": keys, **arguments}


def _compose(steps: Sequence[Plain]) -> Plain:
    return {"_target_": "Compose", "transforms": list(steps)}
