"""Compiles loops over numbers by Numba, and keeps them on the disk for later processes."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit

_log = logging.getLogger(__name__)
Loop = TypeVar("Loop", bound=Callable[..., Any])
NOT_KEPT = (
    "Numba can write neither to this installation nor to your home, so each process compiles its "
    "loops anew, which takes up to a minute; set NUMBA_CACHE_DIR to a folder of yours."
)


def can_cache(function: Loop) -> bool:
    """Returns whether Numba finds a folder in which it keeps what it compiles of a function."""
    try:
        njit(cache=True)(function)
    except RuntimeError:
        return False
    return True


def compiled(**how: Any) -> Callable[[Loop], Any]:
    """Returns a decorator that compiles a function when it is first called."""

    def decorate(function: Loop) -> Any:
        if not (is_cached := can_cache(function)):
            _say_once(NOT_KEPT)
        return njit(cache=is_cached, nogil=True, **how)(function)

    return decorate


_say_once = functools.cache(_log.warning)
