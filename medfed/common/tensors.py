"""Flat tensor algebra: the only arithmetic that a federated round adds to local training.

A model, a gradient or a displacement is a ``Tensors``: a flat mapping from parameter name to
tensor. Tensors held in a ``State`` are never changed in place, so that states share memory freely
(every client of a federation may refer to one copy of the shared part).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

_K = TypeVar("_K")
_SMALL, _FEW = 2**13, 3  # elements of a tensor, and tensors
Tensors = dict[str, Tensor]
State = dict[str, Tensors]
Layout = tuple[tuple[str, tuple[int, ...], str], ...]
"""Name, shape and dtype (such as ``"float32"``) of each tensor."""
_QUICK = 2**20  # bytes; of a larger tensor the copy takes longer than its start


def subtract(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensors:
    """Returns ``a − b`` over the names of ``a``.

    Args:
        a: Minuend.
        b: Subtrahend; must hold every name of ``a``.

    Example:
        >>> subtract({"w": torch.tensor([3.0])}, {"w": torch.tensor([1.0])})
        {'w': tensor([2.])}
    """
    return add(a, b, -1)


def add(a: Mapping[str, Tensor], b: Mapping[str, Tensor], scale: float = 1.0) -> Tensors:
    """Returns ``a + scale·b`` over the names of ``a``.

    Args:
        a: First summand.
        b: Second summand; must hold every name of ``a``.
        scale: Factor of ``b``.

    Example:
        >>> add({"w": torch.tensor([3.0])}, {"w": torch.tensor([1.0])}, scale=-2.0)
        {'w': tensor([1.])}
    """
    if not a:
        return {}
    sums = torch._foreach_add(list(a.values()), _alike(a, b), alpha=scale)
    return dict(zip(a, sums, strict=True))


def _alike(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[Tensor]:
    """Returns the tensors of ``b`` in the order of ``a``, of which none may be broadcast."""
    if lost := [name for name in a if name not in b]:
        raise ValueError(f"{lost[0]} is in one summand alone, so they cannot be added.")
    others = [b[name] for name in a]
    for name, mine, other in zip(
        a, map(Tensor.size, a.values()), map(Tensor.size, others), strict=True
    ):
        if mine != other:
            shapes = f"{[*mine]} and {[*other]}"
            raise ValueError(f"{name} has the shapes {shapes}, which cannot be added.")
    return others


def weighted_mean(items: Iterable[Mapping[str, Tensor]], weights: Sequence[float]) -> Tensors:
    """Returns ``Σ_i weights_i·items_i / Σ_i weights_i``, summed in the given order.

    Args:
        items: Tensors of equal names and shapes; one at a time is in memory if they are made so.
        weights: One non-negative weight per item, not all zero.

    Raises:
        ValueError: If there is no item or no weight.

    Example:
        >>> weighted_mean([{"w": torch.tensor([0.0])}, {"w": torch.tensor([4.0])}], [1, 3])
        {'w': tensor([3.])}
    """
    total, mean = float(sum(weights)), None
    if total > 0:
        for item, weight in zip(items, weights, strict=True):
            mean = weighted_sum(mean, item, weight / total)
            del item
    if mean is None:
        raise ValueError("weighted_mean needs at least one item of positive weight.")
    return mean


def weighted_sum(before: Tensors | None, item: Mapping[str, Tensor], weight: float) -> Tensors:
    """Returns ``before + weight·item``, in the memory of ``before`` if there is any.

    Example:
        >>> one = {"w": torch.tensor([4.0])}
        >>> weighted_sum(weighted_sum(None, one, 0.25), one, 0.5)
        {'w': tensor([3.])}
    """
    if before is None:
        scaled = torch._foreach_mul(list(item.values()), weight) if item else ()
        return dict(zip(item, scaled, strict=True))
    if before:
        torch._foreach_add_(list(before.values()), _alike(before, item), alpha=weight)
    return before


@torch.no_grad()
def overwrite(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copies values into the tensors of the same names, if there are any.

    Example:
        >>> weights = {"a": torch.ones(1), "b": torch.ones(1)}
        >>> overwrite(weights, {"a": torch.zeros(1)})
        >>> weights
        {'a': tensor([0.]), 'b': tensor([1.])}
    """
    for name in tensors.keys() & values.keys():
        tensors[name].copy_(values[name])


def flatten(tensors: Mapping[str, Tensor]) -> Tensor:
    """Returns all elements as one vector of shape (d,), in the order of the names.

    Example:
        >>> flatten({"a": torch.ones(1, 2), "b": torch.zeros(1)})
        tensor([1., 1., 0.])
    """
    if not tensors:
        return torch.zeros(0)
    return torch.cat([t.reshape(-1) for t in tensors.values()])


