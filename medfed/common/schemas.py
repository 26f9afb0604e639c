"""Reads content from outside as a type, and refuses JSON that can be read in two ways.

A type is anything that msgspec knows: ``dict[str, float]``, a ``TypedDict``, a ``Struct`` or a
frozen dataclass. Content that does not fit the type, or that the JSON standard leaves undefined, is
refused. The error is one line that names the place and quotes only a few letters.
"""

from __future__ import annotations

import json
import math
import re
from codecs import BOM_UTF8
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from medfed.standalone.errors import CheckpointError, did_you_mean, first_line
from medfed.standalone.files import refuse_special

T = TypeVar("T")
LIMIT = 1 << 26  # bytes of the largest file that is read
_BITS = 64  # of a whole number, as other programs read no more
_SENTENCES = (
    (re.compile(r"Object missing required field `(.*)`", re.DOTALL), "{} is missing"),
    (re.compile(r"Object contains unknown field `(.*)`", re.DOTALL), "{} is unknown"),
)

# A number of bytes, samples or steps; a tensor's size.
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
# A finite number.
Number = Annotated[float, msgspec.Meta(ge=-1.7976931348623157e308, le=1.7976931348623157e308)]


def parse_json(
    source: Path | bytes | memoryview,
    kind: type[T] = Any,  # type: ignore[assignment]
    *,
    limit: int = LIMIT,
    finite: bool = True,
) -> T:
    """Reads JSON as a type, and refuses values that parsers read differently.

    Example:
        >>> parse_json(b'{"a": [1, 2.5]}')
        {'a': [1, 2.5]}
        >>> parse_json(b'{"a": 1, "a": 2}')
        Traceback (most recent call last):
        ...
        ValueError: the key a occurs twice
    """
    if isinstance(source, Path):
        refuse_special(source)
        with source.open("rb") as file:
            content = file.read(limit + 1)
        if len(content) > limit:
            raise ValueError(f"it has more than {limit} bytes")
        content = content.removeprefix(BOM_UTF8)  # which Windows writes
    else:
        content = bytes(source)
    try:
        number: Any = _finite if finite else float
        how = {"parse_float": number, "parse_constant": number}
        value: T = json.loads(content.decode(), object_pairs_hook=_once, parse_int=_whole, **how)
        # A key or value may be half of a UTF-16 pair, which cannot be encoded.
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


def fit_keys(content: object, kind: type[T], what: str) -> T:
    """Returns what a person has written as a dataclass, and refuses keys that it does not have.

    Example:
        >>> from dataclasses import make_dataclass
        >>> Size = make_dataclass("Size", [("splits", int)])
        >>> fit_keys({"splits": 2}, Size, "the size"), fit_keys({"split": 2}, Size, "the size")
        Traceback (most recent call last):
        ...
        ValueError: the size has no key 'split' (did you mean splits?); its keys are splits
    """
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise ValueError(f"{what} must have keys, and is {content!r:.80}")
    every = fields(kind)  # type: ignore[arg-type]
    known = {f.name: f.default is f.default_factory is MISSING for f in every}
    for key in content:
        if key not in known:
            hint, names = did_you_mean(str(key), known), ", ".join(sorted(known))
            raise ValueError(f"{what} has no key {str(key)!r}{hint}; its keys are {names}")
    if lacking := [key for key, needed in known.items() if needed and key not in content]:
        raise ValueError(f"{what} lacks the key {lacking[0]}")
    try:
        return fit(content, kind)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


def _sentence(text: str) -> str:
    """Puts the place first in msgspec's "Expected `int`, got `str` - at `$.rounds`"."""
    what, _, place = text.rpartition(" - at ")
    what, place = (what, place) if what else (place, "")
    place = place.replace("`", "").removeprefix("key in ").replace("$", "").removeprefix(".")
    for pattern, sentence in _SENTENCES:
        if match := pattern.fullmatch(what):
            # A name from outside may hold anything; its repr has one line.
            name = match[1] if match[1].isidentifier() else f"{match[1]!r:.40}"
            return sentence.format(f"{place}.{name}" if place else name)
    problem = what.replace("`", "").partition("\n")[0]
    return f"{place or 'it'}: {problem[:1].lower()}{problem[1:]:.200}"


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


def packed(rows: Sequence[Any]) -> bytes:
    """Packs rows of plain values."""
    # A checkpoint of 1,000 clients and 100 rounds has a million such values. ``torch.save``
    # calls Python for each of them, at ten times the cost.
    return msgspec.msgpack.encode(rows)


def unpacked(data: bytes, row: type[T]) -> list[T]:
    """Unpacks what :func:`packed` has packed.

    Example:
        >>> unpacked(packed([(1, "a")]), tuple[int, str])
        [(1, 'a')]
    """
    try:
        rows: list[T] = msgspec.msgpack.decode(data, type=list[row])  # type: ignore[valid-type]
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"The rows of a checkpoint cannot be read ({first_line(error)}); repeat the run."
        ) from error
    return rows
