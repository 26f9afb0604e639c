"""Clients with a label per sample, put together from their blocks: what such data have in common.

A label is a class, or an outcome that is a number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from medfed.datamodules.base import ClientPlan
from medfed.datamodules.client_data import SPLITS, Augment, Block, ClientData, Split
from medfed.datamodules.splits import warn_one_class
from medfed.errors import ConfigError, did_you_mean


def check_outcome(outcome: str) -> None:
    """Refuses an unknown kind of outcome.

    Raises:
        ConfigError: If it is neither ``classes`` nor ``continuous``.

    Example:
        >>> check_outcome("continuous")
    """
    known = ("classes", "continuous")
    if outcome not in known:
        raise ConfigError(
            f"Unknown data.outcome={outcome}{did_you_mean(outcome, known)}; choose "
            f"{' or '.join(known)}."
        )


def labelled_client(
    name: str,
    plan: ClientPlan,
    blocks: Mapping[Split, Block],
    num_classes: int,
    batch_size: int,
    eval_batch_size: int,
) -> ClientData:
    """Puts a client together of whatever its labels are; see the two functions below."""
    labels = blocks["train"]["label"]
    assert isinstance(labels, Tensor)
    if labels.is_floating_point():
        return outcome_client(name, plan, blocks, batch_size, eval_batch_size)
    return classified_client(name, plan, blocks, num_classes, batch_size, eval_batch_size)


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
    return _client(name, plan, blocks, counts, batch_size, eval_batch_size, augment)


def outcome_client(
    name: str,
    plan: ClientPlan,
    blocks: Mapping[Split, Block],
    batch_size: int,
    eval_batch_size: int,
) -> ClientData:
    """Puts a client together whose labels are outcomes; it has no classes to be counted.

    Args:
        name: The client's name.
        plan: What was decided about it.
        blocks: Its samples of every split; ``label`` (N,) float32 is a tensor.
        batch_size: Samples per training batch.
        eval_batch_size: Samples per evaluation batch.

    Returns:
        The client; its ``label_counts`` are the number of its training samples.

    Raises:
        ConfigError: If the partition gives it an order of labels or proportions of classes.
        DataError: If there is no training sample.
    """
    if plan.label_order is not None or plan.shares is not None:
        raise ConfigError(
            f"The partition changes the classes of client {name}, but its outcome is a number; "
            "choose partition=round_robin, quantity_skew or centre."
        )
    counts = torch.tensor([float(blocks["train"]["label"].shape[0])])
    return _client(name, plan, blocks, counts, batch_size, eval_batch_size, None)


def _client(
    name: str,
    plan: ClientPlan,
    blocks: Mapping[Split, Block],
    counts: Tensor,
    batch_size: int,
    eval_batch_size: int,
    augment: Augment | None,
) -> ClientData:
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
