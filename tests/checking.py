"""What a command does first: it composes and checks its line."""

from __future__ import annotations

from collections.abc import Sequence

from medfed.config.compose import composed
from medfed.config.description import checked
from medfed.config.sections import Section


def check_overrides(arguments: Sequence[str], name: str = "train") -> list[Section]:
    """Returns the configurations of a command line, checked."""
    return [checked(asked.source()) for asked in composed(arguments, name)]
