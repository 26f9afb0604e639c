"""Meters, which gather the batches of one split and compute its metrics.

A user can add metrics to those of a task: from MONAI, from TorchMetrics, or a function.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from medfed.common.scores import declare, worst_value
from medfed.common.streams import seeded
from medfed.functional.scores import Floats
from medfed.models.custom_losses import Tried, name_of
from medfed.standalone.checks import check_known
from medfed.standalone.errors import ConfigError, first_line

# ``image`` and ``label``, and where they apply ``channels``, ``case`` and ``spacing``.
Batch = Mapping[str, Tensor]

# What a meter tells of its cases, by column: (N,) numbers or names.
Columns = Mapping[str, NDArray[Any]]


class Meter(Protocol):
    """Gathers the batches of one split and gives their metrics.

    It is a plain object, not a ``torchmetrics.Metric``, so that the state dict of a task holds only
    its network. A metric is NaN, without a warning, if the *data* leave it undefined for every
    prediction.
    """

    def update(self, logits: Tensor, batch: Batch) -> None:
        """Adds one batch."""

    def compute(self) -> dict[str, float]:
        """Returns the metrics of all batches so far."""


@dataclass(eq=False)
class WholeSplit:
    """The meter of metrics that need all logits and labels of a split together.

    Attributes:
        criterion: The loss of logits and labels.
        names: The metrics other than the loss; NaN if the split is empty.
        measure: Computes them from all logits and labels.
        columns: From logits ``(N, ...)`` to numbers ``(N, ...)`` by name, further columns of the
            table of cases; None for no such table.
    """

    criterion: Callable[[Tensor, Tensor], Tensor]
    names: Sequence[str]
    measure: Callable[[Tensor, Tensor], dict[str, float]]
    columns: Callable[[Tensor], Mapping[str, Tensor]] | None = None
    logits: list[Tensor] = field(default_factory=list, init=False)
    labels: list[Tensor] = field(default_factory=list, init=False)
    case: list[int] = field(default_factory=list, init=False)

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
        metrics = self.measure(logits, label)
        if not isinstance(metrics, Mapping):
            what = f"The function {name_of(self.measure)} of a meter"
            raise ConfigError(f"{what} gives {metrics!r:.40}; it must return {{metric: number}}.")
        return {"loss": self.criterion(logits, label).item(), **metrics}

    def cases(self) -> list[dict[str, float | str]]:
        """Returns a row per sample: ``label``, and the task's columns of its logits."""
        if self.columns is None or not self.labels:
            return []
        label = torch.cat(self.labels).cpu().numpy()
        if label.dtype == np.float32:  # 4.84 and not 4.840000152587891
            label = label.astype(str).astype(float)
        columns = {"case": self.case, "label": label.tolist()}
        more = self.columns(torch.cat(self.logits).double())
        columns |= {name: values.tolist() for name, values in more.items()}
        rows = zip(*columns.values(), strict=True)
        return [dict(zip(columns, row, strict=True)) for row in rows]


def scores_of(
    rows: Sequence[Mapping[str, Any]], scores: Callable[[Columns, Floats], Mapping[str, Floats]]
) -> dict[str, float]:
    """Returns the scores of rows of cases that all have the same weight."""
    table = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    return plain(scores(table, np.ones((1, len(rows)))))


def plain(scores: Mapping[str, Floats]) -> dict[str, float]:
    """Returns the scores of the first weighting, which is often the only one."""
    return {name: float(values[0]) for name, values in scores.items()}


