"""What a command does first: it composes and checks its line."""

from __future__ import annotations

from collections.abc import Sequence

from medfed.config.compose import Composition, compose_all
from medfed.config.description import checked
from medfed.config.sections import Section
from medfed.config.spelling import to_hydra_overrides


def composed(arguments: Sequence[str], name: str = "train") -> list[Composition]:
    """Returns the configurations of a command line in the user's spelling."""
    several = bool({"-m", "--multirun"} & set(arguments))
    keys = [a for a in arguments if not a.startswith("-")]
    return compose_all(to_hydra_overrides(keys, several), name)


def check_overrides(arguments: Sequence[str], name: str = "train") -> list[Section]:
    """Returns the configurations of a command line, checked."""
    return [checked(asked.source()) for asked in composed(arguments, name)]
