"""Clients that join after training: kept out of it, and later known by a few patients only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from medfed.datamodules.client_data import Block, ClientData, Rows, gather
from medfed.datamodules.patches import voxel_counts
from medfed.datamodules.seeding import torch_rng
from medfed.errors import ConfigError, did_you_mean


@dataclass(frozen=True, eq=False)
class Chosen:
    """Some of the samples of `Rows`, which may lie on disk.

    Attributes:
        rows: All samples (N, ...).
        index: (n,) int64, which of them count.
    """

    rows: Rows
    index: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """(n, ...)."""
        return (len(self.index), *self.rows.shape[1:])

    def take(self, index: Tensor) -> Tensor:
        """See `client_data.Rows.take`."""
        return self.rows.take(self.index[index])


def check_newcomers(newcomers: Sequence[str], clients: Sequence[str]) -> None:
    """Checks which clients are kept out of training.

    Args:
        newcomers: Their ids.
        clients: All clients of the partition.

    Raises:
        ConfigError: If one is unknown or named twice, or nobody is left to train.

    Example:
        >>> check_newcomers(["b"], ["a", "b"])
        >>> check_newcomers(["a", "b"], ["a", "b"])
        Traceback (most recent call last):
        ...
        medfed.errors.ConfigError: newcomers names all 2 clients, so that none is left to train; \
leave some out.
    """
    for name in newcomers:
        if name not in clients:
            raise ConfigError(
                f"newcomers names {name!r}, which is no client{did_you_mean(name, clients)}; the "
                f"clients are {', '.join(clients)}."
            )
    if len(set(newcomers)) < len(newcomers):
        raise ConfigError(f"newcomers names a client twice: {', '.join(newcomers)}.")
    if newcomers and len(newcomers) == len(clients):
        raise ConfigError(
            f"newcomers names all {len(clients)} clients, so that none is left to train; leave "
            "some out."
        )


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
    )


def _dense(values: Tensor | Rows) -> Tensor:
    return gather(values, torch.arange(values.shape[0]))


def _some(values: Tensor | Rows, index: Tensor) -> Tensor | Rows:
    return gather(values, index) if isinstance(values, Tensor) else Chosen(values, index)


def _counts(client: ClientData, block: Block) -> Tensor:
    """As `ClientData.label_counts`, of other samples."""
    label = _dense(block["label"])
    if label.ndim > 1:
        return voxel_counts(label)
    if label.is_floating_point():  # outcomes without classes
        return torch.full_like(client.label_counts, len(label))
    return torch.bincount(label, minlength=len(client.label_counts)).float()
