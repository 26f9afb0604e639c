"""A device of its own for tests: real numbers in main memory, under another device's name.

It computes what the CPU computes, and like a GPU refuses to mix its tensors with main memory's, but
for single numbers. So a test without a GPU sees what is moved, and when.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

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


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    there = [t for t in tensors if isinstance(t, _There)]
    others = [t for t in tensors if not isinstance(t, _There)]
    name, device = func.overloadpacket.__name__, kwargs.get("device")
    goes = bool(there) if device is None else torch.device(device) == ELSEWHERE
    assert not any(t.is_meta for t in others), f"{name} has a tensor without numbers"
    if there and name not in _MIXING:
        assert not any(t.dim() for t in others), f"{name} mixes tensors of two devices"
    if device is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    plain = tree_map_only(_There, lambda t: t.inner, (args, kwargs))
    known = {id(t.inner): t for t in there}

    def wrapped(made: Tensor) -> Tensor:
        return known.get(id(made), _There(made) if goes else made)

    return tree_map_only(Tensor, wrapped, func(*plain[0], **plain[1]))


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
