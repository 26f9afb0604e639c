"""Pictures of a report as SVG text: they scale, print, and take their colours from the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from medfed.common.console import size

_WIDTH, _LEFT, _RIGHT = 640, 150, 20
# Apart from each other for colour-blind readers too (Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7f7f7f")


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


def forest(
    rows: Sequence[tuple[str, float, float, float]],
    lines: Mapping[str, float],
    label: str,
) -> str:
    """Draws methods with their intervals, below each other, and lines across all of them.

    Args:
        rows: Name, value, and the ends of its interval.
        lines: Values by name, such as the floor and the ceiling.
        label: What the axis is.

    Returns:
        An SVG element.
    """
    height = 22 * len(rows) + 52
    wanted = [v for row in rows for v in row[1:2]] + [*lines.values()]
    spread = max((v for v in wanted if math.isfinite(v)), default=1.0) - min(
        (v for v in wanted if math.isfinite(v)), default=0.0
    )
    # An interval of few splits may be far wider than all that was measured.
    ends = [
        min(max(v, row[1] - 2 * spread), row[1] + 2 * spread)
        for row in rows
        for v in row[2:]
        if math.isfinite(v) and math.isfinite(row[1])
    ]
    axis = Axis.over([*wanted, *ends], _LEFT, _WIDTH - _RIGHT)
    parts = [_grid(axis, height - 36, label)]
    for name, value in lines.items():
        if math.isfinite(value):
            x = axis.at(value)
            parts.append(f'<line class="mark" x1="{x}" x2="{x}" y1="14" y2="{height - 36}"/>')
            parts.append(f'<text class="note" x="{x}" y="10">{escape(name)}</text>')
    for n, (name, value, low, high) in enumerate(rows):
        y = 28 + 22 * n
        parts.append(f'<text class="name" x="{_LEFT - 8}" y="{y + 4}">{escape(name)}</text>')
        if math.isfinite(low) and math.isfinite(high):
            a, b = axis.at(low), axis.at(high)
            parts.append(f'<line class="interval" x1="{a}" x2="{b}" y1="{y}" y2="{y}"/>')
        if math.isfinite(value):
            told = f"{name}: {value:.4f} [{low:.4f}, {high:.4f}]"
            parts.append(_dot(axis.at(value), y, told))
    return _picture(parts, height, label)


def curves(
    at: Sequence[float], lines: Mapping[str, Sequence[float]], x_label: str, y_label: str
) -> str:
    """Draws a line for each method over a dial; the places of the dial are evenly apart.

    Args:
        at: The places.
        lines: Values by method.
        x_label: What the dial is.
        y_label: What the values are.
    """
    height = 300
    y_axis = Axis.over([v for values in lines.values() for v in values], 240, 20)
    step = (_WIDTH - _RIGHT - 60 - 120) / max(1, len(at) - 1)
    places = [60 + step * n for n in range(len(at))]
    parts = [
        f'<line class="grid" x1="60" x2="{places[-1]}" y1="{y_axis.at(t)}" y2="{y_axis.at(t)}"/>'
        f'<text class="name" x="52" y="{y_axis.at(t) + 4}">{t:g}</text>'
        for t in y_axis.ticks()
    ]
    parts += [
        f'<text class="tick" x="{x}" y="258">{v:g}</text>' for x, v in zip(places, at, strict=True)
    ]
    parts.append(
        f'<text class="tick" x="{(places[0] + places[-1]) / 2}" y="280">{escape(x_label)}</text>'
    )
    ends: list[float] = []
    for n, (name, values) in enumerate(lines.items()):
        colour = COLOURS[n % len(COLOURS)]
        dash = "" if n < len(COLOURS) else ' stroke-dasharray="5 3"'
        points = " ".join(
            f"{x:.1f},{y_axis.at(v)}"
            for x, v in zip(places, values, strict=True)
            if math.isfinite(v)
        )
        parts.append(
            f'<polyline fill="none" stroke="{colour}" stroke-width="2"{dash} points="{points}"/>'
        )
        y = y_axis.at(values[-1])
        while any(abs(y - other) < 13 for other in ends):  # names do not lie on each other
            y += 13
        ends.append(y)
        place = f'x="{places[-1] + 8:.1f}" y="{y + 4}" fill="{colour}"'
        parts.append(f'<text class="line" {place}>{escape(name)}</text>')
    return _picture(parts, max(height, int(max(ends, default=0)) + 20), f"{y_label} over {x_label}")


def scatter(points: Mapping[str, tuple[float, float]], x_label: str, y_label: str) -> str:
    """Draws methods by what they send, on a logarithmic axis, and what they reach.

    Args:
        points: By method, bytes first; what sends none stands at the left end.
        x_label: What the first number is.
        y_label: What the second number is.
    """
    height = 300
    logs = {n: math.log10(x) if x > 0 else -math.inf for n, (x, _) in points.items()}
    x_axis = Axis.over([*logs.values()], 70, _WIDTH - 90)
    y_axis = Axis.over([y for _, y in points.values()], 240, 20)
    parts = [
        f'<line class="grid" x1="60" x2="{_WIDTH - 80}" y1="{y_axis.at(t)}" y2="{y_axis.at(t)}"/>'
        f'<text class="name" x="52" y="{y_axis.at(t) + 4}">{t:g}</text>'
        for t in y_axis.ticks()
    ]
    steps = (1, 2, 5) if x_axis.high - x_axis.low < 2 else (1,)
    decades = range(math.floor(x_axis.low), math.ceil(x_axis.high))
    ticks = [s * 10.0**n for n in decades for s in steps]
    ticks = [t for t in ticks if x_axis.low <= math.log10(t) <= x_axis.high]
    ticks = ticks or [x for x, _ in points.values() if x > 0][:1]
    parts += [
        f'<text class="tick" x="{x_axis.at(math.log10(t))}" y="258">{size(round(t))}</text>'
        for t in ticks
    ]
    parts.append(f'<text class="tick" x="{_WIDTH / 2}" y="280">{escape(x_label)}</text>')
    taken: list[tuple[float, float]] = []
    for name, (x, y) in points.items():
        if math.isfinite(y):
            place, text = x_axis.at(logs[name]) if x > 0 else 60, y_axis.at(y)
            parts.append(_dot(place, text, f"{name}: {size(round(x))}, {y:.4f}"))
            while any(abs(place - a) < 90 and abs(text - b) < 13 for a, b in taken):
                text += 13
            taken.append((place, text))
            parts.append(f'<text class="line" x="{place + 7}" y="{text + 4}">{escape(name)}</text>')
    return _picture(parts, height, f"{y_label} over {x_label}")


def _grid(axis: Axis, bottom: float, label: str) -> str:
    ticks = "".join(
        f'<line class="grid" x1="{axis.at(t)}" x2="{axis.at(t)}" y1="14" y2="{bottom}"/>'
        f'<text class="tick" x="{axis.at(t)}" y="{bottom + 14}">{t:g}</text>'
        for t in axis.ticks()
    )
    middle = (axis.start + axis.end) / 2
    return f'{ticks}<text class="tick" x="{middle}" y="{bottom + 31}">{escape(label)}</text>'


def _dot(x: float, y: float, told: str) -> str:
    return f'<circle class="dot" cx="{x}" cy="{y}" r="4.5"><title>{escape(told)}</title></circle>'


def _picture(parts: Sequence[str], height: int, label: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(label, quote=True)}">'
        f"{''.join(parts)}</svg>"
    )
