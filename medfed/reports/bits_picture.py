"""The picture of the bits per weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from medfed.reports.bits_path import BitsPath
from medfed.reports.comparison_pictures import label_of, method_style

_FIELDS = {"mean": "mean over clients", "worst": "worst client"}


def draw_bits(
    paths: Sequence[BitsPath], others: Mapping[str, tuple[float, float]] | None = None
) -> Figure:
    """Draws the test metric against the bits per weight, which are spaced equally.

    Args:
        paths: A path per method; a point is a run, a line the mean over seeds.
        others: Mean and worst client of methods that do not quantise, for comparison.
    """
    bits = sorted({b for path in paths for b in path.bits})
    figure = Figure(figsize=(9.6, 4.0), layout="constrained")
    row = figure.subplots(1, len(_FIELDS))
    for j, (axes, (field, title)) in enumerate(zip(row, _FIELDS.items(), strict=True)):
        for i, path in enumerate(paths):
            _draw_path(axes, path, field, bits, i, len(paths))
        for i, (name, values) in enumerate((others or {}).items()):
            style = ("--", ":", "-.")[i % 3]
            axes.axhline(values[j], color=f"{0.25 + 0.2 * (i % 3)}", ls=style, lw=1.3, label=name)
        axes.set_xticks(range(len(bits)), [f"{b:g}" for b in bits])
        axes.set(title=title, xlabel="bits per quantised weight, mean over clients")
        axes.grid(alpha=0.3)
        axes.margins(x=0.08)
    row[0].set_ylabel(f"test {label_of(paths[0].metric)}")
    row[-1].legend(fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return figure


def _draw_path(
    axes: Any, path: BitsPath, field: str, bits: list[float], index: int, total: int
) -> None:
    colour, marker = method_style(index, total)
    shift = 0.1 * (index - (total - 1) / 2)  # so that equal points of two methods are both seen
    places = [bits.index(b) + shift for b in path.bits]
    axes.plot(places, path.over_seeds(field), color=colour, lw=1.8, label=path.name)
    x = [bits.index(p.bits) + shift for p in path.points]
    y = [getattr(p, field) for p in path.points]
    axes.plot(x, y, marker, color=colour, ms=5.5, mec="white", mew=0.6, alpha=0.9)
