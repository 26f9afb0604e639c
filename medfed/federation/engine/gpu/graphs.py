"""Local steps as captured graphs, one per kind of step, replayed for every client.

A step is its batches' forward and backward passes, the penalty, clipping and the optimizer's step.
Two steps are of one kind if they train the same parameters, in the same precision, on batches of
the same shapes, with penalties of the same structure: then they differ only in values, which are
filled in before a replay. Results equal those of the uncaptured step bit for bit.

A graph records operations on tensors at fixed addresses; Python does not run again. So all inputs
of a step must be filled in place before a replay, and no operation may wait for a value.
:class:`Watch` checks this beforehand, because a capture that fails half-way leaves CUDA's random
generator and stream in a state that is hard to repair.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs, and torch/cuda/graphs.py.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from medfed.federation.client import Batch, Penalty

Replay = Callable[[], None]

# Operations that make the host wait for a value, or whose result's size depends on one.
_WAITS = {
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select"),
    *("unique_dim", "_unique2", "unique_consecutive", "bincount", "repeat_interleave"),
}


class UncapturableError(Exception):
    """The reason, as half a sentence, why a step cannot be recorded."""


class Backend(Protocol):
    """Records steps of one device."""

    def side(self) -> AbstractContextManager[None]:
        """Returns the context for trying a step before recording it."""

    def record(self, step: Callable[[], None]) -> Replay:
        """Records a step's operations on tensors, and returns a function that repeats them.

        It may or may not run the step; the caller restores all tensors that the step changes.
        """


class CudaGraphs:
    """Records CUDA graphs, which share one pool of memory.

    Tensors that outlast a step are outside the pool, and only one graph runs at a time. So the pool
    is as large as the largest graph needs, and graphs may be replayed in any order.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def side(self) -> Iterator[None]:
        """Runs on the stream of the capture, where libraries set themselves up by the way."""
        steps = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(steps)
        with torch.cuda.stream(self._stream):
            yield
        steps.wait_stream(self._stream)

    def record(self, step: Callable[[], None]) -> Replay:
        """See :meth:`Backend.record`; the step does not run."""
        graph = torch.cuda.CUDAGraph()
        # Other threads may pin memory meanwhile. The outer context brings the stream back where
        # the inner one fails to end a capture.
        recording = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        with torch.cuda.stream(torch.cuda.current_stream(self.device)), recording:
            step()
        return graph.replay


