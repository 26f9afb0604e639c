"""What the training loop keeps of its network: live tensors, where they lie, what a part trains."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from medfed.federation.client import Batch
from medfed.federation.tensors import Tensors


class Plan(NamedTuple):
    """What one ``update`` trains. It is looked up once, for a round asks for it at every client.

    Attributes:
        trained: The live parameters that it trains.
        fixed: All other live parameters.
        changing: The live entries that training may change: ``trained`` and their buffers.
        optimizer: The optimizer of ``trained``.
    """

    trained: Tensors
    fixed: list[Tensor]
    changing: Tensors
    optimizer: torch.optim.Optimizer


Place = tuple[dict[str, Any], str, Tensor | None]


def places(network: nn.Module) -> list[Place]:
    """Lists where a network keeps each of its tensors, to notice when it keeps another there."""
    return [
        (held, name, tensor)
        for module in network.modules()
        for held in (module._parameters, module._buffers)
        for name, tensor in held.items()
    ]


def gradient_of(tensor: Tensor) -> Tensor:
    """Returns a parameter's gradient, zero where the loss does not depend on it."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Moves the tensors of a batch, without waiting where the device allows it."""
    if device.type == "cpu":
        return batch
    return {
        k: v.to(device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in batch.items()
    }
