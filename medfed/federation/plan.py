"""What one kind of local training works on: looked up once, used by every client of every round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medfed.common.tensors import Tensors
from medfed.federation.budget import restore_optimizer

FILLABLE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Optimizers for which a state of zeros is a fresh one (of SGD: where nothing is dampened)."""
_ALIKE = (*FILLABLE, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adamax)
_SMALL = 2**16


@dataclass
class Plan:
    """The live tensors that one ``update`` trains, keeps fixed and changes, and their optimizer.

    Attributes:
        trained: The live parameters that it trains.
        fixed: All other live parameters.
        changing: The live entries that training may change: ``trained`` and their buffers.
        buffers: All live running statistics.
        optimizer: The optimizer of ``trained``.
        in_place: Whether gradients, optimizer state and step sizes keep their places in memory from
            step to step and from client to client, as a captured step needs it. Gradients are then
            zeroed instead of dropped, fresh state is zeros, and step sizes are tensors.
    """

    trained: Tensors
    fixed: list[Tensor]
    changing: Tensors
    buffers: list[Tensor]
    optimizer: torch.optim.Optimizer
    in_place: bool = False

    def __post_init__(self) -> None:
        self.live = list(self.trained.values())
        # Equal to the bit, and less Python per step; large tensors are the cache's business.
        together = not self.in_place and type(self.optimizer) in _ALIKE
        together = together and all(t.device.type == "cpu" for t in self.live)
        together = together and sum(map(Tensor.numel, self.live)) < _SMALL * len(self.live)
        for options in self.optimizer.param_groups:
            if together and options.get("foreach") is None and not options.get("fused"):
                options["foreach"] = True
            if self.in_place:
                place = self.live[0].device  # single precision is what kernels of a GPU read
                exact = torch.float64 if place.type == "cpu" else torch.float32
                options["lr"] = torch.tensor(float(options["lr"]), dtype=exact, device=place)

    def begin(self, rates: Sequence[float], memory: Mapping[str, Tensor] | None) -> None:
        """Puts gradients, step sizes and optimizer state in place for one client's training.

        Args:
            rates: The step size of each group.
            memory: The optimizer's state; nothing for a fresh one.
        """
        for group, needed in ((self.live, True), (self.fixed, False)):
            for parameter in group:
                if parameter.requires_grad is not needed:
                    parameter.requires_grad_(needed)
        for parameter in self.fixed:
            parameter.grad = None
        self.clear()
        for options, size in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(options["lr"], Tensor):
                options["lr"].fill_(size)
            else:
                options["lr"] = size
        if memory:
            restore_optimizer(self.optimizer, memory, self.in_place)
        elif self.in_place and self._fillable:
            kept = [v for fields in self.optimizer.state.values() for v in fields.values()]
            if found := [v for v in kept if isinstance(v, Tensor)]:
                torch._foreach_zero_(found)
        else:
            self.optimizer.state.clear()

    def clear(self) -> None:
        """Forgets the gradients of the trained parameters."""
        forget(self.live, self.in_place)

    @property
    def _fillable(self) -> bool:
        groups = self.optimizer.param_groups
        return type(self.optimizer) in FILLABLE and not any(g.get("dampening") for g in groups)


def forget(tensors: Sequence[Tensor], in_place: bool = False) -> None:
    """Forgets the gradients of some parameters, or sets them to zero where they are.

    Example:
        >>> weight = torch.ones(2, requires_grad=True)
        >>> weight.sum().backward()
        >>> forget([weight], in_place=True)
        >>> weight.grad
        tensor([0., 0.])
    """
    found = [t.grad for t in tensors if t.grad is not None] if in_place else []
    if found:
        torch._foreach_zero_(found)
        return
    for tensor in tensors:
        tensor.grad = None