class FiniteOnly:
    """A meter around another one, which counts predictions that are not finite as failures.

    Metrics made of NaN can look like others (``argmax`` finds a class, ``NaN > 0.5`` an empty
    mask), so one such prediction, or an infinite loss, gives every metric of the split its worst
    possible value. Metrics that the data leave undefined stay NaN.
    """

    def __init__(self, meter: Meter, custom: Meter | None = None) -> None:
        self.meter = meter
        self.custom = custom
        self.failed = False

    def update(self, logits: Tensor, batch: Batch) -> None:
        """Adds one batch."""
        # A finite sum has finite terms; to look at each takes twenty times as long.
        if not math.isfinite(float(logits.sum())) and not bool(logits.isfinite().all()):
            self.failed = True
            logits = torch.zeros_like(logits)  # the labels decide which metrics are defined
        self.meter.update(logits, batch)
        if self.custom is not None:
            self.custom.update(logits, batch)

    def compute(self) -> dict[str, float]:
        """Returns the metrics of all batches so far."""
        metrics = self.meter.compute()
        metrics = {name: float(value) for name, value in metrics.items()}
        more = {} if self.custom is None else self.custom.compute()
        if not self.failed and not any(map(math.isinf, metrics.values())):
            return metrics | more
        metrics |= more
        return {n: v if math.isnan(v) else worst_value(n) for n, v in metrics.items()}

    def cases(self) -> list[dict[str, float | str]]:
        """Returns the rows of the meter, if it has any; a failed model gets the worst values."""
        rows: list[dict[str, float | str]] = getattr(self.meter, "cases", list)()
        if self.failed:
            for row in rows:
                numbers = {n: v for n, v in row.items() if isinstance(v, float) and n != "time"}
                row |= {n: _failure(n) for n, v in numbers.items() if not math.isnan(v)}
                row.pop("counts", None)
        return rows


def _failure(column: str) -> float:
    """The values of a failed model's row: NaN for probabilities, which have no worst value."""
    if column.split("/")[0] in ("probability", "prediction", "risk", "survival"):
        return math.nan
    return worst_value(column)


# Warnings of TorchMetrics and MONAI when labels leave a metric undefined but they give a number.
_UNDEFINED = re.compile(r"meaningless|ill-defined|undefined|must not be all|No (positive|negative)")


_IN_MM = ("HausdorffDistanceMetric", "SurfaceDistanceMetric", "SurfaceDiceMetric")


@dataclass
class CustomMetric:
    """A metric and its direction."""

    metric: Any  # a metric of MONAI or TorchMetrics, or a function of predictions and labels
    direction: Literal["max", "min"]
    # The value of a failed model, and of a case whose prediction leaves it undefined, such as the
    # distance of an empty mask; None for infinity.
    worst: float | None = None
    name: str = ""

    def __post_init__(self) -> None:
        if self.direction is None:
            raise ConfigError(
                f"model.metrics has {name_of(self.metric)} without a direction; add direction: max "
                "or min."
            )
        check_known("direction of model.metrics", self.direction, ("max", "min"))
        if not (callable(self.metric) or self._gathers):
            raise ConfigError(f"model.metrics has {self.metric}, which is not a metric.")
        self.values: list[float] = []
        self.empty = True

    def reset(self) -> None:
        """Clears the metric."""
        self.values, self.empty = [], True
        if hasattr(self.metric, "reset"):
            self.metric.reset()

    def add(self, prediction: Tensor, target: Tensor, mm: Sequence[float] | None = None) -> None:
        """Adds cases ``(B, ...)``; of voxels of ``mm``, if the metric takes it."""
        self.empty = False
        prediction, target = prediction.clone(), target.clone()  # a user's code may change them
        if self._gathers:
            self.metric.update(prediction, target)
            return
        value, parts = self._measure(prediction, target, mm)
        if not bool(parts.isfinite().all()):
            classes = prediction.ndim == 2 and target.ndim == 1
            ideal = F.one_hot(target, prediction.shape[1]) if classes else target
            _, best = self._measure(ideal.to(prediction), target, mm)
            # If even the labels as predictions have no value, the data leave it undefined.
            if bool((~parts.isfinite() & best.isfinite()).any()):
                value = worst_value(self.name)
        self.values.append(value)

    def value(self) -> float:
        """Returns the metric of all added cases; NaN if they leave it undefined."""
        if self._gathers:
            return math.nan if self.empty else _one(self.metric.compute())
        known = [v for v in self.values if not math.isnan(v)]
        return sum(known) / len(known) if known else math.nan

    def alone(self, prediction: Tensor, target: Tensor) -> float:
        """Returns the metric of these cases alone."""
        self.reset()
        self.add(prediction, target)
        return self.value()

    @property
    def _gathers(self) -> bool:
        """Whether it is from TorchMetrics, or has its interface."""
        return hasattr(self.metric, "update") and hasattr(self.metric, "compute")

    def _measure(
        self, prediction: Tensor, target: Tensor, spacing: Sequence[float] | None
    ) -> tuple[float, Tensor]:
        """The value of one case, and the values of which it is a mean."""
        if not hasattr(self.metric, "aggregate"):
            value = _one(self.metric(prediction, target))
            return value, torch.tensor(value)
        if prediction.ndim == 2 and target.ndim == 1:  # of classes MONAI wants one-hot labels
            target = F.one_hot(target, prediction.shape[1])
        mm = spacing is not None and type(self.metric).__name__ in _IN_MM
        more = {"spacing": list(spacing or ())} if mm else {}
        self.metric.reset()
        parts = self.metric(y_pred=prediction.float(), y=target.float(), **more)
        value = _one(self.metric.aggregate())
        parts = parts if isinstance(parts, Tensor) else torch.tensor(value)
        return (math.nan if bool(parts.isnan().all()) else value), parts  # MONAI's mean is then 0


