"""How an optimizer steps: over all tensors together, where that is faster and changes no result.

Plain SGD over small tensors steps here, without what PyTorch does around it. PyTorch's own step
records itself for profilers, groups tensors by device and checks its options, which takes longer
than the step of a small network. The arithmetic here is the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

# Optimizers whose steps over many tensors together equal those one by one, bit for bit.
_EITHER_WAY = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW),
    *(torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adamax),
)
_SMALL = 2**16
_OTHER_RULES = ("weight_decay", "dampening", "nesterov", "maximize", "differentiable", "fused")


def faster(
    kind: type[torch.optim.Optimizer], device: str, size: float
) -> Literal["foreach", "fused"] | None:
    """Returns the option of an optimizer that makes its steps faster on a kind of device.

    On a CPU, steps over all tensors together need less Python, but large ones would fall out of the
    cache. On a GPU, one kernel takes the whole step. `size`: elements of a tensor in the mean.

    Example:
        >>> faster(torch.optim.SGD, "cpu", 100), faster(torch.optim.AdamW, "cuda", 1e6)
        ('foreach', 'fused')
        >>> faster(torch.optim.SGD, "cpu", 1e6), faster(torch.optim.Rprop, "cuda", 100)
        (None, None)
    """
    if device == "cpu":
        return "foreach" if kind in _EITHER_WAY and size < _SMALL else None
    return "fused" if kind in _EITHER_WAY[:3] and device == "cuda" else None


def step_of(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """Returns the optimizer's step, or its equal for plain SGD with ``foreach``.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
        >>> weight.grad = torch.tensor([2.0])
        >>> step_of(torch.optim.SGD([weight], lr=0.25, foreach=True))()
        >>> weight.tolist()
        [0.5]
    """
    plain = type(optimizer) is torch.optim.SGD and all(
        group["foreach"] and not any(group[rule] for rule in _OTHER_RULES)
        for group in optimizer.param_groups
    )
    return partial(_plain_step, optimizer) if plain else optimizer.step


def _plain_step(optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            moving = [p for p in group["params"] if p.grad is not None]
            along: list[Tensor] = [p.grad for p in moving]
            if not moving:
                continue
            buffers: list[Any] = []
            if momentum := group["momentum"]:
                buffers = [optimizer.state[p].get("momentum_buffer") for p in moving]
            if any(g.is_sparse for g in along) or any(b is None for b in buffers):
                optimizer.step()  # which begins the momentum, too
                return
            if momentum:
                torch._foreach_mul_(buffers, momentum)
                torch._foreach_add_(buffers, along)
                along = buffers
            torch._foreach_add_(moving, along, alpha=-group["lr"])
