"""Steps as CUDA graphs: one call starts all kernels of forward, loss, backward, clipping and step.

The time of a small network's step is Python's, which a graph runs once. It repeats the kernels in
the same memory: batches are copied into its inputs, the optimizer's state stays in its place, and
weights are loaded in place anyway. A step size is part of a graph. Kernels and bits are those of
ordinary steps. Whether steps are graphs depends on what trains and on the shapes of batches alone,
so a resumed run has the graphs of an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from medfed.common.streams import seeded
from medfed.common.tensors import Tensors, forget
from medfed.federation.budget import LocalBudget
from medfed.federation.client import Batch
from medfed.federation.engine.gradients import Gradients, size_of
from medfed.federation.engine.working_network import TrainableSet, WorkingNetwork
from medfed.federation.other_state import NOTHING, OTHER
from medfed.standalone.errors import first_line

_KINDS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_WARM_UP = 3  # steps before a capture, in which libraries choose and load kernels


def obstacle(
    how: Mapping[str, Any],
    budget: LocalBudget,
    optimizer: torch.optim.Optimizer,
    network: nn.Module,
    private: bool = False,
    half: bool = False,
) -> str | None:
    """Names what keeps the steps of a call from being graphs; ``None`` if nothing does.

    Args:
        how: The method's options of training.
        budget: The run's.
        optimizer: Of what trains.
        network: The network.
        private: Whether noise protects patients.
        half: Whether gradients are in float16.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> sgd = torch.optim.SGD(layer.parameters())
        >>> obstacle({"update": "all"}, LocalBudget(), sgd, layer)
        >>> obstacle({"update": "all"}, LocalBudget(accumulate=2), sgd, layer)
        'local.accumulate'
    """
    dropout = any(isinstance(m, _DropoutNd) and m.p > 0 for m in network.modules())
    other_rules = type(optimizer) not in _KINDS or any(
        group.get("dampening") or group["differentiable"] or isinstance(group["lr"], Tensor)
        for group in optimizer.param_groups
    )
    reasons = {
        "a function of the method": any(map(callable, how.values())),
        "local.accumulate": budget.accumulate > 1,
        "privacy.example": private,
        "trainer.precision": half,
        "local.compile": budget.compile,
        "the optimizer": other_rules,
        "dropout": dropout,
    }
    return next((name for name, found in reasons.items() if found), None)


def record(
    step: Callable[[], Tensor], optimizer: torch.optim.Optimizer
) -> tuple[Tensor, Callable[[], object]]:
    """Returns the loss of a step that is recorded and not run, and what runs it."""
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True  # which Adam asks for in a capture, and fused steps ignore
    vars(optimizer)["_warned_capturable_if_run_uncaptured"] = True
    graph = torch.cuda.CUDAGraph()
    # Another thread may make batches meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        loss = step()
    return loss, graph.replay


class _Graph(NamedTuple):
    inputs: Tensors
    loss: Tensor
    replay: Callable[[], object]


class GraphedSteps:
    """The steps of one set of tensors; each step of a full batch is a graph, unless it cannot be.

    `step`: takes an ordinary step of one batch in a list, and returns its loss. `say`: gets the
    reason why steps are no graphs.
    """

    def __init__(
        self,
        plan: TrainableSet,
        model: WorkingNetwork,
        gradients: Gradients,
        step: Callable[[Sequence[Batch]], Tensor],
        say: Callable[[str], None],
    ) -> None:
        self.plan, self._model, self._gradients = plan, model, gradients
        self._step, self._say = step, say
        self._graphs: dict[tuple[Any, ...], _Graph] = {}  # by the shapes of a batch
        self._when: tuple[Any, ...] = ()
        self._state: dict[Any, dict[str, Tensor]] = {}  # the optimizer's, in its place
        self._refused = False

    def begin(self) -> None:
        """Prepares the steps of a client, whose weights and optimizer have been restored."""
        rates = tuple(group["lr"] for group in self.plan.optimizer.param_groups)
        if (now := (rates, self._gradients.precision, self._addresses())) != self._when:
            self._graphs.clear()  # each holds the memory of a step
            self._when = now
        if self._state:
            self._put_state(dict(self.plan.optimizer.state))

    def __call__(self, group: Sequence[Batch]) -> Tensor:
        """Takes a step; returns the loss of its batch."""
        batch = group[0]
        plain = all(isinstance(t, Tensor) for t in batch.values())
        if self._refused or not plain or size_of(batch) != self._gradients.full_size:
            return self._step(group)
        shapes = tuple((name, t.shape, t.dtype) for name, t in batch.items())
        if (graph := self._graphs.get(shapes) or self._capture(batch)) is None:
            return self._step(group)
        self._graphs[shapes] = graph
        for name, tensor in graph.inputs.items():
            tensor.copy_(batch[name], non_blocking=True)
        passes = self._gradients.gradient_passes
        graph.replay()
        self._gradients.gradient_passes = passes + 1
        return graph.loss.clone()

    def _capture(self, batch: Batch) -> _Graph | None:
        """Records a step, after others that leave no trace."""
        inputs = {name: tensor.clone() for name, tensor in batch.items()}
        passes, optimizer = self._gradients.gradient_passes, self.plan.optimizer
        weights = self._model.changed(self._model.entries)
        state = {p: {n: t.clone() for n, t in v.items()} for p, v in optimizer.state.items()}
        graph, reason = None, self._warm_up(inputs, weights[OTHER])
        self._model.load(weights)
        self._state = dict(optimizer.state)
        self._put_state(state)
        if reason is None:
            try:
                graph = _Graph(inputs, *record(lambda: self._step([inputs]), optimizer))
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                reason = first_line(error)
        self._model.load(weights)  # a recorded step may have changed attributes
        self._gradients.gradient_passes = passes
        forget(self.plan.parameters)
        if reason is not None:
            self._refused = True
            self._say(reason)
        return graph

    def _warm_up(self, inputs: Tensors, other: Tensor) -> str | None:
        """Takes steps; returns what keeps them from being graphs."""
        device = self._model.device
        side: AbstractContextManager[Any] = nullcontext()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            side = torch.cuda.stream(torch.cuda.Stream(device))
        with seeded(0, device), side:
            streams = _streams(device)
            for _ in range(_WARM_UP):
                self._step([inputs])
            draws = not torch.equal(_streams(device), streams)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if draws:
            return "they draw random numbers"
        if self._addresses() != self._when[-1]:
            return "the network replaces its buffers"
        now = self._model.other.packed()
        before, after = (self._model.other.by_name(packed)[1] for packed in (other, now))
        moved = not torch.equal(*(NOTHING if rest is None else rest for rest in (before, after)))
        return "the network changes more than tensors" if moved else None

    def _put_state(self, values: Mapping[Any, Mapping[str, Tensor]]) -> None:
        for parameter, fields in self._state.items():
            for field, tensor in fields.items():
                if (value := values.get(parameter, {}).get(field)) is not None:
                    tensor.copy_(value)
                else:  # -0 + x is x, also of zeros: the first momentum is the gradient itself
                    tensor.fill_(-0.0 if field == "momentum_buffer" else 0.0)
        self.plan.optimizer.state.update(self._state)

    def _addresses(self) -> tuple[int, ...]:
        network = self._model.network
        return tuple(t.data_ptr() for t in chain(network.parameters(), network.buffers()))


def _streams(device: torch.device) -> Tensor:
    """The states of random numbers."""
    state = torch.get_rng_state()
    return torch.cat([state, torch.cuda.get_rng_state(device)]) if device.type == "cuda" else state
