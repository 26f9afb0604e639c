"""Metrics of clients over rounds: the record, which direction is better, statistics over clients.

A client can lack a number for two reasons, which are always distinguished. NaN means that the
client's *data* leave a metric undefined for any prediction (the AUROC of one class); statistics of
that metric then omit the client. Any other value that is not finite means that the client's *model*
has failed. It counts as the worst possible value, so that a mean never ignores failed models.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from medfed.standalone.errors import few
from medfed.standalone.files import csv_text

_TOLD = 10  # clients with a sentence each
_BOUNDED = (
    *("accuracy", "balanced_accuracy", "auroc", "sensitivity", "specificity", "f1", "cpm"),
    *("lesion_cpm", "lesions_found", "iou", "iou_both", "dice", "dice_case", "nsd", "cindex"),
)
# The worst and the best possible value of each metric; others have neither.
_ENDS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(_BOUNDED, (0.0, 1.0)),
    "coverage": (0.0, 1.0),
    **dict.fromkeys(("set_size", "factor"), (math.inf, 1.0)),
    "brier": (1.0, 0.0),
    **dict.fromkeys(("loss", "log_loss", "hd95", "rmse", "mae", "width"), (math.inf, 0.0)),
    "r2": (-math.inf, 1.0),
    "pairs": (0.0, math.inf),
}
_users_metrics: dict[str, tuple[float, float]] = {}  # likewise


def declare(metric: str, direction: str, worst: float | None = None) -> None:
    """Registers a user's metric, whose name says neither its direction nor its worst value."""
    end = math.inf if direction == "min" else -math.inf
    _users_metrics[metric] = end if worst is None else worst, -end


def _ends(metric: str) -> tuple[float, float]:
    known = _ENDS.get(metric.split("/")[0], (-math.inf, math.inf))
    return _users_metrics.get(metric, known)


class Record(NamedTuple):
    """The metrics of one client after one round."""

    round: int
    client: str
    metrics: dict[str, float]


def smaller_is_better(metric: str) -> bool:
    """Returns whether smaller values of a metric are better."""
    worst, best = _ends(metric)
    return worst > best


def worst_value(metric: str) -> float:
    """Returns the worst possible value of a metric, which a failed model gets."""
    return _ends(metric)[0]


def rounded(value: float) -> float:
    """Returns a metric with the digits that leave a hospital, by which rounds are also selected.

    Example:
        >>> rounded(0.123456), rounded(1234.56), rounded(12345.0)
        (0.1235, 1235.0, 12345.0)
    """
    return value if value.is_integer() else float(f"{value:.4g}")


def limits_of(metric: str) -> tuple[float, float]:
    """Returns the least and the greatest possible value of a metric."""
    worst, best = _ends(metric)
    return min(worst, best), max(worst, best)


def failures_count(
    metrics: Mapping[str, float], undefined: Collection[str] | None = None
) -> dict[str, float]:
    """Returns a client's metrics, with the worst possible value for those of a failed model."""
    if undefined is None:
        undefined = undefined_in(metrics)
    values = {n: v if math.isfinite(v) else worst_value(n) for n, v in metrics.items()}
    return values | {n: math.nan for n in metrics if n in undefined}


def undefined_in(metrics: Mapping[str, float]) -> list[str]:
    """Returns the metrics that a client's data leave undefined."""
    return [name for name, value in metrics.items() if math.isnan(value)]


