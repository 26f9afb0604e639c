"""``docs/README.md`` of a bundle: how it is run, and what it expects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from medfed.delivery.bundle.metadata import further, map_codes
from medfed.delivery.bundle.source_code import short_hash

_INPUT = {
    "volumes": "one volume per patient (NIfTI; NRRD, MetaImage and folders of DICOM series need "
    "`pip install SimpleITK`), channels on the last axis, in the order below",
    "pictures": "one picture per file: PNG, JPEG, TIFF or BMP",
    "images": "one image per file: PNG, or NumPy arrays (channels, height, width) alike",
    "ct_patches": "one patch per file: NumPy arrays (channels, height, width[, depth]) in HU",
    "table": "CSV files with a header; one patient per row, empty cells are missing values",
}
_README = """\
# {task} model of {client}

Trained by {method} in a federation of hospitals; this is the model that is personal to {client}. \
Other hospitals have other models.

## How to run it
MONAI is enough (`pip install {packages}`). In the bundle's folder:
```
python -m monai.bundle run --config_file configs/inference.json --dataset_dir /path/to/input \
--output_dir /path/to/output
```
The output folder then holds {result}. `scripts/decode.py` unpacks the weights.

## What it expects
Input: {expected}.

{inputs}: {channels}.

{notes}Output: {labels}.
{code}
## Test metrics{quantised}
Of patients of {client} that were kept out of training and selection.

| metric | value |
|---|---:|
{metrics}

What is recorded of its data, tests and origin is in `docs/model_card.md`.

## Size
{size}

## Intended use and limits
Research only. It is no medical device and must not be used for diagnosis or treatment. It was \
tested on patients of the same hospital alone; on scans of other scanners, protocols or groups of \
patients it may fail without notice.
"""


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
        expected = (
            f"one folder per patient, with one volume per channel ({named}): NIfTI; NRRD, "
            "MetaImage and folders of DICOM series need `pip install SimpleITK`"
        )
    table = "`predictions.csv`" if task == "regression" else "`probabilities.csv`"
    result = "one mask (NIfTI) per patient, on its own grid"
    if source["kind"] == "pictures":
        result = "PNG masks of the pictures' own sizes"
    metrics = facts["run_test_metrics"] if own is None else own
    rows = (f"| {n} | {'undefined' if v is None else f'{v:.4f}'} |" for n, v in metrics.items())
    return _README.format(
        task=task.capitalize(),
        client=facts["client"],
        method=facts["method"],
        result=result if task == "segmentation" else table,
        expected=expected,
        inputs="Features" if source["kind"] == "table" else "Channels",
        channels=", ".join((not files and source.get("file_channels")) or facts["channels"]),
        notes="".join(f"{note}\n\n" for note in _notes(facts)),
        labels=outputs(facts),
        code=_code(facts),
        packages=" ".join(["monai", "nibabel", "pillow", "fire", *sorted(further(facts))]),
        quantised=" before quantisation" if own is None else "",
        metrics="\n".join(rows),
        size=_size(facts),
    )


def _code(facts: Mapping[str, Any]) -> str:
    """What is said of a network's own source."""
    code = facts.get("code")
    if not code:
        return ""
    listed = "\n".join(f"- `scripts/plugins/{n}`, SHA-256 {h}" for n, h in code["files"].items())
    return (
        "\n## Source code of the network\nThe network is no library's: whoever trained it wrote "
        "it, and it is in this bundle as it was then. MONAI runs it; read it before. "
        f"`medfed predict` runs it only with `accept_code={short_hash(code)}`.\n\n{listed}\n"
    )


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
    if scale := facts.get("outcome_scale"):
        notes.append(
            f"The network itself answers in standard units: {facts['labels'][0]} is its output "
            f"times {scale[1]:g} plus {scale[0]:g}, which `predictions.csv` already is."
        )
    if parts := facts.get("largest_part"):
        notes.append(
            f"Of {', '.join(parts)} only the largest connected part is kept; the metrics below are "
            "of the whole masks."
        )
    return notes


def outputs(facts: Mapping[str, Any]) -> str:
    """What the results hold: names, of a label map with their values."""
    if facts.get("activation") != "softmax":
        return ", ".join(facts["labels"])
    codes = map_codes(facts) or {}
    return "a label map: 0 background, " + ", ".join(f"{v} {name}" for name, v in codes.items())


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
