"""A bundle's pages: ``docs/README.md`` says how to run it, ``docs/model_card.md`` what is recorded.

Every line comes from the metadata. Where nothing was recorded, the page says so. What runs the
bundle under MONAI is ``configs/inference.json``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from medfed.common.console import in_markdown
from medfed.delivery.bundle.metadata import further
from medfed.delivery.bundle.scripts.masks import map_codes
from medfed.delivery.bundle.source_code import short_hash
from medfed.delivery.bundle.weights import MODEL

_INPUT = {
    "volumes": "a scan, or a folder of scans (NIfTI; NRRD, MetaImage and folders of DICOM series "
    "need `pip install SimpleITK`), channels on the last axis, in the order below",
    "pictures": "a picture, or a folder of pictures: PNG, JPEG, TIFF or BMP",
    "images": "an image, or a folder of images: PNG, JPEG, TIFF or BMP, or NumPy arrays (channels, "
    "height, width)",
    "ct_patches": "a folder of CT scans (MetaImage) with `candidates.csv`: the columns seriesuid, "
    "coordX, coordY and coordZ",
    "table": "one CSV file with a header; one patient per row, empty cells are missing values",
}
_README = """\
# {task} model of {client}

A federation of hospitals trained this model with {method}. It is {client}'s own model; the other \
hospitals have other models.

## How to run it
It needs MONAI, not medfed (`pip install {packages}`). In the bundle's folder:
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
From patients of {client} that neither training nor selection used.

| metric | value |
|---|---:|
{metrics}

`docs/model_card.md` describes its data, tests and origin.

## Size
{size}

## Intended use and limits
For research only. This is not a medical device; do not use it for diagnosis or treatment. It was \
tested only on patients of the same hospital. On other scanners, protocols or groups of patients \
it may fail without notice.
"""


def readme(facts: Mapping[str, Any]) -> str:
    """Writes the page for people.

    Args:
        facts: The part ``medfed`` of the metadata.

    Returns:
        Markdown.
    """
    facts = in_markdown(facts)
    source, task, exported = facts["input"], facts["task"], facts["test_metrics"]
    files = source.get("files")
    expected = _INPUT[source["kind"]]
    if files:
        named = ", ".join(f"{n}: {' or '.join(files[n])}" for n in facts["channels"])
        expected = (
            f"one folder per patient, with one volume per channel ({named}): NIfTI; NRRD, "
            "MetaImage and folders of DICOM series need `pip install SimpleITK`"
        )
    result = "the masks of each scan, on its grid"
    if source["kind"] == "pictures":
        result = "PNG masks of the sizes of the pictures"
    metrics = facts["run_test_metrics"] if exported is None else exported
    rows = (f"| {n} | {'undefined' if v is None else f'{v:.4f}'} |" for n, v in metrics.items())
    return _README.format(
        task=task.capitalize(),
        client=facts["client"],
        method=facts["method"],
        result=result if task == "segmentation" else "`predictions.csv`",
        expected=expected,
        inputs="Features" if source["kind"] == "table" else "Channels",
        channels=", ".join((not files and source.get("file_channels")) or facts["channels"]),
        notes="".join(f"{note}\n\n" for note in _notes(facts)),
        labels=outputs(facts),
        code=_code(facts),
        packages=" ".join(["monai", "nibabel", "pillow", "fire", *sorted(further(facts))]),
        quantised=" before quantisation" if exported is None else "",
        metrics="\n".join(rows),
        size=_size(facts),
    )


def _code(facts: Mapping[str, Any]) -> str:
    """The section on the network's source code; empty where a library has the network."""
    code = facts.get("code")
    if not code:
        return ""
    listed = "\n".join(f"- `scripts/plugins/{n}`, SHA-256 {h}" for n, h in code["files"].items())
    return (
        "\n## Source code of the network\nThe network comes from no library. This bundle holds the "
        "source code with which it was trained. MONAI runs that code, so read it first. "
        f"`medfed predict` runs it only with `accept_code={short_hash(code)}`.\n\n{listed}\n"
    )


