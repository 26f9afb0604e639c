"""Pictures of ``report``, drawn by Matplotlib.

Files hold a figure in the colours of paper. A page shows it as SVG, with hover texts, in colours
that follow the page (light, dark, print).
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import cycle
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from medfed.common.console import caption, size, visible
from medfed.common.figures import legend_below

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 400  # points, as wide as a phone, so that words stay readable there
_STEP = 17  # from row to row
# Colours in the light and in the dark; those of lines are Okabe and Ito's, apart from each other
# for colour-blind readers too.
COLOURS = {
    "ink": ("#1c1c1e", "#ececf0"),
    "soft": ("#66666c", "#a6a6ae"),
    "line": ("#dcdce1", "#3a3a40"),
    "paper": ("#ffffff", "#161618"),
    "good": ("#00725a", "#4cc9a6"),
    "bad": ("#b34700", "#ff9d5c"),
    "c0": ("#0072b2", "#56b4e9"),
    "c1": ("#d55e00", "#ff8c42"),
    "c2": ("#009e73", "#2fd0a2"),
    "c3": ("#b5569b", "#e08fc6"),
    "c4": ("#b07d00", "#f0b429"),
    "c5": ("#4a4a52", "#c9c9d2"),
    "c6": ("#8c6d31", "#cfa96a"),
    "c7": ("#5a54c4", "#a7a2ff"),
}
SERIES = tuple(name for name in COLOURS if name[0] == "c")
# With the eight colours, Matplotlib's markers make a pair for each of 48 methods, which stay
# distinct without colours, too.
SHAPES = ("o", "s", "^", "D", "v", "X")
Point = tuple[float, float]


class Look(NamedTuple):
    """The colour, one of `COLOURS`, and the marker, one of `SHAPES`, of a method."""

    colour: str
    shape: str = "o"

    @property
    def paper(self) -> str:
        """The colour in the light, which :func:`svg` makes that of the page."""
        return COLOURS[self.colour][0]


class Picture(NamedTuple):
    """A picture and its caption."""

    figure: Figure | None  # the picture, or None for an image
    caption: str  # the words below it
    source: str = ""  # of an image, its content as an address


INK, SOFT, LINE = Look("ink"), Look("soft"), Look("line")
_SMALL: dict[str, Any] = {"color": SOFT.paper, "fontsize": 10}
_KEY: dict[str, Any] = {"labelcolor": "linecolor", "handlelength": 0.6, "handletextpad": 0.5}
_ABOVE: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
_DASHES = (0, (3, 3))


def looks_in_order(names: Iterable[str]) -> dict[str, Look]:
    """Returns a pair of colour and marker for each name, the colours first."""
    pairs = cycle(Look(colour, shape) for shape in SHAPES for colour in SERIES)
    return dict(zip(names, pairs, strict=False))


class Row(NamedTuple):
    """A line of a forest."""

    name: str
    value: float
    low: float  # the lower end of its interval
    high: float  # the upper end
    look: Look = Look("c0")  # its colour and marker
    word: str = ""  # ``better`` or ``worse``, which an arrow shows; empty: no arrow

    def draw(self, axes: Axes, y: float, sign: str = "", radius: float = 4) -> None:
        """Draws the value and its interval, with arrows where it goes on beyond the axis."""
        if not math.isfinite(self.value):
            return
        hover, (left, right) = f"{self.name}: {self.value:{sign}.4f}", axes.get_xlim()
        if math.isfinite(self.low):
            hover += f" [{self.low:{sign}.4f}, {self.high:{sign}.4f}]"
            ends = np.clip((self.low, self.high), left, right)
            axes.plot(ends, (y, y), color=self.look.paper, lw=1.6, clip_on=False)
            if self.low < left:
                _dot(axes, left, y, self.look._replace(shape="<"), hover, 3)
            if self.high > right:
                _dot(axes, right, y, self.look._replace(shape=">"), hover, 3)
        _dot(axes, float(np.clip(self.value, left, right)), y, self.look, hover, radius)


def panels(count: int = 1, height: float = 270) -> tuple[Figure, list[Axes]]:
    """Returns an empty picture of panels, one below another."""
    from matplotlib.figure import Figure  # importing it takes half a second

    figure = Figure(figsize=(WIDTH / 72, count * height / 72), layout="constrained")
    column: list[Axes] = figure.subplots(count, squeeze=False)[:, 0].tolist()
    for axes in column:
        axes.grid(color=LINE.paper, clip_on=False)
        axes.set_axisbelow(True)
        axes.set_facecolor("none")
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, labelsize=10, colors=SOFT.paper)
    return figure, column


def _dot(axes: Axes, x: float, y: float, look: Look, hover: str, radius: float = 4) -> None:
    """Draws a marker."""
    style: dict[str, Any] = {"color": look.paper, "ms": 2 * radius, "mew": 0, "clip_on": False}
    axes.plot([x], [y], look.shape, gid=f"hover {visible(hover)}", **style)


def arrows(figure: Figure) -> str:
    """Explains the arrows of a picture with intervals; empty where it has none."""
    markers = {line.get_marker() for axes in figure.axes for line in axes.lines}
    return " Arrows: the interval goes on beyond the axis." * bool(markers & {"<", ">"})


def _words(axes: Axes, below: str, above: str = "") -> None:
    """Writes what is on the axes: below it, and above it for the vertical one."""
    axes.set_xlabel("\n".join(wrap(below.replace("$", r"\$"), 56)), **_SMALL)
    axes.set_title("\n".join(wrap(above.replace("$", r"\$"), 60)), loc="left", **_SMALL)


def legend(figure: Figure, names: Iterable[str], looks: Mapping[str, Look]) -> None:
    """Names the markers of methods below a picture, in their colours."""
    from matplotlib.lines import Line2D

    each = {name: looks.get(name, SOFT) for name in names}
    lines = [
        Line2D([], [], color=look.paper, marker=look.shape, ls="", mew=0, label=caption(name, 60))
        for name, look in each.items()
    ]
    legend_below(figure, lines, **_KEY)


def _no_value(axes: Axes, y: float) -> None:
    """Says that a row has nothing to draw."""
    axes.text(0.01, y, "no value", va="center", transform=axes.get_yaxis_transform(), **_SMALL)


def _around(values: Sequence[float]) -> tuple[float, float]:
    """The ends of an axis that shows all finite values."""
    known = [v for v in values if math.isfinite(v)] or [0.0, 1.0]
    low, high = min(known), max(known)
    room = 0.04 * (high - low) or abs(high) or 1.0
    return low - room, high + room


def reach(rows: Sequence[Row], always: Sequence[float] = ()) -> list[float]:
    """Returns the values that the axis of a forest must show.

    Example:
        >>> reach([Row("a", 0.9, -9.0, 9.0), Row("b", 0.8, 0.7, 0.9)])[:2]
        [0.8, 0.9]
    """
    # With few splits one interval may be far wider than the others, and one method may be far
    # worse than all others. The axis cuts both, so that the other rows stay legible.
    values = sorted(row.value for row in rows if math.isfinite(row.value))
    if not values:
        return [*always]
    quarter = len(values) // 4
    low, high = values[quarter], values[-1 - quarter]
    far = 5 * (high - low) if high > low else math.inf
    values = [v for v in values if low - far <= v <= high + far]
    inner = [*values, *(v for v in always if math.isfinite(v))]
    halves = sorted((r.high - r.low) / 2 for r in rows if math.isfinite(r.high - r.low))
    room = max([max(inner) - min(inner), *(1.2 * h for h in halves[(len(halves) - 1) // 2 :][:1])])
    ends = (end for row in rows for end in (row.low, row.high) if math.isfinite(end))
    return [*inner, *(min(max(end, min(inner) - room), max(inner) + room) for end in ends)]


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), [caption(name) for name in names], color=INK.paper)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")


def forest(rows: Sequence[Row], lines: Mapping[str, float], label: str) -> Figure:
    """Draws methods with their intervals, one below another, and lines across all of them."""
    heads = sorted((v, name) for name, v in lines.items() if math.isfinite(v))
    figure, (axes,) = panels(height=_STEP * len(rows) + 14 * len(heads) + 50)
    inner = reach(rows)
    span = (max(inner) - min(inner)) if inner else 0.0
    near = [v for v, _ in heads if not inner or min(inner) - span <= v <= max(inner) + span]
    left, right = axes.set_xlim(_around([*inner, *near]))
    _name_rows(axes, [row.name for row in rows])
    _words(axes, label)
    for n, (value, name) in enumerate(reversed(heads)):
        text = f"{name} {value:.4g}"
        text = f"◂ {text}" if value < left else f"{text} ▸" if value > right else text
        if left <= value <= right:
            axes.axvline(value, color=SOFT.paper, lw=1, ls=_DASHES, clip_on=False)
        align = "left" if value < (left + right) / 2 else "right"
        at, above = min(max(value, left), right), (0, 3 + 14 * n)
        axes.annotate(text, (at, 1), above, ha=align, **_ABOVE, **_SMALL)
    for n, row in enumerate(rows):
        row.draw(axes, n)
        if not math.isfinite(row.value):
            _no_value(axes, n)
        if row.word:
            arrow, look = ("▲", "good") if row.word == "better" else ("▼", "bad")
            place = axes.get_yaxis_transform()
            axes.text(1.04, n, arrow, color=COLOURS[look][0], va="center", transform=place)
    return figure


def hospitals(
    names: Sequence[str],
    series: Mapping[str, Sequence[tuple[float, float, float]]],
    label: str,
    looks: Mapping[str, Look],
    zero: bool = True,
) -> Figure:
    """Draws a value of each hospital, with an interval, under some methods."""
    height = (7 * len(series) + 8) * len(names) + 50
    figure, (axes,) = panels(height=height)
    rows = [Row("", *value) for values in series.values() for value in values]
    known = [0.0] * zero + [row.value for row in rows if math.isfinite(row.value)]
    axes.set_xlim(_around([*known, *reach(rows, known)]))
    _name_rows(axes, names)
    _words(axes, label)
    if zero:
        axes.axvline(0, color=INK.paper, lw=1, clip_on=False)
    for k, (method, values) in enumerate(series.items()):
        look, down = looks.get(method, SOFT), (k + 1) / (len(series) + 1) - 0.5
        for n, value in enumerate(values):
            row = Row(f"{names[n]}, {method}", *value, look)
            row.draw(axes, n + 0.8 * down, "+" if zero else "", 3.2)
    for n, of in enumerate(zip(*series.values(), strict=True)):
        if not any(math.isfinite(value) for value, *_ in of):
            _no_value(axes, n)
    legend(figure, series, looks)
    return figure


def _log_ticks(axes: Axes, low: float, high: float, zero: float | None = None) -> None:
    """Makes an axis of bytes logarithmic, with ticks that have room; one may stand for none."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    subs = (1, 2, 5) if high < 16 * low else (1, 3) if high < 100 * low else (1,)
    locator = MaxNLocator(3) if high < 4 * low else LogLocator(subs=subs, numticks=6)
    ticks = [t for t in locator.tick_values(low, high) if low <= t <= high]
    ticks = ticks if high > 1.05 * low else [low]
    words = [size(round(t)) for t in ticks]
    axes.set_xscale("log")
    axes.set_xticks(ticks if zero is None else [zero, *ticks], ["0"] * (zero is not None) + words)
    axes.minorticks_off()


