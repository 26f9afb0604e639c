"""The network that all clients of a process share in turn, and its trainable parts.

One network serves all clients and holds the weights that were loaded last. Its entries, the entries
that a kind of training changes, and their optimizer are determined once, so a client's turn costs
only the copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from medfed.common.tensors import Tensors, forget, select
from medfed.federation.budget import (
    ChannelsLast,
    OptimizerFactory,
    lay_out,
    ordinary,
    restore_optimizer,
)
from medfed.federation.split import (
    ParameterSplit,
    Update,
    float_entries,
    normalises_batches,
    parameter_groups,
    training_mode,
)

Rates = Mapping[Literal["shared", "personal"], float]

# Optimizers whose steps over many tensors together equal those one by one, bit for bit.
_EITHER_WAY = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW),
    *(torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adamax),
)
_SMALL = 2**16


@dataclass
class Plan:
    """The tensors that one kind of training trains, fixes and changes.

    Attributes:
        trained: The network's parameters that it trains.
        fixed: All its other parameters.
        changing: The entries that training may change: ``trained`` and their buffers.
        buffers: All running statistics.
        optimizer: The optimizer of ``trained``, in groups of shared and of personal parameters.
    """

    trained: Tensors
    fixed: list[Tensor]
    changing: Tensors
    buffers: list[Tensor]
    optimizer: torch.optim.Optimizer

    def __post_init__(self) -> None:
        self.parameters = list(self.trained.values())
        # Steps over all tensors together need less Python. Large ones would fall out of the cache.
        together = type(self.optimizer) in _EITHER_WAY
        together = together and all(t.device.type == "cpu" for t in self.parameters)
        size = sum(map(Tensor.numel, self.parameters))
        for options in self.optimizer.param_groups:
            chosen = options.get("foreach") is not None or options.get("fused")
            if together and size < _SMALL * len(self.parameters) and not chosen:
                options["foreach"] = True

    def begin(
        self, rate: float, rates: Rates | None = None, memory: Mapping[str, Tensor] | None = None
    ) -> None:
        """Puts gradients, step sizes and optimizer state in place for one client's training.

        Args:
            rate: The step size.
            rates: Step sizes of the parts instead.
            memory: The optimizer's state; nothing for a fresh one.
        """
        for group, needed in ((self.parameters, True), (self.fixed, False)):
            for parameter in group:
                # Checking is cheaper than setting, and mostly there is nothing to set.
                if parameter.requires_grad is not needed:
                    parameter.requires_grad_(needed)
        forget([*self.fixed, *self.parameters])
        for options in self.optimizer.param_groups:
            options["lr"] = rates[options["name"]] if rates else rate
        restore_optimizer(self.optimizer, memory or {})


class WorkingNetwork:
    """A network whose weights the training client overwrites.

    Args:
        network: The model; its entries are named as in ``split``.
        split: Shared and personal names.
        optimizer: Makes an optimizer of a list of parameters or groups of them.
        channels_last: The layout of convolutions; see :func:`medfed.federation.budget.lay_out`.

    Attributes:
        make_optimizer: See ``optimizer``.
        normalises: Whether a layer computes statistics of a batch.
    """

    def __init__(
        self,
        network: nn.Module,
        split: ParameterSplit,
        optimizer: OptimizerFactory,
        channels_last: ChannelsLast = False,
    ) -> None:
        self.network, self.split, self.make_optimizer = network, split, optimizer
        self.normalises = False
        self._channels_last = channels_last
        self._plans: dict[Update, Plan] = {}
        self._entries: Tensors = {}
        self._places: list[tuple[dict[str, Any], str, Tensor | None]] = []
        self._device: torch.device | None = None
        self._modules: list[nn.Module] = []
        self._first: nn.Parameter = next(network.parameters())

    @property
    def entries(self) -> Tensors:
        """The network's live parameters and float buffers, except those that never change."""
        # A network that is moved keeps its parameters but gets new buffers, also on the way back.
        moved = self._device != self.device
        if moved or not all(where.get(name) is t for where, name, t in self._places):
            self._look_over()
        return self._entries

    def _look_over(self) -> None:
        """Finds the network's tensors again; all plans of the old ones become invalid."""
        self._first = next(self.network.parameters())
        self._device = self.device
        # Before its tensors are listed: the layout gives each kernel other memory.
        lay_out(self.network, self._channels_last)
        every, base = float_entries(self.network), self.split.base
        self._entries = {n: t for n, t in every.items() if n not in base}
        self._modules = list(self.network.modules())
        # Where each module keeps its tensors, to notice when one is replaced.
        self._places = [
            (where, name, tensor)
            for module in self._modules
            for where in (module._parameters, module._buffers)
            for name, tensor in where.items()
        ]
        self.normalises = normalises_batches(self.network)
        self._plans.clear()

    @property
    def device(self) -> torch.device:
        """The network's device."""
        return self._first.device

    def initial(self) -> Tensors:
        """Returns a copy of the network's current entries."""
        return {n: ordinary(t) for n, t in self.entries.items()}

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copies all entries into the network."""
        entries = self.entries
        with torch.no_grad():
            torch._foreach_copy_(list(entries.values()), [weights[n] for n in entries])

    def training(self) -> AbstractContextManager[None]:
        """Sets training mode, with fixed statistics where they never change."""
        # The modules are known, and the walk through a deep network takes as long as a small step.
        return training_mode(self.network, self.split.policy, self.split.base, self._modules)

    def plan(self, update: Update) -> Plan:
        """Returns the plan of training one part, or both."""
        entries = self.entries
        if (plan := self._plans.get(update)) is None:
            trained = select(entries, self.split.parameters(update))
            outside = self.split.buffers.union(trained)
            plan = Plan(
                trained,
                [t for n, t in entries.items() if n not in outside],
                select(entries, self.split.names(update)),
                [entries[n] for n in self.split.buffers],
                self.make_optimizer(parameter_groups(trained, self.split.personal)),
            )
            # PyTorch's optimizers keep nothing but their state, which every call restores or
            # clears. A user's optimizer may keep more: each call of a client gets a new one.
            if type(plan.optimizer).__module__.startswith("torch.optim."):
                self._plans[update] = plan
        return plan
