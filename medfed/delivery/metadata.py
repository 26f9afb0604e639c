"""``configs/metadata.json`` of a bundle: MONAI's own entries, and under ``medfed`` all facts.

================  ==================================================================================
``medfed`` entry
================  ==================================================================================
format_version    1
task              ``segmentation``, ``classification``, ``risk`` or ``regression``
client, method    the hospital, and the algorithm that made its model
network           ``_target_`` and arguments, plain data; see :mod:`medfed.delivery.networks`
spatial_dims      2 or 3; ``null`` for tables
slices            whether a 2-D model runs over the axial slices of a volume (those without any
                  non-zero voxel are background, as training never saw one)
channels          all input channels (or features) in order
present           those that the hospital was trained with; the others are zero after normalisation
labels            regions or classes in the order of the output, or the outcome of a regression
normalization, input, orientation, spacing, spacing_range
                  what training did to the data: ``FederatedDataModule.preprocessing``
site              the simulated scanner of the hospital's training data, or ``null``
patch_size        window of the inference; ``null``: whole slices or volumes
overlap, window_batch, threshold
                  of the segmentation, else ``null``
bits              bits per weight of the quantised tensors, by name
sizes             bytes: ``fp32`` (a plain file of the same weights), ``packed`` (models/model.pt),
                  ``entropy_bound``; ``onnx`` (models/model.onnx) where there is one
hashes            SHA-256 of every other file of the bundle
data_hash         SHA-256 over the hashes of the data files and the hospital's patients
test_metrics      of this bundle's weights; ``null`` where they could not be measured
run_test_metrics  of the model as trained, before it was quantised for the bundle
quantization      what was done at export, with validation metrics before and after
training_config   the run's configuration, without the paths of its machine
commit, versions  of the code and its packages at training
================  ==================================================================================
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch

from medfed.delivery.bundle import FORMAT_VERSION
from medfed.delivery.networks import ordinary

Plain = dict[str, Any]
_SCHEMA = (
    "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/"
    "meta_schema_20240725.json"
)
_TASKS = {
    "SegmentationTask": "segmentation",
    "ClassificationTask": "classification",
    "RegressionTask": "regression",
}
_PRIVATE = ("folder", "resume", "logger", "trainer", "progress")
_PATHS = ("path", "root", "cache")


def collect_facts(
    client: str,
    config: Mapping[str, Any],
    network: Mapping[str, Any],
    preprocessing: Mapping[str, Any],
    splits: Mapping[str, Any],
    summary: Mapping[str, Any],
    versions: Mapping[str, Any],
) -> Plain:
    """Gathers what a run folder says of one client's model.

    Args:
        client: The client.
        config: The run's configuration, resolved.
        network: See :func:`medfed.delivery.networks.describe`.
        preprocessing: What became of the client's data before the network saw them.
        splits: The run's ``splits.json``.
        summary: Its ``summary.json``.
        versions: Its ``versions.json``.

    Returns:
        The part ``medfed`` of the metadata, without what is known only once weights are written.
    """
    model = config["model"]
    task = _TASKS.get(str(model["_target_"]).rpartition(".")[2], "risk")
    dims = ordinary(network).get("spatial_dims")
    segments = task == "segmentation"
    packages = {k: v for k, v in versions.items() if k not in ("commit", "platform")}
    return {
        "format_version": FORMAT_VERSION,
        "task": task,
        "client": client,
        "method": summary["algorithm"],
        "network": dict(network),
        "spatial_dims": dims,
        "slices": segments and dims == 2,
        **preprocessing,
        "site": splits.get("partition", {}).get(client, {}).get("site"),
        "patch_size": model["patch_size"] if segments else None,
        "overlap": model["overlap"] if segments else None,
        "window_batch": model["window_batch"] if segments else None,
        "threshold": model["threshold"] if segments else None,
        "data_hash": data_hash(splits, client),
        "test_metrics": finite(summary["clients"][client]),
        "run_test_metrics": finite(summary["clients"][client]),
        "training_config": without_paths(config),
        "commit": versions.get("commit", "unknown"),
        "versions": packages,
    }


def monai_metadata(facts: Plain) -> Plain:
    """Wraps the facts into what MONAI asks of a bundle's metadata.

    Args:
        facts: All of the part ``medfed``.

    Returns:
        ``configs/metadata.json``.
    """
    many = len(facts["labels"])
    what = " and ".join(facts["labels"]) if many <= 3 else f"{many} classes"
    return {
        "schema": _SCHEMA,
        "version": "1.0.0",
        "changelog": {"1.0.0": "exported from a federated run"},
        "monai_version": version("monai"),
        "pytorch_version": str(torch.__version__).partition("+")[0],
        "numpy_version": version("numpy"),
        "required_packages_version": {"nibabel": version("nibabel"), "fire": "0.6.0"},
        "task": f"{facts['task'].capitalize()} of {what}",
        "description": f"The personal model of {facts['client']}, trained by {facts['method']} in "
        "a federation of hospitals.",
        "authors": facts["client"],
        "copyright": "See the hospital that trained it.",
        "intended_use": "Research. No medical device; not for diagnosis or treatment.",
        "network_data_format": {"inputs": {"image": _inputs(facts)}, "outputs": _outputs(facts)},
        "medfed": facts,
    }


def data_hash(splits: Mapping[str, Any], client: str) -> str:
    """Hashes which data a client's model was trained on; paths do not count.

    Args:
        splits: A run's ``splits.json``.
        client: The client.

    Returns:
        SHA-256 over the sorted hashes of all data files, and the client's patients by split.

    Example:
        >>> splits = {"files": {"a.nii": "12"}, "clients": {"A": {"train": ["p"]}}}
        >>> data_hash(splits, "A")[:12]
        '30351274273d'
    """
    content = [sorted(splits["files"].values()), splits["clients"][client]]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Replaces NaN, which JSON does not have, by None.

    Example:
        >>> finite({"dice": 0.5, "hd95": float("nan")})
        {'dice': 0.5, 'hd95': None}
    """
    return {n: float(v) if v is not None and math.isfinite(v) else None for n, v in metrics.items()}


