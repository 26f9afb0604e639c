"""What configs/inference.json calls: inputs through the network, results to files."""

import csv
import glob
import os
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
) -> None:
    """Segments volumes (1, C, H, W, D) and hands ``pred``, the logits, to the postprocessing.

    Channels that this hospital was trained without are set to zero. A model of slices sees those
    that hold anything at all; the others are background.
    """
    device = next(network.parameters()).device
    for batch in loader:
        image = torch.as_tensor(batch["image"]).as_subclass(Tensor).to(device)
        mask = torch.tensor(present, device=device, dtype=image.dtype)
        logits = inferer(image * mask.reshape(1, -1, 1, 1, 1), network)
        if slices:
            filled = (image != 0).any(dim=1, keepdim=True).any(dim=2, keepdim=True)
            logits = logits.masked_fill(~filled.any(dim=3, keepdim=True), -100.0)
        for item in decollate_batch({**batch, "pred": logits.cpu()}):
            postprocessing(item)


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
def regress(loader: Iterable[Batch], network: nn.Module, present: Sequence[int], path: str) -> None:
    """Writes the predicted outcome in its unit, one row per input, as CSV."""
    _write_table(loader, network, network, present, ["prediction"], path)


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
        writer.writerow(["input", *columns])
        for batch in loader:
            image = torch.as_tensor(batch["image"]).as_subclass(Tensor).to(device)
            image = image * mask.reshape(1, -1, *[1] * (image.ndim - 2))
            for name, row in zip(batch["name"], compute(image).tolist(), strict=True):
                writer.writerow([name, *row])


def find_cases(folder: str, patterns: Sequence[Sequence[str]]) -> list[list[str]]:
    """Finds one file per channel in each folder of a case: of its patterns, the first that fits."""
    cases = []
    for case in sorted(entry.path for entry in os.scandir(folder) if entry.is_dir()):
        found = [[sorted(glob.glob(os.path.join(case, p))) for p in names] for names in patterns]
        cases.append([next(files[0] for files in channel if files) for channel in found])
    return cases


def read_table(paths: Sequence[str], features: Sequence[str]) -> list[dict[str, Any]]:
    """Reads the rows of CSV files, features by the names in the header; empty cells are missing."""
    rows = []
    for path in paths:
        with open(path, newline="") as file:
            for number, row in enumerate(csv.DictReader(file), start=1):
                values = [float(row[name]) if row[name] else float("nan") for name in features]
                name = f"{os.path.basename(path)}:{number}"
                rows.append({"name": name, "image": torch.tensor(values, dtype=torch.float64)})
    return rows


class ScaleFeatures:
    """Scales features (F,) to [-1, 1] between minimum and maximum; missing ones become 0."""

    def __init__(
        self, minimum: Sequence[float], maximum: Sequence[float], missing_indicator: bool
    ) -> None:
        low = torch.tensor(minimum, dtype=torch.float64)
        width = torch.tensor(maximum, dtype=torch.float64) - low
        self.low, self.width = low, torch.where(width == 0, 1.0, width)
        self.missing_indicator = missing_indicator

    def __call__(self, features: Tensor) -> Tensor:
        """Returns (F,) float32, or (2F,) with 1 for what was missing."""
        scaled = 2 * (features.double() - self.low) / self.width - 1
        missing = features.isnan()
        filled = scaled.clamp(-1, 1).masked_fill(missing, 0.0)
        parts = [filled, missing.double()] if self.missing_indicator else [filled]
        return torch.cat(parts).float()
