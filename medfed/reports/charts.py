"""Pictures of ``report`` and ``compare``: SVG with hover texts for a page, figures for files.

A `Canvas` holds lines, areas, dots and words. A page shows it as SVG (``templates/macros.html``),
whose colours follow the page (light, dark, print); Matplotlib writes the same marks as PNG, PDF or
SVG files.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from medfed.common.console import size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 400  # as wide as a phone, so that words stay readable there
LETTERS = 11.5  # their size
_LETTER = 0.56  # width of a letter, as a share of its size
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
SERIES = tuple(name for name in COLOURS if name[0] == "c" and name[1:].isdigit())
# Markers as corners around their middle, in radii; a circle has none. With the eight colours they
# make a pair for each of 48 methods, which stay distinct without colours, too.
SHAPES: dict[str, tuple[tuple[float, float], ...]] = {
    "circle": (),
    "square": ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
    "triangle": ((0, -1.2), (1.15, 0.9), (-1.15, 0.9)),
    "diamond": ((0, -1.35), (1.35, 0), (0, 1.35), (-1.35, 0)),
    "wedge": ((0, 1.2), (1.15, -0.9), (-1.15, -0.9)),
    "hourglass": ((-1.1, -1.1), (1.1, -1.1), (-1.1, 1.1), (1.1, 1.1)),
}
Anchor = Literal["start", "middle", "end"]
_ALIGN = {"start": "left", "middle": "center", "end": "right"}


class Look(NamedTuple):
    """The colour, one of `COLOURS`, and the marker, one of `SHAPES`, of a method."""

    colour: str
    shape: str = "circle"


SOFT = Look("soft")


def looks_in_order(names: Iterable[str]) -> dict[str, Look]:
    """Returns a pair of colour and marker for each name, the colours first.

    Example:
        >>> looks_in_order(["fedavg", "local"])["local"]
        Look(colour='c1', shape='circle')
    """
    pairs = cycle(Look(colour, shape) for shape in SHAPES for colour in SERIES)
    return dict(zip(names, pairs, strict=False))


class Mark(NamedTuple):
    """One element of a picture.

    Attributes:
        shape: ``line``, ``area``, ``dot`` or ``text``.
        points: Its places; of an area its corners.
        colour: One of `COLOURS`.
        text: The words; of other shapes the hover text.
        width: Width of a line, radius of a dot, size of words.
        dashed: Whether a line is dashed.
        anchor: Of words.
        alpha: Opacity of an area.
    """

    shape: str
    points: tuple[tuple[float, float], ...]
    colour: str
    text: str = ""
    width: float = 1.0
    dashed: bool = False
    anchor: Anchor = "start"
    alpha: float = 1.0


@dataclass
class Canvas:
    """A picture, `WIDTH` wide.

    Attributes:
        label: A description for readers who cannot see it.
        height: Its height.
        marks: Its elements; later ones cover earlier ones.
    """

    label: str
    height: float = 0.0
    marks: list[Mark] = field(default_factory=list)

    def line(
        self, *points: tuple[float, float], colour: str = "line", width: float = 1,
        dashed: bool = False, hover: str = "",
    ) -> None:  # fmt: skip
        """Draws a line through points."""
        self.marks.append(Mark("line", points, colour, hover, width, dashed))

    def dot(self, x: float, y: float, look: Look, hover: str, radius: float = 4) -> None:
        """Draws a marker."""
        if corners := SHAPES[look.shape]:
            places = tuple((x + radius * a, y + radius * b) for a, b in corners)
            self.marks.append(Mark("area", places, look.colour, hover))
        else:
            self.marks.append(Mark("dot", ((x, y),), look.colour, hover, radius))

    def text(
        self, x: float, y: float, text: str, colour: str = "ink", anchor: Anchor = "start",
        size: float = LETTERS,
    ) -> None:  # fmt: skip
        """Writes words whose base line is at ``y``."""
        self.marks.append(Mark("text", ((x, y),), colour, text, size, anchor=anchor))

    def figure(self) -> Figure:
        """Returns it for a file, in the colours of paper."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(WIDTH / 72, self.height / 72))  # a unit is a point
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, WIDTH), ylim=(self.height, 0))
        axes.axis("off")
        for mark in self.marks:
            style: dict[str, Any] = {"color": COLOURS[mark.colour][0]}
            x, y = zip(*mark.points, strict=True)
            if mark.shape == "line":
                style["ls"] = (0, (3, 3)) if mark.dashed else "-"
                axes.plot(x, y, lw=mark.width, **style)
            elif mark.shape == "dot":
                axes.plot(x, y, "o", ms=2 * mark.width, mew=0, **style)
            elif mark.shape == "area":
                axes.fill(x, y, alpha=mark.alpha, lw=0, **style)
            else:
                style |= {"fontsize": mark.width * 0.93, "ha": _ALIGN[mark.anchor]}
                axes.text(x[0], y[0], mark.text.replace("$", r"\$"), va="baseline", **style)
        return figure


