"""Groups of methods that differ in one number alone: the paths that a comparison can draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from omegaconf import OmegaConf

from medfed.reports.comparison import Method
from medfed.reports.runs import differences


def sweeps(
    methods: Sequence[Method], key: str, beside: Callable[[str], bool] | None = None
) -> list[list[Method]]:
    """Groups methods that are equal but for one number.

    Args:
        methods: Methods; those without the key are in no group.
        key: The number's key, such as ``canonical.count``.
        beside: Which other keys may differ too; ``None``: none.

    Returns:
        Groups of one method or more, each by the growing number, the longest group first.
    """
    groups: list[list[Method]] = []
    for method in methods:
        if OmegaConf.select(method.runs[0].config, key) is None:
            continue
        for group in groups:
            changed = set(differences(group[0].runs[0], method.runs[0])) - {key}
            if not any(beside is None or not beside(c) for c in changed):
                group.append(method)
                break
        else:
            groups.append([method])
    ordered = [sorted(group, key=lambda m: number_of(m, key)) for group in groups]
    return sorted(ordered, key=len, reverse=True)


def number_of(method: Method, key: str) -> float:
    """Returns a method's value of the number."""
    return float(OmegaConf.select(method.runs[0].config, key))
