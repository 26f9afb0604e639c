"""The validation metrics of all clients over rounds, by round, so that no round looks at all."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from medfed.common.scores import Record, failed, undefined_in, worst_value


class History(list[Record]):
    """Records in the order of rounds and clients; what is known of each round is kept.

    Args:
        records: What there is already.

    Example:
        >>> history = History([Record(0, "a", {"iou": 0.5}), Record(0, "b", {"iou": 1.0})])
        >>> history.mean(0, "iou"), history.rounds
        (0.75, [0])
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        super().__init__()
        self.by_round: dict[int, list[Record]] = {}
        self.failures: dict[str, list[int]] = {}  # of clients whose models have failed
        self.measured = False  # whether any loss is known: without a validation patient none is
        self._means: dict[int, dict[tuple[str, str], float]] = {}
        self._undefined: dict[str, list[str]] = {}
        self.extend(records)

    def extend(self, records: Iterable[Record]) -> None:
        """Appends the records of a round."""
        for record in records:
            self.append(record)

    def __iadd__(self, records: Iterable[Record]) -> History:  # type: ignore[override,misc]
        """The same."""
        self.extend(records)
        return self

    def append(self, record: Record) -> None:
        """Appends one record."""
        super().append(record)
        self.by_round.setdefault(record.round, []).append(record)
        if failed({record.client: record.metrics}):
            self.failures.setdefault(record.client, []).append(record.round)
        self.measured |= not math.isnan(record.metrics.get("loss", math.nan))
        self._means.pop(record.round, None)
        if record.client not in self._undefined:
            self._undefined[record.client] = undefined_in(record.metrics)

    @property
    def rounds(self) -> list[int]:
        """The rounds that were evaluated, in order."""
        return sorted(self.by_round)

    def undefined(self) -> dict[str, list[str]]:
        """Returns for each client the metrics that its validation data leave undefined.

        They are known after its first evaluation.
        """
        return dict(self._undefined)

    def mean(self, number: int, metric: str, mode: str = "max") -> float:
        """Returns the mean of a metric over the clients that have it, larger is better.

        Args:
            number: The round.
            metric: The metric.
            mode: Of ``min`` the mean is turned round.
        """
        known = self._means.setdefault(number, {})
        if (metric, mode) not in known:
            known[metric, mode] = self._mean(number, metric, mode)
        return known[metric, mode]

    def _mean(self, number: int, metric: str, mode: str) -> float:
        undefined, sign = self._undefined, 1 if mode == "max" else -1
        values = [
            sign * (v if math.isfinite(v) else worst_value(metric))
            for v, client in (
                (r.metrics.get(metric, math.nan), r.client) for r in self.by_round.get(number, ())
            )
            if metric not in undefined.get(client, ())
        ]
        # Of a metric that is unknown here the direction of selection says what is worst.
        values = [v if math.isfinite(v) else -math.inf for v in values]
        return sum(values) / len(values) if values else math.nan

    def state_dict(self) -> list[tuple[Any, ...]]:
        """Returns the rows, loadable with ``weights_only=True``."""
        return [(r.round, r.client, dict(r.metrics)) for r in self]
