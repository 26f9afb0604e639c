"""Names from the data (clients, patients, centres) as file names and as text for people."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence

from rich.markup import escape

_BYTES = 120  # of a file name, so that a suffix and a prefix fit on every file system
_SHOWN, _DRAWN = 40, 24  # characters of a name in tables and sentences, and in figures
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\.|$)", re.IGNORECASE)  # by Windows


def file_names(names: Iterable[str]) -> dict[str, str]:
    """Gives every name a file name of its own, without a folder and valid on every system.

    An ordinary name is its own file name. One that no system, or not every one, would take is
    written with ``_`` and marked by a hash, and so are names that differ by upper case alone.

    Args:
        names: All names that share a folder, in any order.

    Returns:
        Name to file name, without a suffix.

    Example:
        >>> file_names(["hospital_0", "St. Mary's"])
        {'hospital_0': 'hospital_0', "St. Mary's": "St. Mary's"}
        >>> file_names(["../x", "a", "A"])
        {'../x': '_x-d6b96a97', 'a': 'a-ca978112', 'A': 'A-559aead0'}
    """
    found = {name: safe if (safe := _safe(name)) == name else _marked(name) for name in names}
    while True:
        count = Counter(map(_folded, found.values()))
        twins = [n for n, file in found.items() if count[_folded(file)] > 1]
        if not twins:
            return found
        found |= {name: _marked(found[name], name) for name in twins}


def shown(name: str, most: int = _SHOWN) -> str:
    r"""Returns a name for a sentence or a picture: on one line, visible, and not too long.

    Example:
        >>> shown("hospital_0"), shown("a\nb\x1b[31m"), shown(""), len(shown("x" * 300))
        ('hospital_0', 'a\\nb\\x1b[31m', "''", 40)
    """
    text = visible(name) or "''"
    return text if len(text) <= most else f"{text[: most - 9]}…{text[-8:]}"


def few(names: Sequence[str], most: int = 20) -> str:
    """Lists names for a sentence, not all of very many.

    Example:
        >>> few(["a", "b", "c"], most=2)
        'a, b and 1 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def evenly(names: Sequence[str], most: int) -> list[str]:
    """Picks some of very many names, spread evenly, the same whenever it is asked.

    Example:
        >>> evenly(["a", "b", "c", "d", "e"], 2), evenly(["a"], 2)
        (['a', 'c'], ['a'])
    """
    count = min(most, len(names))
    return [names[n * len(names) // count] for n in range(count)]


def visible(text: str) -> str:
    r"""Writes out the characters that would break a line or command a terminal.

    Example:
        >>> visible("a\nb\x1b[31m")
        'a\\nb\\x1b[31m'
    """
    return "".join(c if _visible(c) else ascii(c)[1:-1] for c in text)


def cell(name: str) -> str:
    r"""Returns a name for what reads Rich's markup, such as a table or a progress bar.

    Example:
        >>> cell("hospital_0"), cell("[red]")
        ('hospital_0', '\\[red]')
    """
    return escape(f"{shown(name)} ")[:-1]  # a backslash at the end would be doubled


def caption(name: str) -> str:
    r"""Returns a name for a figure, where dollar signs would begin a formula.

    Example:
        >>> caption("hospital_0"), caption("a$b$")
        ('hospital_0', 'a\\$b\\$')
    """
    text = shown(name, _DRAWN).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text  # which a legend would leave out


def _visible(character: str) -> bool:
    return unicodedata.category(character)[0] != "C" and character not in "\u2028\u2029"


def _safe(name: str) -> str:
    text = re.sub(r"""[<>:"/\\|?*]+""", "_", name)
    text = "".join(c if _visible(c) else "_" for c in text).strip(". ")
    while len(text.encode()) > _BYTES:
        text = text[:-1].rstrip(". ")
    return f"_{text}" if not text or _RESERVED.match(text) else text


def _marked(file: str, name: str | None = None) -> str:
    start = _safe(file)
    while len(start.encode()) > _BYTES - 9:
        start = start[:-1].rstrip(". ")
    whole = file if name is None else name
    return f"{start}-{hashlib.sha256(whole.encode(errors='surrogatepass')).hexdigest()[:8]}"


def _folded(file: str) -> str:
    return unicodedata.normalize("NFKC", file).casefold()
