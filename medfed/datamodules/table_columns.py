"""From the columns of a table to what a network sees: numbers, categories, what is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medfed.common.errors import DataError

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Columns:
    """What all clients of a federation agree on, so that an input means the same everywhere.

    A column of numbers is one input. One of categories is an input per category, 1 where a row has
    it; of two categories the second alone. Then come the indicators, 1 where a cell is missing.
    A category that is missing or unknown is 0 in all inputs.

    Attributes:
        names: (F) names of the columns.
        categories: Those of each column that has some.
        indicators: Columns with an indicator of missing cells.
    """

    names: tuple[str, ...]
    categories: Mapping[str, tuple[str, ...]]
    indicators: tuple[str, ...]

    @property
    def numeric(self) -> list[int]:
        """Positions of the P columns of numbers."""
        return [at for at, name in enumerate(self.names) if name not in self.categories]

    def inputs(self) -> list[tuple[str, str]]:
        """Name of every input, and the column that it is made of.

        Raises:
            DataError: If two inputs have one name.

        Example:
            >>> columns = Columns(("age", "sex"), {"sex": ("f", "m")}, ("age",))
            >>> columns.inputs()
            [('age', 'age'), ('sex=m', 'sex'), ('age missing', 'age')]
        """
        found = [
            (name, name) if shown is None else (f"{name}={shown}", name)
            for name in self.names
            for shown in self._shown(name)
        ]
        found += [(f"{name} missing", name) for name in self.indicators]
        seen: set[str] = set()
        for name, _ in found:
            if name in seen:
                raise DataError(f"Two inputs would be called {name}; rename a column of the table.")
            seen.add(name)
        return found

    def _shown(self, name: str) -> Sequence[str | None]:
        """The categories of a column that have an input, or None for its numbers."""
        if name not in self.categories:
            return [None]
        texts = self.categories[name]
        return texts[1:] if len(texts) == 2 else texts

    def encode(self, rows: Array, numbers: Array) -> NDArray[np.float32]:
        """Makes the inputs of rows.

        Args:
            rows: (N, F); NaN is missing, a category is its position, -1 where it is unknown.
            numbers: (N, P) scaled numbers, without gaps.

        Returns:
            (N, C), in the order of `inputs`.

        Example:
            >>> columns = Columns(("age", "sex"), {"sex": ("f", "m")}, ("age",))
            >>> rows = np.array([[50.0, 1.0], [np.nan, 0.0]])
            >>> columns.encode(rows, np.array([[0.5], [0.0]])).tolist()
            [[0.5, 1.0, 0.0], [0.0, 0.0, 1.0]]
        """
        found = np.empty((len(rows), len(self.inputs())), dtype=np.float32)
        place, number = 0, 0
        for at, name in enumerate(self.names):
            if name not in self.categories:
                found[:, place] = numbers[:, number]
                place, number = place + 1, number + 1
                continue
            shown = self._shown(name)
            first = len(self.categories[name]) - len(shown)
            for code in range(first, first + len(shown)):
                found[:, place] = rows[:, at] == code
                place += 1
        gaps = [self.names.index(name) for name in self.indicators]
        found[:, place:] = np.isnan(rows[:, gaps])
        return found

    def facts(self) -> dict[str, Any]:
        """What reads a row again as in training, as JSON; see `from_facts`."""
        return {
            "kind": "table",
            "features": list(self.names),
            "categories": {name: list(texts) for name, texts in self.categories.items()},
            "indicators": list(self.indicators),
        }

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Columns:
        """Undoes `facts`, and what bundles had instead of indicators before.

        Example:
            >>> Columns.from_facts({"features": ["a"], "missing_indicator": True}).indicators
            ('a',)
        """
        names = tuple(facts["features"])
        everything = names if facts.get("missing_indicator") else ()
        indicators = facts.get("indicators")
        categories = facts.get("categories") or {}
        return cls(
            names,
            {name: tuple(texts) for name, texts in categories.items()},
            everything if indicators is None else tuple(indicators),
        )
