"""What configs/inference.json calls: finds files, hands them to the model, writes its answers."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.data import decollate_batch
from PIL import Image
from torch import Tensor, nn

from medfed.datamodules.tables.columns import Columns
from medfed.delivery.bundle.scripts.label_maps import label_map, map_codes
from medfed.delivery.bundle.scripts.predictor import (
    Predictor,
    channels_of,
    prepare,
    regions_of_picture,
)
from medfed.delivery.bundle.scripts.tables import inputs_of, unusual_cells

Facts = Mapping[str, Any]


def segment(
    loader: Iterable[Mapping[str, Any]],
    network: nn.Module,
    facts: Facts,
    postprocessing: Callable[[Any], Any],
) -> None:
    """Segments volumes (1, C, H, W, D) in RAS and hands ``pred`` to the postprocessing.

    That is a label map of exclusive regions, and otherwise a mask for each. Results are named after
    the case.
    """
    predictor = Predictor.of(network, facts)
    for batch in loader:
        (item,) = decollate_batch(batch)
        image = item["image"]
        voxels = image.as_tensor().float()
        # A volume per channel, or one that holds all of them.
        names = facts["channels"]
        if not facts["input"].get("files"):
            names = channels_of(item["name"], len(voxels), facts)
        seen = prepare(voxels, names, facts, image.pixdim.tolist())
        size = tuple(image.shape[1:])
        probabilities = predictor.regions(seen.image, seen.body, item["name"], seen.grid, size)
        masks = predictor.masks(probabilities)
        if facts.get("activation") == "softmax":
            inside = dict(zip(predictor.labels, masks, strict=True))
            masks = label_map(inside, map_codes(facts) or {})[None]
        item["pred"] = masks if masks.dtype == torch.int32 else masks.to(torch.uint8)
        image.meta["filename_or_obj"] = f"{item['name']}.nii.gz"
        postprocessing(item)


def segment_pictures(
    inputs: Sequence[Mapping[str, str]], network: nn.Module, facts: Facts, output: str
) -> None:
    """Segments pictures and writes PNG masks of their own sizes.

    A region has one, 0 and 255; exclusive classes share one, with the label values of training.
    """
    predictor = Predictor.of(network, facts)
    os.makedirs(output, exist_ok=True)
    for item in inputs:
        stem = os.path.splitext(item["name"])[0].replace(os.sep, "_")
        masks = predictor.masks(regions_of_picture(predictor, Path(item["image"])).full)
        inside = dict(zip(predictor.labels, masks, strict=True))
        pixels = {name: mask.numpy().astype(np.uint8) * 255 for name, mask in inside.items()}
        if facts.get("activation") == "softmax":
            codes = label_map(inside, map_codes(facts) or {}).numpy()
            pixels = {"pred": codes if codes.dtype == np.uint8 else codes.astype(np.uint16)}
        for name, values in pixels.items():
            Image.fromarray(values).save(os.path.join(output, f"{stem}_{name}.png"))


def answer_samples(
    loader: Iterable[Mapping[str, Any]], network: nn.Module, facts: Facts, path: str
) -> None:
    """Writes the probability of every class, or the outcome in its unit, one row per input."""
    predictor = Predictor.of(network, facts)
    present = predictor.present
    columns = ["prediction"] if facts["task"] == "regression" else predictor.labels
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["input", *map(inert, columns)])
        for batch in loader:
            image = torch.as_tensor(batch["image"]).as_subclass(Tensor)
            image = image * present.reshape(1, -1, *[1] * (image.ndim - 2))
            answers = predictor.classify(image, ", ".join(batch["name"][:1]))
            for name, row in zip(batch["name"], answers.tolist(), strict=True):
                writer.writerow([inert(name), *row])


def find_files(folder: str, endings: Sequence[str], output: str) -> list[dict[str, str]]:
    """Finds all files below a folder but not in the output's, named by the path below it."""
    files, left_out = [], os.path.realpath(output)
    if os.path.realpath(folder) == left_out:
        raise ValueError(f"{output} is the folder of the input; choose another output_dir.")
    for place, _, names in os.walk(folder):
        if os.path.join(os.path.realpath(place), "").startswith(os.path.join(left_out, "")):
            continue
        for name in names:
            if name.endswith(tuple(endings)) and not name.startswith("."):
                path = os.path.join(place, name)
                files.append({"image": path, "name": os.path.relpath(path, folder)})
    if not files:
        raise ValueError(f"{folder} has no files ending with {', '.join(endings)}.")
    return sorted(files, key=lambda file: file["name"])


def inert(text: str) -> str:
    """Puts a quote before a text that a spreadsheet would take for a formula; numbers are none."""
    try:
        float(text)
    except ValueError:
        return f"'{text}" if re.match(r"'*[=+\-@\t\r]", text) else text
    return text


_MISSING = ("", "?", "nan", "na", "n/a", "none", "null")


def read_table(tables: Sequence[Mapping[str, str]], facts: Facts) -> list[dict[str, Any]]:
    """Reads the rows of CSV files, features by the names in the header, as the network sees them.

    Empty cells are missing. What training has not seen the like of is printed.
    """
    rows = []
    columns = Columns.from_facts(facts["input"])
    for table in tables:
        with open(table["image"], newline="", encoding="utf-8-sig") as file:
            cells = [[row[name].strip() for name in columns.names] for row in csv.DictReader(file)]
        texts = {n: [row[columns.names.index(n)] for row in cells] for n in columns.categories}
        known = [columns.categories.get(name) for name in columns.names]
        pairs = ([_cell(t, c) for t, c in zip(row, known, strict=True)] for row in cells)
        values = np.array([*pairs], dtype=np.float64).reshape(-1, len(known))
        for number, said in unusual_cells(values, columns, facts, texts).items():
            print(f"{table['name']}:{number}: {'; '.join(said)}")
        for number, inputs in enumerate(inputs_of(values, columns, facts), start=1):
            rows.append({"name": f"{table['name']}:{number}", "image": torch.from_numpy(inputs)})
    return rows


def _cell(text: str, categories: Sequence[str] | None) -> float:
    """A number, or the position of a category; NaN is missing, -1 an unknown category."""
    if text.lower() in _MISSING:
        return float("nan")
    if categories is None:
        return float(text)
    if text not in categories and re.fullmatch(r"[+-]?\d+\.0*", text):
        text = str(int(float(text)))  # 1.0 is the category 1
    return float(categories.index(text)) if text in categories else -1.0
