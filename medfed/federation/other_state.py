"""What training changes in a network besides its entries: counters, queues, averages, attributes.

The entries of a model are its parameters that train and its float buffers. Everything else that a
pass changes belongs to the hospital whose data have passed: integer and bool tensors, buffers that
a state dict leaves out, frozen tensors that the network itself moves, tensors and numbers in plain
attributes, lists and dictionaries of these. It travels with a client's model as one more entry,
:data:`OTHER`: the differences from the initial network, as bytes. A method treats it like a running
statistic that stays with the client; no message holds it, and it is never averaged. A network that
changes nothing else has no bytes of it.

What a loss keeps belongs to the hospital, too, but is no part of the model that it gets.

A walk over the whole module tree after each call of training finds the differences, and refuses
what bytes cannot express.
"""

from __future__ import annotations

import copy
import pickle
import random
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import chain
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from medfed.common.tensors import Tensors
from medfed.standalone.errors import ConfigError
from medfed.standalone.neighbours import with_store_of

OTHER = "other state"
"""The entry of a model that holds the differences, (bytes,) uint8; no tensor can be named so."""
NOTHING = torch.zeros(0, dtype=torch.uint8)  # no differences

_SCALARS = (type(None), bool, int, float, str, bytes)
_LISTS = {"list": list, "deque": deque, "set": set, "tuple": tuple, "size": torch.Size}
_CHANGING = (list, deque, set, dict)
_FIXED = (FunctionType, BuiltinFunctionType, MethodType, ModuleType, type, Enum, torch.dtype)
_IGNORED = ("pytorch_lightning", "lightning", "logging", "threading", "_thread")
_DTYPES = {
    str(kind).removeprefix("torch."): kind
    for kind in vars(torch).values()
    if isinstance(kind, torch.dtype)
}
_OF_EVERY_MODULE = {*vars(nn.Module())}
_MISSING = object()
_LOSS = "the loss: "  # before the names of what a loss keeps


class _CannotKeepError(Exception):
    """A value that bytes cannot express."""


@dataclass
class _Begun:
    """An attribute at the start."""

    value: Any  # the object itself
    # Of a tensor a copy; of a list or another container its code; of a random generator or an array
    # a fingerprint; else the object.
    copy: Any
    # Which of these ``copy`` is; ``fixed``: an object that cannot change.
    kind: Literal["tensor", "code", "fingerprint", "fixed"]


@dataclass
class _Holder:
    """A dictionary of attributes: of a module, of its tensors, or of an object in an attribute."""

    name: str
    kind: str
    values: MutableMapping[str, Any]
    skipped: frozenset[str]
    begun: dict[str, _Begun]
    size: int  # how many attributes there were, with those that are skipped

    def is_as_begun(self) -> bool:
        """Whether it has the objects of the start alone, and none of them can change."""
        values = self.values
        return len(values) == self.size and all(
            first.kind == "fixed" and values.get(key) is first.value
            for key, first in self.begun.items()
        )

    def forbids(self, key: str) -> bool:
        """Whether a key is an entry or a name of every module, such as forward."""
        return key in self.skipped or (key not in self.begun and hasattr(nn.Module, key))


