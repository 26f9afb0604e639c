"""Samples with one label each, a class or an outcome, as one client holds them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from medfed.common.errors import ConfigError
from medfed.common.names import shown
from medfed.datamodules.client_data import Block
from medfed.datamodules.plans import ClientPlan
from medfed.datamodules.splits import SPLITS, Split

log = logging.getLogger("medfed.datamodules.base")


def labelled(
    name: str,
    plan: ClientPlan,
    blocks: Mapping[Split, Block],
    class_names: Sequence[str],
    balanced: bool = False,
) -> dict[str, Any]:
    """Puts the labels of one client under its own numbers, and counts those of training.

    A client with a label order of its own gets the classes under its own numbers, in all splits.
    One that trains on a single class is warned of.

    Args:
        name: The client's name.
        plan: What was decided about it.
        blocks: Its samples of every split; ``label`` is (N,), int64 or float32.
        class_names: Names of K classes.
        balanced: Whether classes are weighed by their training samples.

    Returns:
        ``train``, ``evaluation`` and ``label_counts`` of its `ClientData`. Outcomes are no classes:
        their counts are the number of training samples.

    Raises:
        ConfigError: If the partition gives outcomes an order or proportions of classes.
    """
    labels = {split: torch.as_tensor(block["label"]) for split, block in blocks.items()}
    if labels["train"].is_floating_point():
        if plan.label_order is not None or plan.shares is not None:
            raise ConfigError(
                f"The partition changes the classes of client {name}, but its outcome is a "
                "number; choose partition=round_robin, quantity_skew or centre."
            )
        counts = torch.tensor([float(len(labels["train"]))])
    else:
        if plan.label_order is not None:
            order = torch.tensor(plan.label_order)
            labels = {split: order[values] for split, values in labels.items()}
        counts = torch.bincount(labels["train"], minlength=len(class_names)).float()
        if int((counts > 0).sum()) < 2:
            log.warning("Client %s trains on a single class.", name)
        absent = [class_names[k] for k in (counts == 0).nonzero().flatten().tolist()]
        if balanced and absent:
            log.warning(
                "Client %s has no training sample of %s; balanced weights give 0 to it.",
                name, ", ".join(map(shown, absent)),
            )  # fmt: skip
    named = {s: {**blocks[s], "label": labels[s]} for s in SPLITS}
    evaluation = {s: [named[s]] if len(labels[s]) else [] for s in SPLITS[1:]}
    return {"train": named["train"], "evaluation": evaluation, "label_counts": counts}
