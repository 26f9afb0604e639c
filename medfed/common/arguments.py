"""Checks what a user's code hands over by the annotations of what takes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from inspect import signature
from numbers import Integral, Real
from pathlib import Path
from types import FunctionType, NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from medfed.standalone.checks import check_limits
from medfed.standalone.errors import ConfigError, did_you_mean

_NUMBERS = {int: Integral, float: (Real, Tensor)}
_WORDS = {int: "a whole number", float: "a number", str: "a text", Path: "a path", tuple: "a tuple"}
_WORDS |= {Callable: "a function", Sequence: "a list", Mapping: "a dictionary"}


def kind(value: object) -> str:
    """Names a value in a sentence.

    Example:
        >>> import torch
        >>> kind((1, 2)), kind({"loss": 1}), kind(torch.zeros(3)), kind(Tensor), kind("sgd")
        ('a tuple of 2', 'a dict with loss', 'a tensor of shape [3]', 'the class Tensor', "'sgd'")
    """
    if isinstance(value, type | FunctionType):
        return f"the {'class' if isinstance(value, type) else 'function'} {value.__name__}"
    if isinstance(value, Tensor):
        whole = "" if value.is_floating_point() else f" and type {str(value.dtype)[6:]}"
        return f"a tensor of shape {list(value.shape)}{whole}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with {', '.join(map(str, value)) or 'nothing'}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    plain = value is None or isinstance(value, str | bool | int | float)
    return repr(value) if plain else f"an object of the type {type(value).__name__}"


def check_arguments(takes: Any, given: Mapping[str, Any], where: str = "") -> None:
    """Refuses arguments of another type, name or range than the annotations of what takes them.

    `where`: the beginning of the sentence.

    Example:
        >>> def train(rate: float = 0.1, after: Callable[[int], None] | None = None) -> None: ...
        >>> check_arguments(train, {"rate": 0.5, "after": print})
        >>> check_arguments(train, {"rate": "high"})
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.ConfigError: rate must be a number, not 'high'.
        >>> check_arguments(train, {"after": lambda: None})
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.ConfigError: after must take 1 argument, and the function <lambda> does not: too many positional arguments.
    """  # noqa: E501
    hints = _hints(takes)
    for name, value in given.items():
        if name not in hints:
            hint = did_you_mean(name, hints)
            raise ConfigError(f"{where}{name} is unknown{hint}; choose {', '.join(hints)}.")
        check_kind(f"{where}{name}", value, hints[name])
        check_limits([(f"{where}{name}", value, hints[name])])


def check_kind(name: str, value: object, hint: Any, advice: str = "") -> None:
    """Refuses a value of another type than a hint's, and a function of other arguments.

    `advice`: what follows the name of the type.
    """
    if not _fits(value, hint):
        if _fits(value, Sequence) and Sequence in map(get_origin, _sides(hint)):
            name, hint = f"each of {name}", str
            value = next(one for one in value if not isinstance(one, str))  # type: ignore[attr-defined]
        raise ConfigError(f"{name} must be {_named(hint)}{advice}, not {kind(value)}.")
    for side in _sides(hint):
        called = get_args(side)[0] if get_origin(side) is Callable and get_args(side) else ...
        if called is ... or not callable(value):
            continue
        try:
            parameters = signature(value)
        except (TypeError, ValueError):  # of what is not written in Python
            continue
        try:
            parameters.bind(*called)
        except TypeError as error:
            count = f"{len(called)} argument{'s' * (len(called) > 1)}"
            lacks = f"{kind(value)} does not: {error}"
            raise ConfigError(f"{name} must take {count}, and {lacks}.") from error


@cache
def _hints(takes: Any) -> dict[str, Any]:
    hints = get_type_hints(takes, include_extras=True)
    return {name: hint for name, hint in hints.items() if name != "return"}


def _sides(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) is Annotated:
        return _sides(get_args(hint)[0])
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    sides = _sides(hint)
    if len(sides) > 1:
        return any(_fits(value, side) for side in sides)
    only, inside = get_origin(sides[0]) or sides[0], get_args(sides[0])
    if only is Literal:  # whose sentence lists the values
        return True
    if only is Callable:
        return callable(value)
    if only in _NUMBERS:
        return isinstance(value, _NUMBERS[only]) and not isinstance(value, bool)
    if only is Sequence:
        whole = isinstance(value, Sequence) and not isinstance(value, str)
        return whole and (inside != (str,) or all(isinstance(one, str) for one in value))
    protocol = getattr(only, "_is_protocol", False) or not isinstance(only, type)
    return protocol or isinstance(value, only)


def _named(hint: Any) -> str:
    names = []
    for only in (get_origin(side) or side for side in _sides(hint) if side is not NoneType):
        name = getattr(only, "__name__", str(only))
        article = "an" if name[0] in "AEIOU" else "a"
        names.append(_WORDS.get(only, f"{article} {name}"))
    return " or ".join(names)
