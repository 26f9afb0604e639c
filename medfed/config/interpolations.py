"""Replaces interpolations such as ``${seed}`` by their values.

OmegaConf parses each one and makes a node of each value, which takes a hundred times as long. So
values that are one whole interpolation, as in the shipped configurations, are looked up here. If a
configuration holds anything else, or an error, OmegaConf resolves all of it.
"""

from __future__ import annotations

import re
from typing import Any

from omegaconf import OmegaConf

from medfed.common.errors import ConfigError

# ${either:a,b} is a, or b if a is null.
OmegaConf.register_new_resolver("either", lambda a, b: b if a is None else a, replace=True)
# ${when:a,b,c,d} is c if a is b, else d.
OmegaConf.register_new_resolver("when", lambda a, b, c, d: c if a == b else d, replace=True)

_KEY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_CALL = re.compile(r"\$\{(oc\.select|either|when):(.*)\}", re.DOTALL)
_INTEGER, _REAL = re.compile(r"-?(0|[1-9]\d*)"), re.compile(r"-?(0|[1-9]\d*)\.\d+(e-?\d+)?")
_WORD = re.compile(r"(?!(inf|nan)$)[a-z_]+")
_CONSTANTS = {"null": None, "true": True, "false": False}
_DEEPEST = 16  # an interpolation that leads to itself ends there


class _UnusualError(Exception):
    """Something that OmegaConf has to resolve, or to name as an error."""


class _NoMapError(_UnusualError):
    """A value that has no keys stands where the key would lead on."""


class _AbsentKeyError(Exception):
    """No value stands at the key."""


def looked_up(root: dict[str, Any]) -> dict[str, Any] | None:
    """Returns plain values with every interpolation replaced, as OmegaConf does it.

    Args:
        root: Mappings and lists.

    Returns:
        New mappings and lists; ``None`` if only OmegaConf can resolve them.

    Raises:
        ConfigError: If an interpolation looks for a key within a value that has none, which
            OmegaConf takes for an absent key.

    Example:
        >>> looked_up({"a": {"b": 1}, "c": "${a}", "d": "${oc.select:tuned.lr,0.1}"})
        {'a': {'b': 1}, 'c': {'b': 1}, 'd': 0.1}
        >>> looked_up({"a": "${b}"}) is None, looked_up({"a": "x_${oc.env:HOME}"}) is None
        (True, True)
    """
    try:
        filled: dict[str, Any] = _filled(root, root, 0)
    except (_UnusualError, _AbsentKeyError, RecursionError):
        return None
    return filled


def _filled(node: Any, root: dict[str, Any], depth: int) -> Any:
    kind = type(node)
    if kind is str and "${" not in node and node != "???":
        return node
    if kind is str and depth < _DEEPEST:
        return _value_of(node, root, depth)
    if kind is dict and not any("${" in str(key) for key in node):
        return {key: _filled(value, root, depth) for key, value in node.items()}
    if kind is list:
        return [_filled(value, root, depth) for value in node]
    if node is None or kind in (int, float, bool):
        return node
    raise _UnusualError


def _value_of(text: str, root: dict[str, Any], depth: int) -> Any:
    if not (text.startswith("${") and text.endswith("}")):
        raise _UnusualError
    if _KEY.fullmatch(text[2:-1]):
        return _at(text[2:-1], root, depth)
    call = _CALL.fullmatch(text)
    if call is None:
        raise _UnusualError
    match call[1], [part.strip() for part in _divided(call[2])]:
        case "oc.select", [key, default] if _KEY.fullmatch(key):
            otherwise = _argument(default, root, depth)
            try:
                return _at(key, root, depth)
            except _AbsentKeyError:
                return otherwise
            except _NoMapError as error:  # OmegaConf would take the default
                place, name, value = error.args
                raise ConfigError(
                    f"{place}={value} stands where keys such as {place}.{name} belong; set these."
                ) from error
        case "either", [first, second]:
            a, b = (_argument(part, root, depth) for part in (first, second))
            return b if a is None else a
        case "when", [*parts] if len(parts) == 4:
            a, b, c, d = (_argument(part, root, depth) for part in parts)
            return c if a == b else d
    raise _UnusualError


def _at(key: str, root: dict[str, Any], depth: int) -> Any:
    """Returns the value of a key, of which a part may itself stand behind an interpolation."""
    node: Any = root
    for count, name in enumerate(names := key.split(".")):
        if isinstance(node, str) and "${" in node:
            node = _filled(node, root, depth + 1)
        if node is not None and type(node) is not dict:
            raise _NoMapError(".".join(names[:count]), names[count], node)
        if node is None:
            raise _UnusualError
        if name not in node:
            raise _AbsentKeyError
        node = node[name]
    return _filled(node, root, depth + 1)


def _argument(text: str, root: dict[str, Any], depth: int) -> Any:
    if text.startswith("${"):
        return _filled(text, root, depth + 1)
    if text.startswith("[") and text.endswith("]") and "[" not in text[1:]:
        return [_argument(part.strip(), root, depth) for part in text[1:-1].split(",")]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _REAL.fullmatch(text):
        return float(text)
    if _WORD.fullmatch(text):
        return _CONSTANTS.get(text, text)
    raise _UnusualError


def _divided(text: str) -> list[str]:
    """Divides arguments at the commas outside of braces and brackets."""
    parts = re.findall(r"(?:\$\{(?:[^{}]|\$\{[^{}]*\})*\}|\[[^][]*\]|[^,])+", text)
    if ",".join(parts) != text:  # an empty argument
        raise _UnusualError
    return parts
