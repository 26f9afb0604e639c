"""``docs/README.md`` of a bundle: what it is, how to run it, and what it must not be used for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_INPUT = {
    "volumes": "one NIfTI file per patient, channels on the last axis, in the order below",
    "images": "one image per file: PNG, or NumPy arrays (channels, height, width) alike",
    "ct_patches": "one patch per file: NumPy arrays (channels, height, width[, depth]) in HU",
    "table": "CSV files with a header; one patient per row, empty cells are missing values",
}


def readme(facts: Mapping[str, Any]) -> str:
    """Writes the page for people.

    Args:
        facts: The part ``medfed`` of the metadata, all but the hashes.

    Returns:
        Markdown.
    """
    return "\n".join(
        [
            f"# {facts['task'].capitalize()} model of {facts['client']}",
            "",
            f"Trained by {facts['method']} in a federation of hospitals; this is the model that is "
            f"personal to {facts['client']}. Other hospitals have other models.",
            "",
            *_how_to_run(facts),
            *_expects(facts),
            *_metrics(facts),
            *_size(facts),
            "## Intended use and limits",
            "Research only. It is no medical device and must not be used for diagnosis or "
            "treatment. It was tested on patients of the same hospital alone; on scans of other "
            "scanners, protocols or groups of patients it may fail without notice.",
            "",
        ]
    )


def _how_to_run(facts: Mapping[str, Any]) -> list[str]:
    segments = facts["task"] == "segmentation"
    table = "predictions" if facts["task"] == "regression" else "probabilities"
    result = "one mask per patient, on its own grid" if segments else f"`{table}.csv`"
    return [
        "## How to run it",
        "MONAI is enough (`pip install monai nibabel pillow fire`). In the bundle's folder:",
        "```",
        "python -m monai.bundle run --config_file configs/inference.json "
        "--dataset_dir /path/to/input --output_dir /path/to/output",
        "```",
        f"The output folder then holds {result}. `scripts/decode.py` unpacks the weights.",
        "",
    ]


def _expects(facts: Mapping[str, Any]) -> list[str]:
    kind, files = facts["input"]["kind"], facts["input"].get("files")
    expected = _INPUT[kind]
    if files:
        named = ", ".join(f"{n}: {' or '.join(files[n])}" for n in facts["channels"])
        expected = f"one folder per patient, with one NIfTI file per channel ({named})"
    lines = ["## What it expects", f"Input: {expected}.", ""]
    names = facts["input"].get("file_channels") if not files else None
    channels = list(names or facts["channels"])
    word = "Features" if kind == "table" else "Channels"
    lines += [f"{word}: {', '.join(channels)}.", ""]
    absent = [n for n in facts["channels"] if n not in facts["present"]]
    if absent:
        lines += [
            f"{facts['client']} was trained without {', '.join(absent)}. Their places must be "
            "there, and may hold zeros: whatever they hold is set to zero.",
            "",
        ]
    if facts["spacing"]:
        lines += [f"Spacing of the training data: {_mm(facts['spacing'])}.", ""]
    if facts["site"]:
        lines += [
            "The training data went through a simulated scanner (`site` in the metadata); plain "
            "scans differ from them.",
            "",
        ]
    return [*lines, f"Output: {', '.join(facts['labels'])}.", ""]


def _metrics(facts: Mapping[str, Any]) -> list[str]:
    """The test metrics of these weights, or of those that they were made of."""
    own = facts["test_metrics"]
    metrics = own if own is not None else facts["run_test_metrics"]
    title = "## Test metrics" if own is not None else "## Test metrics before quantisation"
    rows = [f"| {n} | {'undefined' if v is None else f'{v:.4f}'} |" for n, v in metrics.items()]
    where = f"Of patients of {facts['client']} that were kept out of training and selection."
    return [title, where, "", "| metric | value |", "|---|---:|", *rows, ""]


def _size(facts: Mapping[str, Any]) -> list[str]:
    sizes, bits = facts["sizes"], sorted(set(facts["bits"].values()))
    if not bits:
        return ["## Size", f"`models/model.pt`: {sizes['packed']:,} bytes, single precision.", ""]
    named = " and ".join(map(str, bits))
    return [
        "## Size",
        f"{len(facts['bits'])} weight tensors have {named} bits per weight. `models/model.pt`: "
        f"{sizes['packed']:,} bytes, {sizes['fp32'] / sizes['packed']:.1f} times less than in "
        f"single precision ({sizes['fp32']:,}); no code of single weights could take less than "
        f"{sizes['entropy_bound']:,}.",
        "",
    ]


def _mm(spacing: list[float]) -> str:
    return " x ".join(f"{s:.3g}" for s in spacing) + " mm"
