"""The errors that a user can cause; each is one sentence that says what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class MedfedError(Exception):
    """Base of every error whose message the user sees without a traceback.

    Attributes:
        client: The client that caused it, if known.
    """

    client: str | None = None


class ConfigError(MedfedError, ValueError):
    """A key, name or value in the configuration that cannot be used."""


class MachineError(ConfigError):
    """A GPU or a package that this machine lacks and another may have."""


class DataError(MedfedError):
    """A file, patient or table that cannot be read or does not fit."""


class WriteError(DataError, OSError):
    """A file or folder that cannot be written; the message says what helps."""


class NonFiniteError(MedfedError, ArithmeticError):
    """A loss or a reply with NaN or infinity; the run discards that round."""


class CodecError(MedfedError, ValueError):
    """Bytes of a message that are foreign, cut short, or decode to no number."""


class CheckpointError(MedfedError):
    """A checkpoint or run folder that is torn, foreign or of another configuration."""


class SiteError(MedfedError):
    """A hospital's machine that does not answer, or does not answer as agreed."""


class RankError(MedfedError):
    """Another process of the same run has ended, so this process cannot continue."""


def first_line(error: BaseException) -> str:
    r"""Returns the first line of an error's message, without the full stop, for another sentence.

    Example:
        >>> first_line(ValueError("Too short.\nSee the manual.")), first_line(EOFError())
        ('Too short', 'EOFError')
    """
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def did_you_mean(name: str, known: Iterable[str], count: int = 3) -> str:
    """Names the closest known names, for the end of an error sentence.

    `count`: largest number of names to suggest. Returns ``" (did you mean a, b?)"``, or an empty
    string if no name is close.

    Example:
        >>> did_you_mean("fedavgg", ["fedavg", "fedprox", "fedavg"])
        ' (did you mean fedavg?)'
        >>> did_you_mean("xyz", ["fedavg"])
        ''
    """
    close = difflib.get_close_matches(str(name), {*map(str, known)}, n=count, cutoff=0.5)
    return f" (did you mean {', '.join(quoted(close))}?)" if close else ""


def quoted(names: Iterable[str]) -> list[str]:
    """Returns names for a list between commas: one that has a comma itself is in quotes.

    Example:
        >>> quoted(["Basel, West", "Bonn"])
        ['"Basel, West"', 'Bonn']
    """
    return [f'"{name}"' if "," in name else name for name in names]


def few(names: Sequence[str], most: int = 20) -> str:
    """Lists names for a sentence; of very many names, only the first.

    Example:
        >>> few(["a", "b", "c"], most=2)
        'a, b and 1 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
