"""How the numbers of a table are scaled, learnt from training rows alone.

``standard``: less the mean, divided by the deviation, as by scikit-learn's ``StandardScaler``; a
missing cell becomes the median, as by its ``SimpleImputer``. So that no single value rules the
others, values far outside of them count as the limit of what is far: 3 interquartile ranges beyond
the quartiles (Tukey, "Exploratory Data Analysis", 1977: "far out"), in training as in prediction.

``minmax``: the minimum becomes -1, the maximum 1, a missing cell 0. One outlier squeezes all other
values; it is what medfed 0.1 did, and what its published numbers are of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Normalization = Literal["standard", "minmax"]
NORMALIZATIONS: tuple[str, ...] = get_args(Normalization)
_FAR = 3.0  # interquartile ranges
_STANDARD = ("low", "high", "median", "mean", "sd")


@dataclass(frozen=True)
class Standard:
    """Standardisation of P columns that one outlier does not rule; all attributes are (P,).

    Attributes:
        low: Values below count as this.
        high: Values above count as this.
        median: What a missing cell becomes.
        mean: What becomes 0.
        sd: What becomes 1; 1 where all values are the same.
    """

    low: Array
    high: Array
    median: Array
    mean: Array
    sd: Array

    def scale(self, values: Array) -> Array:
        """Scales (N, P) values; NaN is missing.

        Example:
            >>> train = np.array([[1.0], [2.0], [3.0], [np.nan]])
            >>> fit_standard(train).scale(train).round(2).ravel().tolist()
            [-1.22, 0.0, 1.22, 0.0]
        """
        filled = np.where(np.isnan(values), self.median, np.clip(values, self.low, self.high))
        scaled: Array = (filled - self.mean) / self.sd
        return scaled

    def facts(self) -> dict[str, Any]:
        """What scales a row again as in training, as JSON."""
        return {"name": "standard"} | {name: getattr(self, name).tolist() for name in _STANDARD}

    def far_out(self, values: Array) -> NDArray[np.int64]:
        """Counts the values of (N, P) beyond the limits: (P,)."""
        counts: NDArray[np.int64] = np.sum((values < self.low) | (values > self.high), axis=0)
        return counts


@dataclass(frozen=True)
class MinMax:
    """Scaling of P columns between -1 and 1; a column without any value has both ends 0.

    Attributes:
        minimum: (P,), what becomes -1.
        maximum: (P,), what becomes 1.
    """

    minimum: Array
    maximum: Array

    def scale(self, values: Array) -> Array:
        """Scales (N, P) values and clips them; NaN is missing and becomes 0.

        Example:
            >>> fitted = MinMax(np.zeros(1), np.full(1, 4.0))
            >>> fitted.scale(np.array([[1.0], [9.0], [np.nan]])).tolist()
            [[-0.5], [1.0], [0.0]]
        """
        from sklearn.preprocessing import MinMaxScaler

        if not values.size:
            return values
        ends = np.stack([self.minimum, self.maximum])
        scaler = MinMaxScaler(feature_range=(-1, 1), clip=True).fit(ends)
        scaled: Array = np.nan_to_num(scaler.transform(values))
        return scaled

    def facts(self) -> dict[str, Any]:
        """What scales a row again as in training, as JSON."""
        limits = {"minimum": self.minimum.tolist(), "maximum": self.maximum.tolist()}
        return {"name": "minmax", **limits, "to": [-1, 1], "missing": 0}


Scaling = Standard | MinMax


def fit(name: Normalization, train: Array) -> Scaling:
    """Learns a scaling from (N, P) training values; NaN is missing."""
    return fit_standard(train) if name == "standard" else fit_minmax(train)


def fit_minmax(train: Array) -> MinMax:
    """Learns minimum and maximum.

    Example:
        >>> fit_minmax(np.array([[0.0, np.nan], [4.0, np.nan]])).maximum.tolist()
        [4.0, 0.0]
    """
    known = np.where(np.isnan(train).all(axis=0), 0.0, train)
    return MinMax(np.nanmin(known, axis=0), np.nanmax(known, axis=0))


def fit_standard(train: Array) -> Standard:
    """Learns limits, median, mean and standard deviation of what is not missing.

    A column without any value becomes 0 throughout.

    Example:
        >>> chol = np.array([[180.0], [200.0], [220.0], [240.0], [1e6]])
        >>> fitted = fit_standard(chol)
        >>> fitted.high.tolist(), fitted.scale(chol).round(2).ravel().tolist()
        ([360.0], [-0.95, -0.63, -0.32, 0.0, 1.9])
    """
    low, median, high = limits(train)
    clipped = np.clip(train, low, high)
    count = (~np.isnan(train)).sum(axis=0)
    mean, sd = moments(
        count, median, np.nansum(clipped - median, 0), np.nansum((clipped - median) ** 2, 0)
    )
    return Standard(low, high, median, mean, sd)


def moments(count: Array, about: Array, total: Array, squares: Array) -> tuple[Array, Array]:
    """Mean and standard deviation (divided by N) of P columns, from sums of differences.

    Args:
        count: (P,) numbers of values.
        about: (P,) of what the differences are taken.
        total: (P,) sums of the differences.
        squares: (P,) sums of their squares.

    Example:
        >>> one = np.ones(1)
        >>> [x.tolist() for x in moments(2 * one, 5 * one, 2 * one, 4 * one)]  # of 5 and 7
        [[6.0], [1.0]]
    """
    shift = total / np.maximum(count, 1)
    variance = np.maximum(squares / np.maximum(count, 1) - shift**2, 0)
    # What rounding alone leaves of a constant column is no deviation.
    constant = np.sqrt(variance) <= 1e-9 * np.maximum(np.abs(about + shift), np.abs(shift))
    return about + shift, np.where(constant, 1.0, np.sqrt(variance))


def limits(train: Array) -> tuple[Array, Array, Array]:
    """The limits beyond which values of (N, P) are far out, and the median between them.

    They are 3 interquartile ranges beyond the quartiles. Where a quarter of the values or more are
    the same, such as zeros, the quartiles are those of the others, together with that value.

    Returns:
        (P,) lower limits, medians and upper limits; 0 where a column has no value.

    Example:
        >>> mostly = np.array([[0.0]] * 9 + [[1.0]] * 3)
        >>> [x.tolist() for x in limits(mostly)]
        [[-3.0], [0.0], [4.0]]
    """
    found = np.zeros((3, train.shape[1]))
    for at, column in enumerate(train.T):
        known = column[~np.isnan(column)]
        if len(known):
            found[:, at] = _limits(known)
    low, median, high = found
    return low, median, high


def _limits(values: Array) -> tuple[float, float, float]:
    median = float(np.median(values))
    distinct, counts = np.unique(values, return_counts=True)
    top = np.lexsort((-np.abs(distinct - median), counts))[-1]
    common, often = distinct[top], counts[top] > 1 and 4 * counts[top] >= len(values)
    others = values[values != common] if often else values
    first, third = np.quantile(others if len(others) else values, (0.25, 0.75))
    if often:
        first, third = min(first, common), max(third, common)
    reach = _FAR * (third - first)
    return float(first - reach), median, float(third + reach)


def value_range(train: Array, scaling: Scaling) -> tuple[Array, Array]:
    """Smallest and largest value of (N, P) training rows, far-out ones as the limit.

    Returns:
        (P,) each; NaN where a column has no value.

    Example:
        >>> train = np.array([[1.0, np.nan], [3.0, np.nan]])
        >>> [x.tolist() for x in value_range(train, fit_standard(train))]
        [[1.0, nan], [3.0, nan]]
    """
    empty = np.isnan(train).all(axis=0)
    known = np.where(empty, 0.0, train)
    if isinstance(scaling, Standard):
        known = np.clip(known, scaling.low, scaling.high)
    ends = np.nanmin(known, axis=0), np.nanmax(known, axis=0)
    return np.where(empty, np.nan, ends[0]), np.where(empty, np.nan, ends[1])


def from_facts(facts: Mapping[str, Any]) -> Scaling:
    """Undoes ``facts()``.

    Example:
        >>> from_facts(fit_minmax(np.array([[1.0], [3.0]])).facts()).minimum.tolist()
        [1.0]
    """

    def column(name: str) -> Array:
        return np.array(facts[name], dtype=np.float64)

    if facts.get("name", "minmax") == "minmax":
        return MinMax(column("minimum"), column("maximum"))
    return Standard(*map(column, _STANDARD))
