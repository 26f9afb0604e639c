"""Checks of configured values before any constructor sees them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from hydra.utils import get_object
from omegaconf import DictConfig, ListConfig, OmegaConf

from medfed.errors import ConfigError

# Keys outside of any constructor: the smallest whole number, and whether null will do.
WHOLE_NUMBERS = {
    "rounds": (1, False),
    "seed": (0, False),
    "threads": (1, False),
    "evaluation.every": (1, False),
    "evaluation.patience": (1, True),
    "checkpoint.keep": (1, False),
    "checkpoint.every": (1, False),
}
_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    NoneType: "null",
}


def check_values(config: DictConfig) -> None:
    """Checks that nothing is left open, and the numbers that no constructor checks.

    Raises:
        ConfigError: If a value is missing, or a number is not whole or too small, or the newcomers
            are no list.

    Example:
        >>> check_values(OmegaConf.create({"rounds": 0}))
        Traceback (most recent call last):
        ...
        medfed.errors.ConfigError: rounds must be a whole number of at least 1, not 0.
    """
    if missing := sorted(OmegaConf.missing_keys(config)):
        raise ConfigError(f"{missing[0]} has no value yet; set it by {missing[0]}=VALUE.")
    for key, (least, optional) in WHOLE_NUMBERS.items():
        value = OmegaConf.select(config, key)
        if value is None and optional:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(
                f"{key} must be a whole number of at least {least}{' or null' * optional}, "
                f"not {value}."
            )
    newcomers = config.get("newcomers", ListConfig([]))
    if not isinstance(newcomers, ListConfig):
        raise ConfigError(f"newcomers must be a list of clients; write newcomers=[{newcomers}].")


def check_types(node: DictConfig) -> None:
    """Compares plain values with the annotations of the constructors that will receive them.

    Args:
        node: A node with ``_target_``, of which nested nodes may have one, too.

    Raises:
        ConfigError: If a value is of another type; the key is named.

    Example:
        >>> node = {"_target_": "medfed.federation.cohort.Cohort", "fraction": "half"}
        >>> check_types(OmegaConf.create({"cohort": node}).cohort)
        Traceback (most recent call last):
        ...
        medfed.errors.ConfigError: cohort.fraction must be a number, not 'half'.
    """
    hints = _annotations(str(node["_target_"])) if "_target_" in node else {}
    for key in node:
        value = node[key]
        if isinstance(value, DictConfig):
            check_types(value)
            continue
        hint = hints.get(str(key))
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if not set(kinds) <= set(_WORDS) or _is_any_of(value, kinds):
            continue
        words = " or ".join(word for kind, word in _WORDS.items() if kind in kinds)
        raise ConfigError(f"{node._get_full_key(str(key))} must be {words}, not {value!r}.")


def _annotations(target: str) -> dict[str, Any]:
    try:
        found = get_object(target)
        if inspect.isclass(found) and not is_dataclass(found):
            found = found.__init__
        return get_type_hints(found)
    except Exception:  # an unknown target or annotation: the constructor will speak for itself
        return {}


def _is_any_of(value: object, kinds: Sequence[Any]) -> bool:
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, tuple(kinds)) or (isinstance(value, int) and float in kinds)
