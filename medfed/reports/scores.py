"""What methods score, in pictures: over rounds, per client, against bytes, against a number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from medfed.common.console import caption, size
from medfed.common.figures import colours, legend_right
from medfed.common.scores import label_of, mean_of_known, smaller_is_better
from medfed.config.sections import Section
from medfed.records.predictions import read_predictions
from medfed.reports.methods import Comparison, Finding, Method

if TYPE_CHECKING:
    from medfed.models.contours import Case

_CAPTIONS = {
    "clients": "Test metric of every client under every method.",
    "validation": "Validation metric against the round.",
    "bytes": "Mean test metric against the bytes that travelled.",
    "contours": "One test slice per client, true and predicted contours of every method.",
}
BYTES = "bytes that travelled in the whole run, up and down, all clients"
# Okabe and Ito's colours, which people with colour-vision deficiency tell apart.
_METHODS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")


def find(comparison: Comparison) -> Finding:
    """Finds how all methods compare, whatever they differ in."""
    methods, metric = comparison.methods, comparison.metric
    values = {m.name: {c: m.scores(metric, c) for c in comparison.clients} for m in methods}
    figures = {
        "clients": client_dots(values, metric),
        "validation": method_curves(methods, metric),
        "bytes": cost_scatter(methods, metric),
    }
    if cases := read_predictions({m.name: m.runs[0].folder for m in methods}, comparison.clients):
        figures["contours"] = _contours(cases, methods[0].runs[0].config)
    return Finding(pictures=figures, captions=_CAPTIONS)


def _contours(cases: Mapping[str, Case], config: Section) -> Figure:
    """Draws the predictions as the task of the first run decides them."""
    # Late: only pictures of images need PyTorch.
    from medfed.models.contours import contour_grid
    from medfed.models.segmentation import chosen_activation

    regions, model = list(config.regions), config.model
    wanted = model.get("activation", "sigmoid")
    exclusive = chosen_activation(wanted, len(regions), config.get("exclusive")) == "softmax"
    return contour_grid(cases, regions, threshold=model.threshold, exclusive=exclusive)


def method_curves(methods: Sequence[Method], metric: str) -> Figure:
    """Draws a validation metric against the round: mean over clients, and the worst client.

    Args:
        methods: The methods; a band spans the seeds.
        metric: The metric's name.
    """
    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, sharex=True)
    worst = np.nanmax if smaller_is_better(metric) else np.nanmin
    for k, method in enumerate(methods):
        colour, marker = method_style(k, len(methods))
        for axes, pool in ((left, np.nanmean), (right, worst)):
            rounds, lines = over_clients(method, metric, pool)
            style = {"color": colour, "marker": marker if len(rounds) <= 30 else None}
            axes.plot(rounds + 1, lines.mean(0), ms=4, lw=1.8, label=method.name, **style)
            if len(lines) > 1:
                axes.fill_between(rounds + 1, lines.min(0), lines.max(0), color=colour, alpha=0.18)
    left.set(title="mean over clients", xlabel="round", ylabel=f"validation {label_of(metric)}")
    right.set(title="worst client", xlabel="round")
    for axes in (left, right):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    several = any(len(m.runs) > 1 for m in methods)
    legend_right(right, title="band: range over seeds" if several else None)
    return figure


def client_dots(values: Mapping[str, Mapping[str, Sequence[float]]], metric: str) -> Figure:
    """Draws a metric per client and method as dots, and the mean over clients beside them.

    Args:
        values: Per method and client a value per seed; a dot is their mean, a bar their range.
        metric: The metric's name.
    """
    clients = list(next(iter(values.values())))
    places = [*map(caption, clients), "mean over\nclients"]
    wide = max(0.62, 0.12 * len(values))  # inches
    figure = Figure(figsize=(max(8.0, 3.4 + wide * len(places)), 4.4), layout="constrained")
    axes = figure.subplots()
    shift = np.linspace(-0.3, 0.3, len(values)) if len(values) > 1 else np.zeros(1)
    for k, (method, by_client) in enumerate(values.items()):
        table = np.array([by_client[c] for c in clients], dtype=float)
        table = np.vstack([table, mean_of_known(table, 0)])
        style = {"ms": 6 if len(values) < 5 else 4.5, "lw": 1.2, "label": method}
        x = np.arange(len(places)) + shift[k]
        range_bars(axes, x, table, method_style(k, len(values)), **style)
    for i in range(0, len(places), 2):
        axes.axvspan(i - 0.5, i + 0.5, color="0.95", zorder=0)
    axes.axvline(len(clients) - 0.5, color="0.4", lw=0.8)
    axes.set(xlim=(-0.5, len(places) - 0.5), ylabel=f"test {label_of(metric)}")
    steep = len(clients) > 6
    axes.set_xticks(range(len(places)), places, rotation=45 if steep else 0)
    if steep:
        for tick in axes.get_xticklabels():
            tick.set(ha="right", rotation_mode="anchor")
    axes.grid(axis="y", alpha=0.3)
    several = any(len(v) > 1 for by_client in values.values() for v in by_client.values())
    legend_right(axes, title="bar: range over seeds" if several else None)
    return figure


def cost_scatter(methods: Sequence[Method], metric: str) -> Figure:
    """Draws the mean test metric against the bytes that travelled in both directions.

    Args:
        methods: The methods.
        metric: The metric's name.
    """
    figure = Figure(figsize=(7.4, 4.2), layout="constrained")
    axes = figure.subplots()
    sent = []
    for k, method in enumerate(methods):
        counts = [sum(run.summary["bytes"].values()) for run in method.runs]
        sent += [count for count in counts if count > 0]
        style = {"ms": 9, "lw": 1.4, "label": method.name, "clip_on": False}
        values = np.array([method.scores(metric)])
        range_bars(axes, np.mean(counts), values, method_style(k, len(methods)), **style)
    if sent and max(sent) > 20 * min(sent):
        axes.set_xscale("symlog", linthresh=min(sent) / 2)
        axes.set_xlim(left=-min(sent) / 6)
    else:
        axes.set_xlim(-0.04 * max(sent, default=1), 1.08 * max(sent, default=1))
        axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.margins(y=0.12)
    axes.xaxis.set_major_formatter(lambda count, _: size(round(count)))
    axes.set(xlabel=BYTES, ylabel=f"test {label_of(metric)}, mean over clients")
    axes.grid(alpha=0.3)
    legend_right(axes)
    return figure


def range_bars(
    axes: Axes, x: Any, table: NDArray[np.float64], look: tuple[str, str], **style: Any
) -> None:
    """Draws points at the mean over seeds, with a bar over their range.

    Args:
        axes: Where to draw.
        x: (P,) places of the points.
        table: (P, S) a value per point and seed.
        look: Colour and marker.
        style: As :meth:`matplotlib.axes.Axes.errorbar` takes it.
    """
    # What is infinite has no place in a picture; its mean has none either.
    middle = mean_of_known(table, 1)
    middle = np.where(np.isfinite(middle), middle, np.nan)
    reach = np.stack([middle - np.fmin.reduce(table, 1), np.fmax.reduce(table, 1) - middle])
    colour, marker = look
    bars = reach if table.shape[1] > 1 else None
    axes.errorbar(x, middle, yerr=bars, fmt=marker, color=colour, **style)


def number_curves(
    paths: Mapping[str, Sequence[tuple[float, Mapping[str, float | None]]]],
    titles: Mapping[str, str],
    metric: str,
    axis: str,
    planted: float | None,
    others: Mapping[str, Sequence[float]],
) -> Figure:
    """Draws scores against a number in which runs differ, a panel per score.

    Args:
        paths: Per method the number and the scores of each run; a line is the mean over runs.
        titles: The scores to draw, with their titles.
        metric: Of the first scores.
        axis: The number's name.
        planted: The number by which the data were made, where it is known.
        others: The first scores of methods without the number, for comparison.
    """
    values = sorted({x for runs in paths.values() for x, _ in runs})
    figure = Figure(figsize=(2.2 + 3.6 * len(titles), 4.0), layout="constrained")
    row = figure.subplots(1, len(titles), squeeze=False)[0]
    for j, (axes, (score, title)) in enumerate(zip(row, titles.items(), strict=True)):
        for i, (name, runs) in enumerate(paths.items()):
            colour, marker = method_style(i, len(paths))
            # Beside each other, so that equal points of two methods are both seen.
            shift = 0.1 * (i - (len(paths) - 1) / 2)
            x = np.array([values.index(value) + shift for value, _ in runs])
            y = np.array([scores[score] for _, scores in runs], dtype=float)
            places = np.unique(x)
            means = [y[x == place].mean() for place in places]
            axes.plot(places, means, color=colour, lw=1.8, label=name)
            axes.plot(x, y, marker, color=colour, ms=5.5, mec="white", mew=0.6, alpha=0.9)
        if planted in values:
            place = values.index(planted)
            axes.axvline(place, color="0.8", lw=6, zorder=0, label="planted groups")
        for i, (name, levels) in enumerate(others.items()):
            if j < len(levels):
                style = {"color": f"{0.25 + 0.2 * (i % 3)}", "ls": ("--", ":", "-.")[i % 3]}
                axes.axhline(levels[j], lw=1.3, label=name, **style)
        axes.set_xticks(range(len(values)), [f"{x:g}" for x in values])  # spaced equally
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(axis)
        axes.grid(alpha=0.3)
        axes.margins(x=0.08)
    row[0].set_ylabel(f"test {label_of(metric)}")
    legend_right(row[-1], row[0])
    return figure


def method_style(index: int, count: int) -> tuple[str, str]:
    """Returns colour and marker of a method: Okabe and Ito's, a colour scale where there are many.

    Example:
        >>> method_style(0, 3)
        ('#0072B2', 'o')
    """
    return colours(count, _METHODS, 0.92)[index], "os^DvPX*"[index % 8]


def over_clients(
    method: Method, metric: str, pool: Callable[..., Any]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Pools a validation metric over clients.

    Args:
        method: Whose runs.
        metric: The metric's name.
        pool: Makes one number of an array.

    Returns:
        The rounds that all seeds have, and a line per seed.
    """
    histories = [run.history() for run in method.runs]
    rounds = sorted(set.intersection(*({r.round for r in history} for history in histories)))
    lines = np.full((len(histories), len(rounds)), np.nan)
    for row, history in zip(lines, histories, strict=True):
        for k, number in enumerate(rounds):
            values = np.array([r.metrics[metric] for r in history if r.round == number])
            if not np.isnan(values).all():
                row[k] = pool(values)
    # A failed model is in the mean and the worst, which then have no place in a picture.
    return np.array(rounds), np.where(np.isfinite(lines), lines, np.nan)
