"""What comes from outside, read as what it must be: JSON that means one thing, of a type.

A type is anything that msgspec knows: ``dict[str, float]``, a ``TypedDict``, a ``Struct`` or a
frozen dataclass. Whatever is not of it, and whatever the standard of JSON leaves open, is refused
in a line that names the place and never quotes more than a few letters.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Annotated, Any, TypeVar, overload

import msgspec

T = TypeVar("T")
LIMIT = 1 << 26
"""Bytes of the largest file that is read."""
_BITS = 64  # of a whole number: what computers agree on
_SENTENCES = (
    (re.compile(r"Object missing required field `(.*)`", re.DOTALL), "{} is missing"),
    (re.compile(r"Object contains unknown field `(.*)`", re.DOTALL), "{} is unknown"),
)

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
"""A number of bytes, samples or steps; a tensor's size."""
Number = Annotated[float, msgspec.Meta(ge=-1.7976931348623157e308, le=1.7976931348623157e308)]
"""A finite number."""


@overload
def parse_json(
    source: Path | bytes | memoryview, *, limit: int = ..., finite: bool = ...
) -> Any: ...
@overload
def parse_json(
    source: Path | bytes | memoryview, kind: type[T], *, limit: int = ..., finite: bool = ...
) -> T: ...
def parse_json(
    source: Path | bytes | memoryview, kind: Any = Any, *, limit: int = LIMIT, finite: bool = True
) -> Any:
    """Reads JSON whose every value means one thing, as a type.

    Args:
        source: A file, or its bytes, in UTF-8.
        kind: What it must hold; see :func:`fit`.
        limit: Bytes that a file may have.
        finite: Whether NaN and infinity, which Python writes, are refused.

    Returns:
        What it holds; every text can be written.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is too large or nested too deeply, names a key twice, holds NaN, infinity,
            a whole number of more than 64 bits or half a character, or is not of the type; the
            reason has one line.

    Example:
        >>> parse_json(b'{"a": [1, 2.5]}')
        {'a': [1, 2.5]}
        >>> parse_json(b'{"a": 1, "a": 2}')
        Traceback (most recent call last):
        ...
        ValueError: the key a occurs twice
    """
    if isinstance(source, Path):
        with source.open("rb") as file:
            content = file.read(limit + 1)
        if len(content) > limit:
            raise ValueError(f"it has more than {limit} bytes")
    else:
        content = bytes(source)
    try:
        value = json.loads(
            content.decode(),
            object_pairs_hook=_once,
            parse_int=_whole,
            parse_float=_finite if finite else float,
            parse_constant=_finite if finite else float,
        )
        # The text of a key or value may be half of a pair of UTF-16, which nothing can write.
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("it is no UTF-8") from None
    except UnicodeEncodeError:
        raise ValueError("it holds half a character") from None
    return value if kind is Any else fit(value, kind)


def fit(content: Any, kind: type[T]) -> T:
    """Returns plain content as a type.

    Args:
        content: What JSON, YAML or ``torch.load`` gave.
        kind: The type. Keys that it does not name are left out, or refused by a ``Struct`` with
            ``forbid_unknown_fields``.

    Raises:
        ValueError: If it is of another type; the place is named, ``[...]`` being any key.

    Example:
        >>> fit({"a": {"dice": 1}}, dict[str, dict[str, float]])
        {'a': {'dice': 1.0}}
        >>> fit({"a": {"dice": "0.5"}}, dict[str, dict[str, float]])
        Traceback (most recent call last):
        ...
        ValueError: [...][...]: expected float, got str
    """
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise ValueError(_sentence(str(error))) from None


def _sentence(text: str) -> str:
    """Msgspec's "Expected `int`, got `str` - at `$.rounds`", place first."""
    what, _, place = text.rpartition(" - at ")
    what, place = (what, place) if what else (place, "")
    place = place.replace("`", "").removeprefix("key in ").replace("$", "").removeprefix(".")
    for pattern, sentence in _SENTENCES:
        if match := pattern.fullmatch(what):
            # A name from outside may hold anything: as Python writes it, it has one line.
            name = match[1] if match[1].isidentifier() else f"{match[1]!r:.40}"
            return sentence.format(f"{place}.{name}" if place else name)
    said = what.replace("`", "").partition("\n")[0]
    return f"{place or 'it'}: {said[:1].lower()}{said[1:]:.200}"


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in members if names.count(name) > 1)
        raise ValueError(f"the key {twice:.40} occurs twice")
    return members


def _whole(text: str) -> int:
    if len(text) > 20 or (number := int(text)).bit_length() > _BITS:
        raise ValueError(f"{text:.20}... has more than {_BITS} bits")
    return number


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.40} is no finite number")
    return number
