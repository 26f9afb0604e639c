"""Draws ``docs/house.svg``: the packages of medfed in their layers, and which imports which.

    python docs/house_picture.py

Layers are those that ``lint-imports`` checks, arrows are the imports themselves: one is left out if
others lead from the same package to the same package.
"""

from __future__ import annotations

import ast
import re
import textwrap
import tomllib
from pathlib import Path

import grimp
import matplotlib as mpl
import networkx as nx
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

ROOT = Path(__file__).parent.parent
INK, LINE, FILL, EDGE = "#10242b", "#7d8f98", "#e6edf0", "#0f8b8d"
WIDTH, HEIGHT, GAP = 30.0, 6.0, 3.4


def layers() -> list[list[str]]:
    """Returns the packages of every layer, from the top."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    rows = next(c["layers"] for c in contracts["contracts"] if c["type"] == "layers")
    return [row.split(" | ") for row in rows]


def purpose(package: str) -> str:
    """Returns the first sentence of a package, or of a module of that name."""
    place = ROOT / "medfed" / package
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    sentences = re.split(r"\.\s|\.$", ast.get_docstring(ast.parse(file.read_text())) or "")
    return sentences[0].replace("`", "")


def imports(packages: list[str]) -> nx.DiGraph:
    """Returns which package imports which, without what follows from other arrows."""
    graph = grimp.build_graph("medfed", exclude_type_checking_imports=True)
    every = nx.DiGraph()
    every.add_nodes_from(packages)
    for module in graph.modules:
        for other in graph.find_modules_directly_imported_by(module):
            pair = [name.split(".")[1] for name in (module, other) if name.count(".")]
            if len(pair) == 2 and pair[0] != pair[1]:
                every.add_edge(*pair)
    return nx.transitive_reduction(every)


def box(ax: Axes, x: float, y: float, package: str) -> None:
    """Draws a package with what it is for."""
    style = "round,pad=0,rounding_size=0.8"
    ax.add_patch(FancyBboxPatch((x, y), WIDTH, HEIGHT, boxstyle=style, fc=FILL, ec=EDGE, lw=1.1))
    ax.text(x + 0.9, y + HEIGHT - 1.3, package, fontsize=10, weight="bold", color=INK, va="center")
    ax.text(
        x + 0.9,
        y + 2.0,
        textwrap.fill(purpose(package), 44, max_lines=2, placeholder=" …"),
        fontsize=7,
        color=INK,
        va="center",
    )


def arrows() -> list[tuple[str, str]]:
    """Returns the pairs of packages of which the first imports the second, in order."""
    packages = [package for row in layers() for package in row]
    return sorted(pair for pair in imports(packages).edges if set(pair) <= set(packages))


def described() -> str:
    """Returns words and arrows as text, by which a test knows that the picture is of today."""
    words = [f"{package}: {purpose(package)}" for row in layers() for package in row]
    return "; ".join([*words, *(f"{one} to {other}" for one, other in arrows())])


def drawn() -> Figure:
    """Returns the picture."""
    rows = layers()
    height = len(rows) * (HEIGHT + GAP)
    figure = Figure(figsize=(8.4, 8.4 * height / 100))
    ax = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    ax.set(xlim=(0, 100), ylim=(0, height))
    ax.axis("off")
    places = {}
    for number, row in enumerate(rows):
        y = height - (number + 1) * (HEIGHT + GAP) + GAP / 2
        step = 100 / len(row)
        for column, package in enumerate(row):
            places[package] = (column + 0.5) * step - WIDTH / 2, y
    for one, other in arrows():
        (x, y), (to_x, to_y) = places[one], places[other]
        bend = 0.0 if y - to_y < 1.5 * (HEIGHT + GAP) else 0.35 * (1 if x <= to_x else -1)
        ax.add_patch(
            FancyArrowPatch(
                (x + WIDTH / 2, y),
                (to_x + WIDTH / 2, to_y + HEIGHT),
                arrowstyle="-|>,head_length=4,head_width=2",
                connectionstyle=f"arc3,rad={bend}",
                lw=1.1,
                color=LINE,
                zorder=0.5,
            )
        )
    for package, (x, y) in places.items():
        box(ax, x, y, package)
    return figure


if __name__ == "__main__":
    mpl.rcParams["svg.hashsalt"] = "house"
    place, known = ROOT / "docs/house.svg", {"Date": None, "Description": described()}
    drawn().savefig(place, transparent=True, metadata=known)
