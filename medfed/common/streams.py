"""Random numbers that PyTorch draws without a generator argument: initial weights, dropout.

By default they come from one stream of the whole process, from which threads take each other's
numbers. Here they come from a separate stream that depends only on a seed.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

_CPU = torch.device("cpu")
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


@contextmanager
def own_stream(seed: int) -> Iterator[None]:
    """Gives this thread a separate generator for everything that it draws on the CPU."""
    # The numbers are those after ``torch.manual_seed(seed)``. Neither other threads nor
    # PyTorch's global stream are affected. Each operation becomes some microseconds slower.
    with _OwnStream(torch.Generator().manual_seed(seed)):
        yield


@contextmanager
def seeded(seed: int = 0, device: torch.device = _CPU) -> Iterator[None]:
    """Runs its body (dropout, augmentation) under ``seed`` and restores the global streams."""
    # In the main thread the body draws from the global stream: this costs nothing per
    # operation, and checkpointed activations and compiled code need it. Any other thread uses
    # an :func:`own_stream` on the CPU. PyTorch cannot give operations on a GPU another
    # stream, so only one thread at a time may train there.
    if device.type == "cpu" and not has_global_stream():
        with own_stream(seed):
            yield
        return
    generators = generators_of(device)
    before = [generator.get_state() for generator in generators]
    try:
        _seed_torch(seed, device)
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


def generators_of(device: torch.device) -> list[torch.Generator]:
    """Returns PyTorch's global generators by which computations on a device draw."""
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


def _seed_torch(seed: int, device: torch.device) -> None:
    if device.type not in ("cpu", "cuda"):
        torch.manual_seed(seed)
    # It would also seed all other GPUs, or format a stack trace for one that is not in use.
    for generator in generators_of(device):
        generator.manual_seed(seed)


@contextmanager
def globals_kept(device: torch.device) -> Iterator[None]:
    """Puts all global generators back, once after many :func:`globals_seeded`.

    Saving their states takes as long as a step of a small network.
    """
    if _Blocks.keeps or not has_global_stream():
        yield
        return
    with seeded(device=device):
        before = random.getstate(), np.random.get_state()
        _Blocks.keeps = True
        try:
            yield
        finally:
            _Blocks.keeps = False
            random.setstate(before[0])
            np.random.set_state(before[1])


@contextmanager
def globals_seeded(seed: int, device: torch.device = _CPU) -> Iterator[None]:
    """Runs its body as :func:`seeded` does, and seeds Python's and NumPy's global generators, too.

    A user's network, loss or method may draw by these. In the main thread alone, as all threads
    share them; a block within one seeds PyTorch's stream alone, and leaves it to the outer one.
    """
    if not has_global_stream():
        with seeded(seed, device):
            yield
        return
    if _Blocks.seeds:
        _seed_torch(seed, device)
        yield
        return
    with nullcontext() if _Blocks.keeps else globals_kept(device):
        _seed_torch(seed, device)
        random.seed(seed)
        np.random.seed(seed)
        _Blocks.seeds = True
        try:
            yield
        finally:
            _Blocks.seeds = False


class _Blocks:
    """Which blocks around the main thread's work use its global generators."""

    keeps = seeds = False


def has_global_stream() -> bool:
    """Whether this thread may use the global stream: the main thread."""
    return threading.current_thread() is threading.main_thread()


class _OwnStream(TorchDispatchMode):
    """Passes a generator to each operation that draws on the CPU, unless it has one."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs an operation."""
        kwargs = dict(kwargs or {})
        if not _draws(func) or not _on_cpu(args, kwargs):
            return func(*args, **kwargs)
        drawing = _drawing(func)
        if drawing is None:  # composite: its inner operations take generators
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        draw, place = drawing
        if place < len(args):  # some older operations take it by position
            generator, args = args[place], args[:place]
            kwargs["generator"] = generator
        if kwargs.get("generator") is None:
            if torch._C._current_graph_task_id() != -1:
                raise RuntimeError(
                    "A backward pass draws random numbers, as checkpointed activations with "
                    "dropout do; train such a network in the main thread of a process."
                )
            kwargs["generator"] = self._generator
        return draw(*args, **kwargs)


@cache
def _draws(func: OpOverload) -> bool:
    # PyTorch marks the CPU's fused attention as random, but does not choose it if it would draw.
    fused = func.name() == "aten::_scaled_dot_product_flash_attention_for_cpu"
    return torch.Tag.nondeterministic_seeded in func.tags and not fused


def _on_cpu(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    device = kwargs.get("device") or (tensors[0].device if tensors else _CPU)
    return torch.device(device).type == "cpu"


@cache
def _drawing(func: OpOverload) -> tuple[OpOverload, int] | None:
    """The overload with a generator, and the generator's position; ``None`` for a composite one."""
    names = [a.name for a in func._schema.arguments]
    if "generator" in names:
        return func, names.index("generator")
    wanted = _arguments(func)
    for name in func.overloadpacket.overloads():
        other: OpOverload = getattr(func.overloadpacket, name)
        theirs = _arguments(other)
        if theirs.pop("generator", None) and theirs == wanted:
            return other, len(theirs) + 1
    if func.has_kernel_for_dispatch_key(_COMPOSITE):
        return None
    raise RuntimeError(f"{func} draws random numbers without a generator; use the main thread.")


def _arguments(func: OpOverload) -> dict[str, str]:
    return {a.name: str(a.type) for a in func._schema.arguments}
