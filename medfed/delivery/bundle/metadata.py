"""What a bundle says: ``configs/metadata.json`` for programs, ``docs/README.md`` for people.

The metadata have MONAI's own entries, and under ``medfed`` all facts, of which both are made.

================  ==================================================================================
``medfed`` entry
================  ==================================================================================
format_version    2
task              ``segmentation``, ``classification``, ``risk`` or ``regression``
client, method    the hospital, and the algorithm that made its model
network           ``_target_`` and arguments, plain data; see :mod:`medfed.delivery.bundle.networks`
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
data_hash         SHA-256 over the hashes of the data files and the hospital's patients
test_metrics      of this bundle's weights; ``null`` where they could not be measured
run_test_metrics  of the model as trained, before it was quantised for the bundle
quantization      what was done at export, with validation metrics before and after
training_config   the run's configuration, without the paths of its machine
commit, versions  of the code and its packages at training
================  ==================================================================================

The hashes of all files, these among them, are in ``configs/manifest.json``; version 1 had those of
the other files here, under ``hashes``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch

Plain = dict[str, Any]
METADATA = "configs/metadata.json"
FORMAT_VERSION = 2
_SCHEMA = (
    "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/"
    "meta_schema_20240725.json"
)
_INPUT = {
    "volumes": "one NIfTI file per patient, channels on the last axis, in the order below",
    "images": "one image per file: PNG, or NumPy arrays (channels, height, width) alike",
    "ct_patches": "one patch per file: NumPy arrays (channels, height, width[, depth]) in HU",
    "table": "CSV files with a header; one patient per row, empty cells are missing values",
}
_README = """\
# {task} model of {client}

Trained by {method} in a federation of hospitals; this is the model that is personal to {client}. \
Other hospitals have other models.

## How to run it
MONAI is enough (`pip install monai nibabel pillow fire`). In the bundle's folder:
```
python -m monai.bundle run --config_file configs/inference.json --dataset_dir /path/to/input \
--output_dir /path/to/output
```
The output folder then holds {result}. `scripts/decode.py` unpacks the weights.

## What it expects
Input: {expected}.

{inputs}: {channels}.

{notes}Output: {labels}.

## Test metrics{quantised}
Of patients of {client} that were kept out of training and selection.

| metric | value |
|---|---:|
{metrics}

## Size
{size}

## Intended use and limits
Research only. It is no medical device and must not be used for diagnosis or treatment. It was \
tested on patients of the same hospital alone; on scans of other scanners, protocols or groups of \
patients it may fail without notice.
"""


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
    named = {"segmentation": ("image", "segmentation"), "regression": ("array", "raw")}
    type_, format_ = named.get(facts["task"], ("probabilities", "classes"))
    image = {
        "type": "image" if facts["spatial_dims"] else "tuples",
        "format": "magnitude",
        "modality": "n/a",
        **_tensor(facts, facts["channels"], _shape(facts)),
    }
    pred = {
        "type": type_,
        "format": format_,
        **_tensor(facts, facts["labels"], _shape(facts) if segments else []),
    }
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
        "network_data_format": {"inputs": {"image": image}, "outputs": {"pred": pred}},
        "medfed": facts,
    }


def readme(facts: Mapping[str, Any]) -> str:
    """Writes the page for people.

    Args:
        facts: The part ``medfed`` of the metadata.

    Returns:
        Markdown.
    """
    source, task, own = facts["input"], facts["task"], facts["test_metrics"]
    files = source.get("files")
    expected = _INPUT[source["kind"]]
    if files:
        named = ", ".join(f"{n}: {' or '.join(files[n])}" for n in facts["channels"])
        expected = f"one folder per patient, with one NIfTI file per channel ({named})"
    table = "`predictions.csv`" if task == "regression" else "`probabilities.csv`"
    metrics = facts["run_test_metrics"] if own is None else own
    rows = (f"| {n} | {'undefined' if v is None else f'{v:.4f}'} |" for n, v in metrics.items())
    return _README.format(
        task=task.capitalize(),
        client=facts["client"],
        method=facts["method"],
        result="one mask per patient, on its own grid" if task == "segmentation" else table,
        expected=expected,
        inputs="Features" if source["kind"] == "table" else "Channels",
        channels=", ".join((not files and source.get("file_channels")) or facts["channels"]),
        notes="".join(f"{note}\n\n" for note in _notes(facts)),
        labels=", ".join(facts["labels"]),
        quantised=" before quantisation" if own is None else "",
        metrics="\n".join(rows),
        size=_size(facts),
    )


def input_size(facts: Mapping[str, Any]) -> list[int] | None:
    """Returns the window, image or patch that goes into the network; None where any size does.

    Example:
        >>> input_size({"patch_size": None, "input": {"patches": {"size": (32, 32)}}})
        [32, 32]
    """
    source = facts["input"]
    size = facts["patch_size"] or source.get("size") or source.get("patches", {}).get("size")
    return [int(s) for s in size] if size else None


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


def _notes(facts: Mapping[str, Any]) -> list[str]:
    absent = [n for n in facts["channels"] if n not in facts["present"]]
    notes = []
    if absent:
        notes.append(
            f"{facts['client']} was trained without {', '.join(absent)}. Their places must be "
            "there, and may hold zeros: whatever they hold is set to zero."
        )
    if facts["spacing"]:
        spacing = " x ".join(f"{s:.3g}" for s in facts["spacing"])
        notes.append(f"Spacing of the training data: {spacing} mm.")
    if facts["site"]:
        notes.append(
            "The training data went through a simulated scanner (`site` in the metadata); plain "
            "scans differ from them."
        )
    return notes


def _size(facts: Mapping[str, Any]) -> str:
    sizes, bits = facts["sizes"], sorted(set(facts["bits"].values()))
    if not bits:
        return f"`models/model.pt`: {sizes['packed']:,} bytes, single precision."
    return (
        f"{len(facts['bits'])} weight tensors have {' and '.join(map(str, bits))} bits per weight. "
        f"`models/model.pt`: {sizes['packed']:,} bytes, {sizes['fp32'] / sizes['packed']:.1f} "
        f"times less than in single precision ({sizes['fp32']:,}); no code of single weights could "
        f"take less than {sizes['entropy_bound']:,}."
    )
