"""The words of a site: what it refuses and why, and what a page says of messages and requests."""

from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml  # type: ignore[import-untyped]

from medfed.standalone import errors

Reason = Literal["agreed", "policy", "code"]


class VetoError(errors.ConfigError):
    """A site refuses a study."""

    status: Literal["refused"] = "refused"

    def __init__(self, text: str, reason: Reason = "policy") -> None:
        super().__init__(text)
        self.reason: Reason = reason


@cache
def words_for(what: str) -> dict[str, str]:
    """Returns ``parts``, kinds of ``requests``, ``refused``, ``vetoes`` and others in words."""
    text = (Path(__file__).parent / "templates" / "words.yaml").read_text("utf-8")
    return dict(yaml.safe_load(text)[what])


def veto(why: str, reason: Reason = "policy", /, **facts: Any) -> VetoError:
    """Returns a refusal in the words of its kind, with what was found."""
    return VetoError(words_for("vetoes")[why].format(**facts), reason)


def in_words(what: str, /, **facts: Any) -> str:
    """Says what is wrong, with what was found."""
    return words_for("wrong")[what].format(**facts)
