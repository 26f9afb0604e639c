"""``configs/inference.json`` of a bundle: what MONAI reads and writes around the model.

Segmentation reads volumes (NIfTI; NRRD, MetaImage and DICOM where SimpleITK is installed) and
writes masks on the grid of the input, as NIfTI; classification reads images (``.png``, ``.npy``) or
tables (``.csv``) and writes probabilities as CSV; regression writes predictions. What lies between
is the inference of ``medfed predict``, which the bundle carries in its scripts. It goes by the
metadata alone, which record what training did to the data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from medfed.delivery.bundle.scripts.label_maps import map_codes
from medfed.delivery.bundle.weights import MODEL

Plain = dict[str, Any]


def inference_config(facts: Mapping[str, Any]) -> Plain:
    """Builds the configuration that ``python -m monai.bundle run`` runs.

    Args:
        facts: The part ``medfed`` of the metadata, see :mod:`medfed.delivery.bundle.metadata`.

    Returns:
        ``configs/inference.json``, as JSON has it.
    """
    kinds = {"volumes": _volumes, "pictures": _pictures, "table": _table}
    imports = (
        *(f"import {name}" for name in ("json", "numpy", "torch", "monai")),
        "from scripts.decode import load",
        "import scripts.run as inference",
        *(["import scripts.volumes as volumes"] if facts["input"]["kind"] == "volumes" else []),
    )
    return {
        "imports": [f"${line}" for line in imports],
        "bundle_root": ".",
        "dataset_dir": "$@bundle_root + '/input'",
        "output_dir": "$@bundle_root + '/eval'",
        "device": "$torch.device('cuda' if torch.cuda.is_available() else 'cpu')",
        "network_def": facts["network"],
        "network": f"$load(@network_def, @bundle_root + '/{MODEL}').to(@device)",
        "facts": "$json.load(open(@bundle_root + '/configs/metadata.json', encoding='utf-8'))"
        "['medfed']",
        **kinds.get(facts["input"]["kind"], _images)(facts),
    }


def _volumes(facts: Mapping[str, Any]) -> Plain:
    """Volumes towards right, anterior, superior; masks on the axes of their files."""
    inputs = "$volumes.find_scans(@dataset_dir, @output_dir)"
    if (files := facts["input"]["files"]) is not None:
        patterns = [list(files[name]) for name in facts["channels"]]
        inputs = f"$volumes.find_cases(@dataset_dir, {patterns}, @output_dir)"
    small = all(0 <= code < 256 for code in (map_codes(facts) or {}).values())
    saved = {
        "output_dir": "@output_dir",
        "output_postfix": "pred",
        "output_dtype": "$numpy.uint8" if small else "$numpy.int32",
        "resample": False,
        "separate_folder": False,
        "print_log": False,
    }
    return {
        "inputs": inputs,
        "preprocessing": _compose(
            _step("scripts.volumes.LoadVolumesd"),
            _step("EnsureChannelFirstd"),
            _step("EnsureTyped", dtype="$torch.float32"),
            _step("Orientationd", axcodes="RAS", labels=None),
        ),
        **_loader(1),
        # The scripts leave the answer on the scan's grid, so that only the axes are to be undone.
        "postprocessing": _compose(
            _step("EnsureTyped", "pred"),
            _step("Invertd", "pred", transform="@preprocessing", orig_keys="image"),
            _step("SaveImaged", "pred", **saved),
        ),
        "run": ["$inference.segment(@dataloader, @network, @facts, @postprocessing)"],
    }


def _pictures(facts: Mapping[str, Any]) -> Plain:
    """One PNG per picture and region; the scripts read and write them."""
    endings = [".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp"]
    return {
        "inputs": f"$inference.find_files(@dataset_dir, {endings}, @output_dir)",
        "run": ["$inference.segment_pictures(@inputs, @network, @facts, @output_dir)"],
    }


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
    return {
        "inputs": "$inference.find_files(@dataset_dir, ['.png', '.npy'], @output_dir)",
        "preprocessing": _compose(
            _step("LoadImaged", reader=readers),
            _step("EnsureChannelFirstd"),
            _step("ScaleIntensityRanged", **limits, dtype="$numpy.float32"),
        ),
        **_answers(facts),
    }


def _table(facts: Mapping[str, Any]) -> Plain:
    """Rows of CSV files, which the scripts read, scale and encode."""
    return {
        "tables": "$inference.find_files(@dataset_dir, ['.csv'], @output_dir)",
        "inputs": "$inference.read_table(@tables, @facts)",
        "preprocessing": _compose(_step("EnsureTyped", dtype="$torch.float32", track_meta=False)),
        **_answers(facts),
    }


def _answers(facts: Mapping[str, Any]) -> Plain:
    """A row per sample."""
    name = "predictions" if facts["task"] == "regression" else "probabilities"
    path = f"@output_dir + '/{name}.csv'"
    return {
        **_loader(64),
        "run": [f"$inference.answer_samples(@dataloader, @network, @facts, {path})"],
    }


def _loader(batch_size: int) -> Plain:
    dataset = {"_target_": "Dataset", "data": "@inputs", "transform": "@preprocessing"}
    loader = {"dataset": "@dataset", "batch_size": batch_size, "num_workers": 0}
    return {"dataset": dataset, "dataloader": {"_target_": "DataLoader", **loader}}


def _step(name: str, keys: str = "image", /, **arguments: Any) -> Plain:
    return {"_target_": name, "keys": keys, **arguments}


def _compose(*steps: Plain) -> Plain:
    return {"_target_": "Compose", "transforms": list(steps)}
