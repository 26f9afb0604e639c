"""Checks of configured values; each error is one sentence that names the key and the value."""

from __future__ import annotations

import json
import math
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import is_dataclass
from functools import partial, wraps
from inspect import signature
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

from .errors import ConfigError, did_you_mean

Check = Callable[[str, Any], None]
P = ParamSpec("P")
T = TypeVar("T")


def check_fields(section: str, holder: object) -> None:
    """Checks the fields whose annotation limits their values.

    A ``Literal`` lists the allowed values; ``Annotated`` names a check of this module. Null passes
    where the annotation allows it. In the place of another dataclass there may be no text, number
    or list.

    Example:
        >>> class Step:
        ...     size: Literal["scaled", "literal"] = "scaled"
        ...     rate: Annotated[float, check_positive] = 0.0
        >>> check_fields("algorithm", Step())
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.ConfigError: algorithm.rate must be positive, not 0.0.
    """
    limits: dict[str, Any] = {}
    for kind in reversed(type(holder).__mro__):
        # Base classes of libraries have annotations that exist for type checkers only.
        if not kind.__module__.startswith(("pytorch_lightning", "torch")):
            # A subclass that gives only another default keeps the limits.
            hints = typing.get_type_hints(kind, include_extras=True)
            limits |= {name: hint for name, hint in hints.items() if _checks_of(hint)}
    check_limits((f"{section}.{n}".lstrip("."), getattr(holder, n), h) for n, h in limits.items())


def checked(section: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Returns a decorator that checks arguments by their annotations, as `check_fields` does.

    Example:
        >>> @checked("data.reader")
        ... def read(scale: Annotated[float, check_positive] = 1.0) -> float:
        ...     return scale
        >>> read(0.0)
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.ConfigError: data.reader.scale must be positive, not 0.0.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            hints = typing.get_type_hints(function, include_extras=True)
            bound = signature(function).bind(*args, **kwargs).arguments
            check_limits((f"{section}.{name}", v, hints.get(name)) for name, v in bound.items())
            return function(*args, **kwargs)

        return call

    return decorate


def check_limits(values: Iterable[tuple[str, Any, Any]]) -> None:
    """Checks keys, values and annotations, as `check_fields` does."""
    for key, value, hint in values:
        for check in _checks_of(hint):
            check(key, value)


def _checks_of(hint: Any) -> tuple[Check, ...]:
    """Returns the checks of an annotation, which take the key and the value."""
    if get_origin(hint) is Annotated:
        null = NoneType in get_args(hint.__origin__)
        # What else is there is for msgspec or for readers.
        checks: list[Check] = [check for check in hint.__metadata__ if callable(check)]
        return tuple(partial(_unless_null, check) if null else check for check in checks)
    if is_dataclass(hint):
        return (_check_map,)
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if all(get_origin(part) is Literal or part in (NoneType, bool) for part in parts):
        known = [value for part in parts for value in get_args(part)]
        if known:
            known += [True, False] * (bool in parts) + [None] * (NoneType in parts)
            return (partial(check_known, known=known),)
    return ()


def _unless_null(check: Check, key: str, value: Any) -> None:
    if value is not None:
        check(key, value)


def _check_map(key: str, value: Any) -> None:
    if isinstance(value, str | float | list):
        raise ConfigError(f"{key} must be a map, not {value!r}.")


def check_known(key: str, value: object, known: Iterable[str | bool | None]) -> None:
    """Checks that a value is known.

    Example:
        >>> check_known("data.reader.color", "gray", ["grey", "rgb"])
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.ConfigError: data.reader.color='gray' is unknown; choose grey or rgb.
    """  # noqa: E501
    if value in (known := list(known)):
        return
    names = [name if isinstance(name, str) else json.dumps(name) for name in known]
    few = len(names) == 2
    hint = "" if few else did_you_mean(str(value), names)
    choice = " or ".join(names) if few else f"one of {', '.join(names)}"
    raise ConfigError(f"{key}={value!r} is unknown{hint}; choose {choice}.")


def _must(be: str, holds: Callable[[Any], bool]) -> Check:
    """Returns a check that something holds of a value.

    Example:
        >>> check_positive("algorithm.strength", 0.0)
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.ConfigError: algorithm.strength must be positive, not 0.0.
    """

    def check(key: str, value: Any) -> None:
        if not holds(value):
            raise ConfigError(f"{key} must {be}, not {value}.")

    return check


check_not_negative = _must("not be negative", lambda number: number >= 0)
check_positive = _must("be positive", lambda number: number > 0)
check_count = _must("be 1 or more", lambda count: not count < 1)
check_optional_count = _must("be 1 or more, or null", lambda count: not count < 1)


def within(interval: str) -> Check:
    """Returns a check that a number is in an interval, of which a round bracket excludes its end.

    Example:
        >>> within("(0, 1]")("algorithm.keep", 1.0)
        >>> within("(0, 1]")("algorithm.keep", 0.0)
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.ConfigError: algorithm.keep must be in (0, 1], not 0.0.
    """
    low, high = map(float, interval[1:-1].split(","))
    excluded = [end for end, bracket in ((low, "("), (high, ")")) if bracket in interval]

    return _must(f"be in {interval}", lambda x: low <= x <= high and x not in excluded)


def checked_scale(scale: object, key: str) -> tuple[float, float]:
    """Returns mean and standard deviation of an outcome, after checking them.

    Example:
        >>> checked_scale([450, 60], "data.outcome_scale")
        (450.0, 60.0)
    """
    values = [*scale] if isinstance(scale, Sequence) else [scale]
    numbers = [x for x in values if isinstance(x, int | float) and math.isfinite(x)]
    if len(numbers) != 2 or len(values) != 2 or numbers[1] <= 0:
        wanted = "a mean and a deviation above 0 ([0, 1]: no scaling)"
        raise ConfigError(f"{key}={scale} must be {wanted}.")
    return float(numbers[0]), float(numbers[1])
