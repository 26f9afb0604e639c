"""Experimental: optimizers whose state and step sizes keep their places in memory.

A captured step reads and writes fixed addresses. So what differs from client to client and from
round to round is filled in there, instead of being made anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from medfed.common.tensors import Tensors
from medfed.federation.budget import restore_optimizer
from medfed.federation.engine.gradients import forget
from medfed.federation.engine.network import Plan

FILLABLE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Optimizers for which a state of zeros is a fresh one (of SGD: where nothing is dampened)."""


class PlanInPlace(Plan):
    """A plan whose optimizer is a fused one, with step sizes in tensors and fresh state of zeros.

    Its optimizer is one that :func:`unfit` has nothing against.
    """

    def prepare(self) -> None:
        """Makes the optimizer's state and step sizes, once."""
        for options in self.optimizer.param_groups:
            place = self.parameters[0].device
            options["fused"] = True
            if "capturable" in options:
                options["capturable"] = place.type == "cuda"
            self.optimizer.state.update({p: _zeros(p, options) for p in options["params"]})
            # Single precision is what kernels of a GPU read; on a CPU nothing need be rounded.
            exact = torch.float64 if place.type == "cpu" else torch.float32
            options["lr"] = torch.tensor(float(options["lr"]), dtype=exact, device=place)

    def set_rate(self, options: dict[str, Any], rate: float) -> None:
        """Fills in the step size of a group."""
        options["lr"].fill_(rate)

    def restore(self, memory: Mapping[str, Tensor]) -> None:
        """Fills a state in."""
        restore_optimizer(self.optimizer, memory, in_place=True)

    def refresh(self) -> None:
        """Fills in zeros: a state without a memory."""
        state = [v for fields in self.optimizer.state.values() for v in fields.values()]
        if state:
            torch._foreach_zero_(state)

    def clear(self) -> None:
        """Forgets the gradients of the trained parameters."""
        forget(self.parameters)

    def places(self) -> tuple[int, ...]:
        """Returns where everything lies that steps read and keep; a graph is of these places."""
        return tuple(t.data_ptr() for t in self.kept())

    def kept(self) -> list[Tensor]:
        """Returns the trained parameters, and what the optimizer keeps of them and reads."""
        state = [v for fields in self.optimizer.state.values() for v in fields.values()]
        return [*self.parameters, *state, *(o["lr"] for o in self.optimizer.param_groups)]


def _zeros(parameter: Tensor, options: Mapping[str, Any]) -> Tensors:
    """The state before the first step, which optimizers make in it, each time somewhere else."""
    if "betas" not in options:
        names = ["momentum_buffer"] if options["momentum"] else []
        return {n: torch.zeros_like(parameter, requires_grad=False) for n in names}
    names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if options["amsgrad"] else [])]
    moments = {n: torch.zeros_like(parameter, requires_grad=False) for n in names}
    return {"step": torch.zeros((), device=parameter.device), **moments}


def unfit(optimizer: torch.optim.Optimizer) -> str | None:
    """Says in half a sentence why an optimizer's step cannot be captured; ``None`` where it can.

    That takes a fused kernel: it reads its step size in memory, where the other steps of SGD read
    it on the host. Source: torch/optim/sgd.py and aten/src/ATen/native/cuda/FusedSgdKernel.cu.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> unfit(torch.optim.Adam([weight])) is None
        True
        >>> unfit(torch.optim.Rprop([weight]))
        'Rprop has no fused step that reads its step size from memory'
    """
    if type(optimizer) not in FILLABLE:
        return f"{type(optimizer).__name__} has no fused step that reads its step size from memory"
    for options in optimizer.param_groups:
        if options["fused"] is False or options["foreach"] is not None:
            return "optimizer.fused or optimizer.foreach chooses another step than the fused one"
        if options["differentiable"]:
            return "optimizer.differentiable=true has no fused step"
        if options.get("momentum") and options.get("dampening"):
            return "the first step of SGD with dampening is unlike the others"
        on_gpu = [p.dtype for p in options["params"] if p.device.type == "cuda"]
        if torch.float64 in on_gpu:
            return "weights are in double precision, and a step size in memory in single"
    return None
