"""Charts of a report whose lines have a name each: methods or hospitals, with intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from medfed.reports.benchmark.canvas import SERIES, WIDTH, Canvas, width_of

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
        """Returns an axis on which all values lie; what is not finite is left out.

        Example:
            >>> Axis.over([1.0, 3.0], 0, 100).at(2.0)
            50.0
        """
        known = [v for v in values if math.isfinite(v)] or [0.0, 1.0]
        low, high = min(known), max(known)
        room = 0.04 * (high - low) or abs(high) or 1.0
        return cls(low - room, high + room, start, end)

    def at(self, value: float) -> float:
        """Returns the place of a value; one beyond the axis is at its end."""
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
        name: What it is.
        value: Its value.
        low: The lower end of its interval.
        high: The upper end.
        colour: One of :data:`medfed.reports.benchmark.canvas.COLOURS`.
    """

    name: str
    value: float
    low: float
    high: float
    colour: str = "c0"


def reach(rows: Sequence[Row], always: Sequence[float] = ()) -> list[float]:
    """Returns what an axis of a forest must show.

    An interval of few splits may be far wider than all that was measured, and one method far worse
    than all others: neither may press the rest together.

    Args:
        rows: Its rows.
        always: What else must be seen.

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
    """Draws methods with their intervals, below each other, and lines across all of them.

    Args:
        rows: The methods.
        lines: Values by name, such as the floor and the ceiling; one far from all rows stands at
            the edge, with an arrow.
        label: What the axis is.
    """
    known = {name: value for name, value in lines.items() if math.isfinite(value)}
    shown = reach(rows)
    span = (max(shown) - min(shown)) if shown else 0.0
    near = [v for v in known.values() if not shown or min(shown) - span <= v <= max(shown) + span]
    axis = Axis.over([*shown, *near], LEFT, WIDTH - RIGHT)
    heads = sorted(known.items(), key=lambda item: item[1])
    top = 16 + 13 * max(0, len(heads) - 1)
    bottom = top + STEP * len(rows) + 6
    canvas = Canvas(label, bottom + 36)
    scale(canvas, axis, top, bottom, label)
    for n, (name, value) in enumerate(heads):
        x, y = axis.at(value), 11 + 13 * n
        told = f"{name} {value:.4g}"
        if value < axis.low:
            told = f"◂ {told}"
        elif value > axis.high:
            told = f"{told} ▸"
        else:
            canvas.line((x, y + 3), (x, bottom), colour="soft", dashed=True)
        half = width_of(told) / 2
        canvas.text(min(max(x, LEFT + half), WIDTH - half), y, told, "soft", "middle")
    for n, row in enumerate(rows):
        y = top + 12 + STEP * n
        canvas.text(LEFT - 8, y + 4, short(row.name), anchor="end")
        if math.isfinite(row.low) and math.isfinite(row.high):
            _interval(canvas, axis, y, row.low, row.high, row.colour)
        if math.isfinite(row.value):
            told = f"{row.name}: {row.value:.4f}"
            if math.isfinite(row.low):
                told += f" [{row.low:.4f}, {row.high:.4f}]"
            canvas.dot(axis.at(row.value), y, row.colour, told)
    return canvas


def gains(
    names: Sequence[str], series: Mapping[str, Sequence[tuple[float, float, float]]], label: str
) -> Canvas:
    """Draws how much better hospitals are than alone, with intervals, under some methods.

    Args:
        names: The hospitals.
        series: By method, for each hospital the gain and the ends of its interval.
        label: What the axis is.
    """
    step = 7 * len(series) + 8
    rows = [Row("", *found) for values in series.values() for found in values]
    known = [0.0, *(row.value for row in rows if math.isfinite(row.value))]
    axis = Axis.over([*known, *reach(rows, known)], LEFT, WIDTH - RIGHT)
    top = 12.0 + 14 * len(series)
    bottom = top + step * len(names) + 4
    canvas = Canvas(label, bottom + 36)
    scale(canvas, axis, top, bottom, label)
    canvas.line((axis.at(0), top), (axis.at(0), bottom), colour="ink")
    for k, (method, values) in enumerate(series.items()):
        canvas.dot(LEFT + 4, 11 + 14 * k, SERIES[k], method)
        canvas.text(LEFT + 14, 15 + 14 * k, method, SERIES[k])
        for n, (value, low, high) in enumerate(values):
            if not math.isfinite(value):
                continue
            y = top + 4 + step * n + 7 * k + 4
            told = f"{names[n]}, {method}: {value:+.4f}"
            if math.isfinite(low):
                told += f" [{low:+.4f}, {high:+.4f}]"
                _interval(canvas, axis, y, low, high, SERIES[k])
            canvas.dot(axis.at(value), y, SERIES[k], told, 3.2)
    for n, name in enumerate(names):
        y = top + 4 + step * n + 3.5 * len(series) + 4
        canvas.text(LEFT - 8, y, short(name), anchor="end")
    return canvas


def _interval(canvas: Canvas, axis: Axis, y: float, low: float, high: float, colour: str) -> None:
    """Draws an interval, with an arrow where it goes on beyond the axis."""
    left, right = axis.at(low), axis.at(high)
    canvas.line((left, y), (right, y), colour=colour, width=1.6)
    if low < axis.low:
        canvas.line((left + 4, y - 3), (left, y), (left + 4, y + 3), colour=colour)
    if high > axis.high:
        canvas.line((right - 4, y - 3), (right, y), (right - 4, y + 3), colour=colour)


def short(name: str, most: int = 18) -> str:
    """Returns a name that fits beside a chart.

    Example:
        >>> short("fedavg"), short("a_name_that_does_not_end")
        ('fedavg', 'a_name_th…_not_end')
    """
    return name if len(name) <= most else f"{name[: most // 2]}…{name[-(most - most // 2 - 1) :]}"


def scale(canvas: Canvas, axis: Axis, top: float, bottom: float, label: str) -> None:
    """Draws the axis below a chart, and its lines across it."""
    for tick in axis.ticks():
        x = axis.at(tick)
        canvas.line((x, top), (x, bottom))
        canvas.text(x, bottom + 13, f"{tick:g}", "soft", "middle")
    canvas.text((axis.start + axis.end) / 2, bottom + 30, label, "soft", "middle")
