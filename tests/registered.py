"""Modules of tests whose classes a configuration may name, as those of a plugin folder."""

from __future__ import annotations

from medfed.config import allowed

_known: set[str] = set()
_is_plugin = allowed.is_plugin


def register(module: str) -> None:
    """Lets configurations build what a module defines."""
    _known.add(module)


def _is_known(name: str) -> bool:
    return _is_plugin(name) or any(name.startswith(f"{module}.") for module in _known)


allowed.is_plugin = _is_known
