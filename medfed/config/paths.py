"""Paths on a command line: any path of a file or folder is taken as the shell gives it.

A path that is in quotes as a whole is in Hydra's spelling, in which the quotes are no part of it.
"""

from __future__ import annotations

import os
import re

# Keys whose value is the path of a file or folder; those of PATH_LISTS take several.
PATHS = re.compile(
    r"run|resume|folder|plan|study|out|input|output|candidates|onboard|patients|data_root|paths\.\w+"
    r"|kit|dry_run|provision|approve|lock|init\.weights|partition\.file|hydra\.(run|sweep)\.dir"
    r"|hydra\.sweep\.subdir|data\.(path|root|cache)|data\.reader\.(file|sites\.file)"
    r"|data\.reader\.(candidates|annotations)|algorithm\.affinity\.weights"
)
# Of these, what must be there before a run; other paths have sentences of their own.
EXISTING = ("data.path", "partition.file")
PATH_LISTS = ("runs", "bundle", "of", "plugins")
_PART = re.compile(r"""\s*(?:"[^"]*"|'(?:[^'\\]|\\.)*')\s*(?=,|\Z)|[^,]*""", re.DOTALL)
_PLAIN = re.compile(r"(\.{0,2}/|[A-Za-z_])[A-Za-z0-9_/.-]*")  # the same without quotes
_WORDS = ("null", "true", "false", "inf", "nan")
_SWEPT = re.compile(r"(choice|glob|range|interval|shuffle|sort|tag)\(.*\)", re.DOTALL)


def is_path_key(key: str) -> bool:
    """Returns whether the values of a key are paths.

    Example:
        >>> is_path_key("data.path"), is_path_key("runs"), is_path_key("seed")
        (True, True, False)
    """
    return key in PATH_LISTS or PATHS.fullmatch(key) is not None


def with_paths(argument: str, sweeps: bool = False) -> str:
    """Quotes the paths of a key whose values are paths.

    Returns the argument in Hydra's spelling; empty if its key takes no paths.

    Example:
        >>> with_paths("out=a (1)"), with_paths("runs=[a,b]"), with_paths("seed=1")
        ("out='a (1)'", 'runs=[a,b]', '')
    """
    key, _, value = argument.partition("=")
    name = key.lstrip("+")
    if value in ("", "null", "???") or not is_path_key(name):
        return ""
    if name in PATH_LISTS:
        names = paths_in(value)
        listed = ",".join(map(_path, names))
        return f"{key}={listed}" if names == [value] else f"{key}=[{listed}]"
    if name == "algorithm.affinity.weights" and value.startswith("[["):
        return ""  # rows of numbers
    if sweeps and not name.startswith("hydra."):
        if _SWEPT.fullmatch(value):
            return ""
        return f"{key}={','.join(map(_path, _divided(value)))}"
    return f"{key}={_path(value)}"


def paths_in(value: str) -> list[str]:
    """Returns the paths that a value names: one, or several between commas and in brackets.

    Example:
        >>> paths_in("[a, b]"), paths_in("'a,b'"), paths_in("[]")
        (['a', 'b'], ["'a,b'"], [])
    """
    if value.startswith("[") and value.endswith("]") and not _exists(value):
        value = value[1:-1].strip()
    return _divided(value) if value else []


def _divided(value: str) -> list[str]:
    """Divides at commas outside of quotes; a comma within the name of what exists stays there."""
    parts, at = list[str](), 0
    while at <= len(value):
        part = _PART.match(value, at)
        assert part is not None  # it also matches nothing
        parts, at = [*parts, part[0]], part.end() + 1
    if len(parts) == 1 or not all(part.strip() for part in parts):
        return [value]
    names: list[str] = []
    while parts:
        several = (n for n in range(len(parts), 1, -1) if _exists(",".join(parts[:n])))
        count = next(several, 1)
        names.append(parts[0].strip() if count == 1 else ",".join(parts[:count]))
        parts = parts[count:]
    return names


def _exists(path: str) -> bool:
    return os.path.exists(os.path.expanduser(path))  # also of a name that is too long


def _path(text: str) -> str:
    path = os.path.expanduser(unquoted(text))
    plain = _PLAIN.fullmatch(path) and path.lower() not in _WORDS
    return path if plain else literal(path)


def unquoted(text: str) -> str:
    r"""Returns a text without quotes around all of it, as Hydra reads it.

    Example:
        >>> unquoted('"a"'), unquoted("'a' b"), unquoted(literal("it's")) == "it's"
        ('a', "'a' b", True)
    """
    quote = text[:1]
    if len(text) < 2 or quote not in ("'", '"') or not text.endswith(quote):
        return text
    escaped = rf"(\\+)({quote}|\Z)"
    return re.sub(escaped, lambda m: m[1][: len(m[1]) // 2] + m[2], text[1:-1])


def literal(text: str) -> str:
    r"""Returns a text in quotes, as Hydra reads it; an interpolation in it stays one.

    Example:
        >>> print(literal("it's"), literal("a\\"))
        'it\'s' 'a\\'
    """
    return "'" + re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + m[2].replace("'", r"\'"), text) + "'"
