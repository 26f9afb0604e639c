"""Evaluates each client's model of a finished run on subsets of its channels."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from medfed.common.checks import check_known
from medfed.common.console import cell, say, wide_console
from medfed.common.errors import ConfigError
from medfed.common.figures import save_figures
from medfed.common.files import csv_text, write_text
from medfed.common.scores import label_of, mean_of_known, number, smaller_is_better
from medfed.common.tensors import to_device
from medfed.datamodules.augmentation import ChannelDropout
from medfed.datamodules.client_data import ClientData
from medfed.datamodules.readers.base import check_names
from medfed.federation.client import Batch
from medfed.federation.lightning.module import EvalSplit
from medfed.records.folder import RunFolder
from medfed.reports.subsets import heat_map
from medfed.reports.tables import Table
from medfed.run.experiment import reopen_selected

Subset = tuple[str, ...]


@dataclass(frozen=True)
class Subsets:
    """What was measured.

    Attributes:
        summary: Of the run, as ``summary.json`` holds it.
        split: The split.
        channels: The names of all channels.
        subsets: The requested subsets, in the order of tables.
        present: The channels of each client.
        metrics: By client and subset, without subsets with a channel that the client lacks.
    """

    summary: dict[str, Any]
    split: str
    channels: tuple[str, ...]
    subsets: tuple[Subset, ...]
    present: dict[str, Subset]
    metrics: dict[str, dict[Subset, dict[str, float]]]

    def values(self, metric: str) -> dict[str, list[float]]:
        """Returns a metric by client, a value per subset, NaN if there is none."""
        return {
            client: [by_subset.get(s, {}).get(metric, float("nan")) for s in self.subsets]
            for client, by_subset in self.metrics.items()
        }


MOST = 6
"""Largest number of channels of which all subsets are evaluated: 63 subsets."""
_log = logging.getLogger(__name__)


def measure_subsets(folder: Path, wanted: str | Sequence[str], split: str = "test") -> Subsets:
    """Evaluates every client's selected personal model on subsets of its channels.

    The other channels are zero after normalisation, as for a hospital that lacks them. Surface
    distances are left out, because they take long.

    Args:
        folder: The folder of a finished run.
        wanted: ``all``, or subsets such as ``["FLAIR", "FLAIR+T1w"]``.
        split: ``test``, ``val`` or ``train``.

    Raises:
        ConfigError: If the split or a channel is unknown, or all subsets would be too many.
        CheckpointError: If the run is unfinished, its checkpoint is torn or its data have changed.
    """
    check_known("split", split, get_args(EvalSplit))
    summary = RunFolder(folder).summary
    experiment = reopen_selected(folder)
    module, names = experiment.module, tuple(experiment.data.channel_names)
    subsets = find_subsets(wanted, names)
    clients = {c: experiment.data.clients[c] for c in summary["clients"]}
    planes = {c: len(d.channels) // len(names) for c, d in clients.items()}  # slices of a contrast
    present = {
        c: tuple(n for n, there in zip(names, d.channels[:: planes[c]], strict=True) if there)
        for c, d in clients.items()
    }
    held = {c: [s for s in subsets if set(s) <= set(channels)] for c, channels in present.items()}
    count = sum(map(len, held.values()))
    if not count:
        raise ConfigError(
            f"subsets={'+'.join(subsets[0])}: no client has all of these channels; name others."
        )
    _log.info("Evaluating %d subsets of %d channels, %d times.", len(subsets), len(names), count)
    metrics: dict[str, dict[Subset, dict[str, float]]] = {}
    for client, data in clients.items():
        module.local.model.load(module.federation.personal_model(client))
        metrics[client] = {}
        for subset in held[client]:
            keep = torch.tensor([n in subset for n in names]).repeat_interleave(planes[client])
            batches = (to_device(b, module.device) for b in without(data, split, keep))  # type: ignore[arg-type]
            first = next(batches, None)  # a split may have no case with all of these channels
            if first is not None:
                every = itertools.chain([first], batches)
                metrics[client][subset] = module.task.evaluate(every)
    return Subsets(summary, split, names, subsets, present, metrics)  # type: ignore[arg-type]


def find_subsets(wanted: str | Sequence[str], names: Subset) -> tuple[Subset, ...]:
    """Reads the key ``subsets``.

    Args:
        wanted: ``all``, or subsets whose channels are joined by ``+``.
        names: The channels.

    Returns:
        Subsets, each with its channels in the order of ``names``; ``all`` begins with the single
        channels.

    Raises:
        ConfigError: If a channel is unknown, or all subsets would be too many.

    Example:
        >>> find_subsets("all", ("FLAIR", "T1w"))
        (('FLAIR',), ('T1w',), ('FLAIR', 'T1w'))
        >>> find_subsets(["t1w+FLAIR"], ("FLAIR", "T1w"))
        (('FLAIR', 'T1w'),)
    """
    if wanted == "all":
        if len(names) > MOST:
            raise ConfigError(
                f"subsets=all: {len(names)} channels have {2 ** len(names) - 1} subsets, too many "
                f"to evaluate; name some, such as subsets=[{names[0]},{names[0]}+{names[1]}]."
            )
        sizes = range(1, len(names) + 1)
        return tuple(s for size in sizes for s in itertools.combinations(names, size))
    listed = [wanted] if isinstance(wanted, str) else [str(w) for w in wanted]
    if not listed:
        raise ConfigError("subsets is an empty list; name some, or write subsets=all.")
    chosen = (check_names("channel", text.split("+"), names) for text in listed)
    return tuple(dict.fromkeys(tuple(n for n in names if n in c) for c in chosen))


def without(client: ClientData, split: EvalSplit, keep: Tensor) -> Iterator[Batch]:
    """Yields a split's batches with all but some channels zero, rescaled as in training.

    Samples that lack one of these channels are left out.

    Args:
        client: The client.
        split: The split.
        keep: ``(C,)`` bool.
    """
    alter = client.channel_dropout or ChannelDropout()
    for batch in client.eval_batches(split):
        whole = batch["channels"][:, keep].all(1)
        if not whole.any():
            continue
        batch = {name: values[whole] for name, values in batch.items()}
        kept = batch["channels"] & keep
        yield {
            **batch,
            "image": alter.only(batch["image"], kept, batch["channels"]),
            "channels": kept,
        }


_FEW = 8  # clients with a column each


def shown_metrics(subsets: Subsets) -> list[str]:
    """Returns Dice, where the task has it, and the metric that selected the round."""
    known = next(m for by_subset in subsets.metrics.values() for m in by_subset.values())
    return list(dict.fromkeys(n for n in ("dice", subsets.summary["selection"][0]) if n in known))


def table_of(subsets: Subsets, metric: str) -> NDArray[np.float64]:
    """Returns a metric, a row per client and a last one of means, a column per subset."""
    values = np.array(list(subsets.values(metric).values()))
    return np.vstack([values, mean_of_known(values, 0)])


def print_subsets(subsets: Subsets, folder: Path, console: Console | None = None) -> None:
    """Prints Dice and the selecting metric for each subset and client."""
    console = console or wide_console()
    clients = list(subsets.metrics)
    for metric in shown_metrics(subsets):
        values = table_of(subsets, metric)
        shown, rows = clients if len(clients) <= _FEW else [], []
        for column, subset in enumerate(subsets.subsets):
            texts = ["" if np.isnan(v) else number(v) for v in values[: len(shown), column]]
            having = sum(subset in by_subset for by_subset in subsets.metrics.values())
            row = [*texts, number(values[-1, column]), f"{having} of {len(clients)}"]
            rows.append(["+".join(subset), *row])
        title = f"{subsets.split} {label_of(metric)} on subsets of the channels"
        run = f"{cell(subsets.summary['name'])}, {subsets.summary['algorithm']}"
        table = Table.of(["channels", *shown, "mean", "of"], rows, prose=(0,))
        console.print(table.printed(f"{run}: {title}"))
    say(
        console,
        "A client is measured on what it has; means are over the clients of the last column.",
        f"Written: {folder}/subsets_{subsets.split}.csv and pictures/subsets_{subsets.split}.png",
    )


def to_csv(subsets: Subsets) -> str:
    """Returns a line per client and subset: how many of its channels are missing, and metrics."""
    rows = [(c, s, m) for c, by_subset in subsets.metrics.items() for s, m in by_subset.items()]
    names = list(rows[0][2])
    return csv_text(
        ["client", "channels", "missing", *names],
        (
            [c, "+".join(s), len(subsets.present[c]) - len(s), *(m[n] for n in names)]
            for c, s, m in rows
        ),
    )


def write_subsets(subsets: Subsets, folder: Path) -> None:
    """Writes ``subsets_<split>.csv`` and ``pictures/subsets_<split>.png``."""
    run = RunFolder(folder)
    write_text(run.subsets_csv(subsets.split), to_csv(subsets))
    metric = shown_metrics(subsets)[0]
    values = table_of(subsets, metric)
    title = f"{subsets.split} {label_of(metric)} with some channels"
    rows, falls = [*subsets.metrics, "mean"], smaller_is_better(metric)
    figure = heat_map(
        values, rows, subsets.subsets, subsets.channels, title, falls=falls, mean=True
    )
    save_figures(run.pictures_folder, {f"subsets_{subsets.split}": figure})
