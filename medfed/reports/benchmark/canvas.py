"""Pictures of a report as lines, dots, boxes and words: SVG for a page, vector files for papers."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 400  # as wide as a phone, so that words stay readable there
_SIZE = 11.5  # of words
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
Anchor = Literal["start", "middle", "end"]
_ALIGN = {"start": "left", "middle": "center", "end": "right"}


class Mark(NamedTuple):
    """One thing that is drawn.

    Attributes:
        shape: ``line``, ``dot``, ``box`` or ``text``.
        points: Its places; of a box two opposite corners.
        colour: One of `COLOURS`.
        text: What stands there; of other shapes, what a pointer at it shows.
        width: Of a line, radius of a dot, size of words.
        dashed: Whether a line is.
        anchor: Of words.
        alpha: How much of a box is seen.
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
    """A picture, to be drawn upon.

    Attributes:
        label: What it shows, for those who do not see it.
        height: Its height; it is `WIDTH` wide.
        marks: What is drawn, the first one below.
    """

    label: str
    height: float = 0.0
    marks: list[Mark] = field(default_factory=list)

    def line(
        self, *points: tuple[float, float], colour: str = "line", width: float = 1,
        dashed: bool = False, told: str = "",
    ) -> None:  # fmt: skip
        """Draws a line through points."""
        self.marks.append(Mark("line", points, colour, told, width, dashed))

    def dot(self, x: float, y: float, colour: str, told: str, radius: float = 4) -> None:
        """Draws a dot."""
        self.marks.append(Mark("dot", ((x, y),), colour, told, radius))

    def box(
        self, x: float, y: float, right: float, bottom: float, colour: str, told: str = "",
        alpha: float = 1.0,
    ) -> None:  # fmt: skip
        """Draws a filled box."""
        self.marks.append(Mark("box", ((x, y), (right, bottom)), colour, told, alpha=alpha))

    def text(
        self, x: float, y: float, text: str, colour: str = "ink", anchor: Anchor = "start",
        size: float = _SIZE,
    ) -> None:  # fmt: skip
        """Writes words whose base line is at ``y``."""
        self.marks.append(Mark("text", ((x, y),), colour, text, size, anchor=anchor))

    def svg(self) -> str:
        """Returns it for a page that has :func:`style`."""
        drawn = "".join(map(_svg, self.marks))
        label = escape(self.label, quote=True)
        box = f"0 0 {WIDTH} {self.height:g}"
        return f'<svg viewBox="{box}" role="img" aria-label="{label}">{drawn}</svg>'

    def figure(self) -> Figure:
        """Returns it for a file, in the colours of paper."""
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle

        scale = 100  # points of the picture in an inch
        figure = Figure(figsize=(WIDTH / scale, self.height / scale))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, WIDTH), ylim=(self.height, 0))
        axes.axis("off")
        unit = 72 / scale
        for mark in self.marks:
            colour, (x, y) = COLOURS[mark.colour][0], mark.points[0]
            if mark.shape == "line":
                dashes = (0, (3, 3)) if mark.dashed else "-"
                width = mark.width * unit
                axes.plot(*zip(*mark.points, strict=True), color=colour, lw=width, ls=dashes)
            elif mark.shape == "dot":
                axes.plot(x, y, "o", color=colour, ms=2 * mark.width * unit, mew=0)
            elif mark.shape == "box":
                right, bottom = mark.points[1]
                box = Rectangle((x, y), right - x, bottom - y, color=colour, alpha=mark.alpha, lw=0)
                axes.add_patch(box)
            else:
                words = mark.text.replace("$", r"\$")
                look: dict[str, Any] = {"color": colour, "fontsize": mark.width * unit * 0.93}
                axes.text(x, y, words, ha=_ALIGN[mark.anchor], va="baseline", **look)
        return figure


def _svg(mark: Mark) -> str:
    told = f"<title>{escape(mark.text)}</title>" if mark.text else ""
    x, y = mark.points[0]
    if mark.shape == "line":
        path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in mark.points)
        dash = ' stroke-dasharray="3 3"' if mark.dashed else ""
        width = "" if mark.width == 1 else f' stroke-width="{mark.width:g}"'
        return f'<path class="l {mark.colour}" d="{path}"{width}{dash}>{told}</path>'
    if mark.shape == "dot":
        place = f'cx="{x:.1f}" cy="{y:.1f}" r="{mark.width:g}"'
        return f'<circle class="f {mark.colour}" {place}>{told}</circle>'
    if mark.shape == "box":
        right, bottom = mark.points[1]
        place = f'x="{x:.1f}" y="{y:.1f}" width="{right - x:.1f}" height="{bottom - y:.1f}"'
        alpha = "" if mark.alpha == 1 else f' opacity="{mark.alpha:.2f}"'
        return f'<rect class="f {mark.colour}" {place}{alpha}>{told}</rect>'
    size = "" if mark.width == _SIZE else f' font-size="{mark.width:g}"'
    anchor = "" if mark.anchor == "start" else f' text-anchor="{mark.anchor}"'
    words = escape(mark.text)
    return f'<text class="{mark.colour}" x="{x:.1f}" y="{y:.1f}"{size}{anchor}>{words}</text>'


def width_of(text: str, size: float = _SIZE) -> float:
    """Returns about how wide words are.

    Example:
        >>> round(width_of("fedavg"))
        39
    """
    return _LETTER * size * len(text)


def style() -> str:
    """Returns the colours of a page and of its pictures: light, dark, and in print."""
    light, dark = (
        "".join(f"--{name}:{both[n]};" for name, both in COLOURS.items()) for n in (0, 1)
    )
    kinds = "".join(f"svg .{name}{{--c:var(--{name})}}" for name in COLOURS)
    return (
        f":root{{color-scheme:light dark;{light}}}"
        f"@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"
        "@media print{:root{color-scheme:light}}"
        f"{kinds}svg .l{{stroke:var(--c);fill:none}}svg .f{{fill:var(--c)}}"
        f"svg{{font:{_SIZE}px system-ui,sans-serif}}svg text{{fill:var(--c)}}"
    )
