"""Checks of configured values; each error is one sentence that names the key and the value."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import is_dataclass
from functools import partial
from types import NoneType
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

from medfed.common.errors import ConfigError, did_you_mean


def check_fields(section: str, holder: object) -> None:
    """Checks the fields whose annotation limits their values.

    A ``Literal`` lists the allowed values; ``Annotated`` names a check of this module, which
    takes the key and the value. Null passes where the annotation allows it. In the place of another
    dataclass there may be no text, number or list.

    Args:
        section: The section that configures the object.
        holder: The object.

    Raises:
        ConfigError: If a field has another value.

    Example:
        >>> class Step:
        ...     size: Literal["scaled", "literal"] = "scaled"
        ...     rate: Annotated[float, check_positive] = 0.0
        >>> check_fields("algorithm", Step())
        Traceback (most recent call last):
        ...
        medfed.common.errors.ConfigError: algorithm.rate must be positive, not 0.0.
    """
    limits = {  # a subclass that gives only another default keeps the limits
        name: hint
        for kind in reversed(type(holder).__mro__)
        for name, hint in get_type_hints(kind, include_extras=True).items()
        if get_origin(hint) in (Literal, Annotated) or is_dataclass(hint)
    }
    for name, hint in limits.items():
        key, value = f"{section}.{name}", getattr(holder, name)
        if get_origin(hint) is Literal:
            check_known(key, value, get_args(hint))
        elif is_dataclass(hint):
            if isinstance(value, str | float | list):
                raise ConfigError(f"{key} must be a map, not {value!r}.")
        elif value is not None or NoneType not in get_args(hint.__origin__):
            for check in hint.__metadata__:
                check(key, value)


def check_known(key: str, value: object, known: Iterable[str]) -> None:
    """Checks that a value is known.

    Args:
        key: The key of the value.
        value: The value.
        known: The accepted values.

    Raises:
        ConfigError: If it is unknown; the error names the known values.

    Example:
        >>> check_known("data.reader.color", "gray", ["grey", "rgb"])
        Traceback (most recent call last):
        ...
        medfed.common.errors.ConfigError: data.reader.color='gray' is unknown; choose grey or rgb.
    """
    names = list(known)
    if value in names:
        return
    few = len(names) == 2
    hint = "" if few else did_you_mean(str(value), names)
    choice = " or ".join(names) if few else f"one of {', '.join(names)}"
    raise ConfigError(f"{key}={value!r} is unknown{hint}; choose {choice}.")


def check_not_negative(key: str, value: float) -> None:
    """Checks that a number is 0 or more.

    Raises:
        ConfigError: If it is negative or not a number.

    Example:
        >>> check_not_negative("algorithm.strength", -1.0)
        Traceback (most recent call last):
        ...
        medfed.common.errors.ConfigError: algorithm.strength must not be negative, not -1.0.
    """
    if not value >= 0:
        raise ConfigError(f"{key} must not be negative, not {value}.")


def check_positive(key: str, value: float) -> None:
    """Checks that a number is more than 0.

    Raises:
        ConfigError: If it is 0, negative or not a number.

    Example:
        >>> check_positive("algorithm.strength", 0.0)
        Traceback (most recent call last):
        ...
        medfed.common.errors.ConfigError: algorithm.strength must be positive, not 0.0.
    """
    if not value > 0:
        raise ConfigError(f"{key} must be positive, not {value}.")


def within(interval: str) -> Callable[[str, float], None]:
    """Returns a check that a number is in an interval between 0 and 1.

    Args:
        interval: The allowed interval; a round bracket excludes 0 or 1.

    Returns:
        The check, which raises a ConfigError for other numbers and for what is not a number.

    Example:
        >>> within("(0, 1]")("algorithm.keep", 1.0)
        >>> within("(0, 1]")("algorithm.keep", 0.0)
        Traceback (most recent call last):
        ...
        medfed.common.errors.ConfigError: algorithm.keep must be in (0, 1], not 0.0.
    """
    excluded = [end for end, bracket in ((0, "("), (1, ")")) if bracket in interval]

    def check(key: str, value: float) -> None:
        if not 0 <= value <= 1 or value in excluded:
            raise ConfigError(f"{key} must be in {interval}, not {value}.")

    return check


def check_count(key: str, value: int, null: str = "") -> None:
    """Checks that a count is 1 or more.

    Args:
        key: The key of the value.
        value: The value.
        null: Words for the error where null is allowed, too.

    Raises:
        ConfigError: If it is less than 1.

    Example:
        >>> check_count("algorithm.rounds", 0)
        Traceback (most recent call last):
        ...
        medfed.common.errors.ConfigError: algorithm.rounds must be 1 or more, not 0.
    """
    if value < 1:
        raise ConfigError(f"{key} must be 1 or more,{null} not {value}.")


check_optional_count = partial(check_count, null=" or null,")


def checked_scale(scale: object, key: str) -> tuple[float, float]:
    """Returns mean and standard deviation of an outcome, after checking them.

    Args:
        scale: The mean and the standard deviation.
        key: The key of the value.

    Raises:
        ConfigError: If they are not a finite mean and a finite deviation above 0.

    Example:
        >>> checked_scale([450, 60], "data.outcome_scale")
        (450.0, 60.0)
    """
    given = [*scale] if isinstance(scale, Sequence) else [scale]
    numbers = [x for x in given if isinstance(x, int | float) and math.isfinite(x)]
    if len(numbers) != 2 or len(given) != 2 or numbers[1] <= 0:
        raise ConfigError(
            f"{key}={scale} must be a mean and a deviation above 0 ([0, 1]: no scaling)."
        )
    return float(numbers[0]), float(numbers[1])
