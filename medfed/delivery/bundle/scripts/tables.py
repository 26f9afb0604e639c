"""Rows of a table as a network sees them, and what training has not seen; bundles carry this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medfed.datamodules.tables.columns import Columns, from_facts


def inputs_of(
    rows: NDArray[np.float64], columns: Columns, facts: Mapping[str, Any]
) -> NDArray[np.float32]:
    """The inputs of rows, as in training."""
    scaling, numbers = facts["normalization"], rows[:, columns.numeric]
    return columns.encode(rows, numbers if scaling is None else from_facts(scaling).scale(numbers))


def unusual_cells(
    rows: NDArray[np.float64],
    columns: Columns,
    facts: Mapping[str, Any],
    texts: Mapping[str, Sequence[str | None]],
) -> dict[int, list[str]]:
    """Names the cells of which a model has learnt nothing.

    Args:
        rows: (N, F), see `readers.table.read_cells`.
        columns: What the columns are.
        facts: Of the bundle.
        texts: (N) cells of the columns with categories.

    Returns:
        Sentences without a stop by row, counted from 1; rows without any are left out.

    Example:
        >>> columns = Columns(("age", "sex"), {"sex": ("f", "m")}, ("sex",))
        >>> facts = {"input": {"indicators": ["sex"], "lowest": [40], "highest": [60]}}
        >>> rows = np.array([[50.0, 0.0], [130.0, -1.0], [np.nan, np.nan]])
        >>> found = unusual_cells(rows, columns, facts, {"sex": ["f", "x", None]})
        >>> for row, cells in found.items():
        ...     print(row, cells)
        2 ['age is 130, outside of 40 to 60 in training', "sex is 'x', unknown in training"]
        3 ['age is missing, which it never was in training']
    """
    source, unusual = facts["input"], dict[int, list[str]]()
    lowest, highest = source.get("lowest"), source.get("highest")
    place = {at: number for number, at in enumerate(columns.numeric)}
    for at, name in enumerate(columns.names):
        for row, value in enumerate(rows[:, at].tolist()):
            said = None
            if np.isnan(value):
                if name not in columns.indicators:
                    said = "is missing, which it never was in training"
            elif name in columns.categories:
                if value < 0:
                    said = f"is {texts[name][row]!r:.60}, unknown in training"
            elif lowest is not None and highest is not None:
                said = _outside(value, lowest[place[at]], highest[place[at]])
            if said:
                unusual.setdefault(row + 1, []).append(f"{name} {said}")
    return dict(sorted(unusual.items()))


def _outside(value: float, low: float | None, high: float | None) -> str | None:
    if low is None or high is None:
        return f"is {value:g}, but training had no value of it"
    if low <= value <= high:
        return None
    return f"is {value:g}, outside of {low:g} to {high:g} in training"
