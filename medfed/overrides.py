"""The command line as people write it, and as Hydra reads it."""

from __future__ import annotations

import re
from collections.abc import Sequence

# Sections whose options are those of a group of another name.
GROUPS = {"codec.up": "codec", "codec.down": "codec"}


def hydra_spelling(arguments: Sequence[str]) -> list[str]:
    """Spells ``codec.up=stc`` as Hydra does where an option is meant: ``codec@codec.up=stc``.

    Args:
        arguments: The command line without the program, sweeps included.

    Example:
        >>> hydra_spelling(["codec.up=stc,fp32", "codec.up.sparsity=0.1", "codec@codec.down=stc"])
        ['codec@codec.up=stc,fp32', 'codec.up.sparsity=0.1', 'codec@codec.down=stc']
    """
    spelled = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        is_option = bool(re.fullmatch(r"[\w,()*-]+", value)) and value != "null"
        if key in GROUPS and is_option:
            argument = f"{GROUPS[key]}@{argument}"
        spelled.append(argument)
    return spelled