# What says which scan an image is of, None for an image by itself; mm between voxels.
Scan = tuple[int, ...] | None
Spacing = tuple[float, ...] | None


class Volumes:
    """Passes images ``(R, *spatial)`` on: slices of a scan, which follow each other, as a volume.

    A single slice stays one; of its spacing the axes in the plane count.
    """

    def __init__(self, take: Callable[[Scan, Spacing, Tensor, Tensor], None]) -> None:
        self.take = take
        self._of: tuple[Scan, Spacing] = None, None
        self._slices: list[tuple[Tensor, Tensor]] = []

    def add(self, scan: Scan, spacing: Spacing, prediction: Tensor, truth: Tensor) -> None:
        """Adds an image, and passes on what it does not continue."""
        whole = spacing is not None and prediction.ndim == 1 + len(spacing)
        if whole or scan is None or self._of != (scan, spacing):
            self.close()
        self._of = scan, spacing
        self._slices.append((prediction.cpu(), truth.cpu()))
        if whole:
            self.close()

    def close(self) -> None:
        """Passes on the slices that wait for the rest of their scan."""
        parts, self._slices = list(zip(*self._slices, strict=True)), []
        if parts:
            pair = (p[0] if len(p) == 1 else torch.stack(p, -1) for p in parts)
            (scan, spacing), (prediction, truth) = self._of, pair
            mm = None if spacing is None else spacing[: prediction.ndim - 1]
            self.take(scan, mm, prediction, truth)


def spacings(batch: Batch) -> list[Spacing]:
    """Returns the mm between voxels of each image of a batch; None where nobody says."""
    if "spacing" not in batch:
        return [None] * len(batch["label"])
    return [tuple(mm) for mm in batch["spacing"].tolist()]


# From logits and a batch to the predictions ``(B, ...)`` and labels that metrics are given.
MetricInputs = Callable[[Tensor, Batch], tuple[Tensor, Tensor]]


