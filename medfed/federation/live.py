"""The live network that all clients of a process train, one after the other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn

from medfed.common.errors import ConfigError
from medfed.common.tensors import Tensors, select
from medfed.federation.budget import LocalBudget, OptimizerFactory
from medfed.federation.channels_last import lay_out, ordinary
from medfed.federation.client import Batch, ClientData
from medfed.federation.compiled import compiled
from medfed.federation.feed import Feed
from medfed.federation.gradients import Gradients
from medfed.federation.graphs import Graphs, graphs_for
from medfed.federation.plan import Plan, unfit
from medfed.federation.split import (
    ParameterSplit,
    Update,
    float_entries,
    normalises_batches,
    training_mode,
)

_log = logging.getLogger(__name__)
Part = Literal["shared", "personal"]
Rates = Mapping[Part, float]
PARTS: tuple[Part, ...] = ("shared", "personal")  # as in an update of all


class LiveNetwork(Gradients):
    """One network whose weights are overwritten, what of it is trained, and batches beside it.

    Args:
        network: The model; its entries are named as in ``split``.
        loss: Gives the scalar loss of a batch under ``network``.
        split: Shared and personal names.
        optimizer: Makes an optimizer of a list of parameters.
        budget: Accumulation, layout, compiling.

    Attributes:
        feed: Brings batches to the network's device.
        in_place: Whether optimizer state and step sizes keep their places in memory.
        graphs: Takes steps as captured graphs; ``None``: they run one by one.
    """

    def __init__(
        self,
        network: nn.Module,
        loss: Callable[[Batch], Tensor],
        split: ParameterSplit,
        optimizer: OptimizerFactory,
        budget: LocalBudget,
    ) -> None:
        super().__init__(loss)
        self.network = network
        self.split = split
        self.budget = budget
        self.make_optimizer = optimizer
        if budget.compile:
            self.quick = compiled(loss)
        self.feed = Feed()
        self.in_place = False
        self.forget()

    def forget(self) -> None:
        """Forgets all that is kept of the network, as after another one has taken its place."""
        self.graphs: Graphs | None = None
        self._plans: dict[tuple[str, ...], Plan] = {}
        self._entries: Tensors = {}
        self._held: list[tuple[dict[str, Any], str, Tensor | None]] = []
        self._entries_device: torch.device | None = None
        self._modules: list[nn.Module] = []
        self._first: nn.Parameter = next(self.network.parameters())
        self._normalises = False
        self._said = False

    @property
    def entries(self) -> Tensors:
        """The network's live parameters and float buffers, but those that never change."""
        # A network that is moved keeps its parameters but gets new buffers, also on the way back.
        moved = self._entries_device != self.device
        if moved or not all(where.get(name) is t for where, name, t in self._held):
            self._first = next(self.network.parameters())
            lay_out(self.network, self.budget.channels_last)
            found, base = float_entries(self.network), self.split.base
            self._entries = {n: t for n, t in found.items() if n not in base}
            # Where it keeps each of its tensors, to notice when it keeps another there.
            self._held = [
                (where, name, tensor)
                for module in self.network.modules()
                for where in (module._parameters, module._buffers)
                for name, tensor in where.items()
            ]
            self._entries_device = self.device
            self._modules = list(self.network.modules())
            self._normalises = normalises_batches(self.network)
            self._plans.clear()
            wanted = self.budget.graphs if self.quick is None else False  # a rival, not a part
            self.graphs = graphs_for(self.device, self.graphs, wanted)
        return self._entries

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return self._first.device

    def initial(self) -> Tensors:
        """Returns a copy of the network's present entries."""
        return {n: ordinary(t) for n, t in self.entries.items()}

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copies all entries into the network."""
        entries = self.entries
        with torch.no_grad():
            torch._foreach_copy_(list(entries.values()), [weights[n] for n in entries])

    def _mode(self) -> AbstractContextManager[None]:
        """Training, with whatever statistics never change."""
        return training_mode(self.network, self.split.policy, self.split.base, self._modules)

    def _prepare(
        self,
        update: Update,
        rate: float,
        rates: Rates | None = None,
        memory: Tensors | None = None,
    ) -> Plan:
        """Lets exactly the trained parameters require gradients and resets their optimizer."""
        entries, parts = self.entries, [p for p in PARTS if rates and update in (p, "all")]
        parts = [p for p in parts if self.split.parameters(p)]
        key = (update, *parts)
        if key not in self._plans:
            self._plans[key] = self._plan(entries, update, parts)
        plan = self._plans[key]
        if not type(plan.optimizer).__module__.startswith("torch.optim."):
            del self._plans[key]  # what it keeps beside its state is of one client's call alone
        self.begin()
        plan.begin([rates[p] for p in parts] if rates else [rate], memory)
        return plan

    def _plan(self, entries: Tensors, update: Update, parts: Sequence[Part]) -> Plan:
        trained = select(entries, self.split.parameters(update))
        outside = self.split.buffers.union(trained)
        groups = [
            {"params": list(select(entries, self.split.parameters(p)).values())} for p in parts
        ]
        optimizer = self.make_optimizer(groups or list(trained.values()))  # type: ignore[arg-type]
        fused = self.graphs is not None or self.device.type == "cuda"
        if fused and (reason := unfit(optimizer)) is not None:
            fused = False
            if self.graphs is not None:
                self.graphs.decline(reason)
        return Plan(
            trained,
            [t for n, t in entries.items() if n not in outside],
            select(entries, self.split.names(update)),
            [entries[n] for n in self.split.buffers],
            optimizer,
            self.in_place or fused,
            fused,
        )

    def _groups(self, data: ClientData, seed: int) -> Iterator[list[Batch]]:
        """Yields the batches of one step after the other, of one epoch: the last may be fewer."""
        batches = self._epoch(data, seed)
        while group := list(islice(batches, self.budget.accumulate)):
            yield group

    def _epoch(self, data: ClientData, seed: int) -> Iterator[Batch]:
        """Yields an epoch's batches, where they are needed.

        A last batch of one sample is passed over where BatchNorm has to make statistics of it.
        """
        lone = self.split.policy != "frozen" and self._normalises
        lone = lone and data.num_samples > data.batch_size > 1
        empty = True
        for batch in self.feed.batches(data, seed, self.device):
            if not (lone and len(next(iter(batch.values()))) == 1):
                empty = False
                yield batch
        if empty:
            raise ConfigError(f"Client {data.id} has no training batch.")
