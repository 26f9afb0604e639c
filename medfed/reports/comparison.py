"""All metrics of finished runs, and what differs between them, for ``medfed report``.

`FINDINGS` names the modules that add sentences, tables and pictures about how the runs differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from medfed.common.scores import WITHOUT_SMALL, over_seeds
from medfed.reports import subsets, sweeps, task_pictures
from medfed.reports.findings import Report
from medfed.reports.runs import metrics_of, value_at, with_constants
from medfed.standalone.files import csv_text

# Modules with a function ``find``, which adds to a report, in the order of the text.
FINDINGS = (task_pictures, sweeps, subsets)
_SPENT = ("steps", "gradient_passes", "forward_passes")
_HEAD = ("metric", "place", "method", "seeds", "value", "sd_over_seeds", "low", "high")
Values = Mapping[str, Sequence[float]]  # by method, one value for each of its runs


def values_of(report: Report) -> Iterator[tuple[str, str, Values]]:
    """Yields metric, place and values: of clients, statistics over them, then what runs cost."""
    task = report.tasks[0][0]
    every = {name: [run.summary for run in runs] for name, runs in report.runs.items()}
    clients, scored = [*next(iter(every.values()))[0]["clients"]], with_constants(report.runs)
    for metric in metrics_of(report.runs, task.metric):
        for place in (*clients, "mean", *[WITHOUT_SMALL] * bool(task.small), "sd", "worst"):
            some = task.clients if place == WITHOUT_SMALL else clients
            yield (
                metric,
                place,
                {n: [value_at(s, metric, place, some) for s in of] for n, of in scored.items()},
            )
    costs = [(f"bytes {way}", "total", ("bytes", way)) for way in ("up", "down")]
    costs += [(name.replace("_", " "), c, (name, c)) for name in _SPENT for c in clients]
    for metric, place, (kind, of_what) in costs:
        yield metric, place, {n: [s[kind][of_what] for s in of] for n, of in every.items()}
    rounds = {n: [(s["selected_round"] or 0) + 1 for s in of] for n, of in every.items()}
    yield "selected round", "total", rounds


def to_csv(report: Report) -> str:
    """Returns a line per metric, place and method or constant predictor."""
    # The spread is the sample standard deviation over seeds; one seed has the interval of its
    # run.
    return csv_text(
        _HEAD,
        (
            [metric, place, name, len(of), *over_seeds(of), *_ends(report, name, metric, place)]
            for metric, place, values in values_of(report)
            for name, of in values.items()
        ),
    )


def _ends(report: Report, name: str, metric: str, place: str) -> Sequence[float | None]:
    """The interval that a method's only run has of a client's metric, or of the mean."""
    one, *others = report.runs.get(name, [None, None])
    intervals = None if one is None or others else one.summary.get("intervals")
    means = ("mean", WITHOUT_SMALL)
    of = {n: intervals.get(n, {}) for n in means} | intervals["clients"] if intervals else {}
    ends = of.get(place, {}).get(metric) or (math.nan,) * 2
    return (None, None) if any(map(math.isnan, ends)) else ends


def add_findings(report: Report) -> None:
    """Adds what differs between finished runs: sentences, tables by file, and pictures."""
    report.tables["comparison"] = to_csv(report)
    for module in FINDINGS:
        module.find(report)
