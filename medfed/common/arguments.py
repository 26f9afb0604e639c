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

_NUMBERS: dict[Any, Any] = {int: Integral, float: (Real, Tensor)}
_WORDS: dict[Any, str] = {int: "a whole number", float: "a number", str: "a text", Path: "a path"}
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


def check_arguments(takes: Any, values: Mapping[str, Any], where: str = "") -> None:
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
    for name, value in values.items():
        if name not in hints:
            hint = did_you_mean(name, hints)
            raise ConfigError(f"{where}{name} is unknown{hint}; choose {', '.join(hints)}.")
        check_kind(where + name, value, hints[name])
    check_limits([(where + name, value, hints[name]) for name, value in values.items()])


def check_kind(name: str, value: Any, hint: Any, advice: str = "") -> None:
    """Refuses a value of another type than a hint's, and a function of other arguments.

    `advice`: what follows the name of the type.
    """
    plain = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    sides = get_args(plain) if get_origin(plain) in (Union, UnionType) else (plain,)
    fitting = [side for side in sides if _fits(value, side)]
    if not fitting:
        kinds = " or ".join(_named(side) for side in sides if side is not NoneType)
        raise ConfigError(f"{name} must be {kinds}{advice}, not {kind(value)}.")
    inside = get_args(fitting[0])
    if inside == (str,):
        for one in value:
            check_kind(f"each of {name}", one, str, advice)
    elif callable(value) and inside and inside[0] is not ...:
        try:
            signature(value).bind(*inside[0])
        except TypeError as error:
            count = f"{len(inside[0])} argument{'s' * (len(inside[0]) > 1)}"
            lacks = f"{kind(value)} does not: {error}"
            raise ConfigError(f"{name} must take {count}, and {lacks}.") from error
        except ValueError:  # of what is not written in Python
            pass


@cache
def _hints(takes: Any) -> dict[str, Any]:
    hints = get_type_hints(takes, include_extras=True)
    return {name: hint for name, hint in hints.items() if name != "return"}


def _fits(value: Any, hint: Any) -> bool:
    only = get_origin(hint) or hint
    if only in _NUMBERS:
        return isinstance(value, _NUMBERS[only]) and not isinstance(value, bool)
    if only is Sequence:
        return isinstance(value, Sequence) and not isinstance(value, str)
    # The sentence of a Literal lists its values.
    other = only is Literal or getattr(only, "_is_protocol", False) or not isinstance(only, type)
    return other or isinstance(value, only)


def _named(hint: Any) -> str:
    only = get_origin(hint) or hint
    article = "an" if only.__name__[0] in "AEIOU" else "a"
    return _WORDS.get(only, f"{article} {only.__name__}")