class Watch(TorchDispatchMode):
    """Refuses what cannot be captured.

    Raises:
        UncapturableError: At the first operation that waits for a value, or uses another random
            generator than the default one.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Looks at one operation before it runs."""
        kwargs = kwargs or {}
        self.check(func.overloadpacket.__name__, args, kwargs)
        return func(*args, **kwargs)

    def check(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raises where an operation cannot be captured."""
        if name in _WAITS:
            raise UncapturableError(f"a step waits for a value ({name})")
        if name in ("index", "index_put_", "index_put") and any(
            isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8) for t in args[1]
        ):
            raise UncapturableError("a step picks elements by a mask, and waits for their number")
        if isinstance(kwargs.get("generator"), torch.Generator):
            raise UncapturableError("a step uses a random generator that is not the default one")
        if name in ("_to_copy", "copy_") and _crosses(name, args, kwargs):
            raise UncapturableError("a step copies between main memory and the device")


def _crosses(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Says whether a copy is between main memory and a device."""
    if name == "_to_copy":
        source, target = args[0].device, torch.device(kwargs.get("device") or args[0].device)
    else:
        target, source = args[0].device, args[1].device
    return bool((source.type == "cpu") != (target.type == "cpu"))


_log = logging.getLogger(__name__)

Step = Callable[[Sequence[Batch], Penalty | None], Tensor]
KEPT = 16  # graphs
# The first steps of a kind run uncaptured: a capture costs as much as several steps, and short last
# batches have many sizes.
OFTEN = 4
OFTEN_IF_SHORT = 16


@dataclass(frozen=True)
class Anatomy:
    """The components of a penalty.

    Attributes:
        structure: What a graph keeps for ever.
        tensors: What is filled in.
    """

    structure: Hashable
    tensors: list[Tensor]


def anatomy(penalty: Penalty | None) -> Anatomy | None:
    """Splits a penalty into its components; ``None`` if its dependencies are unknown.

    A dataclass depends on its fields: tensors, mappings of names to tensors, and plain values.

    Args:
        penalty: A penalty, or none.

    Example:
        >>> from medfed.functional.prox import Proximity
        >>> anatomy(Proximity(0.5, {"x": torch.ones(1)})).tensors
        [tensor([1.])]
        >>> anatomy(lambda weights: weights["x"].sum()) is None
        True
    """
    if penalty is None:
        return Anatomy(None, [])
    if not is_dataclass(penalty) or isinstance(penalty, type):
        return None
    structure: list[Hashable] = [type(penalty)]
    tensors: list[Tensor] = []
    for one in fields(penalty):
        value = getattr(penalty, one.name)
        if isinstance(value, Tensor):
            value = {"": value}
        if isinstance(value, Mapping) and all(isinstance(t, Tensor) for t in value.values()):
            tensors += value.values()
            structure.append(tuple((n, tuple(t.shape), t.dtype) for n, t in value.items()))
        elif value is None or isinstance(value, bool | int | float | str):
            structure.append(value)
        else:
            return None
    return Anatomy(tuple(structure), tensors)


def _copied(penalty: Any) -> Any:
    """Returns a penalty with tensors of its own."""
    if penalty is None:
        return None
    copies: dict[str, Any] = {}
    for one in fields(penalty):
        value = getattr(penalty, one.name)
        if isinstance(value, Tensor):
            copies[one.name] = value.detach().clone()
        elif isinstance(value, Mapping):
            copies[one.name] = {n: t.detach().clone() for n, t in value.items()}
    return replace(penalty, **copies)


@dataclass(frozen=True)
class Graph:
    """A captured step.

    Attributes:
        replay: Takes it again.
        inputs: Its batches' tensors, one after the other.
        anchors: Its penalty's tensors.
        loss: What the step returns.
        keeps: What must live as long as it does.
    """

    replay: Replay
    inputs: list[Tensor]
    anchors: list[Tensor]
    loss: Tensor
    keeps: object


@dataclass(eq=False)
class Graphs:
    """Captures the steps of one network, and replays them.

    Attributes:
        backend: Records steps.
        often: Steps of a kind before it is captured.
        often_if_short: The same of smaller batches than others.
        kept: Graphs at most; the least recently used one is dropped.
        captured: Steps that were captured so far.
        replayed: Steps that were replayed.
        reasons: Why other steps were not captured, each logged once.
    """

    backend: Backend
    often: int = OFTEN
    often_if_short: int = OFTEN_IF_SHORT
    kept: int = KEPT
    captured: int = field(default=0, init=False)
    replayed: int = field(default=0, init=False)
    reasons: list[str] = field(default_factory=list, init=False)
    _graphs: OrderedDict[Hashable, Graph | None] = field(default_factory=OrderedDict, init=False)
    _seen: Counter[Hashable] = field(default_factory=Counter, init=False)
    _largest: int = field(default=0, init=False)

    def clear(self) -> None:
        """Forgets all graphs, of a network that keeps its weights elsewhere from now on."""
        self._graphs.clear()
        self._seen.clear()

    def decline(self, reason: str) -> None:
        """Says once why steps are not captured."""
        if reason not in self.reasons:
            self.reasons.append(reason)
            _log.info("Steps that are not captured as a graph run one by one: %s.", reason)

    def take(
        self,
        kind: Hashable,
        group: Sequence[Batch],
        penalty: Penalty | None,
        step: Step,
        changes: Callable[[], list[Tensor]],
    ) -> Tensor | None:
        """Takes a step by a graph, if there is one or it is time to capture it.

        Args:
            kind: What the step trains, and how.
            group: Its batches.
            penalty: Its penalty.
            step: Takes it, uncaptured.
            changes: Gives all tensors that it changes.

        Returns:
            Its loss, which the next step overwrites; ``None`` where no step was taken.
        """
        parts = anatomy(penalty)
        if parts is None:
            self.decline(f"the penalty {_name(penalty)} does not declare what it depends on")
            return None
        inputs = [value for batch in group for value in batch.values()]
        if not all(isinstance(value, Tensor) for value in inputs):
            self.decline("batches hold more than tensors")
            return None
        shapes = tuple(
            tuple((n, tuple(t.shape), t.dtype) for n, t in batch.items()) for batch in group
        )
        key = (kind, shapes, parts.structure)
        if key not in self._graphs and self._is_time(key, group):
            self._graphs[key] = self._capture(group, penalty, step, changes())
            while len(self._graphs) > self.kept:
                self._graphs.popitem(last=False)
        if (graph := self._graphs.get(key)) is None:
            return None
        self._graphs.move_to_end(key)
        torch._foreach_copy_(graph.inputs, inputs)
        if graph.anchors:
            torch._foreach_copy_(graph.anchors, parts.tensors)
        graph.replay()
        self.replayed += 1
        return graph.loss

    def _is_time(self, key: Hashable, group: Sequence[Batch]) -> bool:
        size = sum(len(next(iter(batch.values()))) for batch in group)
        self._largest = max(self._largest, size)
        self._seen[key] += 1
        often = self.often if size == self._largest else self.often_if_short
        return self._seen[key] > often

    def _capture(
        self,
        group: Sequence[Batch],
        penalty: Penalty | None,
        step: Step,
        changes: list[Tensor],
    ) -> Graph | None:
        """Captures a step, which changes nothing; ``None`` where it cannot be."""
        batches = [{n: t.clone() for n, t in batch.items()} for batch in group]
        copied = _copied(penalty)
        inputs = [t for batch in batches for t in batch.values()]
        anchors = [] if penalty is None else _tensors(copied)
        device = inputs[0].device
        before = [t.detach().clone() for t in changes]
        streams = _random(device)
        losses: list[Tensor] = []
        try:
            with self.backend.side():
                with Watch():
                    step(batches, copied)
                step(batches, copied)
            replay = self.backend.record(lambda: losses.append(step(batches, copied)))
        except (UncapturableError, RuntimeError) as error:
            self.decline(str(error).splitlines()[0].rstrip("."))
            return None
        finally:
            with torch.no_grad():
                torch._foreach_copy_(changes, before)
            _random(device, streams)
        self.captured += 1
        return Graph(replay, inputs, anchors, losses[0], (batches, copied, changes))


def _tensors(penalty: Penalty) -> list[Tensor]:
    parts = anatomy(penalty)
    return [] if parts is None else parts.tensors


def _name(penalty: Penalty | None) -> str:
    return getattr(penalty, "__qualname__", type(penalty).__qualname__).replace("<locals>.", "")


def _random(device: torch.device, states: Sequence[Tensor] = ()) -> list[Tensor]:
    """Returns the states of the streams that a step may draw from; puts given ones back."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    for generator, state in zip(generators, states, strict=False):
        generator.set_state(state)
    return [generator.get_state() for generator in generators]
