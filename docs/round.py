"""Draws ``docs/round.svg``, one round of a federation with a personal part.

    python docs/round.py

Text stands on filled shapes and lines are grey, so the picture suits light and dark pages.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

INK, LINE = "#10242b", "#7d8f98"
SERVER, HOSPITAL, WHITE = "#cfe3e6", "#e6edf0", "#ffffff"
SHARED, OWN = ("#0f8b8d", "#b9e0df"), ("#c8641b", "#f6d5ba")  # edge and fill
NAMES = ("Hospital A", "Hospital B", "Hospital C")
WIDTH, LEFTS = 29.0, (1.0, 35.5, 70.0)


def box(ax: Axes, x: float, y: float, w: float, h: float, fill: str, edge: str) -> None:
    """Draws a filled box with round corners."""
    style = "round,pad=0,rounding_size=1.2"
    ax.add_patch(FancyBboxPatch((x, y), w, h, boxstyle=style, fc=fill, ec=edge, lw=1.2))


def part(ax: Axes, x: float, y: float, w: float, text: str, colours: tuple[str, str]) -> None:
    """Draws a part of a model with its name."""
    box(ax, x, y, w, 5.4, colours[1], colours[0])
    ax.text(x + w / 2, y + 2.6, text, ha="center", va="center", fontsize=10.5, color=INK)


def step(ax: Axes, x: float, y: float, number: str, text: str, colour: str) -> None:
    """Draws a numbered step."""
    box(ax, x, y, 27.5, 7.2, WHITE, colour)
    ax.text(x + 2.2, y + 3.5, number, ha="center", va="center", fontsize=13, color=colour)
    ax.text(x + 4.2, y + 3.5, text, ha="left", va="center", fontsize=9.6, color=INK)


def arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    """Draws an arrow between the server and a hospital."""
    style = "-|>,head_length=7,head_width=3.5"
    ax.add_patch(FancyArrowPatch(start, end, arrowstyle=style, lw=2, color=colour, shrinkB=1))


def drawn() -> Figure:
    """Returns the picture."""
    figure = Figure(figsize=(8.4, 4.7))
    ax = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    ax.set(xlim=(0, 100), ylim=(0, 56))
    ax.axis("off")
    box(ax, 30, 44, 40, 11, SERVER, LINE)
    ax.text(32, 51.7, "Server", fontsize=13, weight="bold", color=INK, va="center")
    ax.text(32, 47.5, "4", fontsize=13, color=SHARED[0], va="center")
    ax.text(34.2, 47.5, "averages what comes back", fontsize=9.6, color=INK, va="center")
    part(ax, 53.5, 49.0, 14.5, "shared part", SHARED)
    for name, left in zip(NAMES, LEFTS, strict=True):
        box(ax, left, 1, WIDTH, 31, HOSPITAL, LINE)
        ax.text(left + 1.8, 28.9, name, fontsize=12, weight="bold", color=INK, va="center")
        part(ax, left + 1.8, 20.6, 12.2, "shared", SHARED)
        part(ax, left + 15, 20.6, 12.2, "personal", OWN)
        box(ax, left + 1.8, 2.8, WIDTH - 3.6, 15.2, WHITE, OWN[0])
        ax.text(left + 3.2, 14.3, "2", fontsize=13, va="center", color=OWN[0])
        ax.text(left + 5.4, 14.3, "trains both on its patients", fontsize=9.6, va="center")
        ax.text(left + 5.4, 9.4, "Stay here: images, rows,", fontsize=9.6, va="center")
        ax.text(left + 5.4, 6.1, "names, the personal part", fontsize=9.6, va="center")
        middle = left + WIDTH / 2
        reach = 50 + (middle - 50) * 0.38
        arrow(ax, (reach - 2.5, 43.6), (middle - 5, 32.4), LINE)
        arrow(ax, (middle + 5, 32.4), (reach + 2.5, 43.6), SHARED[0])
    step(ax, 0.8, 45.9, "1", "the shared weights go\nto every hospital", LINE)
    step(ax, 71.7, 45.9, "3", "only their change comes\nback, each byte counted", SHARED[0])
    return figure


if __name__ == "__main__":
    mpl.rcParams["svg.hashsalt"] = "round"
    place = Path(__file__).with_suffix(".svg")
    drawn().savefig(place, transparent=True, metadata={"Date": None})
