"""What configs/inference.json calls: inputs through the network, results to files."""

import csv
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from monai.data import decollate_batch
from torch import Tensor, nn

Batch = Mapping[str, Any]


@torch.no_grad()
def segment(
    loader: Iterable[Batch],
    network: nn.Module,
    inferer: Callable[[Tensor, nn.Module], Tensor],
    postprocessing: Callable[[Any], Any],
    present: Sequence[int],
    slices: bool,
    exclusive: bool,
    neighbours: Callable[[Tensor], Tensor],
) -> None:
    """Segments volumes (1, C, H, W, D) and hands ``pred`` to the postprocessing.

    That is the logits less those of `background`, so that 0 means background wherever an image is
    padded. Channels that this hospital was trained without are set to zero. A model of slices sees
    those that hold anything at all, with their `neighbours` as channels; the others are
    background. Results are named after the case.
    """
    device = next(network.parameters()).device
    for batch in loader:
        image = torch.as_tensor(batch["image"]).as_subclass(Tensor).to(device)
        mask = torch.tensor(present, device=device, dtype=image.dtype)
        seen = neighbours((image * mask.reshape(1, -1, 1, 1, 1))[0])[None]
        logits = inferer(seen, network)
        if slices:
            filled = (image != 0).any(dim=1, keepdim=True).any(dim=2, keepdim=True)
            outside = 10 * background(logits.shape[1], exclusive).to(device)
            logits = torch.where(filled.any(dim=3, keepdim=True), logits, outside)
        pred = logits.cpu() - background(logits.shape[1], exclusive)
        for item in decollate_batch({**batch, "pred": pred}):
            item["image"].meta["filename_or_obj"] = f"{item['name']}.nii.gz"
            postprocessing(item)


def background(count: int, exclusive: bool) -> Tensor:
    """Logits (count, 1, 1, 1) of what is certainly background, which may be a class of its own."""
    logits = torch.full((count, 1, 1, 1), -10.0)
    if exclusive:
        logits[0] = 10.0
    return logits


@torch.no_grad()
def classify(
    loader: Iterable[Batch],
    network: nn.Module,
    present: Sequence[int],
    labels: Sequence[str],
    path: str,
) -> None:
    """Writes the probability of every class, one row per input, as CSV."""
    _write_table(loader, lambda x: network(x).softmax(dim=1), network, present, labels, path)


@torch.no_grad()
def regress(
    loader: Iterable[Batch],
    network: nn.Module,
    present: Sequence[int],
    scale: Sequence[float],
    path: str,
) -> None:
    """Writes the predicted outcome in its unit, one row per input, as CSV."""
    mean, deviation = scale
    _write_table(
        loader, lambda x: network(x) * deviation + mean, network, present, ["prediction"], path
    )


def _write_table(
    loader: Iterable[Batch],
    compute: Callable[[Tensor], Tensor],
    network: nn.Module,
    present: Sequence[int],
    columns: Sequence[str],
    path: str,
) -> None:
    device = next(network.parameters()).device
    mask = torch.tensor(present, device=device)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["input", *map(inert, columns)])
        for batch in loader:
            image = torch.as_tensor(batch["image"]).as_subclass(Tensor).to(device)
            image = image * mask.reshape(1, -1, *[1] * (image.ndim - 2))
            for name, row in zip(batch["name"], compute(image).tolist(), strict=True):
                writer.writerow([inert(name), *row])


def find_files(folder: str, endings: Sequence[str], output: str) -> list[dict[str, str]]:
    """Finds all files below a folder but not in the output's, named by the path below it."""
    found, apart = [], os.path.realpath(output)
    if os.path.realpath(folder) == apart:
        raise ValueError(f"{output} is the folder of the input; choose another output_dir.")
    for place, _, names in os.walk(folder):
        if os.path.join(os.path.realpath(place), "").startswith(os.path.join(apart, "")):
            continue
        for name in names:
            if name.endswith(tuple(endings)) and not name.startswith("."):
                path = os.path.join(place, name)
                found.append({"image": path, "name": os.path.relpath(path, folder)})
    if not found:
        raise ValueError(f"{folder} has no files ending with {', '.join(endings)}.")
    return sorted(found, key=lambda file: file["name"])


