"""What a bundle says: ``configs/metadata.json``.

The metadata have MONAI's own entries, and under ``medfed`` all facts. The pages for people are made
of these, too (:mod:`medfed.delivery.bundle.readme`, :mod:`medfed.delivery.bundle.model_card`).

================  ==================================================================================
``medfed`` entry
================  ==================================================================================
format_version    5
task              ``segmentation``, ``classification``, ``risk`` or ``regression``
client, method    the hospital, and the algorithm that made its model
network           ``_target_`` and arguments, plain data; see
                  :mod:`medfed.delivery.bundle.network_descriptions`
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
                  exclusive, the first output is the background; ``null`` or missing: ``sigmoid``
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

The hashes of all files, these among them, are in ``configs/manifest.json``; version 1 had those of
the other files here, under ``hashes``. Before version 3 volumes were z-scored, but not resampled or
cropped, and regions might overlap. Before version 4 the project's own networks were the only ones,
and masks were kept whole. Before version 5 a regression's network answered the outcome itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch

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


def label_codes(regions: Mapping[str, Sequence[int]]) -> dict[str, int] | None:
    """Chooses the label value of every region, where the regions nest or are exclusive.

    The zone of a region is what none of the regions within it takes. Where each zone was exactly
    one label value of the training masks, it keeps that value, so that prediction and truth
    compare; otherwise the zones are numbered, from outside to inside where they nest.

    Args:
        regions: Label values of the training masks that make up every region.

    Returns:
        Value by region, an outer one before those within it; None where two regions overlap
        without nesting, or are the same.

    Example:
        >>> label_codes({"whole": [1, 2, 4], "core": [1, 4], "enhancing": [4]})  # BraTS
        {'whole': 2, 'core': 1, 'enhancing': 4}
        >>> label_codes({"enhancing": [3], "whole": [1, 2, 3]})
        {'whole': 1, 'enhancing': 2}
        >>> label_codes({"liver": [1], "tumour": [2]}), label_codes({"a": [1], "b": [2, 3]})
        ({'liver': 1, 'tumour': 2}, {'a': 1, 'b': 2})
        >>> label_codes({"a": [1, 2], "b": [2, 3]}) is None
        True
    """
    values = {name: set(found) for name, found in regions.items()}
    exclusive = sum(map(len, values.values())) == len(set().union(*values.values()))
    names = list(regions)
    if not exclusive:
        names.sort(key=lambda name: -len(values[name]))
    inner = [set() if exclusive else values[name] for name in names[1:]] + [set()]
    if any(not within < values[name] for name, within in zip(names, inner, strict=True)):
        return None
    zones = {n: sorted(values[n] - within) for n, within in zip(names, inner, strict=True)}
    if all(len(zone) == 1 for zone in zones.values()):
        return {name: int(zone[0]) for name, zone in zones.items()}
    return {name: number for number, name in enumerate(names, start=1)}


def map_codes(facts: Mapping[str, Any]) -> dict[str, int] | None:
    """Chooses the label values of the one map that a segmentation is written as.

    Regions that were decided one by one, and do not nest, may lie in each other where the training
    masks never did; that would be lost in one map.

    Args:
        facts: The part ``medfed`` of the metadata.

    Returns:
        See :func:`label_codes`; None where every region needs a mask of its own.

    Example:
        >>> regions = {"liver": [1], "tumour": [2]}
        >>> facts = {"labels": list(regions), "input": {"regions": regions}}
        >>> map_codes({**facts, "activation": "softmax"}), map_codes(facts)
        ({'liver': 1, 'tumour': 2}, None)
    """
    given = facts["input"].get("regions") or {}
    regions = {name: given.get(name, [1]) for name in facts["labels"]}
    codes = label_codes(regions)
    if facts.get("activation") == "softmax":
        return codes or {name: number for number, name in enumerate(regions, start=1)}
    shared = sum(map(len, regions.values())) > len(set().union(*regions.values()))
    return codes if shared or len(regions) == 1 else None


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