def stacked(*canvases: Canvas) -> Canvas:
    """Returns one picture of several, each below the one before it."""
    whole = Canvas("; ".join(canvas.label for canvas in canvases))
    for canvas in canvases:
        whole.marks += [
            mark._replace(points=tuple((x, y + whole.height) for x, y in mark.points))
            for mark in canvas.marks
        ]
        whole.height += canvas.height + 12
    return whole


def width_of(text: str, size: float = LETTERS) -> float:
    """Returns about how wide words are.

    Example:
        >>> round(width_of("fedavg"))
        39
    """
    return _LETTER * size * len(text)


LEFT, RIGHT, STEP = 118, 16, 17


class Axis(NamedTuple):
    """A linear axis.

    Attributes:
        low: The value at its start.
        high: The value at its end.
        start: Where it starts on the picture.
        end: Where it ends.
    """

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float) -> Axis:
        """Returns an axis that holds all finite values.

        Example:
            >>> Axis.over([1.0, 3.0], 0, 100).at(2.0)
            50.0
        """
        known = [v for v in values if math.isfinite(v)] or [0.0, 1.0]
        low, high = min(known), max(known)
        room = 0.04 * (high - low) or abs(high) or 1.0
        return cls(low - room, high + room, start, end)

    def at(self, value: float) -> float:
        """Returns the place of a value; a value beyond the axis is at the axis' end."""
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + min(1.0, max(0.0, share)) * (self.end - self.start), 1)

    def ticks(self, count: int = 5) -> list[float]:
        """Returns round values on the axis.

        Example:
            >>> Axis(0.0, 1.0, 0, 100).ticks()
            [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
        """
        raw = (self.high - self.low) / count
        size = 10 ** math.floor(math.log10(raw))
        step = next(s * size for s in (1, 2, 5, 10) if s * size >= raw * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [float(f"{n * step:.10g}") for n in range(first, last + 1)]


class Row(NamedTuple):
    """A line of a forest.

    Attributes:
        name: Its label.
        value: Its value.
        low: The lower end of its interval.
        high: The upper end.
        look: Its colour and marker.
        word: ``better`` or ``worse``, which an arrow shows; empty: no arrow.
    """

    name: str
    value: float
    low: float
    high: float
    look: Look = Look("c0")
    word: str = ""

    def draw(self, canvas: Canvas, axis: Axis, y: float, sign: str = "", radius: float = 4) -> None:
        """Draws the value and its interval, with arrows where it goes on beyond the axis."""
        if not math.isfinite(self.value):
            return
        hover = f"{self.name}: {self.value:{sign}.4f}"
        if math.isfinite(self.low):
            hover += f" [{self.low:{sign}.4f}, {self.high:{sign}.4f}]"
            (left, right), colour = (axis.at(self.low), axis.at(self.high)), self.look.colour
            canvas.line((left, y), (right, y), colour=colour, width=1.6)
            if self.low < axis.low:
                canvas.line((left + 4, y - 3), (left, y), (left + 4, y + 3), colour=colour)
            if self.high > axis.high:
                canvas.line((right - 4, y - 3), (right, y), (right - 4, y + 3), colour=colour)
        canvas.dot(axis.at(self.value), y, self.look, hover, radius)


def reach(rows: Sequence[Row], always: Sequence[float] = ()) -> list[float]:
    """Returns the values that the axis of a forest must show.

    With few splits an interval may be far wider than all values together, and one method may be far
    worse than all others. The axis cuts both, so that the other rows stay legible.

    Args:
        rows: Its rows.
        always: Further values that it must show.

    Example:
        >>> reach([Row("a", 0.9, -9.0, 9.0), Row("b", 0.8, 0.7, 0.9)])[:2]
        [0.8, 0.9]
    """
    values = sorted(row.value for row in rows if math.isfinite(row.value))
    if not values:
        return [*always]
    quarter = len(values) // 4
    low, high = values[quarter], values[-1 - quarter]
    far = 5 * (high - low) if high > low else math.inf
    values = [v for v in values if low - far <= v <= high + far]
    shown = [*values, *(v for v in always if math.isfinite(v))]
    room = max(shown) - min(shown)
    ends = (end for row in rows for end in (row.low, row.high) if math.isfinite(end))
    return [*shown, *(min(max(end, min(shown) - room), max(shown) + room) for end in ends)]


def forest(rows: Sequence[Row], lines: Mapping[str, float], label: str) -> Canvas:
    """Draws methods with their intervals, one below another, and lines across all of them.

    Args:
        rows: The methods.
        lines: Values by name, such as that of a constant; a value far from all rows is at the edge,
            with an arrow.
        label: Of the axis.
    """
    known = {name: value for name, value in lines.items() if math.isfinite(value)}
    shown = reach(rows)
    span = (max(shown) - min(shown)) if shown else 0.0
    near = [v for v in known.values() if not shown or min(shown) - span <= v <= max(shown) + span]
    heads = sorted(known.items(), key=lambda item: item[1])
    top = 16 + 13 * max(0, len(heads) - 1)
    bottom = top + STEP * len(rows) + 6
    canvas, axis = _over_a_scale([*shown, *near], top, bottom, label)
    for n, (name, value) in enumerate(heads):
        x, y = axis.at(value), 11 + 13 * n
        text = f"{name} {value:.4g}"
        if value < axis.low:
            text = f"◂ {text}"
        elif value > axis.high:
            text = f"{text} ▸"
        else:
            canvas.line((x, y + 3), (x, bottom), colour="soft", dashed=True)
        half = width_of(text) / 2
        canvas.text(min(max(x, LEFT + half), WIDTH - half), y, text, "soft", "middle")
    for n, row in enumerate(rows):
        y = top + 12 + STEP * n
        canvas.text(LEFT - 8, y + 4, short(row.name), anchor="end")
        row.draw(canvas, axis, y)
        if row.word:
            arrow, colour = ("▲", "good") if row.word == "better" else ("▼", "bad")
            canvas.text(WIDTH - 1, y + 4, arrow, colour, "end")
    return canvas


def hospitals(
    names: Sequence[str],
    series: Mapping[str, Sequence[tuple[float, float, float]]],
    label: str,
    looks: Mapping[str, Look],
    zero: bool = True,
) -> Canvas:
    """Draws a value of each hospital, with an interval, under some methods.

    Args:
        names: The hospitals.
        series: By method the value of each hospital and the ends of its interval.
        label: Of the axis.
        looks: By method.
        zero: Whether the values are differences, so that a line marks 0.
    """
    step = 7 * len(series) + 8
    rows = [Row("", *value) for values in series.values() for value in values]
    known = [0.0] * zero + [row.value for row in rows if math.isfinite(row.value)]
    top = 12.0 + 14 * len(series)
    bottom = top + step * len(names) + 4
    canvas, axis = _over_a_scale([*known, *reach(rows, known)], top, bottom, label)
    if zero:
        canvas.line((axis.at(0), top), (axis.at(0), bottom), colour="ink")
    for k, (method, values) in enumerate(series.items()):
        look = looks.get(method, SOFT)
        canvas.dot(LEFT + 4, 11 + 14 * k, look, method)
        canvas.text(LEFT + 14, 15 + 14 * k, method, look.colour)
        for n, value in enumerate(values):
            row, y = Row(f"{names[n]}, {method}", *value, look), top + 8 + step * n + 7 * k
            row.draw(canvas, axis, y, "+" if zero else "", 3.2)
    for n, name in enumerate(names):
        y = top + 4 + step * n + 3.5 * len(series) + 4
        canvas.text(LEFT - 8, y, short(name), anchor="end")
    return canvas


def short(name: str, most: int = 18) -> str:
    r"""Returns a name that fits into the margin of a chart; no font has control characters.

    Example:
        >>> short("fedavg"), short("a_name_that_does_not_end"), short("a\rb")
        ('fedavg', 'a_name_th…_not_end', 'a b')
    """
    name = "".join(c if c.isprintable() else " " for c in name)
    return name if len(name) <= most else f"{name[: most // 2]}…{name[-(most - most // 2 - 1) :]}"


def _over_a_scale(
    values: Sequence[float], top: float, bottom: float, label: str
) -> tuple[Canvas, Axis]:
    """An empty chart with the axis of some values below it, and its lines across it."""
    canvas, axis = Canvas(label, bottom + 36), Axis.over(values, LEFT, WIDTH - RIGHT)
    for tick in axis.ticks():
        x = axis.at(tick)
        canvas.line((x, top), (x, bottom))
        canvas.text(x, bottom + 13, f"{tick:g}", "soft", "middle")
    canvas.text((axis.start + axis.end) / 2, bottom + 30, label, "soft", "middle")
    return canvas, axis


_NAMES = 108  # the width of the names to the right of curves
Point = tuple[float, float]


def curves(
    lines: Mapping[str, Sequence[Point]],
    x_label: str,
    y_label: str,
    looks: Mapping[str, Look],
    *,
    log: bool = False,
    evenly: bool = False,
    crossed: Sequence[Point] = (),
) -> Canvas:
    """Draws a line for each method.

    Args:
        lines: Points by method, in the order of the first number.
        x_label: Of the first number.
        y_label: Of the second number.
        looks: By method.
        log: Whether the first axis is logarithmic; it leaves out points at 0.
        evenly: Whether equal steps separate the values of the first number.
        crossed: Points to mark.
    """
    places = sorted({x for points in lines.values() for x, _ in points if not log or x > 0})

    def spread(x: float) -> float:
        if evenly:
            before = max((i for i, p in enumerate(places) if p <= x), default=0)
            after = min(before + 1, len(places) - 1)
            gap = places[after] - places[before]
            return before + ((x - places[before]) / gap if gap else 0.0)
        return math.log10(x) if log else x

    words_below = wrap(x_label, 37)
    canvas = Canvas(f"{y_label} over {x_label}", 254 + 14 * len(words_below))
    x_axis = Axis.over([spread(x) for x in places], 50, WIDTH - _NAMES)
    y_axis = Axis.over([y for p in lines.values() for _, y in p], 216, 26)
    _frame(canvas, y_axis, 50, WIDTH - _NAMES)
    if evenly:
        ticks = [(x_axis.at(n), f"{v:g}") for n, v in enumerate(places)]
    elif log:
        ticks = [(x_axis.at(math.log10(t)), size(round(t))) for t in _decades(x_axis)]
    else:
        ticks = [(x_axis.at(t), f"{t:g}") for t in x_axis.ticks(4)]
    for x, words in ticks:
        canvas.text(x, 234, words, "soft", "middle")
    for n, line in enumerate(words_below):
        canvas.text((50 + WIDTH - _NAMES) / 2, 256 + 14 * n, line, "soft", "middle")
    canvas.text(4, 10, y_label, "soft", size=10)
    ends = {}
    for name, points in lines.items():
        look = looks.get(name, SOFT)
        seen = [(spread(x), x, y) for x, y in points if math.isfinite(y) and (not log or x > 0)]
        if not seen:
            continue
        at = [(x_axis.at(x), y_axis.at(y)) for x, _, y in seen]
        canvas.line(*at, colour=look.colour, width=2, dashed=look.shape != "circle", hover=name)
        for place, (_, x, y) in zip(at, seen, strict=True):
            canvas.dot(*place, look, f"{name}: {y:.4f} at {size(round(x)) if log else f'{x:g}'}", 3)
        ends[name] = (at[-1][1], look.colour)
    for x, y in crossed:
        for look, radius in ((Look("ink"), 3.5), (Look("paper"), 2)):
            canvas.dot(x_axis.at(spread(x)), y_axis.at(y), look, "the lines cross here", radius)
    for name, y in _apart({n: y for n, (y, _) in ends.items()}, 13, 250).items():
        canvas.text(WIDTH - _NAMES + 6, y + 4, short(name, 16), ends[name][1])
    return canvas


def scatter(
    points: Mapping[str, Point],
    named: Sequence[str],
    front: Sequence[str],
    y_label: str,
    looks: Mapping[str, Look],
) -> Canvas:
    """Draws methods by the bytes that they send, on a logarithmic axis, and their scores.

    Args:
        points: By method, bytes first; methods that send nothing are at the left end.
        named: The methods whose names are written; the other markers show theirs on hovering.
        front: Methods in the order in which a line joins them.
        y_label: Of the second number.
        looks: By method.
    """
    canvas = Canvas(f"{y_label} over bytes sent", 300)
    logs = [math.log10(x) for x, _ in points.values() if x > 0]
    x_axis = Axis.over(logs, 74, WIDTH - 14)
    best = [Row(n, y, math.nan, math.nan) for n, (_, y) in points.items()]
    y_axis = Axis.over(reach(best), 246, 26)
    _frame(canvas, y_axis, 50, WIDTH - 8)
    for tick in _decades(x_axis):
        words = size(round(tick))
        inside = min(x_axis.at(math.log10(tick)), WIDTH - width_of(words) / 2)
        canvas.text(inside, 264, words, "soft", "middle")
    if any(x <= 0 for x, _ in points.values()):
        canvas.text(58, 264, "0", "soft", "middle")
    canvas.text(WIDTH / 2, 287, "bytes sent by all, up and down", "soft", "middle")
    canvas.text(4, 10, y_label, "soft", size=10)
    at = {
        n: (x_axis.at(math.log10(x)) if x > 0 else 58.0, y_axis.at(y))
        for n, (x, y) in points.items()
        if math.isfinite(y)
    }
    if joined := [at[n] for n in front if n in at]:
        steps = [joined[0]]
        for x, y in joined[1:]:
            steps += [(x, steps[-1][1]), (x, y)]
        canvas.line(*steps, colour="soft", dashed=True)
    for name in sorted(at, key=lambda n: n in named):
        x, y = points[name]
        radius = 4.5 if name in named else 3.2
        hover = f"{name}: {size(round(x))}, {y:.4f}"
        canvas.dot(*at[name], looks.get(name, SOFT), hover, radius)
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in at.values()]
    lines = [m.points for m in canvas.marks if m.dashed]
    for (x, y), (right, bottom) in (ends for points in lines for ends in pairwise(points)):
        taken.append((x, min(y, bottom) - 1, right, max(y, bottom) + 1))
    for name in named:
        if name in at and (place := _free(short(name), at[name], taken)):
            colour = looks.get(name, SOFT).colour
            taken.append(place)
            middle = (place[1] + place[3]) / 2
            if abs(middle - at[name][1]) > 20:  # too far to be read as the name of its marker
                near = min((place[0], place[2]), key=lambda x: abs(x - at[name][0]))
                canvas.line(at[name], (near, middle), colour=colour, width=0.6)
            canvas.text(place[0] + 1, place[3] - 3, short(name), colour)
    return canvas


