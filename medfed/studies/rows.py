"""The rows of one hospital, as a study reads them: columns of numbers and of categories."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from medfed.standalone import csv_files, errors

Floats = NDArray[np.float64]
OUTCOME = "outcome"
"""The column of the answer, whatever the table calls it."""
OF = ": "
"""Stands between the name of a model and that of one of its scores, such as a Dice."""
LESIONS, DETECTED, ALARMS = "lesions", "lesions found from ", "false alarms from "
"""Columns of scans: how many lesions they have; and a model's scores, which end in a threshold."""


@dataclass(frozen=True)
class Rows:
    """N rows of a hospital."""

    columns: Mapping[str, Floats]  # (N,) by name; NaN is missing, a category its position
    # the categories of columns that have some
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    survival: Floats | None = None  # (N, 2) times and events; None where the data have none
    # (N,) the patient of each row
    patients: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    hint: str = ""  # where further columns could come from

    def column(self, name: str) -> Floats:
        """Returns a column."""
        if name not in self.columns:
            hint = errors.did_you_mean(name, self.columns)
            raise errors.ConfigError(
                f"The study needs the column {name!r}, which the data do not have{hint}; they have "
                f"{', '.join(self.columns) or 'none'}. {self.hint}".rstrip()
            )
        return self.columns[name]

    def coded(self, name: str, names: tuple[str, ...]) -> Floats:
        """Returns a column as positions in the names of categories; -1: another.

        Example:
            >>> Rows({"grade": np.array([1.0, 3.0, np.nan])}).coded("grade", ("1", "2")).tolist()
            [0.0, -1.0, nan]
        """
        column, known = self.column(name), self.categories.get(name)
        if known is None:  # numbers that the plan takes for categories
            same = column[:, None] == np.array([csv_files.as_number(n) for n in names])
            return np.where(np.isnan(column), np.nan, np.where(same.any(1), same.argmax(1), -1))
        codes = np.array([names.index(t) if t in names else -1 for t in known] or [0], float)
        there = ~np.isnan(column)
        return np.where(there, codes[np.where(there, column, 0).astype(int)], np.nan)

    def times(self) -> tuple[Floats, Floats]:
        """Returns times (N,) and whether the event happened (N,)."""
        if self.survival is None:
            raise errors.ConfigError(
                "The study's plan asks for survival; set data.outcome=survival, data.time=COLUMN "
                "and data.event=COLUMN."
            )
        return self.survival[:, 0], self.survival[:, 1]
