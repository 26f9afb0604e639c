"""Evaluates each client's model of a finished run on subsets of its channels."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from medfed.common.checks import check_known
from medfed.common.errors import ConfigError
from medfed.common.tensors import to_device
from medfed.datamodules.augmentation import ChannelDropout
from medfed.datamodules.client_data import ClientData
from medfed.datamodules.readers.base import check_names
from medfed.federation.client import Batch
from medfed.federation.lightning.module import EvalSplit
from medfed.records.evaluations import Subset, Subsets
from medfed.records.folder import RunFolder
from medfed.run.experiment import reopen_selected

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
