"""Sections of a configuration in the form that all code below the commands reads: frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, NoReturn


class Section(dict[str, Any]):
    """A section of a configuration, frozen, with every interpolation replaced.

    A key is read as an item or an attribute; a mapping in it is a section, too.

    Example:
        >>> data = Section({"path": None, "reader": {"fold": 3}}, "data")
        >>> data.reader.fold, data.get("cache", "none"), data.reader.place
        (3, 'none', 'data.reader')
    """

    __slots__ = ("checked", "place", "targets")

    def __init__(self, values: Mapping[str, Any], place: str = "", checked: bool = False) -> None:
        self.place, self.checked = place, checked
        for key, value in values.items():
            if isinstance(value, Mapping):
                value = Section(value, f"{place}.{key}" if place else key, checked)
            super().__setitem__(key, value)
        self.targets = targets(self, place)  # of every part to build in it

    def __getattr__(self, key: str) -> Any:
        try:
            return self[key]
        except KeyError:
            raise AttributeError(f"{self.place or 'the configuration'} has no key {key}") from None

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(f"{self.place or 'The configuration'} is frozen.")

    __setitem__ = __delitem__ = __ior__ = _refuse  # type: ignore[assignment]
    clear = pop = popitem = setdefault = update = _refuse  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return Section, (dict(self), self.place, self.checked)

    def chosen(self, key: str) -> Section | None:
        """Returns a section if it has a ``_target_``, otherwise ``None``: nobody chose it.

        An experiment may set keys of a section that is not chosen; they have no effect.
        """
        section = self.get(key)
        return section if isinstance(section, Section) and "_target_" in section else None

    def plain(self) -> dict[str, Any]:
        """Returns a copy of the section as mappings and lists."""
        return {k: v.plain() if isinstance(v, Section) else deepcopy(v) for k, v in self.items()}


def select(node: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Returns the value of a dotted key; the default if there is none.

    Example:
        >>> select({"data": {"fold": 2}}, "data.fold"), select({"data": None}, "data.fold")
        (2, None)
    """
    value: Any = node
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value


def has(node: Mapping[str, Any], key: str) -> bool:
    """Says whether a key with dots is there, whatever its value."""
    return select(node, key, ...) is not ...


def put(node: dict[str, Any], key: str, value: Any) -> None:
    """Sets the value of a dotted key, in place.

    Example:
        >>> node = {"data": {"fold": 2}}
        >>> put(node, "data.seed", 1)
        >>> node
        {'data': {'fold': 2, 'seed': 1}}
    """
    *places, leaf = key.split(".")
    for place in places:
        node = node.setdefault(place, {})
    node[leaf] = value


def listed(value: Any) -> list[Any]:
    """Returns a list as it is, another value as a list of it, and null as an empty one."""
    return value if isinstance(value, list) else [] if value is None else [value]


def walk(node: Any, place: str = "", lists: bool = True) -> list[tuple[str, Any]]:
    """Returns every value and its key, a mapping before its values; without recursion.

    Example:
        >>> [key for key, _ in walk({"data": {"fold": 2, "sizes": [1, 2]}}, "run")]
        ['run', 'run.data', 'run.data.fold', 'run.data.sizes', 'run.data.sizes[0]', \
'run.data.sizes[1]']
    """
    waiting, every = [(place, node)], []
    while waiting:
        key, value = waiting.pop()
        every.append((key, value))
        inner: list[tuple[str, Any]] = []
        if isinstance(value, Mapping):
            inner = [(f"{key}.{k}" if key else str(k), v) for k, v in value.items()]
        elif lists and isinstance(value, list | tuple):
            inner = [(f"{key}[{i}]", v) for i, v in enumerate(value)]
        waiting += reversed(inner)
    return every


def leaves(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns every value that is no mapping by its key; a list is one value.

    Example:
        >>> leaves({"data": {"fold": 2, "sizes": [1, 2]}, "seed": 0})
        {'data.fold': 2, 'data.sizes': [1, 2], 'seed': 0}
    """
    walked = walk(config, lists=False)
    return {key: value for key, value in walked if not isinstance(value, Mapping)}


def targets(plain: Any, place: str = "") -> list[tuple[str, Mapping[Any, Any]]]:
    """Returns every mapping with a ``_target_``, and the key of that name.

    Example:
        >>> targets({"a": [{"_target_": "x.Y"}], "b": 1})
        [('a[0]._target_', {'_target_': 'x.Y'})]
    """
    return [
        (f"{key}._target_".lstrip("."), value)
        for key, value in walk(plain, place)
        if isinstance(value, Mapping) and "_target_" in value
    ]


_PLACES = (
    *("folder", "resume", "logger", "trainer", "progress", "hydra", "path", "root", "cache"),
    *("patient", "centre", "patient_pattern", "centre_pattern", "centres"),
)


def without_places(values: Any) -> Any:
    """Leaves out where a run took place and how its data name patients and hospitals.

    Other paths from the root of a disk become the name of their file.

    Example:
        >>> without_places({"seed": 0, "folder": "/home/me", "data": {"patient": "nr", "size": 3}})
        {'seed': 0, 'data': {'size': 3}}
        >>> without_places({"init": {"weights": "/home/me/w.pt"}})
        {'init': {'weights': 'w.pt'}}
    """
    if isinstance(values, Mapping):
        return {k: without_places(v) for k, v in values.items() if k not in _PLACES}
    if isinstance(values, list):
        return [without_places(value) for value in values]
    is_path = isinstance(values, str) and (Path(values).is_absolute() or values.startswith("~"))
    return Path(values).name if is_path else values
