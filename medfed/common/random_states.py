"""Random numbers of code that takes no seed: samplers, data sets and transforms of users.

Such code draws from the global streams of Python, NumPy and PyTorch, or from random states that it
keeps anywhere: as an attribute, in a list, behind a subset or a lambda, as MONAI's transforms do.
"""

from __future__ import annotations

import copyreg
import random
import types
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
import torch

from medfed.common.seeding import derive_seed
from medfed.common.streams import has_global_stream

State = random.Random | np.random.RandomState | np.random.Generator | torch.Generator
_STATES = (random.Random, np.random.RandomState, np.random.Generator, torch.Generator)
_PLAIN = (str, bytes, int, float, complex, type(None), type, types.ModuleType)
_LEAVES = (*_PLAIN, np.ndarray, torch.Tensor)
_LIBRARIES = ("builtins", "abc", "typing", "torch", "collections")
_MOST = 100  # a longer list is one of samples, not of transforms


class RandomStates:
    """The global random states and all that some objects hold; a block uses them under a seed."""

    # Each block continues where the last one stopped. Outside of the blocks all states are as
    # if there had been none, so blocks of several seeds may take turns.

    def __init__(self, seed: int, *objects: object) -> None:
        everywhere: dict[str, State] = {"python": random._inst, "numpy": np.random.mtrand._rand}  # type: ignore[attr-defined]
        if has_global_stream():  # see `streams.seeded`
            everywhere["torch"] = torch.default_generator
        named = chain(everywhere.items(), _states_in(*objects))
        self._named = {id(state): (name, state) for name, state in reversed([*named])}
        self._states = [state for _, state in self._named.values()]
        self._seed = seed
        self._continue: list[Callable[[], Any]] = []
        self._leave: list[Callable[[], Any]] = []

    def seed(self) -> None:
        """Sets all states to their beginning, without restoring them later."""
        for name, state in self._named.values():
            _set_seed(state, derive_seed(self._seed, name))

    def __enter__(self) -> None:
        self._leave = [_way_back(state) for state in self._states]
        for put_back in self._continue or [self.seed]:
            put_back()

    def __exit__(self, *_: object) -> None:
        self._continue = [_way_back(state) for state in self._states]
        for put_back in self._leave:
            put_back()


def _states_in(*objects: object) -> Iterator[tuple[str, State]]:
    """Yields the random states that objects hold at any depth, with a name from where they are.

    Example:
        >>> class Noise:
        ...     def __init__(self):
        ...         self.transforms = [partial(min, random.Random()), {"b": torch.Generator()}]
        >>> [(name, type(state).__name__) for name, state in _states_in(Noise())]
        [('0.transforms.0.args.0', 'Random'), ('0.transforms.1.b', 'Generator')]
    """
    waiting = [(str(number), one) for number, one in enumerate(objects)]
    visited: dict[int, object] = {}  # with the objects: the id of a temporary one is given away
    while waiting:
        name, one = waiting.pop()
        if isinstance(one, _LEAVES) or id(one) in visited:
            continue
        visited[id(one)] = one
        if not isinstance(one, _STATES):
            parts = [(part if ":" in part else f"{name}.{part}", v) for part, v in _parts(one)]
            waiting += reversed(parts)
        elif not isinstance(one, random.SystemRandom):
            yield name, one


def _parts(one: Any) -> Iterable[tuple[str, object]]:
    """The objects that one holds, by name; with a colon where the name is one for the process."""
    if isinstance(one, list | tuple):
        return ((str(number), part) for number, part in enumerate(islice(one, _MOST)))
    if isinstance(one, dict):
        return ((str(key).replace(":", ""), part) for key, part in islice(one.items(), _MOST))
    if isinstance(one, partial):
        return ("func", one.func), ("args", one.args), ("keywords", one.keywords)
    if isinstance(one, types.MethodType | types.BuiltinMethodType | types.MethodWrapperType):
        return ("self", one.__self__), ("func", getattr(one, "__func__", None))
    if isinstance(one, types.CellType):
        try:
            return (("cell", one.cell_contents),)
        except ValueError:  # not filled yet
            return ()
    if isinstance(one, types.FunctionType):
        known = {n: one.__globals__.get(n) for n in one.__code__.co_names}
        used = ((f"{one.__module__}:{n}", v) for n, v in known.items() if isinstance(v, _STATES))
        inside = (one.__closure__, one.__defaults__, one.__kwdefaults__)
        return *used, *zip(("closure", "defaults", "keywords"), inside, strict=True)
    slots = [(n, getattr(one, n, None)) for n in copyreg._slotnames(type(one))]  # type: ignore[attr-defined]
    # A class may hold a state for all its objects, as MONAI's Randomizable does.
    kinds = [k for k in type(one).__mro__ if k.__module__.partition(".")[0] not in _LIBRARIES]
    kinds_of = (*_STATES, types.FunctionType)
    every = ((f"{k.__qualname__}:{n}", v) for k in kinds for n, v in vars(k).items())
    shared = (named for named in every if isinstance(named[1], kinds_of))
    return *getattr(one, "__dict__", {}).items(), *slots, *shared


def _set_seed(state: State, seed: int) -> None:
    match state:
        case torch.Generator():
            state.manual_seed(seed)
        case np.random.Generator():
            state.bit_generator.state = type(state.bit_generator)(seed).state  # type: ignore[call-arg]
        case np.random.RandomState():
            fresh = np.random.RandomState(type(state._bit_generator)(seed))
            state.set_state(fresh.get_state(legacy=False))
        case random.Random():
            state.seed(seed)


def _way_back(state: State) -> Callable[[], Any]:
    """Returns what puts a random state back as it is now."""
    match state:
        case torch.Generator():
            return partial(state.set_state, state.get_state())
        case np.random.Generator():
            return partial(setattr, state.bit_generator, "state", state.bit_generator.state)
        case np.random.RandomState():
            return partial(state.set_state, state.get_state(legacy=False))
        case random.Random():
            return partial(state.setstate, state.getstate())