def without_paths(config: Mapping[str, Any]) -> Plain:
    """Leaves out what says where a run took place and not what it computed.

    Example:
        >>> without_paths({"seed": 0, "folder": "/home/me", "data": {"path": "/x", "size": 3}})
        {'seed': 0, 'data': {'size': 3}}
    """
    kept = {k: v for k, v in config.items() if k not in _PRIVATE}
    if isinstance(kept.get("data"), Mapping):
        kept["data"] = {k: v for k, v in kept["data"].items() if k not in _PATHS}
    return kept


def _inputs(facts: Plain) -> Plain:
    return {
        "type": "image" if facts["spatial_dims"] else "tuples",
        "format": "magnitude",
        "modality": "n/a",
        "num_channels": len(facts["channels"]),
        "spatial_shape": _shape(facts),
        "dtype": "float32",
        "value_range": [],
        "is_patch_data": facts["patch_size"] is not None,
        "channel_def": _numbered(facts["channels"]),
    }


def _outputs(facts: Plain) -> Plain:
    segments = facts["task"] == "segmentation"
    named = {"segmentation": ("image", "segmentation"), "regression": ("array", "raw")}
    type_, format_ = named.get(facts["task"], ("probabilities", "classes"))
    pred = {
        "type": type_,
        "format": format_,
        "num_channels": len(facts["labels"]),
        "spatial_shape": _shape(facts) if segments else [],
        "dtype": "float32",
        "value_range": [],
        "is_patch_data": facts["patch_size"] is not None,
        "channel_def": _numbered(facts["labels"]),
    }
    return {"pred": pred}


def _shape(facts: Plain) -> list[Any]:
    if facts["patch_size"] is not None:
        return list(facts["patch_size"])
    size = facts["input"].get("size") or facts["input"].get("patches", {}).get("size")
    return list(size) if size else ["*"] * (facts["spatial_dims"] or 0)


def _numbered(names: Sequence[str]) -> dict[str, str]:
    return {str(i): name for i, name in enumerate(names)}