def curves(
    lines: Mapping[str, Sequence[Point]],
    x_label: str,
    y_label: str,
    looks: Mapping[str, Look],
    *,
    log: bool = False,
    evenly: bool = False,
    axes: Axes | None = None,
) -> Figure:
    """Draws a line for each method."""
    # `log`: whether the first axis is logarithmic; it leaves out points at 0. `axes`: a panel
    # to draw in, without a legend; ``None``: a new picture.
    whole, axes = axes is None, axes or panels()[1][0]
    places = sorted({x for points in lines.values() for x, _ in points if not log or x > 0})

    def spread(x: float) -> float:
        return float(np.interp(x, places, range(len(places)))) if evenly else x

    for k, (name, points) in enumerate(lines.items()):
        look, width = looks.get(name, SOFT), 4 - 2.4 * k / len(lines)  # so that none hides another
        known = [(x, y) for x, y in points if math.isfinite(y) and (not log or x > 0)]
        at = [[spread(x) for x, _ in known], [y for _, y in known]]
        dashes = "-" if look.shape == "o" else _DASHES
        style: dict[str, Any] = {"color": look.paper, "lw": width, "ls": dashes, "clip_on": False}
        axes.plot(*at, gid=f"hover {visible(name)}", **style)
        for x, y in known:
            hover = f"{name}: {y:.4f} at {size(round(x)) if log else f'{x:g}'}"
            _dot(axes, spread(x), y, look, hover, 3)
    if evenly:
        axes.set_xticks(range(len(places)), [f"{v:g}" for v in places])
    elif log:
        _log_ticks(axes, places[0], places[-1])
    else:
        whole_numbers = all(float(x).is_integer() for x in places)
        axes.locator_params(axis="x", nbins=5, steps=[1, 2, 5, 10], integer=whole_numbers)
    _words(axes, x_label, y_label)
    figure = axes.get_figure(root=True)
    assert figure is not None
    if whole:
        legend(figure, lines, looks)
    return figure


