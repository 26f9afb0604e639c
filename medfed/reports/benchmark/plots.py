"""Charts of a report on two axes: curves, and what was reached for what was sent; and shares."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from textwrap import wrap

from medfed.common.console import size
from medfed.reports.benchmark.canvas import SERIES, WIDTH, Canvas, width_of
from medfed.reports.benchmark.forests import LEFT, RIGHT, Axis, Row, reach, short

_NAMES = 108  # beside curves, for their names
Point = tuple[float, float]


def curves(
    lines: Mapping[str, Sequence[Point]],
    x_label: str,
    y_label: str,
    *,
    log: bool = False,
    evenly: bool = False,
    crossed: Sequence[Point] = (),
    colours: Mapping[str, str] | None = None,
) -> Canvas:
    """Draws a line for each method.

    Args:
        lines: Points by method, in the order of the first number.
        x_label: What the first number is.
        y_label: What the second number is.
        log: Whether the first number is on a logarithmic axis; what is not above 0 is left out.
        evenly: Whether its values stand evenly apart.
        crossed: Points to be marked.
        colours: By method; None: one after the other.
    """
    places = sorted({x for points in lines.values() for x, _ in points if not log or x > 0})

    def spread(x: float) -> float:
        if evenly:
            before = max((i for i, p in enumerate(places) if p <= x), default=0)
            after = min(before + 1, len(places) - 1)
            gap = places[after] - places[before]
            return before + ((x - places[before]) / gap if gap else 0.0)
        return math.log10(x) if log else x

    words_below = wrap(x_label, 48)
    canvas = Canvas(f"{y_label} over {x_label}", 254 + 14 * len(words_below))
    x_axis = Axis.over([spread(x) for x in places], 50, WIDTH - _NAMES)
    y_axis = Axis.over([y for p in lines.values() for _, y in p], 216, 14)
    _frame(canvas, y_axis, 50, WIDTH - _NAMES)
    if evenly:
        told = [(x_axis.at(n), f"{v:g}") for n, v in enumerate(places)]
    elif log:
        told = [(x_axis.at(math.log10(t)), size(round(t))) for t in _decades(x_axis)]
    else:
        told = [(x_axis.at(t), f"{t:g}") for t in x_axis.ticks(4)]
    for x, words in told:
        canvas.text(x, 234, words, "soft", "middle")
    for n, line in enumerate(words_below):
        canvas.text((50 + WIDTH - _NAMES) / 2, 256 + 14 * n, line, "soft", "middle")
    canvas.text(4, 10, y_label, "soft", size=10)
    ends = {}
    for k, (name, points) in enumerate(lines.items()):
        colour = (colours or {}).get(name, SERIES[k % len(SERIES)])
        seen = [(x_axis.at(spread(x)), y_axis.at(y)) for x, y in points if _seen(x, y, log)]
        if not seen:
            continue
        canvas.line(*seen, colour=colour, width=2, dashed=k >= len(SERIES), told=name)
        for (x, y), (_, value) in zip(seen, [p for p in points if _seen(*p, log)], strict=True):
            canvas.dot(x, y, colour, f"{name}: {value:.4f}", 2.4)
        ends[name] = (seen[-1][1], colour)
    for x, y in crossed:
        canvas.dot(x_axis.at(spread(x)), y_axis.at(y), "ink", f"crossing at {x:.3g}", 3.5)
        canvas.dot(x_axis.at(spread(x)), y_axis.at(y), "paper", f"crossing at {x:.3g}", 2)
    for name, y in _apart({n: y for n, (y, _) in ends.items()}, 13, 250).items():
        canvas.text(WIDTH - _NAMES + 6, y + 4, short(name, 16), ends[name][1])
    return canvas


def scatter(
    points: Mapping[str, Point], named: Mapping[str, str], front: Sequence[str], y_label: str
) -> Canvas:
    """Draws methods by what they send, on a logarithmic axis, and what they reach.

    Args:
        points: By method, bytes first; what sends none stands at the left end.
        named: The methods whose names are written, with their colours; the others have a dot each,
            which tells its name where it is pointed at.
        front: Methods in the order in which a line joins them.
        y_label: What the second number is.
    """
    canvas = Canvas(f"{y_label} over bytes sent", 300)
    logs = [math.log10(x) for x, _ in points.values() if x > 0]
    x_axis = Axis.over(logs, 74, WIDTH - 14)
    best = [Row(n, y, math.nan, math.nan) for n, (_, y) in points.items()]
    y_axis = Axis.over(reach(best), 246, 16)
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
        told = f"{name}: {size(round(x))}, {y:.4f}"
        radius = 4.5 if name in named else 3.2
        canvas.dot(*at[name], named.get(name, "soft"), told, radius)
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in at.values()]
    lines = [m.points for m in canvas.marks if m.dashed]
    for (x, y), (right, bottom) in (ends for points in lines for ends in pairwise(points)):
        taken.append((x, min(y, bottom) - 1, right, max(y, bottom) + 1))
    for name, colour in named.items():
        if name in at and (place := _free(short(name), at[name], taken)):
            taken.append(place)
            canvas.text(place[0] + 1, place[3] - 3, short(name), colour)
    return canvas


def shares(
    names: Sequence[str], blocks: Mapping[str, Sequence[Sequence[float]]], label: str
) -> Canvas:
    """Draws rows of shares between 0 and 1 as boxes, in blocks beside each other.

    Args:
        names: Of the rows.
        blocks: By title the rows.
        label: What it shows.
    """
    columns = sum(len(rows[0]) for rows in blocks.values())
    wide = (WIDTH - LEFT - RIGHT - 14 * (len(blocks) - 1)) / max(1, columns)
    canvas = Canvas(label, 26 + 14 * len(names))
    left = float(LEFT)
    for title, rows in blocks.items():
        canvas.text(left, 12, title, "soft")
        for n, row in enumerate(rows):
            for k, value in enumerate(row):
                x, y = left + k * wide, 19 + 14 * n
                told = f"{names[n]}, {title} {k}: {value:.2f}"
                shade = 0.06 + 0.94 * min(1.0, max(0.0, value))
                canvas.box(x + 0.5, y, x + wide - 0.5, y + 13, "c0", told, shade)
        left += len(rows[0]) * wide + 14
    for n, name in enumerate(names):
        canvas.text(LEFT - 8, 30 + 14 * n, short(name), anchor="end")
    return canvas


def _seen(x: float, y: float, log: bool) -> bool:
    return math.isfinite(y) and (not log or x > 0)


def _decades(axis: Axis) -> Iterator[float]:
    steps = (
        (1, 2, 5) if axis.high - axis.low < 1.2 else (1, 3) if axis.high - axis.low < 2 else (1,)
    )
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
    found: dict[str, float] = {}
    last = -math.inf
    for name in order:
        last = found[name] = max(places[name], last + gap)
    limit = bottom
    for name in reversed(order):
        found[name] = min(found[name], limit)
        limit = found[name] - gap
    return found


def _free(
    text: str, at: Point, taken: Sequence[tuple[float, float, float, float]]
) -> tuple[float, float, float, float] | None:
    """Returns a place for a name around its dot that nothing else covers; None: there is none."""
    wide, (x, y) = width_of(text) + 2, at
    for down in (0, -12, 12, -24, 24, -36, 36):
        for left in (x + 6, x - 6 - wide):
            place = (left, y - 7 + down, left + wide, y + 7 + down)
            inside = place[0] >= 50 and place[2] <= WIDTH and place[1] >= 0 and place[3] <= 252
            if inside and not any(
                place[0] < b[2] and b[0] < place[2] and place[1] < b[3] and b[1] < place[3]
                for b in taken
            ):
                return place
    return None