class OtherState:
    """The other state of one network, compared with that at its start.

    Example:
        >>> network = nn.BatchNorm1d(2)
        >>> other = OtherState(network, ["weight", "bias", "running_mean", "running_var"])
        >>> len(other.packed())
        0
        >>> _ = network(torch.rand(3, 2))
        >>> after = other.packed()
        >>> other.restore(None)
        >>> int(network.num_batches_tracked), len(after) > 0
        (0, True)
        >>> other.restore(after)
        >>> int(network.num_batches_tracked)
        1
    """

    def __init__(self, network: nn.Module, entries: Iterable[str]) -> None:
        self._known: list[Any] = []  # modules, entries and objects, which a code refers to
        self._numbers: dict[int, int] = {}
        self._holders: list[_Holder] = []
        self._network, names = network, set(entries)
        self._layers = self._tree()
        modules = dict(network.named_modules())
        for module in modules.values():
            self._know(module)
        self._memory = set[int]()
        kinds = network.named_parameters, network.named_buffers
        for name, tensor in chain.from_iterable(of(remove_duplicate=False) for of in kinds):
            if name in names:
                self._know(tensor)
                self._memory.add(_memory_of(tensor))
        self._first = next(network.parameters(), None)
        for name, module in modules.items():
            self._hold_module(name, module, names)
        self._places = {(h.name, h.kind): number for number, h in enumerate(self._holders)}

    def add_loss(self, loss: Any) -> None:
        """Also compares what a loss keeps: the modules that it uses, and itself if it is an object.

        The lists and numbers around a function are its author's, such as a record of all losses.
        """
        for place, value in _used_by(loss, "", set()):
            self._explore(value, place)
        self._places = {(h.name, h.kind): number for number, h in enumerate(self._holders)}

    def packed(self) -> Tensor:
        """Returns the differences from the start, (bytes,) uint8; on the CPU."""
        entries = []
        for holder, key in self._changed():
            value, begun = holder.values.get(key, _MISSING), holder.begun.get(key)
            try:
                if begun is None and isinstance(value, nn.Parameter):
                    raise _CannotKeepError
                if begun is not None and begun.kind == "fingerprint":
                    raise _CannotKeepError
                gone = value is _MISSING
                code = None if gone else self._code(value)
                entries.append([holder.name, holder.kind, key, gone, code])
            except _CannotKeepError:
                of = "" if holder.name.startswith(_LOSS) else " of the network"
                raise ConfigError(
                    f"Training changes {_place(holder.name, key)}{of} "
                    f"({type(value).__name__}), which cannot be kept for each hospital; keep it in "
                    "a buffer (register_buffer), or in an attribute that is a tensor, a number, or "
                    "a list or dictionary of these."
                ) from None
        return _encoded(entries) if entries else NOTHING

    def restore(self, packed: Tensor | None) -> None:
        """Puts the network into the state at its start, with differences."""
        wanted: dict[tuple[int, str], Any] = {}
        for name, kind, key, gone, code in _decoded(packed):
            number = self._places.get((name, kind))
            if number is None or self._holders[number].forbids(key):
                raise ValueError(f"the network has no {name}.{key}")
            wanted[number, key] = _MISSING if gone else code
        changed = {(self._places[h.name, h.kind], key) for h, key in self._changed()}
        for number, key in changed.difference(wanted):
            self._put_back(self._holders[number], key)
        for (number, key), code in wanted.items():
            self._put(self._holders[number], key, code)

    def follow(self) -> None:
        """Adopts tensors that replace those at the start, as moving a network to a device does."""
        for holder in self._holders:
            for key, begun in holder.begun.items():
                if begun.kind == "tensor" and isinstance(holder.values.get(key), Tensor):
                    begun.value = holder.values[key]

    def by_name(self, packed: Tensor | None) -> tuple[Tensors, Tensor | None]:
        """Parts the network's differences into tensors that a state dict names, and all others."""
        named, rest, modules = Tensors(), [], dict(self._network.named_modules())
        for name, kind, key, gone, code in _decoded(packed):
            if name.startswith(_LOSS):
                continue
            module = modules.get(name)
            lost = module is None or key in module._non_persistent_buffers_set
            if kind == "" or lost or gone or not _is_tensor(code):
                rest.append([name, kind, key, gone, code])
            else:
                named[_place(name, key)] = _tensor(code)
        return named, _encoded(rest) if rest else None

    def drop(self, packed: Tensor) -> None:
        """Puts what some differences are of into its state at the start."""
        for name, kind, key, *_ in _decoded(packed):
            self._put_back(self._holders[self._places[name, kind]], key)

    def __reduce__(self) -> Any:
        """A copy would look for the objects of this network in another one."""
        raise ConfigError(
            "A federation can be neither copied nor pickled; keep each hospital's weights, as by "
            "done.weights(NAME)."
        )

    def _tree(self) -> list[tuple[str, int]]:
        return [(name, id(module)) for name, module in self._network.named_modules()]

    def _know(self, value: Any) -> None:
        self._numbers[id(value)] = len(self._known)
        self._known.append(value)

    def _hold_module(self, name: str, module: nn.Module, entries: set[str]) -> None:
        prefix = f"{name}." if name else ""
        for kind, tensors in (("buffer", module._buffers), ("parameter", module._parameters)):
            mine = frozenset(key for key in tensors if prefix + key in entries)
            self._hold(name, kind, tensors, mine)  # type: ignore[arg-type]
        self._hold(name, "", module.__dict__, frozenset(_OF_EVERY_MODULE))

    def _hold(
        self, name: str, kind: str, values: MutableMapping[str, Any], skipped: frozenset[str]
    ) -> None:
        holder = _Holder(name, kind, values, skipped, {}, len(values))
        self._holders.append(holder)
        for key, value in list(values.items()):
            if key not in skipped:
                holder.begun[key] = self._begun(value, _place(name, key))

    def _begun(self, value: Any, place: str) -> _Begun:
        if isinstance(value, Tensor):
            # A view of an entry changes with it.
            view = id(value) in self._numbers or _memory_of(value) in self._memory
            return _Begun(
                value, value if view else value.detach().clone(), "fixed" if view else "tensor"
            )
        self._explore(value, place)
        if isinstance(value, _CHANGING) or (_is_plain(value) and not _is_fixed(value)):
            return _Begun(value, self._code(value), "code")
        if (fingerprint := _fingerprint(value)) is not None:
            return _Begun(value, fingerprint, "fingerprint")
        return _Begun(value, value, "fixed")

    def _explore(self, value: Any, place: str) -> None:
        """Makes known what an attribute holds, with the attributes of objects in it."""
        if isinstance(value, (Tensor, weakref.ref, *_SCALARS)) or id(value) in self._numbers:
            return
        if isinstance(value, dict):
            for key, one in value.items():
                self._explore(key, place)
                self._explore(one, f"{place}[{key}]")
        elif isinstance(value, _CHANGING) or _is_plain(value):
            for number, one in enumerate(value):
                self._explore(one, f"{place}[{number}]")
        elif isinstance(value, nn.Module):  # one that hides from the module tree, in a list
            for name, module in value.named_modules():
                if id(module) not in self._numbers:
                    self._know(module)
                    self._hold_module(f"{place}.{name}".rstrip("."), module, set())
        else:
            self._know(value)
            if not isinstance(value, _FIXED) and not _foreign(value) and hasattr(value, "__dict__"):
                self._hold(place, "object", vars(value), frozenset())

    def _changed(self) -> Iterator[tuple[_Holder, str]]:
        if self._tree() != self._layers:
            raise ConfigError(
                "Training adds, removes or replaces layers of the network, which cannot be kept "
                "for each hospital; build all layers in __init__."
            )
        for holder in self._holders:
            if holder.is_as_begun():
                continue
            begun, skipped = holder.begun, holder.skipped
            for key, value in holder.values.items():
                first = begun.get(key)
                same = key in skipped or (first is not None and self._same(value, first))
                if not same and not _foreign(value):
                    yield holder, key
            for key in begun.keys() - holder.values.keys():
                yield holder, key

    def _same(self, value: Any, begun: _Begun) -> bool:
        if begun.kind == "tensor":
            if not isinstance(value, Tensor) or value.dtype != begun.copy.dtype:
                return False
            return torch.equal(value.detach(), begun.copy.to(value.device))
        if type(value) is not type(begun.value):
            return False
        if begun.kind == "code":
            try:
                return bool(self._code(value) == begun.copy)
            except _CannotKeepError:
                return False
        if begun.kind == "fingerprint":
            return bool(_fingerprint(value) == begun.copy)
        # Two equal tuples of numbers, or two equal numbers, are one.
        return value is begun.value or (_is_fixed(value) and bool(value == begun.value))

    def _code(self, value: Any) -> Any:
        """Turns a value into lists of plain values."""
        if type(value) in _SCALARS and not (type(value) is int and value.bit_length() > 63):
            return value
        if (number := self._numbers.get(id(value))) is not None:
            return ["known", number]
        if isinstance(value, Tensor):
            name = str(value.dtype).removeprefix("torch.")
            if name not in _DTYPES or value.layout != torch.strided:
                raise _CannotKeepError
            flat = value.detach().cpu().contiguous().reshape(-1)
            return ["tensor", name, list(value.shape), flat.view(torch.uint8).numpy().tobytes()]
        if isinstance(value, np.generic):
            return self._code(value.item())
        if isinstance(value, weakref.ref):
            return ["weak", self._code(value())]
        if isinstance(value, dict):
            return ["dict", [[self._code(k), self._code(v)] for k, v in value.items()]]
        for kind, of in _LISTS.items():
            if type(value) is of or (isinstance(value, of) and of in _CHANGING):
                inside = sorted(value, key=repr) if kind == "set" else value
                return [kind, [self._code(one) for one in inside]]
        raise _CannotKeepError

    def _value(self, code: Any) -> Any:
        """Returns the value that :meth:`_code` has encoded."""
        if not isinstance(code, list):
            return code
        if _is_tensor(code):
            return _tensor(code).to("cpu" if self._first is None else self._first.device)
        try:
            kind, inside = code
            if kind == "known":
                return self._known[inside]
            if kind == "weak":
                return weakref.ref(self._value(inside))
            if kind == "dict":
                return {self._value(k): self._value(v) for k, v in inside}
            return _LISTS[kind](map(self._value, inside))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ValueError("the other state of the model is damaged") from error

    def _put_back(self, holder: _Holder, key: str) -> None:
        if (begun := holder.begun.get(key)) is None:
            holder.values.pop(key, None)
        elif begun.kind == "code":
            self._put(holder, key, begun.copy)
        else:
            if begun.kind == "tensor":
                begun.value.detach().copy_(begun.copy)
            holder.values[key] = begun.value

    def _put(self, holder: _Holder, key: str, code: Any) -> None:
        if code is _MISSING:
            holder.values.pop(key, None)
            return
        value, begun = self._value(code), holder.begun.get(key)
        first = None if begun is None else begun.value
        if isinstance(first, Tensor) and isinstance(value, Tensor):
            value = value.to(first.device)
            alike = first.shape == value.shape and first.dtype == value.dtype
            if alike and begun is not None and begun.kind == "tensor":
                first.detach().copy_(value)
                value = first
        # In place, as another attribute or a hook may hold the same object.
        elif isinstance(first, _CHANGING) and isinstance(first, type(value)):
            first.clear()
            (first.update if isinstance(first, set | dict) else first.extend)(value)
            value = first
        holder.values[key] = value


