"""Experimental: the training loop's steps on a GPU, as captured graphs if possible.

This code has not run on a GPU yet. It speeds up steps in three ways. A captured step uses fixed
addresses, so optimizers keep their state and step sizes in place, and each client's values are
filled in there. The device keeps training samples, or receives them before their step. Batches,
their order and their random numbers never depend on this.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from medfed.common.tensors import Tensors, forget, to_device
from medfed.federation.budget import restore_optimizer
from medfed.federation.client import Batch, ClientData, Penalty
from medfed.federation.engine.gpu.graphs import CudaGraphs, Graphs
from medfed.federation.engine.gradients import Gradients, WatchedForward
from medfed.federation.engine.network import Plan

_log = logging.getLogger(__name__)
TakeStep = Callable[[Plan, Sequence[Batch], Penalty | None, WatchedForward | None], Tensor]
FILLABLE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Optimizers for which a state of zeros is a fresh one (of SGD: where nothing is dampened)."""
SHARE = 0.25  # of the memory that is free when the first client trains, by default


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


@runtime_checkable
class Keepable(Protocol):
    """Data of a client that a device can keep."""

    @property
    def device_bytes(self) -> int | None:
        """What that takes; ``None`` where it cannot be."""

    def keep_on(self, device: torch.device) -> None:
        """Copies the training samples there, so that batches are made there."""


class Samples:
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


class GpuSteps:
    """Takes the steps of a network on one device.

    Args:
        device: Where it is.
        graphs: Captures steps; ``None``: they run one by one.
        gigabytes: Room for samples; see :class:`Samples`.

    Attributes:
        device: See there.
        graphs: See there.
        samples: Brings batches to the device.
    """

    def __init__(
        self, device: torch.device, graphs: Graphs | None = None, gigabytes: float | None = None
    ) -> None:
        self.device, self.graphs, self.samples = device, graphs, Samples(gigabytes)

    def clear(self) -> None:
        """Forgets all graphs, of a network that keeps its weights elsewhere from now on."""
        if self.graphs is not None:
            self.graphs.clear()

    def plan(
        self,
        trained: Tensors,
        fixed: list[Tensor],
        changing: Tensors,
        buffers: list[Tensor],
        optimizer: torch.optim.Optimizer,
    ) -> Plan:
        """Returns a plan of tensors that keep their places, where the optimizer can keep them."""
        reason = unfit(optimizer)
        if reason is not None and self.graphs is not None:
            self.graphs.decline(reason)
        kind = PlanInPlace if reason is None else Plan
        return kind(trained, fixed, changing, buffers, optimizer)

    def step(
        self,
        take: TakeStep,
        gradients: Gradients,
        network: nn.Module,
        plan: Plan,
        group: Sequence[Batch],
        penalty: Penalty | None,
        watch: WatchedForward | None,
    ) -> Tensor:
        """Takes one gradient step, by a captured graph if there is one; returns its loss.

        Args:
            take: Takes it; see :meth:`medfed.federation.engine.loop.LocalTrainer.step`.
            gradients: What counts its passes.
            network: The network itself.
            plan: What it trains.
            group: Its batches.
            penalty: A term added to the loss.
            watch: Sees the forward passes, and may add a term.
        """
        if self.graphs is None or not isinstance(plan, PlanInPlace):
            return take(plan, group, penalty, watch)
        if watch is not None or gradients.half:
            what = "a term that sees batches or outputs" if watch else "float16, which rescales,"
            self.graphs.decline(f"{what} needs Python in every step")
            return take(plan, group, penalty, watch)
        before = gradients.gradient_passes

        def step(batches: Sequence[Batch], term: Penalty | None) -> Tensor:
            return take(plan, batches, term, None)

        def changes() -> list[Tensor]:
            return [*plan.kept(), *network.buffers()]

        # A graph is of addresses: a plan of the same tensors is a plan of the same graphs.
        kind: Any = (gradients.precision, plan.places())
        loss = self.graphs.take(kind, group, penalty, step, changes)
        plan.clear()  # what a graph keeps of gradients is its own
        # Trials of a capture are no passes of the client, and a replay counts none by itself.
        gradients.gradient_passes = before + (0 if loss is None else len(group))
        return step(group, penalty) if loss is None else loss


@cache
def _say_that_it_is_experimental() -> None:
    _log.warning(
        "Training on a GPU is experimental: captured steps (local.graphs) and samples kept on the "
        "device (data.device_gb) have not run on one yet; local.graphs=false and data.device_gb=0 "
        "switch them off."
    )


def gpu_steps(device: torch.device, captures: bool, gigabytes: float | None) -> GpuSteps:
    """Returns what takes the steps of a network that has come to a GPU, and says so once.

    Args:
        device: The GPU.
        captures: Whether steps are captured as graphs.
        gigabytes: Room for samples; see :class:`Samples`.
    """
    _say_that_it_is_experimental()
    return GpuSteps(device, Graphs(CudaGraphs(device)) if captures else None, gigabytes)
