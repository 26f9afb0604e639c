"""Layers that keep statistics of their batches, found by type and not by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase


@contextmanager
def training_mode(network: nn.Module, frozen_buffers: bool) -> Iterator[None]:
    """Puts a network in training mode, its running statistics fixed where they are frozen."""
    network.train()
    if frozen_buffers:
        for module in network.modules():
            if isinstance(module, _NormBase) and module.track_running_stats:
                module.eval()
    try:
        yield
    finally:
        if frozen_buffers:
            network.train()


def normalises_batches(network: nn.Module) -> bool:
    """Returns whether a layer makes statistics of a batch, which one sample does not give.

    Example:
        >>> normalises_batches(nn.BatchNorm1d(2)), normalises_batches(nn.LayerNorm(2))
        (True, False)
    """
    return any(isinstance(module, _BatchNorm) for module in network.modules())
