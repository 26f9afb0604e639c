"""Clients that join after training, of which only a few patients are known."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from medfed.common.errors import ConfigError
from medfed.common.seeding import torch_rng
from medfed.datamodules.client_data import Block, ClientData, Rows, gather
from medfed.datamodules.patches import voxel_counts


def first_patients(client: ClientData, count: int, seed: int) -> ClientData:
    """Keeps a client's first training patients in an order drawn from the seed.

    The order does not depend on the count, so that fewer patients are among more. Patients without
    a training sample are passed over; the other splits stay as they are.

    Args:
        client: The client.
        count: How many training patients, 1 or more; all where there are fewer.
        seed: Seed of the order.

    Returns:
        A client of its own, with labels counted anew.

    Raises:
        ConfigError: If the count is below 1.
    """
    if count < 1:
        raise ConfigError(f"A client keeps 1 training patient or more, not {count}.")
    case = _dense(client.train["case"])
    with_samples = case.unique()
    order = torch.randperm(len(with_samples), generator=torch_rng(seed, "newcomer", client.id))
    kept = with_samples[order[:count]].sort().values
    index = torch.isin(case, kept).nonzero().flatten()
    block: Block = {name: _some(values, index) for name, values in client.train.items()}
    patients = [client.patients["train"][i] for i in kept.tolist()]
    return replace(
        client,
        train={**block, "case": torch.searchsorted(kept, case[index])},
        label_counts=_counts(client, block),
        patients={**client.patients, "train": patients},
        fresh=None if client.fresh is None else client.fresh.some(kept.tolist()),
    )


def _dense(values: Tensor | Rows) -> Tensor:
    return gather(values, torch.arange(values.shape[0]))


def _some(values: Tensor | Rows, index: Tensor) -> Tensor | Rows:
    return gather(values, index) if isinstance(values, Tensor) else values.some(index)


def _counts(client: ClientData, block: Block) -> Tensor:
    """As `ClientData.label_counts`, of other samples."""
    label = _dense(block["label"])
    if label.ndim > 1:
        return voxel_counts(label)
    if label.is_floating_point():  # outcomes without classes
        return torch.full_like(client.label_counts, len(label))
    return torch.bincount(label, minlength=len(client.label_counts)).float()
