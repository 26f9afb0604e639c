"""A device of its own for tests: real numbers in main memory, under another device's name.

It computes what the CPU computes, and like a GPU refuses to mix its tensors with main memory's, but
for single numbers. So a test without a GPU sees what is moved, and when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ELSEWHERE = torch.device("meta")  # PyTorch's own tensors there hold nothing
_MIXING = ("_to_copy", "copy_", "_foreach_copy_", "index", "index_put_")  # as on a GPU


class _There(Tensor):
    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> _There:
        facts = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        facts |= {"dtype": inner.dtype, "device": ELSEWHERE}
        made = torch.Tensor._make_wrapper_subclass(cls, inner.size(), **facts)
        made.inner = inner.detach()
        return made

    def tolist(self) -> Any:
        return self.inner.tolist()

    def new_tensor(self, data: Any, **facts: Any) -> Tensor:
        return _There(self.inner.new_tensor(data, **facts))

    def __getitem__(self, key: Any) -> Tensor:
        # PyTorch would make a list into a tensor without numbers.
        parts = (torch.tensor(p) if isinstance(p, list) else p for p in _as_tuple(key))
        return super().__getitem__(tuple(parts))

    def __deepcopy__(self, memo: Any) -> Tensor:
        copied = _There(self.inner.clone())
        return copied.requires_grad_(self.requires_grad)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _computed(func, args, kwargs or {})


def _as_tuple(key: Any) -> tuple[Any, ...]:
    return key if isinstance(key, tuple) else (key,)


class _Device(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _computed(func, args, kwargs or {})


def _changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    return [_changed(one, change) for one in value] if type(value) in (list, tuple) else value


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    known: dict[int, Tensor] = {}
    others = list[Tensor]()

    def unwrapped(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, _There):
            others.append(tensor)
            return tensor
        known[id(tensor.inner)] = tensor
        return tensor.inner

    args = _changed(args, unwrapped)
    kwargs = {name: _changed(value, unwrapped) for name, value in kwargs.items()}
    name, goes = func.overloadpacket.__name__, bool(known)
    if (device := kwargs.get("device")) is not None:
        goes, kwargs["device"] = torch.device(device) == ELSEWHERE, torch.device("cpu")
    assert not any(t.is_meta for t in others), f"{name} has a tensor without numbers"
    if known and name not in _MIXING:
        assert not any(t.dim() for t in others), f"{name} mixes tensors of two devices"

    def wrapped(made: Tensor) -> Tensor:
        if id(made) in known:
            return known[id(made)]
        return _There(made) if goes else made

    return _changed(func(*args, **kwargs), wrapped)


@contextmanager
def elsewhere() -> Iterator[torch.device]:
    """Gives a device on which tensors can be within the block."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # a moved network keeps its objects
    try:
        with _Device():
            yield ELSEWHERE
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