def ordinary(tensor: Tensor) -> Tensor:
    """Returns a detached copy in ordinary layout.

    Example:
        >>> last = torch.ones(1, 2, 3, 3).contiguous(memory_format=torch.channels_last)
        >>> ordinary(last).stride()
        (18, 9, 3, 1)
    """
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def length(tensors: Mapping[str, Tensor]) -> float:
    """Returns the Euclidean length of all elements together; not finite if one of them is not.

    Example:
        >>> length({"a": torch.tensor([3.0]), "b": torch.tensor([[0.0, 4.0]])})
        5.0
    """
    few = list(joined(tensors).values())
    return math.hypot(*map(float, torch._foreach_norm(few))) if few else 0.0


def joined(tensors: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
    """Returns the same numbers in fewer tensors: all small ones follow each other in a vector.

    An operation on hundreds of small tensors takes many times as long. The vector's key is the
    names and shapes of all tensors.

    Example:
        >>> [*joined({"a": torch.ones(1, 1), "b": torch.zeros(1), "c": torch.ones(1)}).values()]
        [tensor([1., 0., 1.])]
    """
    small = [t for t in tensors.values() if t.numel() < _SMALL]
    if len(small) < _FEW or len(dtypes_of(tensors)) > 1:
        return dict(tensors)
    few: dict[Any, Tensor] = {}
    if len(small) < len(tensors):
        few = {n: t for n, t in tensors.items() if t.numel() >= _SMALL}
    few[(*zip(tensors, map(Tensor.size, tensors.values()), strict=True),)] = _flatten_dense_tensors(
        small
    )
    return few


def parted(few: Mapping[Any, Tensor]) -> Tensors:
    """Undoes :func:`joined`.

    Example:
        >>> parted(joined({"a": torch.ones(1, 1), "b": torch.zeros(1), "c": torch.ones(1)}))
        {'a': tensor([[1.]]), 'b': tensor([0.]), 'c': tensor([1.])}
    """
    rows = next((key for key in few if isinstance(key, tuple)), None)
    if rows is None:
        return dict(few)
    sizes = [shape.numel() for name, shape in rows if name not in few]
    pieces = iter(few[rows].split(sizes))
    return {n: few[n] if n in few else next(pieces).view(shape) for n, shape in rows}


def dtypes_of(tensors: Mapping[Any, Tensor]) -> set[torch.dtype]:
    """Returns all dtypes of tensors.

    Example:
        >>> dtypes_of({"a": torch.ones(1), "b": torch.zeros(2)})
        {torch.float32}
    """
    return {*map(attrgetter("dtype"), tensors.values())}


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    """Returns the layout with which :func:`cut` reverses :func:`flatten`.

    Example:
        >>> layout_of({"a": torch.ones(1, 2)})
        (('a', (1, 2), 'float32'),)
    """
    return tuple([(n, tuple(t.shape), _dtype_name(t.dtype)) for n, t in tensors.items()])


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def numel(layout: Layout) -> int:
    """Returns the number of elements.

    Example:
        >>> numel((("a", (1, 2), "float32"), ("b", (), "float32")))
        3
    """
    return sum(math.prod(shape) for _, shape, _ in layout)


def cut(flat: Tensor, layout: Layout) -> Tensors:
    """Cuts a vector of shape (d,) into views with the names, shapes and dtypes of ``layout``.

    Example:
        >>> cut(torch.arange(3.0), (("a", (1, 2), "float32"), ("b", (), "float32")))
        {'a': tensor([[0., 1.]]), 'b': tensor(2.)}
    """
    sizes = [math.prod(shape) for _, shape, _ in layout]
    if sum(sizes) != flat.numel():
        raise ValueError(f"{flat.numel()} elements cannot fill {sum(sizes)} places.")
    tensors = {}
    plain = _dtype_name(flat.dtype)
    for (name, shape, dtype), piece in zip(layout, flat.split(sizes), strict=True):
        # Most entries of a deep network are vectors of one type, which need no reshaping.
        shaped = piece if len(shape) == 1 else piece.view(shape)
        tensors[name] = shaped if dtype == plain else shaped.to(getattr(torch, dtype))
    return tensors


def select(tensors: Mapping[str, Tensor], names: Iterable[str]) -> Tensors:
    """Returns the entries of the given names, in their order.

    Example:
        >>> select({"a": torch.ones(1), "b": torch.zeros(1)}, ["b"])
        {'b': tensor([0.])}
    """
    return {n: tensors[n] for n in names}


def map_state(state: Mapping[str, Tensors], function: Callable[[Tensor], Tensor]) -> State:
    """Returns a state with every tensor replaced by a function of it.

    Example:
        >>> map_state({"group": {"a": torch.ones(1)}}, torch.neg)
        {'group': {'a': tensor([-1.])}}
    """
    return {g: {n: function(t) for n, t in named.items()} for g, named in state.items()}


def distinct(states: Iterable[State]) -> dict[int, Tensor]:
    """Returns the tensors of states by their ids; one that several states share is there once.

    Example:
        >>> one = torch.ones(1)
        >>> list(distinct([{"g": {"a": one}}, {"g": {"b": one}}]).values())
        [tensor([1.])]
    """
    return {id(t): t for state in states for named in state.values() for t in named.values()}


def states_on(
    states: Mapping[_K, State],
    device: torch.device,
    twins: dict[int, tuple[Tensor, Tensor]] | None = None,
) -> dict[_K, State]:
    """Returns states on a device; a tensor that several states share is moved once.

    `twins`: tensors by their ids with equal ones on the other device, which need not be moved;
    what is moved is added, in both directions.

    Example:
        >>> one = torch.ones(1)
        >>> kept = states_on({"a": {"g": {"w": one}}}, torch.device("cpu"))
        >>> kept["a"]["g"]["w"] is one
        True
    """
    twins = {} if twins is None else twins
    known = distinct(states.values()).items()
    here = [t for key, t in known if t.device != device and key not in twins]
    for tensor, twin in _moved(here, device):
        twins |= {id(tensor): (tensor, twin), id(twin): (twin, tensor)}

    def move(tensor: Tensor) -> Tensor:
        return tensor if tensor.device == device else twins[id(tensor)][1]

    return {key: map_state(state, move) for key, state in states.items()}


def _moved(tensors: Sequence[Tensor], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields tensors with equal ones on another device; one copy moves all small ones of a type."""
    small = [t for t in tensors if t.nbytes <= _QUICK]
    yield from ((t, t.to(device)) for t in tensors if t.nbytes > _QUICK)
    for dtype in {t.dtype for t in small}:
        group = [t for t in small if t.dtype == dtype]
        flat = _flatten_dense_tensors(group).to(device)
        # In memory of their own, in their layouts: a view would keep the memory of all.
        apart = [torch.empty_like(t, device=device) for t in group]
        torch._foreach_copy_(apart, _unflatten_dense_tensors(flat, group))
        yield from zip(group, apart, strict=True)


def forget(tensors: Iterable[Tensor]) -> None:
    """Deletes the gradients of some parameters; a backward pass then writes instead of adding.

    Example:
        >>> weight = torch.ones(2, requires_grad=True)
        >>> weight.grad = torch.ones(2)
        >>> forget([weight])
        >>> weight.grad is None
        True
    """
    for tensor in tensors:
        tensor.grad = None


def gradient_of(tensor: Tensor) -> Tensor:
    """Returns a parameter's gradient; zero if the loss does not depend on it.

    Example:
        >>> gradient_of(torch.ones(2, requires_grad=True))
        tensor([0., 0.])
    """
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def onto(tensor: Tensor, device: torch.device) -> Tensor:
    """Moves a tensor to a device, without waiting for a copy from main memory to a GPU.

    That needs pinned memory: for a copy from other memory, PyTorch waits until the GPU has finished
    all its work.

    Example:
        >>> onto(torch.ones(1), torch.device("cpu"))
        tensor([1.])
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        # An expanded tensor, such as a batch's channel masks, can only be pinned as a copy.
        return tensor.contiguous().pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def to_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Moves the tensors of a batch, as :func:`onto` does.

    Example:
        >>> to_device({"image": torch.ones(1), "id": "a"}, torch.device("cpu"))
        {'image': tensor([1.]), 'id': 'a'}
    """
    if device.type == "cpu":
        return batch
    return {k: onto(v, device) if isinstance(v, Tensor) else v for k, v in batch.items()}


def first_non_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Names the first tensor that holds NaN or infinity; ``None`` if all are finite.

    Example:
        >>> first_non_finite({"a": torch.ones(2), "b": torch.tensor([float("nan")])})
        'b'
    """
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            return name
    return None


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Returns the SHA-256 of names, shapes and exact bits, as a hexadecimal string.

    Example:
        >>> digest({"a": torch.ones(2)}) == digest({"a": torch.ones(2)})
        True
        >>> digest({"a": torch.ones(2)}) == digest({"a": torch.zeros(2)})
        False
    """
    sha = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        sha.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()