def _used_by(function: Any, name: Any, visited: set[int]) -> Iterator[tuple[str, Any]]:
    """Yields the modules and callable objects that a function uses, with their names."""
    if id(function) in visited or isinstance(function, type | BuiltinFunctionType):
        return
    visited.add(id(function))
    inside: dict[Any, Any]
    if isinstance(function, partial):
        inside = {**function.keywords, **dict(enumerate((function.func, *function.args)))}
    elif isinstance(function, MethodType):
        owner = function.__self__
        inside = {**getattr(owner, "__dict__", {}), **getattr(owner, "_modules", {})}
        inside[""] = function.__func__
    elif isinstance(function, FunctionType):
        code = [function.__code__]
        for one in code:  # also of functions and comprehensions within it
            code += [inner for inner in one.co_consts if isinstance(inner, CodeType)]
        inside = {n: function.__globals__.get(n) for one in code for n in one.co_names}
        cells = zip(code[0].co_freevars, function.__closure__ or (), strict=True)
        inside |= {n: cell.cell_contents for n, cell in cells}
    else:
        yield f"{_LOSS}{name}", function
        return
    for key, value in inside.items():
        # The functions of libraries use what is no part of a loss.
        if callable(value) and "site-packages" not in str(getattr(value, "__code__", "")):
            yield from _used_by(value, key, visited)


