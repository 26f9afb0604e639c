"""``configs/inference.json`` of a bundle: preprocessing, inference and results in MONAI's terms.

Segmentation reads NIfTI files and writes masks on the grid of the input; classification reads
images (``.png``, ``.npy``) or tables (``.csv``) and writes probabilities as CSV; regression writes
predictions. The configuration follows the metadata alone, which record what training did to the
data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from medfed.delivery.bundle import MODEL

Plain = dict[str, Any]
_IMPORTS = ("glob", "os", "numpy", "torch", "monai")
_CALLED = ("segment", "classify", "regress", "find_cases", "read_table")


def inference_config(facts: Mapping[str, Any]) -> Plain:
    """Builds the configuration that ``python -m monai.bundle run`` runs.

    Args:
        facts: The part ``medfed`` of the metadata, see :mod:`medfed.delivery.metadata`.

    Returns:
        ``configs/inference.json``, as JSON has it.
    """
    kind = facts["input"]["kind"]
    inputs = {"volumes": _volumes, "table": _table}.get(kind, _images)(facts)
    present = [int(name in facts["present"]) for name in facts["channels"]]
    loader = {"batch_size": 1 if kind == "volumes" else 64, "num_workers": 0}
    dataset = {"_target_": "Dataset", "data": "@inputs", "transform": "@preprocessing"}
    return {
        "imports": [
            *(f"$import {name}" for name in _IMPORTS),
            "$from scripts.decode import load",
            *(f"$from scripts.inference import {name}" for name in _CALLED),
        ],
        "bundle_root": ".",
        "dataset_dir": "$@bundle_root + '/input'",
        "output_dir": "$@bundle_root + '/eval'",
        "device": "$torch.device('cuda' if torch.cuda.is_available() else 'cpu')",
        "network_def": facts["network"],
        "network": f"$load(@network_def, @bundle_root + '/{MODEL}').to(@device)",
        "present": present,
        **inputs,
        "dataset": dataset,
        "dataloader": {"_target_": "DataLoader", "dataset": "@dataset", **loader},
        **(_segmentation(facts) if facts["task"] == "segmentation" else _classification(facts)),
    }


def _volumes(facts: Mapping[str, Any]) -> Plain:
    source = facts["input"]
    known = source["file_channels"]
    steps: list[Plain] = [
        {"_target_": "LoadImaged", "keys": "image", "reader": "NibabelReader"},
        {"_target_": "EnsureChannelFirstd", "keys": "image"},
        {"_target_": "EnsureTyped", "keys": "image", "dtype": "$torch.float32"},
        {"_target_": "Orientationd", "keys": "image", "axcodes": "RAS", "labels": None},
        {"_target_": "NormalizeIntensityd", "keys": "image", "nonzero": True, "channel_wise": True},
    ]
    if source["files"] is None and known != facts["channels"]:
        order = [known.index(name) for name in facts["channels"]]
        steps.insert(2, {"_target_": "Lambdad", "keys": "image", "func": f"$lambda x: x[{order}]"})
    found = "sorted(glob.glob(@dataset_dir + '/*.nii.gz') + glob.glob(@dataset_dir + '/*.nii'))"
    if source["files"] is not None:
        patterns = [list(source["files"][name]) for name in facts["channels"]]
        found = f"find_cases(@dataset_dir, {patterns})"
    return {
        "images": f"${found}",
        "inputs": "$[{'image': image} for image in @images]",
        "preprocessing": {"_target_": "Compose", "transforms": steps},
    }


def _images(facts: Mapping[str, Any]) -> Plain:
    """Files of one sample each: PNG, or arrays (C, *spatial) of bytes or HU."""
    scale = facts["normalization"]
    low, high = scale["hu"] if scale["name"] == "window" else scale["range"]
    readers = [
        "$monai.data.PILReader(reverse_indexing=False)",
        "$monai.data.NumpyReader(channel_dim=0)",
    ]
    steps: list[Plain] = [
        {"_target_": "LoadImaged", "keys": "image", "reader": readers},
        {"_target_": "EnsureChannelFirstd", "keys": "image"},
        {
            "_target_": "ScaleIntensityRanged",
            "keys": "image",
            "a_min": low,
            "a_max": high,
            "b_min": scale["to"][0],
            "b_max": scale["to"][1],
            "clip": True,
            "dtype": "$numpy.float32",
        },
    ]
    found = "sorted(glob.glob(@dataset_dir + '/*'))"
    return {
        "images": f"$[p for p in {found} if p.endswith(('.png', '.npy'))]",
        "inputs": "$[{'image': image, 'name': os.path.basename(image)} for image in @images]",
        "preprocessing": {"_target_": "Compose", "transforms": steps},
    }


def _table(facts: Mapping[str, Any]) -> Plain:
    scale, features = facts["normalization"], facts["input"]["features"]
    steps: list[Plain] = []
    if scale is not None:
        func = {
            "_target_": "scripts.inference.ScaleFeatures",
            "minimum": scale["minimum"],
            "maximum": scale["maximum"],
            "missing_indicator": facts["input"]["missing_indicator"],
        }
        steps.append({"_target_": "Lambdad", "keys": "image", "func": func, "track_meta": False})
    steps.append(
        {"_target_": "EnsureTyped", "keys": "image", "dtype": "$torch.float32", "track_meta": False}
    )
    return {
        "features": list(features),
        "tables": "$sorted(glob.glob(@dataset_dir + '/*.csv'))",
        "inputs": "$read_table(@tables, @features)",
        "preprocessing": {"_target_": "Compose", "transforms": steps},
    }


def _segmentation(facts: Mapping[str, Any]) -> Plain:
    slices = bool(facts["slices"])
    save = {
        "_target_": "SaveImaged",
        "keys": "pred",
        "output_dir": "@output_dir",
        "output_postfix": "pred",
        "output_dtype": "$numpy.uint8",
        "resample": False,
        "separate_folder": False,
        "print_log": False,
    }
    threshold = facts["threshold"]
    # A voxel at the threshold itself does not belong to the region.
    above = f"$lambda p: (p > {threshold}).to(torch.uint8)"
    steps: list[Plain] = [
        {"_target_": "Activationsd", "keys": "pred", "sigmoid": True},
        {
            "_target_": "Invertd",
            "keys": "pred",
            "transform": "@preprocessing",
            "orig_keys": "image",
            "nearest_interp": False,
            "to_tensor": True,
        },
        {"_target_": "Lambdad", "keys": "pred", "func": above},
        save,
    ]
    arguments = "@dataloader, @network, @inferer, @postprocessing, @present"
    return {
        "inferer": _inferer(facts["patch_size"], slices, facts["overlap"], facts["window_batch"]),
        "postprocessing": {"_target_": "Compose", "transforms": steps},
        "run": [f"$segment({arguments}, {slices})"],
    }


def _inferer(patch: Sequence[int] | None, slices: bool, overlap: float, batch: int) -> Plain:
    """Windows as in training, gaussian; without windows whole slices or volumes at once."""
    windows = {"sw_batch_size": batch, "overlap": overlap, "mode": "gaussian"}
    if patch is None:
        windows = {"sw_batch_size": batch, "overlap": 0, "mode": "constant"}
    if slices:
        size = [-1, -1] if patch is None else list(patch)
        return {"_target_": "SliceInferer", "roi_size": size, "spatial_dim": 2, **windows}
    size = [-1, -1, -1] if patch is None else list(patch)
    return {"_target_": "SlidingWindowInferer", "roi_size": size, **windows}


def _classification(facts: Mapping[str, Any]) -> Plain:
    if facts["task"] == "regression":
        arguments = "@dataloader, @network, @present, @output_dir + '/predictions.csv'"
        return {"run": [f"$regress({arguments})"]}
    arguments = "@dataloader, @network, @present, @labels, @output_dir + '/probabilities.csv'"
    return {
        "labels": list(facts["labels"]),
        "run": [f"$classify({arguments})"],
    }
