"""What every client would get: counted, as a table for people and as CSV."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from medfed.common.console import wide_console
from medfed.common.files import csv_text
from medfed.common.names import cell
from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.client_data import Block, ClientData
from medfed.datamodules.scanner import UNCHANGED, Scanner
from medfed.datamodules.splits import SPLITS, Split

_COLUMNS = 6  # classes that have a column each; more stand in one
_NAMES = 4  # channels that are named each


class Count(NamedTuple):
    """What a client has in one split.

    Attributes:
        patients: Its patients.
        samples: Patches, rows or images; of an evaluation, slices or volumes.
        units: What `labels` are a part of: samples, or voxels.
        labels: Samples of each of K classes, or voxels of each of R regions.
    """

    patients: int
    samples: int
    units: int
    labels: tuple[int, ...]


@dataclass(frozen=True)
class ClientSummary:
    """One client, counted.

    Attributes:
        client: Its name.
        counts: What it has in each split.
        channels: The channels that it has.
        lacks: The channels that it has not.
        centres: Where its patients come from, as far as that is known.
        scanner: What its scanner changes; empty where it changes nothing.
        notes: What a person should know, such as ``one class``.
    """

    client: str
    counts: Mapping[Split, Count]
    channels: tuple[str, ...]
    lacks: tuple[str, ...]
    centres: tuple[str, ...]
    scanner: Mapping[str, Any]
    notes: tuple[str, ...]


def summarise_clients(data: FederatedDataModule) -> list[ClientSummary]:
    """Counts every client's patients, samples and labels, in all splits.

    Args:
        data: A data module that is set up. Blocks that stay on disk are read once.

    Returns:
        A summary per client, in the partition's order.
    """
    return [_summarise(data, client) for client in data.clients.values()]


def _summarise(data: FederatedDataModule, client: ClientData) -> ClientSummary:
    plan = data.plans[client.id]
    counts: dict[Split, Count] = {}
    for split in SPLITS:
        labels, samples, units = torch.zeros(data.num_classes, dtype=torch.int64), 0, 0
        for block in [client.train] if split == "train" else client.evaluation[split]:
            found, of = count_labels(block, data.num_classes)
            labels, samples, units = labels + found, samples + block["image"].shape[0], units + of
        counts[split] = Count(len(client.patients[split]), samples, units, tuple(labels.tolist()))
    has = list(zip(data.plan_names, plan.channels.tolist(), strict=True))
    held = {i for ids in plan.patients.values() for i in ids}
    centres = {data.patients[i].centre for i in held} - {None}
    regions = label_of(client.train).ndim > 1
    return ClientSummary(
        client=client.id,
        counts=counts,
        channels=tuple(name for name, present in has if present),
        lacks=tuple(name for name, present in has if not present),
        centres=tuple(sorted(str(c) for c in centres)),
        scanner=changes_of(plan.scanner),
        notes=tuple(_notes(counts, data.class_names, regions)),
    )


def count_labels(block: Block, num_classes: int) -> tuple[Tensor, int]:
    """Counts the labels of a block.

    Args:
        block: ``label`` is (N,) int64 for K classes, (N,) floats for an outcome, or
            (N, R, *spatial) for regions.
        num_classes: K or R.

    Returns:
        (K,) samples, (1,) samples with an outcome, or (R,) voxels, int64; and the number of all
        samples or voxels.

    Example:
        >>> count_labels({"label": torch.tensor([0, 2, 2])}, 3)
        (tensor([1, 0, 2]), 3)
        >>> count_labels({"label": torch.tensor([[[[0, 1], [1, 1]]]])}, 1)
        (tensor([3]), 4)
    """
    label = label_of(block)
    if label.ndim == 1 and label.is_floating_point():
        return torch.tensor([len(label)]), len(label)
    if label.ndim == 1:
        return torch.bincount(label, minlength=num_classes), len(label)
    return label.bool().transpose(0, 1).flatten(1).sum(dim=1), label[:, 0].numel()


def label_of(block: Block) -> Tensor:
    """Returns the labels of a block, read where they are not in memory."""
    label = block["label"]
    return label if isinstance(label, Tensor) else label.take(torch.arange(label.shape[0]))


def _notes(counts: Mapping[Split, Count], names: Sequence[str], regions: bool) -> Iterable[str]:
    if counts["train"].patients == 1:
        yield "trains on one patient"
    for split in ("val", "test"):
        if not counts[split].samples:
            yield f"no {split} data"
    present = [n for n, count in zip(names, counts["train"].labels, strict=True) if count]
    if regions and len(present) < len(names):
        yield f"no {', '.join(name for name in names if name not in present)} to train on"
    elif not regions and len(present) == 1 < len(names):
        yield f"only {present[0]}"


def to_csv(clients: Sequence[ClientSummary], class_names: Sequence[str]) -> str:
    """Writes a line per client and split.

    Args:
        clients: The summaries.
        class_names: Names of the classes or regions.

    Returns:
        The text of ``clients.csv``; labels are samples of classes, or voxels of regions.
    """
    columns = ("client", "split", "patients", "samples", "units")
    more = ("channels", "centres", "scanner", "notes")
    rows = []
    for c in clients:
        lists = [" ".join(c.channels), " ".join(c.centres)]
        shared = [*lists, json.dumps(dict(c.scanner)), "; ".join(c.notes)]
        rows += [[c.client, s, *n[:3], *n.labels, *shared] for s, n in c.counts.items()]
    return csv_text([*columns, *(f"label {name}" for name in class_names), *more], rows)


def print_clients(
    clients: Sequence[ClientSummary], class_names: Sequence[str], console: Console | None = None
) -> None:
    """Prints a line per client and the totals; labels are those of the training samples.

    Args:
        clients: The summaries.
        class_names: Names of the classes or regions.
        console: Where to; None is the terminal.
    """
    console = console or wide_console()
    table = Table(title="Clients (train / val / test; labels and channels: of training)")
    table.add_column("client", no_wrap=True)
    table.add_column("patients", justify="right", no_wrap=True)
    table.add_column("samples", justify="right", no_wrap=True)
    for name in class_names if len(class_names) <= _COLUMNS else ["labels"]:
        table.add_column(cell(name), justify="right")
    optional = {
        "centre": [_centres(c) for c in clients],
        "scanner": [changes_text(c.scanner) for c in clients],
        "note": [escape("; ".join(c.notes)) for c in clients],
    }
    shown = {title: cells for title, cells in optional.items() if any(cells)}
    for title in ("channels", *shown):
        table.add_column(title)
    for k, c in enumerate(clients):
        cells = [_channels(c), *(column[k] for column in shown.values())]
        table.add_row(cell(c.client), *_counts([c], class_names), *cells)
    table.add_section()
    table.add_row("all", *_counts(clients, class_names), "", *[""] * len(shown))
    console.print(table)


def _counts(clients: Sequence[ClientSummary], names: Sequence[str]) -> list[str]:
    """Patients and samples per split, and the labels of training, summed."""
    patients = " / ".join(f"{sum(c.counts[s].patients for c in clients):,}" for s in SPLITS)
    samples = " / ".join(f"{sum(c.counts[s].samples for c in clients):,}" for s in SPLITS)
    train = [c.counts["train"] for c in clients]
    sums = [sum(column) for column in zip(*(n.labels for n in train), strict=True)]
    units = sum(n.units for n in train)
    if units > sum(n.samples for n in train):  # voxels, of which people want the share
        return [patients, samples, *(f"{100 * count / units:.1f} %" for count in sums)]
    if len(names) <= _COLUMNS:
        return [patients, samples, *(f"{count:,}" for count in sums)]
    present = [f"{name}: {count:,}" for name, count in zip(names, sums, strict=True) if count]
    return [patients, samples, escape(", ".join(present))]


def _channels(client: ClientSummary) -> str:
    count = len(client.channels) + len(client.lacks)
    if count <= _NAMES:
        return escape(", ".join(client.channels))
    lacks = f", lacks {', '.join(client.lacks)}" if client.lacks else ""
    return escape(f"{len(client.channels)} of {count}{lacks}")


def _centres(client: ClientSummary) -> str:
    if client.centres == (client.client,):
        return ""
    many = len(client.centres) > 2
    return f"{len(client.centres)} centres" if many else ", ".join(map(cell, client.centres))


def changes_of(scanner: Scanner | None) -> dict[str, Any]:
    """Returns the settings of a scanner that change images."""
    settings = {} if scanner is None else scanner.record()
    return {k: v for k, v in settings.items() if k in UNCHANGED and v != UNCHANGED[k]}


def changes_text(changes: Mapping[str, float]) -> str:
    """Writes what a scanner changes.

    Example:
        >>> changes_text({"gamma": 1.3, "noise": 0.125})
        'gamma 1.3, noise 0.12'
    """
    return ", ".join(f"{name} {value:.2g}" for name, value in changes.items())