def _encoded(rows: list[Any]) -> Tensor:
    return torch.frombuffer(bytearray(msgspec.msgpack.encode(rows)), dtype=torch.uint8)


def _decoded(packed: Tensor | None) -> list[tuple[str, str, str, bool, Any]]:
    if packed is None or not packed.numel():
        return []
    if packed.dtype != torch.uint8 or packed.ndim != 1:
        raise ValueError("the other state of the model is damaged")
    data = packed.cpu().numpy().tobytes()
    try:
        return msgspec.msgpack.decode(data, type=list[tuple[str, str, str, bool, Any]])
    except msgspec.MsgspecError as error:
        raise ValueError("the other state of the model is damaged") from error


def _place(name: str, key: str) -> str:
    return f"{name}.{key}".lstrip(".")


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.numel() else id(tensor)


def _is_tensor(code: Any) -> bool:
    return isinstance(code, list) and len(code) == 4 and code[0] == "tensor"


def _tensor(code: Any) -> Tensor:
    _, name, shape, data = code
    try:
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0)
        return flat.to(torch.uint8).view(_DTYPES[name]).reshape(shape)
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError("the other state of the model is damaged") from error


def _is_plain(value: Any) -> bool:
    return type(value) in (tuple, torch.Size)


def _is_fixed(value: Any) -> bool:
    """Whether a value stays equal as long as it is the same object."""
    if isinstance(value, tuple):
        return all(map(_is_fixed, value))
    return isinstance(value, (*_SCALARS, *_FIXED))


