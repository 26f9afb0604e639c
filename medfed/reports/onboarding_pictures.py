"""The picture of hospitals that join: metric and time against the number of their patients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from medfed.onboarding import Row
from medfed.reports.comparison_pictures import label_of, method_style
from medfed.reports.results import size


def onboarding_figure(rules: Mapping[str, Sequence[Row]], metric: str, others: float) -> Figure:
    """Draws a line per rule over the newcomers' mean, and a point per newcomer.

    Args:
        rules: The rows of each rule, by its name.
        metric: The metric's name.
        others: Mean of the hospitals that took part in training.
    """
    figure = Figure(figsize=(10.4, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.7, 1))
    counts = list(dict.fromkeys(row.k for rows in rules.values() for row in rows))
    for i, (name, rows) in enumerate(rules.items()):
        colour, marker = method_style(i, len(rules))
        # Beside each other, so that points of equal height do not hide each other.
        shift = 0.14 * (i - (len(rules) - 1) / 2)
        x = np.array([counts.index(row.k) for row in rows]) + shift
        value = np.array([row.metrics[metric] for row in rows])
        seconds = np.array([row.seconds for row in rows])
        down, up = (
            size(round(float(np.mean([getattr(r, w) for r in rows])))) for w in ("down", "up")
        )
        for axes, heights in ((left, value), (right, seconds)):
            axes.plot(x, heights, marker, color=colour, ms=4.5, alpha=0.5, mew=0)
            places = sorted(set(x.tolist()))
            means = [np.nanmean(heights[x == p]) for p in places]
            label = f"{name}: {down} down, {up} up"
            axes.plot(places, means, marker + "-", color=colour, ms=7, lw=1.6, label=label)
    left.axhline(others, color="0.4", lw=1, ls="--", label="hospitals of the run, mean")
    left.set(ylabel=f"test {label_of(metric)}")
    right.set(ylabel="CPU seconds", ylim=(0, None))
    for axes in (left, right):
        axes.set_xticks(range(len(counts)), [str(k) for k in counts])
        axes.set_xlabel("training patients of the hospital that joins")
        axes.grid(axis="y", alpha=0.3)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, fontsize=9, frameon=False)
    return figure
