"""A client of a classification, put together from its blocks: what all such data have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from medfed.datamodules.base import ClientPlan
from medfed.datamodules.client_data import SPLITS, Augment, Block, ClientData, Split
from medfed.datamodules.splits import warn_one_class


def classified_client(
    name: str,
    plan: ClientPlan,
    blocks: Mapping[Split, Block],
    num_classes: int,
    batch_size: int,
    eval_batch_size: int,
    augment: Augment | None = None,
) -> ClientData:
    """Counts the labels, warns of a single class, and leaves out empty evaluation blocks.

    A client with a label order of its own gets the classes under its own numbers, in all splits.

    Args:
        name: The client's name.
        plan: What was decided about it.
        blocks: Its samples of every split; ``label`` (N,) int64 is a tensor.
        num_classes: K.
        batch_size: Samples per training batch.
        eval_batch_size: Samples per evaluation batch.
        augment: See `ClientData`.

    Returns:
        The client.

    Raises:
        DataError: If there is no training sample.
    """
    blocks = {split: _named(block, plan.label_order) for split, block in blocks.items()}
    labels = blocks["train"]["label"]
    assert isinstance(labels, Tensor)
    counts = torch.bincount(labels, minlength=num_classes).float()
    warn_one_class(name, counts)
    return ClientData(
        id=name,
        train=blocks["train"],
        evaluation={s: [blocks[s]] if blocks[s]["label"].shape[0] else [] for s in SPLITS[1:]},
        channels=plan.channels,
        label_counts=counts,
        patients={split: list(plan.patients[split]) for split in SPLITS},
        batch_size=batch_size,
        eval_batch_size=eval_batch_size,
        augment=augment,
    )


def _named(block: Block, order: Sequence[int] | None) -> Block:
    """The block with every label k replaced by order[k]."""
    labels = block["label"]
    assert isinstance(labels, Tensor)
    return block if order is None else {**block, "label": torch.tensor(order)[labels]}
