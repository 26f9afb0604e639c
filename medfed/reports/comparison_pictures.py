"""Pictures that compare methods: curves, dots per client, metric against bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from medfed.federation.callbacks.evaluation import Record
from medfed.reports.results import size

# Okabe and Ito's colours, which people with colour-vision deficiency tell apart.
_METHODS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")


def method_curves(
    histories: Mapping[str, Sequence[Sequence[Record]]], metric: str, falls: bool = False
) -> Figure:
    """Draws a validation metric against the round: mean over clients, and the worst client.

    Args:
        histories: Per method the validation records of each seed; a band spans the seeds.
        metric: The metric's name.
        falls: Whether smaller is better.
    """
    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, sharex=True)
    worst = np.nanmax if falls else np.nanmin
    for k, (method, seeds) in enumerate(histories.items()):
        for axes, pool in ((left, np.nanmean), (right, worst)):
            rounds, lines = _over_clients(seeds, metric, pool)
            colour, marker = method_style(k, len(histories))
            axes.plot(
                rounds + 1,
                lines.mean(0),
                color=colour,
                marker=marker if len(rounds) <= 30 else None,
                ms=4,
                lw=1.8,
                label=method,
            )
            if len(lines) > 1:
                axes.fill_between(rounds + 1, lines.min(0), lines.max(0), color=colour, alpha=0.18)
    several = any(len(s) > 1 for s in histories.values())
    left.set(title="mean over clients", xlabel="round", ylabel=f"validation {label_of(metric)}")
    right.set(title="worst client", xlabel="round")
    for axes in (left, right):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    title = "band: range over seeds" if several else None
    right.legend(
        title=title, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False
    )
    return figure


def client_dots(
    values: Mapping[str, Mapping[str, Sequence[float]]], metric: str, split: str = "test"
) -> Figure:
    """Draws a metric per client and method as dots, and the mean over clients beside them.

    Args:
        values: Per method and client a value per seed; a dot is their mean, a bar their range.
        metric: The metric's name.
        split: The split that was measured.
    """
    clients = list(next(iter(values.values())))
    places = [*clients, "mean over\nclients"]
    wide = max(0.62, 0.12 * len(values))  # inches
    figure = Figure(figsize=(max(8.0, 3.4 + wide * len(places)), 4.4), layout="constrained")
    axes = figure.subplots()
    shift = np.linspace(-0.3, 0.3, len(values)) if len(values) > 1 else np.zeros(1)
    for k, (method, by_client) in enumerate(values.items()):
        table = np.array([by_client[c] for c in clients], dtype=float)
        table = np.vstack([table, np.nanmean(table, axis=0)])
        middle = np.nanmean(table, axis=1)
        reach = np.stack([middle - np.nanmin(table, 1), np.nanmax(table, 1) - middle])
        colour, marker = method_style(k, len(values))
        axes.errorbar(
            np.arange(len(places)) + shift[k],
            middle,
            yerr=reach if table.shape[1] > 1 else None,
            fmt=marker,
            color=colour,
            ms=6 if len(values) < 5 else 4.5,
            lw=1.2,
            label=method,
        )
    for i in range(0, len(places), 2):
        axes.axvspan(i - 0.5, i + 0.5, color="0.95", zorder=0)
    axes.axvline(len(clients) - 0.5, color="0.4", lw=0.8)
    axes.set(xlim=(-0.5, len(places) - 0.5), ylabel=f"{split} {label_of(metric)}")
    steep = len(clients) > 6
    axes.set_xticks(range(len(places)), places, rotation=45 if steep else 0)
    if steep:
        for tick in axes.get_xticklabels():
            tick.set(ha="right", rotation_mode="anchor")
    axes.grid(axis="y", alpha=0.3)
    several = any(len(v) > 1 for by_client in values.values() for v in by_client.values())
    title = "bar: range over seeds" if several else None
    axes.legend(
        title=title, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False
    )
    return figure


def cost_scatter(points: Mapping[str, Sequence[tuple[float, float]]], metric: str) -> Figure:
    """Draws the mean test metric against the bytes that travelled.

    Args:
        points: Per method a pair of bytes (both directions) and metric for each seed.
        metric: The metric's name.
    """
    figure = Figure(figsize=(7.4, 4.2), layout="constrained")
    axes = figure.subplots()
    sent = sorted(b for seeds in points.values() for b, _ in seeds if b > 0)
    for k, (method, seeds) in enumerate(points.items()):
        count, value = np.array(seeds, dtype=float).T
        colour, marker = method_style(k, len(points))
        reach = [[value.mean() - value.min()], [value.max() - value.mean()]]
        axes.errorbar(
            count.mean(),
            value.mean(),
            yerr=reach if len(value) > 1 else None,
            fmt=marker,
            color=colour,
            ms=9,
            lw=1.4,
            label=method,
            clip_on=False,
        )
    wide = bool(sent) and (
        sent[0] != sent[-1] or any(b == 0 for s in points.values() for b, _ in s)
    )
    if wide and sent[-1] > 20 * sent[0]:
        axes.set_xscale("symlog", linthresh=sent[0] / 2)
        axes.set_xlim(left=-sent[0] / 6)
    else:
        axes.set_xlim(-0.04 * max(sent, default=1), 1.08 * max(sent, default=1))
        axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.margins(y=0.12)
    axes.xaxis.set_major_formatter(lambda count, _: size(round(count)))
    axes.set(
        xlabel="bytes that travelled in the whole run, up and down, all clients",
        ylabel=f"test {label_of(metric)}, mean over clients",
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return figure


def label_of(metric: str) -> str:
    """Returns a metric's name as people write it, with its unit where it has one.

    Example:
        >>> label_of("iou"), label_of("balanced_accuracy"), label_of("hd95")
        ('IoU', 'balanced accuracy', 'Hausdorff distance, 95th percentile (voxels)')
    """
    known = {
        "iou": "IoU",
        "dice": "Dice",
        "auroc": "AUROC",
        "ece": "calibration error",
        "hd95": "Hausdorff distance, 95th percentile (voxels)",
        "loss": "loss (nats)",
    }
    base, _, region = metric.partition("/")
    return known.get(base, base.replace("_", " ")) + (f", {region}" if region else "")


def method_style(index: int, count: int) -> tuple[str, str]:
    """Returns colour and marker of a method: Okabe and Ito's, a colour scale where there are many.

    Example:
        >>> method_style(0, 3)
        ('#0072B2', 'o')
    """
    marker = "os^DvPX*"[index % 8]
    if count <= len(_METHODS):
        return _METHODS[index], marker
    return to_hex(colormaps["viridis"](0.92 * index / (count - 1))), marker


def _over_clients(
    seeds: Sequence[Sequence[Record]], metric: str, pool: Callable[..., Any]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Pools clients per round: the rounds that all seeds have, and a line per seed."""
    rounds = sorted(set.intersection(*({r.round for r in history} for history in seeds)))
    lines = np.full((len(seeds), len(rounds)), np.nan)
    for row, history in zip(lines, seeds, strict=True):
        for k, number in enumerate(rounds):
            values = np.array([r.metrics[metric] for r in history if r.round == number])
            if np.isfinite(values).any():
                row[k] = pool(values)
    return np.array(rounds), lines
