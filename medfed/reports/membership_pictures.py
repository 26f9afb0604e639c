"""Pictures of memberships in canonical models: as selected, over rounds, what a model serves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from medfed.reports.memberships import Floats, Memberships, leaf_order, matched, served

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "0.4")
_NAMES = 45  # clients, at most, whose names are written


def membership_figures(found: Memberships) -> dict[str, Figure]:
    """Draws the memberships of the selected round and over rounds, and what each model serves."""
    order = leaf_order(found.rows)
    return {
        "memberships": selected_heatmap(found, order),
        "memberships_over_rounds": heatmap_over_rounds(found, order),
        "memberships_serve": bars_of_what_is_served(found, order),
    }


def selected_heatmap(found: Memberships, order: Sequence[int]) -> Figure:
    """Draws a row per client, beside the true mixtures where they are known.

    The memberships are those of the selected round, as the exported models have them.

    Args:
        found: The memberships.
        order: Positions of the clients, top to bottom.
    """
    panels = [(_title(found), found.rows)]
    if found.truth is not None:
        own = matched(found.rows, found.truth)
        width = own.shape[1] - found.truth.shape[1]
        panels = [
            (f"found ({panels[0][0]}),\nrenumbered", own),
            ("true mixtures", np.pad(found.truth, ((0, 0), (0, width)))),
        ]
    height = min(1.6 + 0.21 * len(order), 9.5)
    size = (1.6 + len(panels) * (1.4 + 0.5 * panels[0][1].shape[1]), height)
    figure = Figure(figsize=size, layout="constrained")
    row = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (title, values) in zip(row, panels, strict=True):
        image = _heat(axes, values[list(order)])
        axes.set_title(title, fontsize=10)
        axes.set_xticks(range(values.shape[1]))
        axes.set_xlabel("canonical model")
    _name_clients(row[0], found, order)
    figure.colorbar(image, ax=row.tolist(), label="membership")
    return figure


def heatmap_over_rounds(found: Memberships, order: Sequence[int]) -> Figure:
    """Draws a panel per canonical model: a row per client, a column per round.

    A line marks the selected round where it is not the last one.
    """
    models = found.rows.shape[1]
    height = min(1.6 + 0.21 * len(order), 9.5)
    figure = Figure(figsize=(2.6 + 2.1 * models, height), layout="constrained")
    row = figure.subplots(1, models, squeeze=False, sharey=True)[0]
    for k, axes in enumerate(row):
        image = _heat(axes, found.history[:, list(order), k].T)
        axes.set_title(f"canonical model {k}", fontsize=10)
        if found.round != found.final:
            axes.axvline(found.round, color="white", lw=2.6)
            axes.axvline(found.round, color="black", lw=1.2, ls="--")
        axes.set_xlabel("round")
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    _name_clients(row[0], found, order)
    figure.colorbar(image, ax=row.tolist(), label="membership")
    if found.round != found.final:
        figure.suptitle(f"Memberships over rounds (dashed: {_title(found)})", fontsize=10)
    return figure


def bars_of_what_is_served(found: Memberships, order: Sequence[int]) -> Figure:
    """Draws a row per canonical model: the labels, channels and clients that it serves.

    A tick at each bar is what a model would have that served all clients alike. Labels are left out
    where there is only one (a continuous outcome), channels where every client has all of them.
    """
    columns: list[tuple[str, Floats, tuple[str, ...]]] = []
    if len(found.label_names) > 1:
        columns.append(("labels", found.labels, found.label_names))
    if not found.channels.all():
        counts = found.channels * found.samples[:, None]
        columns.append(("channels", counts, found.channel_names))
    ordered = np.diag(found.samples)[:, list(order)]
    columns.append(("clients", ordered, tuple(found.clients[i] for i in order)))
    models = found.rows.shape[1]
    figure = Figure(figsize=(2.0 + 4.2 * len(columns), 1.5 + 1.5 * models), layout="constrained")
    grid = figure.subplots(models, len(columns), squeeze=False, sharex="col", sharey="col")
    for j, (title, counts, names) in enumerate(columns):
        shares, everyone = served(found, counts), counts.sum(0) / counts.sum()
        for k in range(models):
            axes = grid[k, j]
            axes.bar(range(len(names)), shares[k], color=_COLOURS[k % len(_COLOURS)], width=0.8)
            axes.hlines(
                everyone, np.arange(len(names)) - 0.45, np.arange(len(names)) + 0.45, color="0.2"
            )
            axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
            axes.margins(x=0.02)
            axes.grid(axis="y", alpha=0.3)
            if j == 0:
                weight = found.samples @ found.rows[:, k] / found.samples.sum()
                axes.set_ylabel(f"model {k}\n({weight:.0%} of all)", fontsize=9)
        grid[0, j].set_title(title, fontsize=10)
        many = len(names) > _NAMES
        long = max(map(len, names)) > 3
        grid[-1, j].set_xticks([] if many else range(len(names)))
        if not many:
            grid[-1, j].set_xticklabels(names, fontsize=7, rotation=90 if long else 0)
    figure.suptitle(
        "Share of what each canonical model serves, weighted by membership\n"
        f"({_title(found)}; lines: of all clients)",
        fontsize=10,
    )
    return figure


def _title(found: Memberships) -> str:
    """Says which round is shown, and that it was selected where it is not the last one."""
    if found.round == found.final:
        return f"after round {found.final}"
    return f"round {found.round}, selected"


def _heat(axes: Any, values: Floats) -> Any:
    return axes.imshow(
        values, aspect="auto", cmap="viridis", vmin=0, vmax=1, interpolation="nearest"
    )


def _name_clients(axes: Any, found: Memberships, order: Sequence[int]) -> None:
    if len(order) <= _NAMES:
        axes.set_yticks(range(len(order)), [found.clients[i] for i in order], fontsize=7)
    else:
        axes.set_yticks([])
        axes.set_ylabel(f"{len(order)} clients, like ones next to each other")
