"""A hash of the code that a result comes from, whatever its comments and documents say.

What counts is the code of the modules that a configuration names, and of all of this package and of
plugins that these import: their syntax trees without docstrings. So a method's cells are stale when
the method has changed, or anything that it rests on, and those of other methods are not.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import medfed
from medfed.config.plugins import is_plugin

_PACKAGE = Path(medfed.__file__).parent


def code_hash(targets: Iterable[str]) -> str:
    """Returns the hash of the code behind dotted names.

    Args:
        targets: Modules, or classes and functions in them; those of libraries do not count, as
            their versions do.

    Example:
        >>> code_hash(["medfed.personalize.ditto.Ditto"]) == code_hash(["medfed.personalize.apfl"])
        False
        >>> code_hash(["torch.optim.SGD"]) == code_hash([])
        True
    """
    waiting = [m for t in targets if (m := _module(t))]
    seen: dict[str, str] = {}
    while waiting:
        module = waiting.pop()
        file = _file(module)
        if module in seen or file is None:
            continue
        seen[module], imported = read_code(file)
        waiting += [m for name in imported if (m := _module(name))]
    lines = [f"{module} {seen[module]}" for module in sorted(seen)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def targets_of(node: Any) -> Iterator[str]:
    """Yields what a plain configuration builds.

    Example:
        >>> list(targets_of({"a": [{"_target_": "x.Y"}], "b": 1}))
        ['x.Y']
    """
    if isinstance(node, dict):
        if isinstance(node.get("_target_"), str):
            yield node["_target_"]
        for value in node.values():
            yield from targets_of(value)
    elif isinstance(node, list):
        for value in node:
            yield from targets_of(value)


@cache
def _module(name: str) -> str:
    """The longest part of a dotted name that is a module of ours or of a plugin; else empty."""
    parts = name.split(".")
    if parts[0] != "medfed" and not is_plugin(name):
        return ""
    for end in range(len(parts), 0, -1):
        module = ".".join(parts[:end])
        if _file(module) is not None:
            return module
    return ""


@cache
def _file(module: str) -> Path | None:
    first, *rest = module.split(".")
    if first == "medfed":
        place = _PACKAGE.joinpath(*rest)
    else:
        spec = importlib.util.find_spec(first)
        if spec is None or spec.origin is None:
            return None
        origin = Path(spec.origin)
        if not rest:
            return origin
        place = origin.parent.joinpath(*rest)
    for file in (place.with_suffix(".py"), place / "__init__.py"):
        if file.is_file():
            return file
    return None


@cache
def read_code(file: Path) -> tuple[str, tuple[str, ...]]:
    """Returns a hash of a file's code, and what it imports.

    A file is read once: what a process has loaded does not change while it is edited.

    Args:
        file: A Python file.
    """
    tree = ast.parse(file.read_bytes())
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported |= {f"{node.module}.{name.name}" for name in node.names}
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and _is_text(body[0]):
            del body[0]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest(), tuple(sorted(imported))


def _is_text(node: ast.AST) -> bool:
    constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return constant and isinstance(node.value.value, str)  # type: ignore[attr-defined]
