"""Steps as CUDA graphs: one call starts all kernels of forward, loss, backward, clipping and step.

The time of a small network's step is Python's, which a graph runs once. It repeats the kernels in
the same memory: batches are copied into its inputs, the optimizer's state stays in its place, and
weights are loaded in place anyway. A step size is part of a graph. Kernels and bits are those of
ordinary steps. Whether steps are graphs depends on what trains and on the shapes of batches alone,
so a resumed run has the graphs of an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from medfed.common.streams import generators_of, seeded
from medfed.common.tensors import Tensors, forget
from medfed.federation.budget import LocalBudget
from medfed.federation.client import Batch
from medfed.federation.engine.batches import on_gpu
from medfed.federation.engine.working_network import TrainableSet, WorkingNetwork
from medfed.federation.other_state import NOTHING, OTHER
from medfed.standalone.errors import first_line

if TYPE_CHECKING:
    from medfed.federation.engine.gradients import Gradients

_KINDS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
Recorded = tuple[Tensor, Callable[[], object]]  # the loss of a step, and what takes it
_Graph = tuple[Tensors, Recorded]  # with its inputs
_WARM_UP = 3  # steps before a capture, in which libraries choose and load kernels


def obstacle(
    how: Mapping[str, Any],
    budget: LocalBudget,
    optimizer: torch.optim.Optimizer,
    network: nn.Module,
    gradients: Gradients,
) -> str | None:
    """Names what keeps the steps of a call from being graphs; ``None`` if nothing does.

    Example:
        >>> from medfed.federation.engine.gradients import Gradients
        >>> layer = nn.Linear(1, 1)
        >>> sgd, gradients = torch.optim.SGD(layer.parameters()), Gradients(lambda batch: 0)
        >>> obstacle({"update": "all"}, LocalBudget(), sgd, layer, gradients)
        'the network is on no GPU'
    """
    other_rules = type(optimizer) not in _KINDS or any(
        group.get("dampening") or group["differentiable"] or isinstance(group["lr"], Tensor)
        for group in optimizer.param_groups
    )
    keeping = {
        "the network is on no GPU": not on_gpu(next(network.parameters()).device),
        "a function of the method": any(map(callable, how.values())),
        "local.accumulate": budget.accumulate > 1,
        "privacy.example": gradients.private is not None,
        "trainer.precision": gradients.half,  # in float16
        "local.compile": budget.compile,
        "the optimizer": other_rules,
        "dropout": any(isinstance(m, _DropoutNd) and m.p > 0 for m in network.modules()),
    }
    return next((name for name, obstructs in keeping.items() if obstructs), None)


def record(step: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> Recorded:
    """Returns the loss of a step that is recorded and not run, and what runs it."""
    for group in optimizer.param_groups:
        group["capturable"] = True  # which Adam asks for in a capture; fused steps ignore it
    vars(optimizer)["_warned_capturable_if_run_uncaptured"] = True
    graph = torch.cuda.CUDAGraph()
    # Another thread may make batches meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        loss = step()
    return loss, graph.replay


@dataclass(eq=False)
class GraphedSteps:
    """The steps of one set of tensors; a step of a full batch is a graph if it can be."""

    plan: TrainableSet
    model: WorkingNetwork
    gradients: Gradients
    step: Callable[[Sequence[Batch]], Tensor]  # takes an ordinary step of one batch in a list
    say: Callable[[str], None]  # gets the reason why steps are no graphs
    _graphs: dict[tuple[Any, ...], _Graph] = field(default_factory=dict)  # by a batch's shapes
    _when: tuple[Any, ...] = ()
    _state: dict[Any, dict[str, Tensor]] = field(default_factory=dict)  # the optimizer's
    _refused: bool = False

    def begin(self) -> None:
        """Prepares the steps of a client, whose weights and optimizer have been restored."""
        rates = tuple(group["lr"] for group in self.plan.optimizer.param_groups)
        if (now := (rates, self.gradients.precision, self._addresses())) != self._when:
            self._graphs.clear()  # each holds the memory of a step
            self._when = now
        if self._state:
            self._put_state(dict(self.plan.optimizer.state))

    def __call__(self, group: Sequence[Batch]) -> Tensor:
        """Takes a step; returns the loss of its batch."""
        batch = group[0]
        plain = all(isinstance(t, Tensor) for t in batch.values())
        if self._refused or not plain or not self.gradients.is_full(batch):
            return self.step(group)
        shapes = tuple((name, t.shape, t.dtype) for name, t in batch.items())
        if (graph := self._graphs.get(shapes) or self._capture(batch)) is None:
            return self.step(group)
        self._graphs[shapes] = graph
        (inputs, (loss, replay)), passes = graph, self.gradients.gradient_passes
        for name, tensor in inputs.items():
            tensor.copy_(batch[name], non_blocking=True)
        replay()
        self.gradients.gradient_passes = passes + 1
        return loss.clone()

    def _capture(self, batch: Batch) -> _Graph | None:
        """Records a step, after others that leave no trace."""
        inputs = {name: tensor.clone() for name, tensor in batch.items()}
        passes, optimizer = self.gradients.gradient_passes, self.plan.optimizer
        weights = self.model.changed(self.model.entries)
        state = {p: {n: t.clone() for n, t in v.items()} for p, v in optimizer.state.items()}
        graph, reason = None, self._warm_up(inputs, weights[OTHER])
        self.model.load(weights)
        self._state = dict(optimizer.state)
        self._put_state(state)
        if reason is None:
            try:
                graph = inputs, record(lambda: self.step([inputs]), optimizer)
            except RuntimeError as error:
                reason = first_line(error)
        self.model.load(weights)  # a recorded step may have changed attributes
        self.gradients.gradient_passes = passes
        forget(self.plan.parameters)
        if reason is not None:
            self._refused = True
            self.say(reason)
        return graph

    def _warm_up(self, inputs: Tensors, other: Tensor) -> str | None:
        """Takes steps; returns what keeps them from being graphs."""
        device, cuda = self.model.device, self.model.device.type == "cuda"
        side: Any = torch.cuda.stream(torch.cuda.Stream(device)) if cuda else nullcontext()
        with seeded(0, device), side:
            streams = _streams(device)
            for _ in range(_WARM_UP):
                self.step([inputs])
            draws = not torch.equal(_streams(device), streams)
        if draws:
            return "they draw random numbers"
        now = self.model.other.packed()
        before, after = (self.model.other.by_name(packed)[1] for packed in (other, now))
        unchanged = torch.equal(*(NOTHING if rest is None else rest for rest in (before, after)))
        unchanged = unchanged and self._addresses() == self._when[-1]
        return None if unchanged else "the network changes more than tensors in place"

    def _put_state(self, values: Mapping[Any, Mapping[str, Tensor]]) -> None:
        for parameter, fields in self._state.items():
            for name, tensor in fields.items():
                # -0 + x is x, also of zeros: the first momentum is the gradient itself.
                nothing = tensor.new_full((), -0.0 if name == "momentum_buffer" else 0.0)
                tensor.copy_(values.get(parameter, {}).get(name, nothing))
        self.plan.optimizer.state.update(self._state)

    def _addresses(self) -> tuple[int, ...]:
        network = self.model.network
        return tuple(t.data_ptr() for t in chain(network.parameters(), network.buffers()))


def _streams(device: torch.device) -> Tensor:
    """Returns the states of random numbers, once the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return torch.cat([generator.get_state() for generator in generators_of(device)])
