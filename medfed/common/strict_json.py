"""JSON that means one thing, written and read: what the standard leaves open is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LIMIT = 1 << 26
"""Bytes of the largest file that is read."""


def read_strict_json(path: Path, limit: int = LIMIT, finite: bool = True) -> Any:
    """Reads JSON whose every value means one thing.

    Args:
        path: A file in UTF-8.
        limit: Bytes that it may have.
        finite: Whether NaN and infinity, which Python writes, are refused.

    Returns:
        What it holds; every text can be written.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is too large or nested too deeply, names a key twice, or holds NaN,
            infinity or half a character; the reason has one line.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.json"
        >>> _ = path.write_text('{"a": 1, "a": 2}')
        >>> read_strict_json(path)
        Traceback (most recent call last):
        ...
        ValueError: the key a occurs twice
    """
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it has more than {limit} bytes")
    return parse_strict_json(content, finite)


def parse_strict_json(content: bytes, finite: bool = True) -> Any:
    """Reads bytes as `read_strict_json` reads a file.

    Args:
        content: In UTF-8.
        finite: Whether NaN and infinity are refused.

    Raises:
        ValueError: See there.

    Example:
        >>> parse_strict_json(b'{"a": [1, 2.5]}')
        {'a': [1, 2.5]}
    """
    try:
        found = json.loads(
            content.decode(),
            object_pairs_hook=_once,
            parse_float=_finite if finite else float,
            parse_constant=_finite if finite else float,
        )
        json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("it is no UTF-8") from None
    except UnicodeEncodeError:
        raise ValueError("it holds half a character") from None
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key} occurs twice")
        found[key] = value
    return found


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no finite number")
    return number


def json_text(content: object) -> str:
    """Returns JSON that every parser reads, which Python's own NaN and Infinity are not.

    Args:
        content: What JSON can hold, and numbers that are not finite: NaN becomes null, and infinity
            a number that is larger than any other.

    Example:
        >>> print(json_text({"iou": math.nan, "loss": math.inf}))
        {
         "iou": null,
         "loss": 1e999
        }
        >>> json.loads("1e999")
        inf
    """
    text = json.dumps(_plain(content), indent=1, allow_nan=False)
    return text.replace(json.dumps(_INFINITE), "1e999").replace(
        json.dumps(f"-{_INFINITE}"), "-1e999"
    )


_INFINITE = "\0infinite"  # no other text in JSON of ours has such a character


def _plain(content: object) -> object:
    if isinstance(content, float) and not math.isfinite(content):
        return None if math.isnan(content) else f"{'-' * (content < 0)}{_INFINITE}"
    if isinstance(content, Mapping):
        return {key: _plain(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_plain(value) for value in content]
    return content