def failed(clients: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Returns the clients whose models have failed: a metric, mostly the loss, is infinite."""
    # A user's metrics do not count: a distance may be infinite by its definition.
    return [
        client
        for client, metrics in clients.items()
        if any(math.isinf(v) for n, v in metrics.items() if n not in _users_metrics)
    ]


def undefined_sentences(
    clients: Mapping[str, Mapping[str, float]], split: str, where: str = ""
) -> list[str]:
    """Says which clients have no value of which metric."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for client, metrics in clients.items():
        missing = undefined_in(metrics)
        # If a metric is undefined for all regions, the sentence does not name each region.
        if names := tuple(n for n in missing if "/" not in n or n.split("/")[0] not in missing):
            groups.setdefault(names, []).append(client)
    return [
        f"{where}The {split} data of {few(who)} leave {', '.join(names)} undefined; "
        f"{'its' if len(names) == 1 else 'their'} statistics omit "
        f"{who[0] if len(who) == 1 else 'these clients'}."
        for names, who in groups.items()
    ]


def failure_sentences(
    clients: Mapping[str, Mapping[str, float]], split: str, where: str = ""
) -> list[str]:
    """Says which clients get the worst possible values; arguments as `undefined_sentences`."""
    lost = failed(clients)
    sentences = [
        f"{where}The loss or the predictions of {client} on its {split} data are not finite; "
        f"{client} gets the worst possible values."
        for client in lost[:_TOLD]
    ]
    more = len(lost) - _TOLD
    return sentences + [f"{where}The same holds for {more} more clients."] * (more > 0)


def federation_statistics(values: Sequence[float], falls: bool = False) -> dict[str, float]:
    """Returns mean, standard deviation, worst client and worst decile over clients.

    Example:
        >>> federation_statistics([0.5, 1.0, math.nan])
        {'mean': 0.75, 'sd': 0.25, 'worst': 0.5, 'worst_decile': 0.5}
        >>> federation_statistics([0.5, math.inf], falls=True)
        {'mean': inf, 'sd': nan, 'worst': inf, 'worst_decile': inf}
    """
    # The clients are the whole population, not a sample: the standard deviation is the root
    # of the mean squared deviation (n, not n - 1). The mean includes clients whose models
    # have failed: if the value of one is infinite, so is the mean.
    known = sorted((v for v in values if not math.isnan(v)), reverse=falls)
    if not known:
        return dict.fromkeys(("mean", "sd", "worst", "worst_decile"), math.nan)
    tenth = max(1, len(known) // 10)
    return {
        "mean": float(np.mean(known)),
        "sd": float(np.std(known)) if all(map(math.isfinite, known)) else math.nan,
        "worst": known[0],
        "worst_decile": float(np.mean(known[:tenth])),
    }


# What a line calls the metrics that follow from choices on validation cases, and their ending.
CHOSEN = {"recalibrated": "/calibrated", "thresholds": "/point"}
# The mean of the hospitals with at least `LEAST_CASES` test patients, and so on.
WITHOUT_SMALL = "mean without small"
# The least test patients of a hospital for a verdict that names it or that it decides, and the
# least of its rarer class, or with an event or a lesion.
LEAST_CASES = 10
# The least share of the resamples that must define a metric: fewer, such as those that drew each
# of several rare findings, stand for no other patients.
LEAST_DEFINED = 0.1
# What a site says of its few test patients, whose number stays there.
FEW_CASES = f"fewer than {LEAST_CASES} test patients, or of a class, with an event or a lesion"


def fewest(cases: Iterable[Mapping[str, Any]]) -> tuple[int, str]:
    """Returns on how few test patients the scores of a hospital rest, and on which."""
    # The result is the patients; of those of a classification the ones outside of the
    # commonest class, of a survival task the ones with an event, of a detection with a lesion.
    rows = list(cases)
    names = rows[0].keys() if rows else ()
    counts = {"test patients": len({row["patient"] for row in rows})}
    if "event" in names:
        events = {row["patient"] for row in rows if float(row["event"])}
        counts["test patients with an event"] = len(events)
    elif "lesions" in names:
        having = {row["patient"] for row in rows if float(row["lesions"])}
        counts["test patients with a lesion"] = len(having)
    elif "probability/1" in names:
        ones = {(row["patient"], str(row["label"])) for row in rows}
        classes = Counter(label for _, label in ones)
        rarer = "outside of its commonest class" if "probability/2" in names else "of a class"
        counts[f"test patients {rarer}"] = len(ones) - max(classes.values())
    what = min(counts, key=lambda name: counts[name])
    return counts[what], what


def fewest_cases(cases: Iterable[Mapping[str, Any]]) -> tuple[int, str]:
    """Returns the same of the rows of a meter, whose patients are the cases."""
    return fewest({"patient": row["case"], **row} for row in cases)


def mean_of_known(table: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    """Returns means over the values that are not NaN (NaN without any), without a warning."""
    unknown = np.isnan(table)
    count = (~unknown).sum(axis)
    total = np.where(unknown, 0.0, table).sum(axis)
    return np.where(count > 0, total / np.maximum(count, 1), math.nan)


def mean_of_parts(
    parts: NDArray[np.float64], occurs: NDArray[np.bool_], axis: int
) -> NDArray[np.float64]:
    """Returns the mean over the classes, findings or regions that occur among the samples.

    Where weights take the samples of one of them away, the mean is undefined: that over the others
    is another number, and an interval would cover a mixture of both.

    `parts` is (W, K) or (K, W), a metric of each part, NaN where weights leave it undefined.
    `occurs`: which parts occur among the samples; of a shape that fits. `axis`: that of the parts.
    Returns (W,).

    Example:
        >>> parts = np.array([[0.5, 0.7, np.nan], [0.5, np.nan, np.nan]])
        >>> mean_of_parts(parts, np.array([True, True, False]), 1).tolist()
        [0.6, nan]
    """
    lost = (np.isnan(parts) & occurs).any(axis)
    return np.where(lost, np.nan, mean_of_known(np.where(occurs, parts, np.nan), axis))


def defining(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the resampled values that are defined; none where they are too few for an interval.

    Example:
        >>> defining(np.array([0.5, np.nan])).tolist(), defining(np.array([0.5] + [np.nan] * 10))
        ([0.5], array([], dtype=float64))
    """
    known = values[~np.isnan(values)]
    return known if len(known) >= LEAST_DEFINED * len(values) else known[:0]


def redrawn(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Draws resamples that leave a metric undefined anew, from those that define it.

    Example:
        >>> redrawn(np.array([0.5, np.nan, 1.0, np.nan])).tolist()
        [0.5, 1.0, 1.0, 1.0]
    """
    # So each resample has a value of each client, and a mean over clients is always of the
    # same ones. `values`: (W,) a metric of each resample; NaN where it is undefined. Where too
    # few define it, all are NaN.
    known = defining(values)
    anew = np.resize(known, len(values)) if len(known) else np.full(len(values), math.nan)
    return np.where(np.isnan(values) | np.isnan(anew), anew, values)


def over_seeds(values: Sequence[float]) -> tuple[float, float | None]:
    """Returns the mean of one value per seed, and the sample standard deviation of several.

    Example:
        >>> over_seeds([0.5, 1.0, 1.5]), over_seeds([2.0]), over_seeds([0.5, math.inf])
        ((1.0, 0.5), (2.0, None), (inf, None))
    """
    # What the data of a seed leave undefined is no part of it; a run that has failed
    # (infinite) is.
    known = [v for v in values if not math.isnan(v)]
    if not known:
        return math.nan, None
    spread = len(known) > 1 and all(map(math.isfinite, known))
    return float(np.mean(known)), float(np.std(known, ddof=1)) if spread else None


def span(counts: Iterable[int]) -> str:
    """Writes counts of clients: one number if they are equal, else from least to greatest."""
    least, most = min(numbers := list(counts)), max(numbers)
    return f"{least}" if least == most else f"{least} to {most}"


def number(value: float) -> str:
    """Writes a metric for a table; a dash if it is undefined."""
    return "–" if math.isnan(value) else f"{value:.4f}"


def interval(ends: Sequence[float] | None) -> str:
    """Writes an interval for a table."""
    if ends is None:
        return ""
    low, high = ends
    return "–" if math.isnan(low) else f"[{low:.3f}, {high:.3f}]"


def label_of(metric: str) -> str:
    """Returns a metric's readable name, with its unit if it has one."""
    known = {
        "iou": "IoU",
        "iou_both": "IoU with background, as pFedNet prints it",
        "dice": "Dice",
        "auroc": "AUROC",
        "hd95": "Hausdorff distance, 95th percentile (mm)",
        "nsd": "normalised surface Dice",
        "loss": "loss (nats)",
        "cindex": "C-index",
        "pairs": "comparable pairs",
    }
    base, _, region = metric.partition("/")
    return known.get(base, base.replace("_", " ")) + (f", {region}" if region else "")


def still_improving(scores: Sequence[float]) -> bool:
    """Says whether validation was still improving when training ended.

    Example:
        >>> rising, flat = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [0.1, 0.5, 0.7, 0.6, 0.6, 0.6]
        >>> still_improving(rising), still_improving(flat)
        (True, False)
    """
    # So it was if the best of six evaluations or more is in the last tenth of them, and the
    # last third is better on average than the third before.
    known = [score for score in scores if math.isfinite(score)]
    third = len(known) // 3
    if third < 2 or known.index(max(known)) < len(known) - max(1, len(known) // 10):
        return False
    return sum(known[-third:]) > sum(known[-2 * third : -third])


def metrics_csv(
    history: Sequence[Record], test: Sequence[Record], losses: Sequence[Record] = ()
) -> str:
    """Returns all metrics as CSV: round, client, split and a column per metric."""
    splits = {"val": history, "train": losses, "test": test}
    rows = [(split, record) for split, records in splits.items() for record in records]
    names = list(dict.fromkeys(n for _, r in rows for n in r.metrics))
    cells = [[repr(r.metrics[n]) if n in r.metrics else "" for n in names] for _, r in rows]
    lines = ([r.round, r.client, split, *of] for (split, r), of in zip(rows, cells, strict=True))
    return csv_text(["round", "client", "split", *names], lines)