def _fingerprint(value: Any) -> bytes | None:
    """The content of an array or a random generator; ``None`` of other objects."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, np.random.Generator):
        return pickle.dumps(value.bit_generator.state)
    if isinstance(value, random.Random | np.random.RandomState):
        state = value.getstate if isinstance(value, random.Random) else value.get_state
        return pickle.dumps(state())
    return None


def _foreign(value: Any) -> bool:
    """Whether an object is no state: a logger, or the Trainer of a network that has one."""
    return type(value).__module__.partition(".")[0] in _IGNORED


def copied(network: nn.Module) -> nn.Module:
    """Returns a copy; tensors that the network has computed are copied as numbers.

    PyTorch refuses to copy those, which older weight and spectral normalisations keep, and leaves
    out the hooks of parameters, by which a user masks or scales gradients.

    Example:
        >>> layer = torch.nn.utils.spectral_norm(nn.Linear(2, 2))
        >>> torch.equal(copied(layer).weight, layer.weight)
        True
    """
    computed: dict[int, Any] = {}
    for module in network.modules():
        for value in module.__dict__.values():
            for one in value if isinstance(value, list | tuple) else (value,):
                if isinstance(one, Tensor) and not one.is_leaf:
                    computed[id(one)] = one.detach().clone()
    made = copy.deepcopy(network, computed)
    parameters = dict(made.named_parameters())
    for name, parameter in network.named_parameters():
        for hook in (parameter._backward_hooks or {}).values():
            parameters[name].register_hook(hook)
        for hook in (parameter._post_accumulate_grad_hooks or {}).values():
            parameters[name].register_post_accumulate_grad_hook(hook)
    return made


def filled(network: nn.Module, whole: Mapping[str, Tensor]) -> nn.Module:
    """Puts a client's model into a network at its initial state, and returns it."""
    network = with_store_of(network, whole)
    named = {n: t for n, t in whole.items() if n != OTHER}
    if unknown := network.load_state_dict(named, strict=False).unexpected_keys:
        raise ValueError(f"the network has no {unknown[0]}")
    other = OtherState(network, network.state_dict())
    other.restore(whole.get(OTHER))
    return network
