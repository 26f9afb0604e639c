"""Recording a step once and replaying it: on a GPU as a CUDA graph, on the CPU from a tape.

What is recorded are operations on tensors that stay where they are; Python does not run again. So
whatever a step reads must have been filled in place before it is replayed, and nothing in it may
wait for a value, which :class:`Watch` finds out beforehand: a capture that fails half-way leaves
CUDA's random generator and stream in a state that is hard to mend.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs, and torch/cuda/graphs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Replay = Callable[[], None]

# What makes the host wait for a value, or decides by one how large its result is.
_WAITS = {
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select"),
    *("unique_dim", "_unique2", "unique_consecutive", "bincount", "repeat_interleave"),
}


class UncapturableError(Exception):
    """Says in half a sentence why a step cannot be recorded."""


class Backend(Protocol):
    """Records steps of one device."""

    def side(self) -> AbstractContextManager[None]:
        """Returns the context in which a step is tried before it is recorded."""

    def record(self, step: Callable[[], None]) -> Replay:
        """Records what a step does to tensors, and returns what does it again.

        It may run the step or not; whoever calls it puts back what the step changes.
        """


class CudaGraphs:
    """Records CUDA graphs, which share one pool of memory.

    Whatever outlasts a step lies outside the pool, and only one graph of it runs at a time; so it
    needs what the largest graph needs, and graphs may be replayed in any order.

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


class Tape:
    """Keeps the operations of a step with the very tensors that they read and wrote.

    As a graph does, a replay reads the same addresses and the same numbers, and no Python runs: it
    shows on a CPU whether everything is filled in place. It saves no time.
    """

    def side(self) -> AbstractContextManager[None]:
        """The CPU has no streams."""
        return nullcontext()

    def record(self, step: Callable[[], None]) -> Replay:
        """See :meth:`Backend.record`; the step runs."""
        operations = _Operations()
        with operations:
            step()
        return operations.replay


class Watch(TorchDispatchMode):
    """Refuses what cannot be captured.

    Raises:
        UncapturableError: At the first operation that waits for a value, or draws from a generator
            of its own.
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
            raise UncapturableError("a step draws from a random generator of its own")
        if name in ("_to_copy", "copy_") and _crosses(name, args, kwargs):
            raise UncapturableError("a step copies between main memory and the device")


def _crosses(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Says whether a copy is between main memory and a device."""
    if name == "_to_copy":
        source, target = args[0].device, torch.device(kwargs.get("device") or args[0].device)
    else:
        target, source = args[0].device, args[1].device
    return bool((source.type == "cpu") != (target.type == "cpu"))


class _Operations(Watch):
    """Runs operations and remembers them."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, list[Tensor | None]]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs one operation; of its results those in new memory have to be filled again."""
        kwargs = kwargs or {}
        found = super().__torch_dispatch__(func, types, args, kwargs)
        if func.namespace != "profiler":
            known = {_memory(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
            new = [
                t if isinstance(t, Tensor) and _memory(t) not in known else None
                for t in tree_leaves(found)
            ]
            self._calls.append((func, args, kwargs, new))
        return found

    def replay(self) -> None:
        """Runs all operations on the tensors of the recording."""
        with torch.no_grad():
            for func, args, kwargs, new in self._calls:
                again = tree_leaves(func(*args, **kwargs))
                for tensor, value in zip(new, again, strict=True):
                    if tensor is not None:
                        tensor.copy_(value)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