def shares(
    names: Sequence[str], blocks: Mapping[str, Sequence[Sequence[float]]], label: str
) -> Canvas:
    """Draws rows of shares between 0 and 1 as boxes, in blocks from left to right.

    Args:
        names: Of the rows.
        blocks: By title the rows.
        label: Of the picture.
    """
    columns = sum(len(rows[0]) for rows in blocks.values())
    wide = (WIDTH - LEFT - RIGHT - 14 * (len(blocks) - 1)) / max(1, columns)
    canvas = Canvas(label, 26 + 14 * len(names))
    left = float(LEFT)
    for title, rows in blocks.items():
        canvas.text(left, 12, title, "soft")
        for n, row in enumerate(rows):
            for k, value in enumerate(row):
                x, y = left + k * wide + 0.5, 19 + 14 * n
                right, bottom = x + wide - 1, y + 13
                hover = f"{names[n]}, {title} {k}: {value:.2f}"
                shade = 0.06 + 0.94 * min(1.0, max(0.0, value))
                corners = ((x, y), (right, y), (right, bottom), (x, bottom))
                canvas.marks.append(Mark("area", corners, "c0", hover, alpha=shade))
        left += len(rows[0]) * wide + 14
    for n, name in enumerate(names):
        canvas.text(LEFT - 8, 30 + 14 * n, short(name), anchor="end")
    return canvas


