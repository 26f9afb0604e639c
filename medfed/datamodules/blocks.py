"""Samples of a client, wherever they lie: in memory, on disk, or drawn when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

Batch = dict[str, Tensor]


class Rows(Protocol):
    """Samples that need not lie in memory, such as those of a cache on disk."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, ...), as of a tensor."""
        ...

    def take(self, index: Tensor) -> Tensor:
        """Returns the samples (B, ...) with the given numbers (B,) int64, as a CPU tensor."""
        ...

    def some(self, index: Tensor) -> Rows:
        """Returns those with the given numbers (n,) int64 alone, still not in memory."""
        ...


class BatchSource(Protocol):
    """Makes the batches of an epoch elsewhere, the same ones as `ClientData.train_batch`."""

    def batches(self, client: str, seed: int, order: Sequence[Tensor]) -> Iterator[Batch]:
        """Yields the batches of the samples (B,) that `order` has for each."""
        ...


Block = Mapping[str, Tensor | Rows]


class Draws(Protocol):
    """Training samples that are drawn anew for every epoch."""

    def block(self, seed: int) -> Block:
        """Returns an epoch's samples, as many as `ClientData.train` has."""
        ...

    def some(self, cases: Sequence[int]) -> Draws:
        """Returns those of some patients alone."""
        ...


def gather(values: Tensor | Rows, index: Tensor) -> Tensor:
    """Picks samples; on the CPU on one thread, by NumPy where PyTorch has more.

    A batch is about a megabyte: starting PyTorch's threads for it costs more than copying it, and
    on a busy machine thirty times as much.

    Args:
        values: (N, ...), a tensor or `Rows`.
        index: (B,) int64, best on the same device.

    Returns:
        (B, ...), a copy.

    Example:
        >>> gather(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([2, 0])).tolist()
        [[3.0], [1.0]]
    """
    if not isinstance(values, Tensor):
        return values.take(index.cpu())
    if values.device.type != "cpu" or torch.get_num_threads() == 1:
        return values.index_select(0, index.to(values.device))
    return torch.from_numpy(values.numpy().take(index.cpu().numpy(), axis=0))


def consecutive(values: Tensor | Rows, index: Tensor) -> Tensor:
    """Picks samples that stand in a row: a view where they are a tensor."""
    if isinstance(values, Tensor):
        return values[int(index[0]) : int(index[-1]) + 1]
    return values.take(index)
