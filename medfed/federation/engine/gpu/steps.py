"""Experimental: the training loop's steps on a GPU, as captured graphs where they can be captured.

Beside the graphs it has training samples kept on the device, and optimizers whose state and step
sizes keep their places in memory. None of this has run on a GPU yet.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from medfed.common.tensors import Tensors
from medfed.federation.client import Batch, Penalty
from medfed.federation.engine.gpu.graphs import CudaGraphs, Graphs
from medfed.federation.engine.gpu.in_place import PlanInPlace, unfit
from medfed.federation.engine.gpu.samples import Samples
from medfed.federation.engine.gradients import Gradients, WatchedForward
from medfed.federation.engine.network import Plan

_log = logging.getLogger(__name__)


class Trainer(Protocol):
    """What is needed of :class:`medfed.federation.engine.loop.LocalTrainer`."""

    gradients: Gradients

    @property
    def network(self) -> nn.Module:
        """The network itself."""

    def step(
        self,
        plan: Plan,
        group: Sequence[Batch],
        penalty: Penalty | None,
        watch: WatchedForward | None,
    ) -> Tensor:
        """Takes one gradient step."""


class GpuSteps:
    """Takes the steps of a network on one device.

    Args:
        device: Where it is.
        graphs: Captures steps; ``None``: they run one by one.
        gigabytes: Room for samples; see :class:`medfed.federation.engine.gpu.samples.Samples`.

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
        trainer: Trainer,
        plan: Plan,
        group: Sequence[Batch],
        penalty: Penalty | None,
        watch: WatchedForward | None,
    ) -> Tensor:
        """Takes one gradient step; see :meth:`medfed.federation.engine.loop.LocalTrainer.step`."""
        loss = self._replayed(trainer, plan, group, penalty, watch)
        return trainer.step(plan, group, penalty, watch) if loss is None else loss

    def _replayed(
        self,
        trainer: Trainer,
        plan: Plan,
        group: Sequence[Batch],
        penalty: Penalty | None,
        watch: WatchedForward | None,
    ) -> Tensor | None:
        """Takes the step by a captured graph, if there is one, and returns its loss."""
        gradients = trainer.gradients
        if self.graphs is None or not isinstance(plan, PlanInPlace):
            return None
        if watch is not None or gradients.half:
            what = "a term that sees batches or outputs" if watch else "float16, which rescales,"
            self.graphs.decline(f"{what} needs Python in every step")
            return None
        before = gradients.gradient_passes

        def step(batches: Sequence[Batch], term: Penalty | None) -> Tensor:
            return trainer.step(plan, batches, term, None)

        def changes() -> list[Tensor]:
            return [*plan.kept(), *trainer.network.buffers()]

        # A graph is of addresses: a plan of the same tensors is a plan of the same graphs.
        kind: Any = (gradients.precision, plan.places())
        loss = self.graphs.take(kind, group, penalty, step, changes)
        plan.clear()  # what a graph keeps of gradients is its own
        # Trials of a capture are no passes of the client, and a replay counts none by itself.
        gradients.gradient_passes = before + (0 if loss is None else len(group))
        return loss


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
        gigabytes: Room for samples; see :class:`medfed.federation.engine.gpu.samples.Samples`.
    """
    _say_that_it_is_experimental()
    return GpuSteps(device, Graphs(CudaGraphs(device)) if captures else None, gigabytes)
