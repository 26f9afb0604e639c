"""Metrics of clients over rounds: the record, which way is better, statistics over clients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from medfed.common.files import csv_text


class Record(NamedTuple):
    """The metrics of one client after one round."""

    round: int
    client: str
    metrics: dict[str, float]


def smaller_is_better(metric: str) -> bool:
    """Returns whether smaller values of a metric are better.

    Example:
        >>> smaller_is_better("loss"), smaller_is_better("iou/whole")
        (True, False)
    """
    return metric.split("/")[0] in {"loss", "ece", "hd95", "rmse", "mae"}


def federation_statistics(values: Sequence[float], falls: bool = False) -> dict[str, float]:
    """Returns mean, standard deviation, worst client and worst decile over clients.

    Args:
        values: One value per client; NaN where undefined.
        falls: Whether smaller is better.

    Example:
        >>> federation_statistics([0.5, 1.0])
        {'mean': 0.75, 'sd': 0.25, 'worst': 0.5, 'worst_decile': 0.5}
    """
    finite = sorted((v for v in values if math.isfinite(v)), reverse=falls)
    if not finite:
        return dict.fromkeys(("mean", "sd", "worst", "worst_decile"), math.nan)
    tenth = max(1, len(finite) // 10)
    return {
        "mean": float(np.mean(finite)),
        "sd": float(np.std(finite)),
        "worst": finite[0],
        "worst_decile": float(np.mean(finite[:tenth])),
    }


def metrics_csv(history: Sequence[Record], test: Sequence[Record]) -> str:
    """Returns all metrics as CSV: round, client, split and a column per metric.

    Args:
        history: Validation metrics of every evaluated round.
        test: Test metrics of the selected round.
    """
    rows = [("val", r) for r in history] + [("test", r) for r in test]
    names = list(dict.fromkeys(n for _, r in rows for n in r.metrics))
    return csv_text(
        ["round", "client", "split", *names],
        (
            [r.round, r.client, split, *(repr(r.metrics.get(n, "")) for n in names)]
            for split, r in rows
        ),
    )
