"""Converts the columns of a table to a network's inputs: numbers, categories, missing cells.

What scales them is learned from training rows (`medfed.datamodules.tables.columns`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import DataError

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Columns:
    """The clients' agreement on columns, so that an input has the same meaning everywhere.

    A column of numbers is one input; one of categories an input per category, of two only the
    second. Then come the indicators, 1 if a cell is missing. Missing and unknown categories are 0
    everywhere.
    """

    names: tuple[str, ...]  # (F) names of the columns
    categories: Mapping[str, tuple[str, ...]]  # the categories of each column with categories
    indicators: tuple[str, ...]  # columns with an indicator of missing cells

    @property
    def numeric(self) -> list[int]:
        """Positions of the P columns of numbers."""
        return [at for at, name in enumerate(self.names) if name not in self.categories]

    def inputs(self) -> list[tuple[str, str]]:
        """Name of every input, and its column.

        Example:
            >>> columns = Columns(("age", "sex"), {"sex": ("f", "m")}, ("age",))
            >>> columns.inputs()
            [('age', 'age'), ('sex=m', 'sex'), ('age missing', 'age')]
        """
        every = ((name, category) for name in self.names for category in self._categories_of(name))
        inputs = [(n, n) if category is None else (f"{n}={category}", n) for n, category in every]
        inputs += [(f"{name} missing", name) for name in self.indicators]
        inputs_so_far: set[str] = set()
        for name, _ in inputs:
            if name in inputs_so_far:
                raise DataError(f"Two inputs would be called {name}; rename a column of the table.")
            inputs_so_far.add(name)
        return inputs

    def _categories_of(self, name: str) -> Sequence[str | None]:
        """The categories of a column that have an input, or None for its numbers."""
        if name not in self.categories:
            return [None]
        texts = self.categories[name]
        return texts[1:] if len(texts) == 2 else texts

    def encode(self, rows: Array, numbers: Array) -> NDArray[np.float32]:
        """Makes the inputs (N, C) of rows (N, F) and their scaled numbers (N, P).

        Example:
            >>> columns = Columns(("age", "sex"), {"sex": ("f", "m")}, ("age",))
            >>> rows = np.array([[50.0, 1.0], [np.nan, 0.0]])
            >>> columns.encode(rows, np.array([[0.5], [0.0]])).tolist()
            [[0.5, 1.0, 0.0], [0.0, 0.0, 1.0]]
        """
        inputs, scaled = list[NDArray[Any]](), iter(numbers.T)
        for at, name in enumerate(self.names):
            if name not in self.categories:
                inputs.append(next(scaled))
                continue
            codes = range(len(self.categories[name]))[-len(self._categories_of(name)) :]
            inputs += [rows[:, at] == code for code in codes]
        inputs += [np.isnan(rows[:, self.names.index(name)]) for name in self.indicators]
        return np.stack(inputs, axis=1).astype(np.float32)

    def facts(self) -> dict[str, Any]:
        """The facts for reading a row as in training, as JSON; see `from_facts`."""
        return {
            "kind": "table",
            "features": list(self.names),
            "categories": {name: list(texts) for name, texts in self.categories.items()},
            "indicators": list(self.indicators),
        }

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Columns:
        """Undoes `facts`.

        Example:
            >>> Columns.from_facts({"features": ["a"], "indicators": ["a"]}).indicators
            ('a',)
        """
        categories = facts.get("categories") or {}
        return cls(
            tuple(facts["features"]),
            {name: tuple(texts) for name, texts in categories.items()},
            tuple(facts.get("indicators") or ()),
        )


_STANDARD = ("low", "high", "median", "mean", "sd")


@dataclass(frozen=True)
class Standard:
    """Standardisation of P columns that one outlier does not rule; all attributes are (P,)."""

    low: Array  # the lower limit; lower values become this
    high: Array  # the upper limit; higher values become this
    median: Array  # the replacement of a missing cell
    mean: Array  # the value that becomes 0
    sd: Array  # the deviation that becomes 1; 1 if all values are equal
    # By position of a covariate of `combat`, what a unit of it above its median adds.
    slopes: Mapping[int, Array] = field(default_factory=dict)

    def scale(self, values: Array) -> Array:
        """Scales (N, P) values; NaN is missing.

        Example:
            >>> limit = np.ones(1)
            >>> fitted = Standard(limit, 3 * limit, 2 * limit, 2 * limit, 0.5 * limit)
            >>> fitted.scale(np.array([[1.0], [9.0], [np.nan]])).ravel().tolist()
            [-2.0, 2.0, 0.0]
        """
        filled = np.where(np.isnan(values), self.median, np.clip(values, self.low, self.high))
        scaled: Array = (filled - self.mean) / self.sd
        for at, slope in self.slopes.items():
            more = np.outer(filled[:, at] - self.median[at], slope)
            scaled += np.where(np.isnan(values), 0.0, more)
        return scaled

    def facts(self) -> dict[str, Any]:
        """What scales a row again as in training, as JSON."""
        facts = {"name": "standard"} | {name: getattr(self, name).tolist() for name in _STANDARD}
        slopes = {str(at): slope.tolist() for at, slope in self.slopes.items()}
        return facts | ({"slopes": slopes} if slopes else {})


@dataclass(frozen=True)
class MinMax:
    """Scaling of P columns between -1 and 1; a column without any value has both ends 0."""

    minimum: Array  # (P,), the values that become -1
    maximum: Array  # (P,), the values that become 1
    exact: bool = False  # whether they are the values of patients

    def scale(self, values: Array) -> Array:
        """Scales (N, P) values and clips them; NaN is missing and becomes 0.

        Example:
            >>> fitted = MinMax(np.zeros(1), np.full(1, 4.0))
            >>> fitted.scale(np.array([[1.0], [9.0], [np.nan]])).tolist()
            [[-0.5], [1.0], [0.0]]
        """
        width = self.maximum - self.minimum
        # In the order of scikit-learn's MinMaxScaler, so that both give the same to the last bit.
        factor = 2 / np.where(width < 10 * np.finfo(np.float64).eps, 1, width)
        moved = values * factor + (-1 - self.minimum * factor)
        scaled: Array = np.nan_to_num(np.clip(moved, -1, 1))
        return scaled

    def facts(self) -> dict[str, Any]:
        """What scales a row again as in training, as JSON."""
        limits = {"minimum": self.minimum.tolist(), "maximum": self.maximum.tolist()}
        name = "exact_minmax" if self.exact else "minmax"
        return {"name": name, **limits, "to": [-1, 1], "missing": 0}


Scaling = Standard | MinMax


def from_facts(facts: Mapping[str, Any]) -> Scaling:
    """Undoes ``facts()``.

    Example:
        >>> from_facts(MinMax(np.ones(1), np.full(1, 3.0)).facts()).minimum.tolist()
        [1.0]
    """

    def column(name: str) -> Array:
        return np.array(facts[name], dtype=np.float64)

    if (name := facts.get("name", "exact_minmax")) != "standard":
        return MinMax(column("minimum"), column("maximum"), exact=name == "exact_minmax")
    slopes = {int(at): np.array(slope) for at, slope in facts.get("slopes", {}).items()}
    return Standard(**{name: column(name) for name in _STANDARD}, slopes=slopes)
