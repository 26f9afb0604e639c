"""The pictures of a report on the same runs, and one of the scores of all clients."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.figure import Figure

from medfed.common.scores import label_of
from medfed.reports.charts import hospitals
from medfed.reports.methods import Comparison, Finding
from medfed.reports.task_pictures import contours_of, looks_of, pictures_of


def find(comparison: Comparison) -> Finding:
    """Draws all methods of a comparison."""
    looks = looks_of(comparison.report)
    pictures = {"clients": _clients(comparison)}
    captions = {
        "clients": "Test metric of each client under each method, with its range over seeds."
    }
    for task, verdicts in comparison.report.tasks:
        for name, picture in pictures_of(task, verdicts, looks).items():
            if picture.figure is not None:
                pictures[name], captions[name] = picture.figure, picture.caption
        if contours := contours_of(task, verdicts, len(comparison.clients)):
            pictures["contours"] = contours
            captions["contours"] = "True and predicted contours in one test slice per client."
    return Finding(pictures=pictures, captions=captions)


def _clients(comparison: Comparison) -> Figure:
    def over_seeds(values: list[float]) -> tuple[float, float, float]:
        known = [v for v in values if math.isfinite(v)]
        return (float(np.mean(known)), min(known), max(known)) if known else (math.nan,) * 3

    metric, clients = comparison.metric, comparison.clients
    series = {
        method.name: [over_seeds(method.scores(metric, client)) for client in clients]
        for method in comparison.methods
    }
    looks = looks_of(comparison.report)
    return hospitals(clients, series, f"test {label_of(metric)}", looks, zero=False)
