"""The picture of the number of canonical models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from medfed.reports.comparison_pictures import label_of, method_style
from medfed.reports.count_path import CountPath

_RECOVERY = {
    "adjusted_rand": "adjusted Rand index to the planted groups",
    "half_l1": "half L1 distance to the true mixtures",
}


def draw_counts(
    paths: Sequence[CountPath], others: Mapping[str, tuple[float, float]] | None = None
) -> Figure:
    """Draws the test metric against K, and how well what was planted is recovered.

    Args:
        paths: A path per method; a point is a run, a line the mean over seeds.
        others: Mean and worst client of methods without canonical models, for comparison.
    """
    fields = {"mean": "mean over clients", "worst": "worst client"}
    fields |= {
        field: title
        for field, title in _RECOVERY.items()
        if all(getattr(p, field) is not None for path in paths for p in path.points)
    }
    counts = sorted({k for path in paths for k in path.counts})
    figure = Figure(figsize=(2.2 + 3.6 * len(fields), 4.0), layout="constrained")
    row = figure.subplots(1, len(fields), squeeze=False)[0]
    for axes, (field, title) in zip(row, fields.items(), strict=True):
        for i, path in enumerate(paths):
            _draw_path(axes, path, field, counts, i, len(paths))
        _decorate(axes, paths[0].groups, counts)
        axes.set_title(title, fontsize=10)
    for j, axes in enumerate(row[:2]):
        for i, (name, values) in enumerate((others or {}).items()):
            style = ("--", ":", "-.")[i % 3]
            axes.axhline(values[j], color=f"{0.25 + 0.2 * (i % 3)}", ls=style, lw=1.3, label=name)
    row[0].set_ylabel(f"test {label_of(paths[0].metric)}")
    handles, labels = row[0].get_legend_handles_labels()
    row[-1].legend(
        handles, labels, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False
    )
    return figure


def _draw_path(
    axes: Any, path: CountPath, field: str, counts: list[int], index: int, total: int
) -> None:
    colour, marker = method_style(index, total)
    shift = 0.1 * (index - (total - 1) / 2)  # so that equal points of two methods are both seen
    places = [counts.index(k) + shift for k in path.counts]
    axes.plot(places, path.over_seeds(field), color=colour, lw=1.8, label=path.name)
    x = [counts.index(p.models) + shift for p in path.points]
    y = [getattr(p, field) for p in path.points]
    axes.plot(x, y, marker, color=colour, ms=5.5, mec="white", mew=0.6, alpha=0.9)


def _decorate(axes: Any, groups: int | None, counts: list[int]) -> None:
    """Marks the planted number of groups, and spaces K equally."""
    if groups in counts:
        axes.axvline(counts.index(groups), color="0.8", lw=6, zorder=0, label="planted groups")
    axes.set_xticks(range(len(counts)), [str(k) for k in counts])
    axes.set_xlabel("K, canonical models")
    axes.grid(alpha=0.3)
    axes.margins(x=0.08)