class CustomMetrics:
    """Computes all of the user's metrics of a split."""

    def __init__(self, metrics: dict[str, CustomMetric], inputs: MetricInputs, cases: bool) -> None:
        self.metrics, self.inputs, self.cases = metrics, inputs, cases
        self.waiting: list[tuple[Tensor, Tensor]] = []  # of the whole split
        self.volumes = Volumes(lambda _, mm, p, t: self._add(p[None], t[None], mm))
        for metric in metrics.values():
            metric.reset()

    def update(self, logits: Tensor, batch: Batch) -> None:
        """Adds one batch."""
        prediction, target = (t.detach().cpu() for t in self.inputs(logits, batch))
        if not self.cases:
            self.waiting.append((prediction, target))
            return
        keys = zip(*(batch[n].tolist() for n in ("case", "scan") if n in batch), strict=True)
        scans: list[Scan] = [*keys] or [None] * len(target)
        for image in zip(scans, spacings(batch), prediction, target, strict=True):
            self.volumes.add(*image)

    def _add(self, prediction: Tensor, target: Tensor, spacing: Spacing = None) -> None:
        """Passes the whole split, or one case, to the metrics."""
        for name, metric in self.metrics.items():
            _guarded(name, metric.add, prediction, target, spacing)

    def compute(self) -> dict[str, float]:
        """Returns the metrics by name; NaN if the data leave one undefined."""
        self.volumes.close()
        if self.waiting:
            prediction, target = map(torch.cat, zip(*self.waiting, strict=True))
            self.waiting = []
            self._add(prediction, target)
        return {name: _guarded(name, metric.value) for name, metric in self.metrics.items()}


def check_metrics(metrics: Mapping[str, CustomMetric], known: Sequence[str]) -> None:
    """Checks the names of metrics, and registers their directions."""
    for name, metric in metrics.items():
        if not isinstance(metric, CustomMetric):
            raise ConfigError(f"model.metrics.{name} must have _target_, and direction max or min.")
        if name in known or not re.fullmatch(r"\w[\w-]*", name):
            raise ConfigError(
                f"model.metrics.{name} cannot be called so: {', '.join(known)} are the task's own, "
                "and names are letters, digits, - and _."
            )
        metric.name = name
        declare(name, metric.direction, metric.worst)


def try_metrics(metrics: Mapping[str, CustomMetric], tried: Tried) -> None:
    """Tries metrics on predictions of known quality, before training."""
    for name, metric in metrics.items():
        if getattr(metric.metric, "include_background", True) is False:
            raise ConfigError(
                f"model.metrics.{name} would leave out the first region, as it is given no "
                "background; add include_background: true."
            )
        values = []
        for prediction in (tried.right, tried.wrong[0], tried.right):
            with seeded():
                values.append(_guarded(name, metric.alone, prediction, tried.target))
        right, wrong, again = values
        if again != right and not (math.isnan(again) and math.isnan(right)):
            raise ConfigError(
                f"model.metrics.{name} is {right:.4g}, then {again:.4g} for the same predictions, "
                "so it keeps something between calls; give it update, compute and reset."
            )
        if (wrong > right) if metric.direction == "max" else (wrong < right):
            raise ConfigError(
                f"model.metrics.{name} is {right:.4g} where predictions are right and {wrong:.4g} "
                f"where they are wrong, so its direction is not {metric.direction}."
            )
        metric.reset()


def _guarded(name: str, call: Callable[..., Any], *inputs: Any) -> Any:
    """The result of a user's code; NaN if it warns that its number is undefined."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            value = call(*inputs)
        except Exception as error:
            sizes = [str([*i.shape]) for i in inputs if isinstance(i, Tensor)]
            shapes = f" of shape {' and labels of shape '.join(sizes)}" if sizes else ""
            raise ConfigError(
                f"model.metrics.{name} cannot evaluate the task's predictions{shapes}: "
                f"{first_line(error)}."
            ) from error
    undefined = any(_UNDEFINED.search(str(w.message)) for w in caught)
    return math.nan if undefined and isinstance(value, float) else value


def _one(value: Any) -> float:
    """The single number that a metric gives."""
    while isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    try:
        number = torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(f"it gives {type(value).__name__}, no number") from None
    if number.numel() != 1:
        raise ConfigError(f"it gives {number.numel()} numbers, and must give one (a mean)")
    return float(number)