def scatter(
    points: Mapping[str, Point], front: Sequence[str], y_label: str, looks: Mapping[str, Look]
) -> Figure:
    """Draws methods by the bytes that they send, on a logarithmic axis, and their scores."""
    figure, (axes,) = panels(height=300)
    known = {n: (x, y) for n, (x, y) in points.items() if math.isfinite(y)}
    sent = [x for x, _ in known.values() if x > 0] or [1.0]
    low, high = min(sent), max(sent)
    zero = low / max((high / low) ** 0.25, 1.01)
    bottom, top = axes.set_ylim(
        _around(reach([Row(n, y, math.nan, math.nan) for n, (_, y) in known.items()]))
    )
    at = {n: (x or zero, min(max(y, bottom), top)) for n, (x, y) in known.items()}
    _log_ticks(axes, low, high, zero if any(not x for x, _ in known.values()) else None)
    if joined := [at[n] for n in front if n in at]:
        x, y = zip(*joined, strict=True)
        axes.step(x, y, where="post", color=SOFT.paper, lw=1, ls=_DASHES, clip_on=False)
    for name in sorted(at, key=lambda n: n in front):
        hover = f"{name}: {size(round(points[name][0]))}, {points[name][1]:.4f}"
        _dot(axes, *at[name], looks.get(name, SOFT), hover, 4.5 if name in front else 3.2)
    _words(axes, "bytes sent by all, up and down", y_label)
    legend(figure, at, looks)
    return figure


def svg(figure: Figure, label: str) -> str:
    """Returns a figure for a page: its colours are the page's, and hovering shows texts."""
    from matplotlib import rc_context

    text = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    style = {"svg.fonttype": "none", "svg.hashsalt": "medfed"}
    with rc_context(style), warnings.catch_warnings():
        # The reader's browser has the letters that Matplotlib's font lacks.
        warnings.filterwarnings("ignore", "Glyph")
        figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    markup = text.getvalue()
    box = " ".join(re.findall('viewBox="[^"]*"', markup))
    markup = markup[markup.index("<g ") :]
    markup = re.sub(r"<g id=([\"'])hover (.*?)\1>", r"<g><title>\2</title>", markup)
    markup = re.sub(r'<g id="[^"]*"(/?)>', r"<g\1>", markup).replace("xlink:href", "href")
    for name, (light, _) in COLOURS.items():
        markup = re.sub(rf"(fill|stroke): {light}", rf"\1: var(--{name})", markup)
    markup = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", markup)
    markup = re.sub(r"\n *", "", markup)
    return f'<svg {box} role="img" aria-label="{escape(label)}">{markup}'
