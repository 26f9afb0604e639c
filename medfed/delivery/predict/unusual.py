"""What of a row training has not seen the like of, cell by cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medfed.datamodules.table_columns import Columns


def unusual_cells(
    rows: NDArray[np.float64],
    columns: Columns,
    facts: Mapping[str, Any],
    texts: Mapping[str, Sequence[str | None]],
) -> dict[int, list[str]]:
    """Names the cells of which a model has learnt nothing.

    Args:
        rows: (N, F), see `column_kinds.read_cells`.
        columns: What the columns are.
        facts: Of the bundle; those of earlier versions know the range alone, or not even that.
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
    source, found = facts["input"], dict[int, list[str]]()
    lowest, highest = source.get("lowest"), source.get("highest")
    if lowest is None and (scaling := facts.get("normalization")) is not None:
        lowest, highest = scaling.get("minimum"), scaling.get("maximum")
    place = {at: number for number, at in enumerate(columns.numeric)}
    recorded = source.get("indicators") is not None
    for at, name in enumerate(columns.names):
        for row, value in enumerate(rows[:, at].tolist()):
            said = None
            if np.isnan(value):
                if recorded and name not in columns.indicators:
                    said = "is missing, which it never was in training"
            elif name in columns.categories:
                if value < 0:
                    said = f"is {texts[name][row]!r:.60}, unknown in training"
            elif lowest is not None and highest is not None:
                said = _outside(value, lowest[place[at]], highest[place[at]])
            if said:
                found.setdefault(row + 1, []).append(f"{name} {said}")
    return dict(sorted(found.items()))


def _outside(value: float, low: float | None, high: float | None) -> str | None:
    if low is None or high is None:
        return f"is {value:g}, but training had no value of it"
    if low <= value <= high:
        return None
    return f"is {value:g}, outside of {low:g} to {high:g} in training"
