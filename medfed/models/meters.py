"""Meters: they gather the batches of one split and give its metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from numpy.typing import NDArray
from torch import Tensor

from medfed.common.scores import worst_value

Batch = Mapping[str, Tensor]
"""``image`` and ``label``, and where they apply ``channels``, ``case`` and ``spacing``."""

Columns = Mapping[str, NDArray[Any]]
"""What a meter tells of its cases, by column: (N,) numbers or names."""


class Meter(Protocol):
    """Gathers the batches of one split and gives their metrics.

    A plain object rather than a ``torchmetrics.Metric``, so that the state dict of a task holds its
    network and nothing else. A metric is NaN where the *data* leave it undefined, whatever is
    predicted, and no warning is raised.
    """

    def update(self, logits: Tensor, batch: Batch) -> None:
        """Adds one batch."""

    def compute(self) -> dict[str, float]:
        """Returns the metrics of all batches so far."""


@runtime_checkable
class HasCases(Protocol):
    """A meter that also knows what each case gave."""

    def cases(self) -> list[dict[str, float | str]]:
        """Returns rows of a table; ``case`` is the index of the patient in the split."""


class WholeSplit:
    """The meter of metrics that need all logits and labels of a split at once.

    Args:
        criterion: The loss of logits and labels.
        names: The metrics beside the loss; NaN where the split is empty.
        measure: Gives them for all logits and labels together.
        told: From logits ``(N, ...)`` to numbers ``(N, ...)`` by name, what the table of cases has
            of each sample beside its label; None for no such table.
    """

    def __init__(
        self,
        criterion: Callable[[Tensor, Tensor], Tensor],
        names: Sequence[str],
        measure: Callable[[Tensor, Tensor], dict[str, float]],
        told: Callable[[Tensor], Mapping[str, Tensor]] | None = None,
    ) -> None:
        self.criterion = criterion
        self.names = names
        self.measure = measure
        self.told = told
        self.logits: list[Tensor] = []
        self.labels: list[Tensor] = []
        self.case: list[int] = []

    def update(self, logits: Tensor, batch: Batch) -> None:
        """Adds the logits ``(B, ...)`` and the ``label`` and ``case`` of a batch."""
        first = len(self.case)
        self.logits.append(logits.detach().float())
        self.labels.append(batch["label"])
        self.case += batch.get("case", torch.arange(first, first + len(logits))).tolist()

    def compute(self) -> dict[str, float]:
        """Returns ``loss`` and the metrics of all batches together."""
        if not self.labels:
            return dict.fromkeys(("loss", *self.names), math.nan)
        logits, label = torch.cat(self.logits), torch.cat(self.labels)
        loss = self.criterion(logits, label).item()
        return {"loss": loss} | self.measure(logits, label)

    def cases(self) -> list[dict[str, float | str]]:
        """Returns a row per sample: ``label``, and what the task tells of its logits."""
        if self.told is None or not self.labels:
            return []
        columns = {"case": self.case, "label": torch.cat(self.labels).tolist()}
        told = self.told(torch.cat(self.logits).double())
        columns |= {name: values.tolist() for name, values in told.items()}
        rows = zip(*columns.values(), strict=True)
        return [dict(zip(columns, row, strict=True)) for row in rows]


class FiniteOnly:
    """A meter around another one, to which predictions that are not finite are failures.

    Metrics made of NaN can look like others (``argmax`` finds a class, ``NaN > 0.5`` an empty
    mask), so one such prediction, or an infinite loss, gives every metric of the split its worst
    possible value. What the data leave undefined stays NaN.

    Args:
        meter: The meter of the task.
        own: Measures the same by what the user added.
    """

    def __init__(self, meter: Meter, own: Meter | None = None) -> None:
        self.meter = meter
        self.own = own
        self.failed = False

    def update(self, logits: Tensor, batch: Batch) -> None:
        """Adds one batch."""
        # A finite sum has finite terms; to look at each takes twenty times as long.
        if not math.isfinite(float(logits.sum())) and not bool(logits.isfinite().all()):
            self.failed = True
            logits = torch.zeros_like(logits)  # which metrics are defined is a matter of the labels
        self.meter.update(logits, batch)
        if self.own is not None:
            self.own.update(logits, batch)

    def compute(self) -> dict[str, float]:
        """Returns the metrics of all batches so far."""
        metrics = self.meter.compute()
        own = {} if self.own is None else self.own.compute()
        if not self.failed and not any(map(math.isinf, metrics.values())):
            return metrics | own
        metrics |= own
        return {n: v if math.isnan(v) else worst_value(n) for n, v in metrics.items()}

    def cases(self) -> list[dict[str, float | str]]:
        """Returns the rows of the meter, if it has any; of a failed model with the worst values."""
        rows = self.meter.cases() if isinstance(self.meter, HasCases) else []
        if self.failed:
            for row in rows:
                numbers = {n: v for n, v in row.items() if isinstance(v, float)}
                row |= {n: _failure(n) for n, v in numbers.items() if not math.isnan(v)}
        return rows


def _failure(column: str) -> float:
    """What a row of a failed model holds: there is no worst probability, but none is known."""
    if column.split("/")[0] in ("probability", "prediction"):
        return math.nan
    return worst_value(column)
