"""Names of patients, hospitals, labels, classes and cases: one spelling each."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache

from .errors import DataError

_WHOLE = re.compile(r"(-?(?:0|[1-9]\d*))\.0*", re.ASCII)
_NUMBER = re.compile(r"\+?(-?)0*(\d+)(?:\.(\d*))?", re.ASCII)
_ZERO_FIRST = re.compile(r"0\d+(\.\d+)?", re.ASCII)
_EXPONENT = re.compile(r"\d+E\d+", re.ASCII)


@lru_cache(1 << 16)  # a table repeats its cells
def fold(text: str) -> str:
    """Gives a name one Unicode form (NFC) and single spaces."""
    return " ".join((text if text.isascii() else unicodedata.normalize("NFC", text)).split())


@lru_cache(1 << 16)
def tidy(text: str) -> str:
    """Gives equal whole numbers one spelling; codes keep their digits."""
    match = _WHOLE.fullmatch(text)
    return match[1] if match else text


def code_among(texts: Collection[str]) -> str | None:
    """Returns a text that makes the column one of codes: a leading zero, or all are like 1E50."""
    if texts and all(map(_EXPONENT.fullmatch, texts)):
        return next(iter(texts))
    return next(filter(_ZERO_FIRST.fullmatch, texts), None)


def _visible(text: str) -> str:
    if text.isascii():
        return text
    same = unicodedata.normalize("NFKC", text)
    letters = (c for c in same if unicodedata.category(c) != "Cf" and not "\ufe00" <= c <= "\ufe0f")
    return fold("".join(letters))


def _as_number(text: str) -> str:
    """The text, or its number without what does not change it."""
    match = None if _ZERO_FIRST.fullmatch(text) else _NUMBER.fullmatch(text)
    if match is None:
        return text
    sign, whole, part = match.groups("")
    part = part.rstrip("0")
    return f"{sign}{whole}{'.' * bool(part)}{part}"


@lru_cache(1 << 16)
def likeness(text: str) -> str:
    """A key equal for spellings that differ in case, in a number's format, or in hidden signs."""
    letters = _visible(fold(text))
    return _as_number(unicodedata.normalize("NFC", letters.casefold()))


def _difference(one: str, other: str) -> str:
    """What two spellings of one likeness differ in."""
    if _visible(one) == _visible(other):
        return "in signs that nobody sees"
    if _as_number(_visible(one)) == _as_number(_visible(other)):
        return "in the format of a number"
    return "in capitals" if one.isascii() and other.isascii() else "in capitals or hidden signs"


def alike(names: Iterable[str]) -> list[list[str]]:
    """Groups the different names whose spellings are alike; see `likeness`."""
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(map(fold, names)):
        groups.setdefault(likeness(name), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def same(texts: Sequence[str], where: str, place: Callable[[int], str]) -> list[str]:
    """Folds names, and refuses two that are alike."""
    folded = list(map(fold, texts))
    for one, other, *_ in alike(folded):
        first, second = (f"{n[:60]!r} ({place(folded.index(n))})" for n in (one, other))
        what = f"{where}: {first} and {second} differ only {_difference(one, other)}"
        mend = "write one of them everywhere or, if they are two, give them different names"
        raise DataError(f"{what}; {mend}.")
    return folded
