"""What one kind of local training works on: looked up once, used by every client of every round.

Batches where the network is: of samples that are kept there, or on their way before their step.

On the CPU nothing of this happens. Which batches there are, in which order, and what is drawn for
them never depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from medfed.common.tensors import Tensors, to_device
from medfed.federation.budget import restore_optimizer
from medfed.federation.client import Batch, ClientData

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
        in_place: Whether optimizer state and step sizes keep their places in memory from step to
            step and from client to client, as a captured step needs it. Fresh state is then zeros,
            and step sizes are tensors.
        fused: Whether the optimizer's step is one kernel, which reads its step size from memory.
    """

    trained: Tensors
    fixed: list[Tensor]
    changing: Tensors
    buffers: list[Tensor]
    optimizer: torch.optim.Optimizer
    in_place: bool = False
    fused: bool = False

    def __post_init__(self) -> None:
        self.live = list(self.trained.values())
        # Equal to the bit, and less Python per step; large tensors are the cache's business.
        together = not self.in_place and type(self.optimizer) in _ALIKE
        together = together and all(t.device.type == "cpu" for t in self.live)
        together = together and sum(map(Tensor.numel, self.live)) < _SMALL * len(self.live)
        for options in self.optimizer.param_groups:
            if together and options.get("foreach") is None and not options.get("fused"):
                options["foreach"] = True
            if self.fused:
                options["fused"] = True
                if "capturable" in options:
                    options["capturable"] = self.live[0].device.type == "cuda"
                self.optimizer.state.update({p: _zeros(p, options) for p in options["params"]})
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
        forget(self.live)

    def places(self) -> tuple[int, ...]:
        """Returns where everything lies that steps read and keep; a graph is of these places."""
        return tuple(t.data_ptr() for t in self.kept())

    def kept(self) -> list[Tensor]:
        """Returns the trained parameters, and what the optimizer keeps of them and reads."""
        state = [v for fields in self.optimizer.state.values() for v in fields.values()]
        rates = [options["lr"] for options in self.optimizer.param_groups]
        return [*self.live, *(t for t in [*state, *rates] if isinstance(t, Tensor))]

    @property
    def _fillable(self) -> bool:
        groups = self.optimizer.param_groups
        return type(self.optimizer) in FILLABLE and not any(g.get("dampening") for g in groups)


def _zeros(parameter: Tensor, options: Mapping[str, Any]) -> Tensors:
    """The state before the first step, which optimizers make in it, each time somewhere else."""
    if "betas" not in options:
        names = ["momentum_buffer"] if options["momentum"] else []
        return {n: torch.zeros_like(parameter, requires_grad=False) for n in names}
    names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if options["amsgrad"] else [])]
    moments = {n: torch.zeros_like(parameter, requires_grad=False) for n in names}
    return {"step": torch.zeros((), device=parameter.device), **moments}


def forget(tensors: Iterable[Tensor]) -> None:
    """Forgets the gradients of some parameters; a backward pass then writes and does not add.

    Example:
        >>> weight = torch.ones(2, requires_grad=True)
        >>> weight.grad = torch.ones(2)
        >>> forget([weight])
        >>> weight.grad is None
        True
    """
    for tensor in tensors:
        tensor.grad = None


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


SHARE = 0.25  # of the memory that is free when the first client trains, where nothing else is said


@runtime_checkable
class Keepable(Protocol):
    """Data of a client that a device can keep."""

    @property
    def device_bytes(self) -> int | None:
        """What that takes; ``None`` where it cannot be."""

    def keep_on(self, device: torch.device) -> None:
        """Copies the training samples there, so that batches are made there."""


class Feed:
    """Brings the batches of all clients of a process to a device.

    A client's samples are kept on the device from its first batch on, as long as there is room:
    the first clients to train have it. The batches of the others are copied from pinned memory on
    a stream of their own. That is early enough without a thread: a step is only queued when the
    next batch is asked for, which is made and copied while the device computes.

    Args:
        gigabytes: Room for samples, in GB; ``None``: a quarter of what is free at the first batch.

    Attributes:
        left: Bytes of that room that are left; ``None`` before the first batch.
    """

    def __init__(self, gigabytes: float | None = None) -> None:
        self.gigabytes = gigabytes
        self.left: float | None = None
        self._kept: set[int] = set()
        self._stream: torch.cuda.Stream | None = None

    def batches(self, data: ClientData, seed: int, device: torch.device) -> Iterator[Batch]:
        """Yields an epoch of a client's training batches on a device.

        Args:
            data: The client's data.
            seed: Of the epoch, see :meth:`medfed.federation.client.ClientData.train_batches`.
            device: Where the network is.
        """
        if device.type != "cuda":
            for batch in data.train_batches(seed):
                yield to_device(batch, device)
            return
        side = self._stream = self._stream or torch.cuda.Stream(device)
        with torch.cuda.stream(side):
            self.keep(data, device, lambda: torch.cuda.mem_get_info(device)[0])
        batches = iter(data.train_batches(seed))
        while True:
            # What alters samples on the device waits for this stream alone, never for the steps.
            with torch.cuda.stream(side):
                moved = to_device(next(batches, {}), device)
            if not moved:
                return
            steps = torch.cuda.current_stream(device)
            steps.wait_stream(side)
            for tensor in moved.values():
                if isinstance(tensor, Tensor):
                    tensor.record_stream(steps)
            yield moved

    def keep(self, data: ClientData, device: torch.device, free: Callable[[], int]) -> bool:
        """Keeps a client's samples on a device if they can be and there is room.

        Args:
            data: The client's data.
            device: The device.
            free: Gives the device's free memory in bytes.

        Returns:
            Whether they are there.
        """
        if id(data) in self._kept:
            return True
        if self.left is None:
            self.left = SHARE * free() if self.gigabytes is None else 1e9 * self.gigabytes
        size = data.device_bytes if isinstance(data, Keepable) else None
        if size is None or size > self.left:
            return False
        data.keep_on(device)  # type: ignore[attr-defined]
        self.left -= size
        self._kept.add(id(data))
        return True
