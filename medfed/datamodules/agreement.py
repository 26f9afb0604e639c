"""What clients with tables agree on before training, and the messages by which they do.

Whatever is needed of all of them travels as JSON, by the server, and is counted: which columns have
missing cells, the names of categories, and with pooled scaling counts and sums. No row leaves a
client. Training continues from what the bytes say.

- Indicators: of the columns in which any client misses a training cell.
- Categories: the sorted union of those in training rows.
- Pooled standardisation: each client sends, per column, its number of values and that number times
  its own median and limits; the sums give the means that all clients take. Then each sends sums and
  sums of squares of its values within these limits, which give the mean and standard deviation of
  all training rows together. A mean of medians is not the median of all rows, but no outlier moves
  it, and sums can be added up without anyone seeing the summands.
- Pooled scaling by minimum and maximum: each client sends its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from medfed.datamodules.base import Exchanged
from medfed.datamodules.readers.column_kinds import Categories, in_order
from medfed.datamodules.table_columns import Array, Columns
from medfed.datamodules.table_scaling import (
    MinMax,
    Normalization,
    Scaling,
    Standard,
    fit_minmax,
    limits,
    moments,
)

Indicator = bool | Literal["auto"]


@dataclass(frozen=True)
class Agreement:
    """What the clients know of each other's tables.

    Attributes:
        columns: What the inputs are.
        scaling: That of all clients, or None where each has its own.
    """

    columns: Columns
    scaling: Scaling | None


@dataclass(frozen=True)
class _Server:
    """Passes messages on and counts their bytes."""

    exchanged: list[Exchanged] = field(default_factory=list)

    def receive(self, client: str, content: Mapping[str, Any]) -> dict[str, Any]:
        return self._passed(client, "up", content)

    def answer(self, clients: Sequence[str], content: Mapping[str, Any]) -> dict[str, Any]:
        """The same to all of them."""
        return [self._passed(client, "down", content) for client in clients][-1]

    def _passed(
        self, client: str, direction: Literal["up", "down"], content: Mapping[str, Any]
    ) -> dict[str, Any]:
        data = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
        self.exchanged.append((client, direction, len(data)))
        decoded: dict[str, Any] = json.loads(data)
        return decoded


def agree(
    train: Mapping[str, Array],
    names: Sequence[str],
    categories: Categories,
    indicator: Indicator,
    normalization: Normalization,
    pooled: bool,
) -> tuple[Agreement, list[Exchanged]]:
    """Lets clients agree.

    Args:
        train: (N, F) training rows of every client; NaN is missing, a category its position.
        names: (F) columns.
        categories: Of the columns that have some.
        indicator: Which columns have an indicator: all, none, or with ``auto`` those in which any
            client misses a training cell.
        normalization: How numbers are scaled.
        pooled: Whether all clients scale alike.

    Returns:
        What they agree on, and what travelled for it: nothing where nothing is needed.

    Example:
        >>> rows = {"a": np.array([[1.0]]), "b": np.array([[np.nan], [3.0]])}
        >>> agreed, exchanged = agree(rows, ["age"], {}, "auto", "standard", pooled=False)
        >>> agreed.columns.indicators, exchanged[1]
        (('age',), ('b', 'up', 19))
    """
    server = _Server()
    numeric = [at for at, name in enumerate(names) if name not in categories]
    numbers = {client: rows[:, numeric] for client, rows in train.items()}
    first = {client: _about(rows, names, categories, indicator) for client, rows in train.items()}
    if pooled:
        for client, values in numbers.items():
            first[client] |= _extent(values, normalization)
    if not any(first.values()):
        return Agreement(Columns(tuple(names), {}, tuple(names) if indicator else ()), None), []
    told = [server.receive(client, content) for client, content in first.items()]
    answer = server.answer(list(train), _merged(told, names, categories, indicator, pooled))
    shared = {name: tuple(texts) for name, texts in answer["categories"].items()}
    columns = Columns(tuple(names), shared, tuple(answer["indicators"]))
    if not pooled:
        return Agreement(columns, None), server.exchanged
    if normalization == "minmax":
        ends = (np.array(answer[name]) for name in ("minimum", "maximum"))
        return Agreement(columns, MinMax(*ends)), server.exchanged
    return Agreement(columns, _standard(server, numbers, answer)), server.exchanged


def _about(
    rows: Array, names: Sequence[str], categories: Categories, indicator: Indicator
) -> dict[str, Any]:
    """What a client says of its columns."""
    found: dict[str, Any] = {}
    if indicator == "auto":
        gaps = np.flatnonzero(np.isnan(rows).any(axis=0))
        found["missing"] = [names[at] for at in gaps.tolist()]
    if categories:
        codes = {name: np.unique(rows[:, names.index(name)]) for name in categories}
        found["categories"] = {
            name: [texts[int(code)] for code in codes[name] if code >= 0]
            for name, texts in categories.items()
        }
    return found


def _extent(values: Array, normalization: Normalization) -> dict[str, Any]:
    """How far a client's values reach, as far as the server needs to know."""
    count = (~np.isnan(values)).sum(axis=0)
    found: dict[str, Any] = {"count": count.tolist()}
    if normalization == "minmax":
        fitted = fit_minmax(values)
        return found | {"minimum": fitted.minimum.tolist(), "maximum": fitted.maximum.tolist()}
    for name, own in zip(("low", "median", "high"), limits(values), strict=True):
        found[name] = (count * own).tolist()
    return found


def _merged(
    told: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    categories: Categories,
    indicator: Indicator,
    pooled: bool,
) -> dict[str, Any]:
    """What the server makes of the first messages."""
    gaps = {name for one in told for name in one.get("missing", ())}
    chosen = gaps if indicator == "auto" else {*names} if indicator else set()
    union = {
        name: sorted({text for one in told for text in one["categories"][name]}, key=in_order)
        for name in categories
    }
    found = {"indicators": [n for n in names if n in chosen], "categories": union}
    if not pooled:
        return found
    counts = np.array([one["count"] for one in told])
    if "minimum" in told[0]:
        for name, end, none in (("minimum", np.min, np.inf), ("maximum", np.max, -np.inf)):
            values = np.where(counts > 0, np.array([one[name] for one in told]), none)
            found[name] = np.where(counts.any(axis=0), end(values, axis=0), 0.0).tolist()
        return found
    for name in ("low", "median", "high"):
        total = np.sum([one[name] for one in told], axis=0)
        found[name] = (total / np.maximum(counts.sum(axis=0), 1)).tolist()
    return found


def _standard(server: _Server, numbers: Mapping[str, Array], answer: Mapping[str, Any]) -> Standard:
    """The second exchange of pooled standardisation."""
    low, median, high = (np.array(answer[name]) for name in ("low", "median", "high"))
    told = []
    for client, values in numbers.items():
        apart = np.clip(values, low, high) - median
        sums = {
            "count": (~np.isnan(apart)).sum(axis=0).tolist(),
            "sum": np.nansum(apart, axis=0).tolist(),
            "squares": np.nansum(apart**2, axis=0).tolist(),
        }
        told.append(server.receive(client, sums))
    count, total, squares = (
        np.sum([one[name] for one in told], axis=0) for name in ("count", "sum", "squares")
    )
    mean, sd = moments(count, median, total, squares)
    last = server.answer(list(numbers), {"mean": mean.tolist(), "sd": sd.tolist()})
    return Standard(low, high, median, np.array(last["mean"]), np.array(last["sd"]))