def inert(text: str) -> str:
    """Puts a quote before a text that a spreadsheet would take for a formula; numbers are none."""
    try:
        float(text)
    except ValueError:
        return f"'{text}" if re.match(r"'*[=+\-@\t\r]", text) else text
    return text


_MISSING = ("", "?", "nan", "na", "n/a", "none", "null")


def read_table(
    tables: Sequence[Mapping[str, str]],
    features: Sequence[str],
    categories: Mapping[str, Sequence[str]],
    ranges: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Reads the rows of CSV files, features by the names in the header.

    Empty cells are missing (nan); of columns with categories the position counts, -1 where the
    category is unknown. What lies outside of the range in training is printed.
    """
    rows = []
    numeric = [name for name in features if name not in categories]
    for table in tables:
        with open(table["image"], newline="", encoding="utf-8-sig") as file:
            for number, row in enumerate(csv.DictReader(file), start=1):
                values = [_cell(row[name], categories.get(name)) for name in features]
                name = f"{table['name']}:{number}"
                rows.append({"name": name, "image": torch.tensor(values, dtype=torch.float64)})
                for column, low, high in zip(
                    numeric, ranges["lowest"] or (), ranges["highest"] or (), strict=False
                ):
                    value = values[features.index(column)]
                    if low is not None and (value < low or value > high):
                        print(f"{name}: {column} is {value:g}, in training {low:g} to {high:g}")
    return rows


def _cell(text: str, categories: Sequence[str] | None) -> float:
    """A number, or the position of a category."""
    text = text.strip()
    if text.lower() in _MISSING:
        return float("nan")
    if categories is None:
        return float(text)
    if text not in categories and re.fullmatch(r"[+-]?\d+\.0*", text):
        text = str(int(float(text)))  # 1.0 is the category 1
    return float(categories.index(text)) if text in categories else -1.0


class EncodeColumns:
    """Turns a row's columns (F,) into inputs (C,): numbers, categories, and what is missing.

    A column of numbers is one input, scaled; one of categories is an input per category, of two
    categories the second alone. Indicators of missing cells come last.
    """

    def __init__(
        self,
        features: Sequence[str],
        categories: Mapping[str, Sequence[str]],
        indicators: Sequence[str],
        scale: Callable[[Tensor], Tensor] | None,
    ) -> None:
        self.counts = [len(categories[n]) if n in categories else None for n in features]
        self.gaps = [list(features).index(name) for name in indicators]
        self.numeric = [at for at, count in enumerate(self.counts) if count is None]
        self.scale = scale

    def __call__(self, row: Tensor) -> Tensor:
        """Returns (C,) float32."""
        row = row.double()
        numbers = row[self.numeric]
        scaled = iter(numbers if self.scale is None else self.scale(numbers))
        inputs: list[Tensor] = []
        for value, count in zip(row, self.counts, strict=True):
            if count is None:
                inputs.append(next(scaled))
            else:
                inputs += [(value == code).double() for code in range(int(count == 2), count)]
        inputs += [row[at].isnan().double() for at in self.gaps]
        return torch.stack(inputs).float()


class Standardise:
    """Less the mean, divided by the deviation, within limits; missing cells are the median."""

    def __init__(
        self,
        low: Sequence[float],
        high: Sequence[float],
        median: Sequence[float],
        mean: Sequence[float],
        sd: Sequence[float],
    ) -> None:
        given = (low, high, median, mean, sd)
        self.given = [torch.tensor(values, dtype=torch.float64) for values in given]

    def __call__(self, numbers: Tensor) -> Tensor:
        """Returns (P,) of (P,)."""
        low, high, median, mean, sd = self.given
        within = torch.minimum(torch.maximum(numbers, low), high)
        return (torch.where(numbers.isnan(), median, within) - mean) / sd


class ScaleFeatures:
    """Scales numbers (P,) to [-1, 1] between minimum and maximum; missing ones become 0."""

    def __init__(self, minimum: Sequence[float], maximum: Sequence[float]) -> None:
        low = torch.tensor(minimum, dtype=torch.float64)
        width = torch.tensor(maximum, dtype=torch.float64) - low
        self.low, self.width = low, torch.where(width == 0, 1.0, width)

    def __call__(self, numbers: Tensor) -> Tensor:
        """Returns (P,) of (P,)."""
        scaled = 2 * (numbers - self.low) / self.width - 1
        return scaled.clamp(-1, 1).masked_fill(numbers.isnan(), 0.0)