def _decades(axis: Axis) -> Iterator[float]:
    """Round values on a logarithmic axis, at least two: of a small range those of its numbers."""
    span = axis.high - axis.low
    if span < 0.6:
        yield from Axis(10**axis.low, 10**axis.high, axis.start, axis.end).ticks(3)
        return
    steps = (1, 2, 5) if span < 1.2 else (1, 3) if span < 2 else (1,)
    for n in range(math.floor(axis.low), math.ceil(axis.high)):
        for step in steps:
            if axis.low <= math.log10(step * 10.0**n) <= axis.high:
                yield step * 10.0**n


def _frame(canvas: Canvas, axis: Axis, left: float, right: float) -> None:
    for tick in axis.ticks():
        canvas.line((left, axis.at(tick)), (right, axis.at(tick)))
        canvas.text(left - 6, axis.at(tick) + 4, f"{tick:g}", "soft", "end")


def _apart(places: Mapping[str, float], gap: float, bottom: float) -> dict[str, float]:
    """Moves names down, and up again at the bottom, so that none lies on another."""
    order = sorted(places, key=lambda name: places[name])
    moved: dict[str, float] = {}
    last = -math.inf
    for name in order:
        last = moved[name] = max(places[name], last + gap)
    limit = bottom
    for name in reversed(order):
        moved[name] = min(moved[name], limit)
        limit = moved[name] - gap
    return moved


def _free(
    text: str, at: Point, taken: Sequence[tuple[float, float, float, float]]
) -> tuple[float, float, float, float] | None:
    """Returns the place for a name that is nearest to its dot and that nothing else covers."""
    wide, (x, y) = width_of(text) + 2, at
    lefts = [x + 6, x - 6 - wide, *range(50, int(WIDTH - wide), 20)]
    offsets = sorted(range(-240, 241, 12), key=abs)
    places = [(left, y - 7 + down, left + wide, y + 7 + down) for down in offsets for left in lefts]
    places.sort(key=lambda p: abs((p[1] + p[3]) / 2 - y) + max(0.0, p[0] - x, x - p[2]))
    for place in places:
        inside = place[0] >= 50 and place[2] <= WIDTH and place[1] >= 0 and place[3] <= 252
        if inside and not any(
            place[0] < b[2] and b[0] < place[2] and place[1] < b[3] and b[1] < place[3]
            for b in taken
        ):
            return place
    return None
