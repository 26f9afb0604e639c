"""Checks of configured values; each error is one sentence that names the key and the value."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, get_args, get_origin, get_type_hints

from medfed.common.errors import ConfigError, did_you_mean


def check_choices(section: str, holder: object) -> None:
    """Checks the fields whose annotation is a ``Literal``, which lists the allowed values.

    Args:
        section: The section that configures the object.
        holder: The object.

    Raises:
        ConfigError: If a field has another value.

    Example:
        >>> class Step:
        ...     size: Literal["scaled", "literal"] = "exact"
        >>> check_choices("algorithm", Step())
        Traceback (most recent call last):
        ...
        medfed.common.errors.ConfigError: algorithm.size='exact' is unknown; choose scaled or \
literal.
    """
    for name, hint in get_type_hints(type(holder)).items():
        if get_origin(hint) is Literal:
            check_known(f"{section}.{name}", getattr(holder, name), get_args(hint))


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


def check_share(key: str, value: float, interval: str = "[0, 1]") -> None:
    """Checks that a number is between 0 and 1.

    Args:
        key: The key of the value.
        value: The value.
        interval: The allowed interval; a round bracket excludes 0 or 1.

    Raises:
        ConfigError: If it is not, or is not a number.

    Example:
        >>> check_share("algorithm.keep", 1.0, "(0, 1]")
        >>> check_share("algorithm.keep", 0.0, "(0, 1]")
        Traceback (most recent call last):
        ...
        medfed.common.errors.ConfigError: algorithm.keep must be in (0, 1], not 0.0.
    """
    left_out = [end for end, bracket in ((0, "("), (1, ")")) if bracket in interval]
    if not 0 <= value <= 1 or value in left_out:
        raise ConfigError(f"{key} must be in {interval}, not {value}.")


def check_count(key: str, value: int | None, optional: bool = False) -> None:
    """Checks that a count is 1 or more.

    Args:
        key: The key of the value.
        value: The value.
        optional: Whether null is allowed, too.

    Raises:
        ConfigError: If it is less than 1.

    Example:
        >>> check_count("algorithm.local_steps", 0, optional=True)
        Traceback (most recent call last):
        ...
        medfed.common.errors.ConfigError: algorithm.local_steps must be 1 or more, or null, not 0.
    """
    if value is None and optional:
        return
    if value is None or value < 1:
        raise ConfigError(f"{key} must be 1 or more,{' or null,' * optional} not {value}.")


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
