"""Pictures of what every client would get: patients, labels and channels; intensities; features."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from medfed.common.figures import legend_above, stacked_bars
from medfed.common.names import caption
from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.splits import SPLITS
from medfed.datamodules.tabular import TabularDataModule
from medfed.models.contours import region_colours
from medfed.run.cohort_table import ClientSummary
from medfed.run.contact_sheet import class_colours

Array = NDArray[np.float64]
_SPLITS = ("#0072B2", "#56B4E9", "0.7")
_INK = "#0072B2"
_LINE, _WIDTH = "0.3", 0.8  # of all clients together
_SAMPLES = 48  # training samples per client whose voxels count
_VOXELS = 200_000  # of them, at most
_BINS = 60
_FEATURES = 40  # in a picture of a table
_NUMBERED = 16  # clients whose means are written out
_CHANNELS = 8  # more are not drawn one by one
_LEGEND = 12  # entries that can be told apart


def client_bars(clients: Sequence[ClientSummary], data: FederatedDataModule) -> Figure:
    """Draws patients per split, labels of the training samples, and channels, a row per client.

    Args:
        clients: The counts.
        data: Whose clients they are.
    """
    class_names, channels = data.class_names, data.plan_names
    few = 1 < len(channels) <= _CHANNELS
    ratios = [1.0, 1.3, 0.14 + 0.14 * len(channels)][: 2 + few]
    figure = Figure(figsize=(9.6, 1.5 + 0.3 * len(clients)), layout="constrained")
    panels = figure.subplots(1, len(ratios), sharey=True, width_ratios=ratios)
    _stack(
        panels[0], {s: {c.client: c.counts[s].patients for c in clients} for s in SPLITS}, _SPLITS
    )
    panels[0].set(xlabel="patients")
    train = {c.client: c.counts["train"] for c in clients}
    if all(n.units == n.samples for n in train.values()):
        counts = {
            name: {client: n.labels[k] for client, n in train.items()}
            for k, name in enumerate(class_names)
        }
        _stack(panels[1], counts, class_colours(len(class_names)))
        panels[1].set(xlabel="training samples")
    else:
        shares = [100 * np.array(n.labels) / n.units for n in train.values()]
        _regions(panels[1], np.stack(shares, axis=1), class_names)
    if few:
        _presence(panels[2], clients, channels)
    panels[0].set_ylim(len(clients) - 0.5, -0.5)
    return figure


def _stack(axes: Axes, values: Mapping[str, Mapping[str, float]], colours: Sequence[str]) -> None:
    longest = stacked_bars(axes, values, colours, ec="white", lw=0.4)
    _legend_above(axes, len(values))
    axes.set_xlim(0, 1.04 * max(1.0, longest))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))


def _regions(axes: Axes, shares: Array, names: Sequence[str]) -> None:
    """Regions overlap, so their bars stand side by side; shares (R, clients) in percent."""
    height = 0.8 / len(names)
    places = np.arange(shares.shape[1])
    for r, (share, colour) in enumerate(zip(shares, region_colours(len(names)), strict=True)):
        offset = (r - (len(names) - 1) / 2) * height
        axes.barh(places + offset, share, height=height, label=names[r], color=colour)
    axes.set(xlabel="% of training voxels")
    _legend_above(axes, len(names))


def _presence(axes: Axes, clients: Sequence[ClientSummary], channels: Sequence[str]) -> None:
    for x, channel in enumerate(channels):
        for y, client in enumerate(clients):
            has = channel in client.channels
            axes.plot(x, y, "s", ms=9, mfc=_INK if has else "white", mec=_INK if has else "0.6")
    axes.set_xticks(range(len(channels)), channels, rotation=45, ha="left", rotation_mode="anchor")
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set(xlim=(-0.6, len(channels) - 0.4), xlabel="channels")


def _legend_above(axes: Axes, count: int) -> None:
    if count <= _LEGEND:
        legend_above(axes, min(count, 5))


def intensities(data: FederatedDataModule) -> Figure:
    """Draws how often grey values occur in the training samples, per channel and client.

    Each row has a height of its own; the line is all clients together. Background (exactly 0 in
    z-scored images) does not count, nor do the two ends of the scale for the heights.

    Args:
        data: A data module of images that is set up.
    """
    clients, channels = list(data.clients), data.channel_names
    values = [_voxels(data, client) for client in clients]
    figure = Figure(
        figsize=(1.6 + max(2.0 * len(channels), 4.4), 1.1 + 0.42 * len(clients)),
        layout="constrained",
    )
    panels = figure.subplots(1, len(channels), sharey=True, squeeze=False)[0]
    for c, (axes, channel) in enumerate(zip(panels, channels, strict=True)):
        pooled = [v[c] for v in values if len(v[c])]
        axes.set_title(channel, fontsize=10)
        if pooled:
            _ridges(axes, [v[c] for v in values], np.concatenate(pooled))
        axes.set(xlabel="value", ylim=(len(clients) - 0.45, -1.1))
        axes.tick_params(axis="y", length=0)
        axes.spines[["left", "right", "top"]].set_visible(False)
    panels[0].set_yticks(range(len(clients)), [caption(c) for c in clients], va="bottom")
    line = Line2D([], [], color=_LINE, lw=_WIDTH, label="all clients together")
    figure.legend(handles=[line], loc="outside lower center", fontsize=8, frameon=False)
    return figure


def _voxels(data: FederatedDataModule, client: str) -> list[Array]:
    """Values per channel, none of a channel that the client lacks."""
    held = data.clients[client]
    images = held.train_inputs(_SAMPLES).cpu().transpose(0, 1).flatten(1).numpy()
    scaled = np.abs(images).max() <= 1 + 1e-5
    found = []
    for values, present in zip(images, held.channels.tolist(), strict=True):
        kept = values if scaled else values[values != 0]
        found.append(kept[:: 1 + len(kept) // _VOXELS] if present else kept[:0])
    return found


def _ridges(axes: Axes, rows: Sequence[Array], pooled: Array) -> None:
    edges = _edges(pooled)
    middle = (edges[1:] + edges[:-1]) / 2
    together = _heights(pooled, edges)
    for y, values in enumerate(rows):
        if len(values):
            axes.fill_between(middle, y, y - 0.85 * _heights(values, edges), color=_INK, lw=0)
            axes.plot(middle, y - 0.85 * together, color=_LINE, lw=_WIDTH)
        else:
            axes.text(middle.mean(), y, "missing", color="0.5", size=8, ha="center", va="bottom")
        axes.axhline(y, color="0.8", lw=0.5, zorder=0)


def _edges(values: Array) -> Array:
    """Edges of the bins; where there are few grey levels, a bin for each."""
    levels = np.unique(values)
    if 2 <= len(levels) <= _BINS:
        inner = (levels[1:] + levels[:-1]) / 2
        return np.array([2 * levels[0] - inner[0], *inner, 2 * levels[-1] - inner[-1]])
    low, high = np.percentile(values, (0.5, 99.5))
    return np.linspace(low, max(high, low + 1e-6), _BINS + 1)


def _heights(values: Array, edges: Array) -> Array:
    """Counts per bin, as a share of the highest inner bin, at most 1."""
    counts = np.histogram(values, edges)[0].astype(float)
    heights: Array = np.minimum(counts / max(counts[1:-1].max(), 1), 1.0)
    return heights


def feature_means(data: FederatedDataModule) -> Figure:
    """Draws every client's mean of every feature in the unit of the table, a row per feature.

    Means are of training rows, without missing cells; of categories and indicators, shares. Colours
    say how far a mean is from that of all clients, in standard deviations. Values that count as a
    limit do so here, too, so that no outlier rules a mean.

    Args:
        data: A data module of a table that is set up.
    """
    rows = [_raw(data, client) for client in data.clients]
    pooled = np.concatenate(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of features without any value
        means = np.stack([np.nanmean(r, axis=0) for r in rows], axis=1)
        middle, deviation = np.nanmean(pooled, axis=0), np.nanstd(pooled, axis=0)
    apart = (means - middle[:, None]) / np.where(deviation > 0, deviation, 1.0)[:, None]
    present = np.stack([c.channels.numpy() for c in data.clients.values()], axis=1)
    masked = np.ma.masked_array(apart, ~present | np.isnan(apart))
    most = np.abs(masked).max(axis=1).filled(0)
    shown = np.sort(np.argsort(-most, kind="stable")[:_FEATURES])
    names = [data.channel_names[f] for f in shown]
    width = 0.6 if len(rows) <= _NUMBERED else 0.2
    figure = Figure(
        figsize=(3.4 + width * len(rows), 1.9 + 0.22 * len(names)), layout="constrained"
    )
    axes = figure.subplots()
    reach = max(1.0, float(np.abs(masked).max()))
    axes.set_facecolor("0.8")
    drawn = axes.imshow(masked[shown], cmap="PuOr_r", vmin=-reach, vmax=reach, aspect="auto")
    if len(rows) <= _NUMBERED:
        for y, x in np.ndindex(len(names), len(rows)):
            value = means[shown[y], x]
            text = f"{value:.3g}" if present[shown[y], x] and not np.isnan(value) else "–"
            dark = abs(apart[shown[y], x]) > 0.7 * reach
            axes.text(x, y, text, ha="center", va="center", size=7, color=".95" if dark else "0.1")
    axes.set_xticks(range(len(rows)), [caption(c) for c in data.clients], rotation=30, ha="left")
    axes.xaxis.tick_top()
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(length=0, labelsize=8)
    title = "means of training rows, in the table's units (categories, missing: shares)"
    if len(shown) < len(deviation):
        title += f"\n{len(names)} of {len(deviation)} features that differ most"
    figure.suptitle(title, fontsize=9)
    bar = figure.colorbar(drawn, ax=axes, fraction=0.03, pad=0.01)
    bar.set_label("standard deviations from the mean of all", size=8)
    bar.ax.tick_params(labelsize=8)
    return figure


def _raw(data: FederatedDataModule, client: str) -> Array:
    """(N, C) training inputs of a client before they are scaled; NaN where a cell is missing."""
    if isinstance(data, TabularDataModule):
        return data.unscaled(client)
    held = data.clients[client]
    return held.train_inputs(held.num_samples).double().cpu().numpy()