def _notes(facts: Mapping[str, Any]) -> list[str]:
    absent = [n for n in facts["channels"] if n not in facts["present"]]
    notes = []
    if absent:
        notes.append(
            f"{facts['client']} was trained without {', '.join(absent)}. The input must still have "
            "these channels; their values are replaced by zeros."
        )
    if facts["spacing"]:
        spacing = " x ".join(f"{s:.3g}" for s in facts["spacing"])
        notes.append(f"Spacing of the training data: {spacing} mm.")
    if facts["site"]:
        notes.append(
            "A simulated scanner changed the training data (`site` in the metadata); plain scans "
            "differ from them."
        )
    if scale := facts.get("outcome_scale"):
        notes.append(
            f"The network's output is in standard units: {facts['labels'][0]} is that output times "
            f"{scale[1]:g} plus {scale[0]:g}. `predictions.csv` already has the outcome's unit."
        )
    if parts := facts.get("largest_part"):
        notes.append(
            f"Only the largest connected part of {', '.join(parts)} is kept. The metrics below are "
            "those of the whole masks."
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


CARD = "docs/model_card.md"
_INTENDED = """\
Research on data like those below. This is not a medical device; do not use it for diagnosis or
treatment. It is not intended for data that it was never shown (below). Test it on your own patients
before you use it at another hospital."""


def model_card(facts: Mapping[str, Any]) -> str:
    """Writes the card.

    Args:
        facts: The part ``medfed`` of the metadata, see :mod:`medfed.delivery.bundle.metadata`.

    Returns:
        Markdown.
    """
    facts = in_markdown(facts)
    sections = {
        "Model": _model(facts),
        "Intended use": [_INTENDED],
        "Data": _data(facts),
        "Metrics": _metrics(facts),
        "Never shown": [f"- {line}" for line in never_shown(facts)],
        "Where it comes from": _provenance(facts),
    }
    title = f"# Model card: {facts['task']} model of {facts['client']}"
    parts = [title, *(f"## {name}\n\n" + "\n".join(lines) for name, lines in sections.items())]
    return "\n\n".join(parts) + "\n"


def never_shown(facts: Mapping[str, Any]) -> list[str]:
    """Lists what is known to lie outside of a model's training data.

    Args:
        facts: The part ``medfed`` of the metadata.

    Example:
        >>> facts = {"client": "A", "channels": ["T1", "T2"], "present": ["T1"], "slices": False,
        ...          "input": {"kind": "volumes"}, "spacing_range": [[1, 1, 2], [1, 1, 3]]}
        >>> for line in never_shown(facts):
        ...     print(line)
        Channels: T2 (their places are filled with zeros).
        Voxels below 1 × 1 × 2 mm or above 1 × 1 × 3 mm.
        Sizes of images: not recorded.
        Scanners: the data name none; all that A did not have.
    """
    card, source = facts.get("card") or {}, facts["input"]
    lines = []
    if absent := [n for n in facts["channels"] if n not in facts["present"]]:
        lines.append(f"Channels: {', '.join(absent)} (their places are filled with zeros).")
    if missing := card.get("missing"):
        lines.append(f"Classes without a training sample: {', '.join(missing)}.")
    if spacing := facts.get("spacing_range"):
        low, high = (" × ".join(f"{mm:.3g}" for mm in end) for end in spacing)
        lines.append(f"Voxels below {low} mm or above {high} mm.")
    if facts.get("slices"):
        lines.append("Axial slices without any voxel above zero: they are background.")
    lines += _inputs(facts)
    scanner = "the simulated one of `site` in the metadata" if facts.get("site") else None
    others = f"any but {scanner}" if scanner else f"all that {facts['client']} did not have"
    if source["kind"] != "table":
        lines.append(f"Scanners: {'' if scanner else 'the data name none; '}{others}.")
    return lines


def _inputs(facts: Mapping[str, Any]) -> Iterable[str]:
    source, kind = facts["input"], facts["input"]["kind"]
    if kind == "images":
        yield f"Images of another size than {_by(source['size'])}, if they are not resized to it."
    elif kind == "ct_patches":
        yield f"Patches of another size than {_by(source['patches']['size'])} voxels."
    elif kind in ("volumes", "pictures"):
        yield "Sizes of images: not recorded."
    if (facts.get("normalization") or {}).get("name") == "minmax" and kind == "table":
        yield (
            "Values beyond the smallest and the largest of training, which are in "
            "`configs/metadata.json` to all digits: the scaling needs them."
        )
    numeric = [n for n in source.get("features", ()) if n not in (source.get("categories") or {})]
    ends = zip(numeric, source.get("lowest") or (), source.get("highest") or (), strict=False)
    if ranges := [f"{n} {lo:g} to {hi:g}" for n, lo, hi in ends if lo is not None]:
        yield f"Values outside of about: {'; '.join(ranges)}. Ends are rounded, of no patient."
    for name, texts in (source.get("categories") or {}).items():
        yield f"Categories of {name} other than {', '.join(texts)} (five patients or more)."


def _model(facts: Mapping[str, Any]) -> list[str]:
    card, bits = facts.get("card") or {}, sorted(set(facts["bits"].values()))
    network = facts["network"].get("network", facts["network"])
    packages = [f"{n} {v}" for n, v in (facts.get("packages") or {}).items()]
    source = (
        f", its source in the bundle (SHA-256 {facts['code']['hash']})" if facts.get("code") else ""
    )
    lines = [
        f"- Output: {outputs(facts)}.",
        f"- Network: `{network['_target_']}`"
        + (f" of {', '.join(packages)}" if packages else "")
        + f"{source}; all arguments are in `configs/metadata.json`.",
        f"- Method: {facts['method']}; this is the model of {facts['client']} only.",
    ]
    if card:
        chosen = "not recorded" if card["round"] is None else f"{card['round']} of {card['rounds']}"
        lines.append(f"- Round: {chosen}, of {card['hospitals']} hospitals; seed {card['seed']}.")
    stored = f"{' and '.join(map(str, bits))} bits" if bits else "single precision"
    lines.append(f"- Weights: {stored} (`models/model.pt`, {facts['sizes']['packed']:,} bytes).")
    if facts.get("largest_part"):
        lines.append(f"- Masks: only the largest part of {', '.join(facts['largest_part'])}.")
    return lines


def _data(facts: Mapping[str, Any]) -> list[str]:
    card = facts.get("card") or {}
    if not card:
        return ["Numbers of patients: not recorded."]
    counts = ", ".join(f"{n} for {_SPLITS[s]}" for s, n in card["patients"].items())
    lines = [f"- Hospital: {facts['client']}. Patients: {counts}."]
    if card["samples"] is not None:
        lines.append(f"- Samples of these patients: {card['samples']:,}.")
    if facts["input"]["kind"] == "volumes":
        lines.append(f"- Images: one scan of each patient, {len(facts['present'])} channels.")
    what = "Features" if facts["input"]["kind"] == "table" else "Channels"
    lines.append(f"- {what}: {', '.join(facts['present'])}.")
    lines += [f"- {note[:1].upper()}{note[1:]}." for note in card["notes"]]
    lines.append(
        "- Other hospitals' data influenced the parts of this model that the method shares. Those "
        "data stayed at their hospitals."
    )
    return lines


_SPLITS = {"train": "training", "val": "selection", "test": "the test below"}


def _metrics(facts: Mapping[str, Any]) -> list[str]:
    exported, trained = facts["test_metrics"], facts["run_test_metrics"]
    card = facts.get("card") or {}
    known = card.get("intervals") or {}
    ends, means = known.get("metrics", {}), card.get("means", {})
    quantised = bool(facts["bits"]) and exported != trained
    lines = [f"From patients of {facts['client']} that neither training nor selection used."]
    if facts["bits"] and exported is None:
        lines.append("The quantised weights in this bundle were not evaluated.")
    head = ["metric", "as trained", f"{known.get('level', 0.95):.0%} interval"]
    head += ["this bundle"] * quantised + ["mean over hospitals"] * bool(means)
    rows = [
        [name, _number(value), _interval(ends.get(name))]
        + [_number((exported or {}).get(name))] * quantised
        + [_number(means.get(name))] * bool(means)
        for name, value in trained.items()
    ]
    lines += ["", _row(head), _row(["---", *["---:"] * (len(head) - 1)]), *map(_row, rows), ""]
    if known:
        lines.append(
            f"Intervals: bootstrap over {known['patients']} test patients, {known['resamples']} "
            "resamples, of the model as trained. They do not cover other hospitals' patients."
        )
    if means:
        lines.append("The mean is over the hospitals' own models, each on its own patients.")
    if facts.get("largest_part"):
        lines.append("The metrics are those of the whole masks, before the largest part is taken.")
    return lines


def _provenance(facts: Mapping[str, Any]) -> list[str]:
    card = facts.get("card") or {}
    versions = ", ".join(f"{n} {v}" for n, v in facts["versions"].items() if isinstance(v, str))
    lines = [f"- Code: commit {facts['commit']}; {versions}."]
    lines.append(f"- Data files and this hospital's splits, SHA-256: {facts['data_hash']}")
    lines += [f"- {name}, SHA-256: {sha}" for name, sha in (card.get("hashes") or {}).items()]
    lines.append("- Hashes of this bundle's files, weights included: `configs/manifest.json`.")
    return lines


def _number(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.4f}"


def _interval(ends: Sequence[float | None] | None) -> str:
    if not ends or any(end is None for end in ends):
        return "not known"
    return f"{ends[0]:.4f} to {ends[1]:.4f}"


def _by(sizes: Iterable[int]) -> str:
    return " × ".join(map(str, sizes))


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def inference_config(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Builds the configuration that ``python -m monai.bundle run`` runs.

    Args:
        facts: The part ``medfed`` of the metadata, see :mod:`medfed.delivery.bundle.metadata`.

    Returns:
        ``configs/inference.json``, as JSON has it.
    """
    ct = facts["input"]["kind"] == "ct_patches"
    return {
        "imports": [
            *("$import json", "$import torch"),
            *("$from scripts.decode import load", "$from scripts.run import run as predict"),
        ],
        "bundle_root": ".",
        "dataset_dir": "$@bundle_root + '/input'",
        "output_dir": "$@bundle_root + '/eval'",
        "candidates": "$@dataset_dir + '/candidates.csv'" if ct else None,
        "spacing_tolerance": 0.25,
        "device": "$torch.device('cuda' if torch.cuda.is_available() else 'cpu')",
        "network_def": facts["network"],
        "network": f"$load(@network_def, @bundle_root + '/{MODEL}').to(@device)",
        "facts": "$json.load(open(@bundle_root + '/configs/metadata.json', encoding='utf-8'))"
        "['medfed']",
        "run": [
            "$predict(@network, @facts, @dataset_dir, @output_dir, @candidates, @spacing_tolerance)"
        ],
    }
