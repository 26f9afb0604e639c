"""Writes figures as files."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len

from medfed.standalone.files import refuse_links, replacing

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure


# Without a date, so that the same figure gives the same file.
FORMATS: dict[str, dict[str, Any]] = {
    "png": {},
    "pdf": {"CreationDate": None},
    "svg": {"Date": None},
}


def save_figures(
    folder: Path, figures: Mapping[str, Figure | None], *kinds: str
) -> dict[str, Path]:
    """Writes figures as complete PNG files and, on request, as vector files."""
    if "none" in kinds:
        return {}
    refuse_links(folder)
    from matplotlib import rc_context

    logging.getLogger("fontTools").setLevel(logging.WARNING)  # it tells of every glyph of a PDF
    paths = {}
    for name, figure in figures.items():
        if figure is None:
            continue
        paths[name] = folder / f"{name}.png"
        for ending in dict.fromkeys(("png", *kinds)):
            # Text stays text.
            style = {"svg.hashsalt": name, "svg.fonttype": "none", "pdf.fonttype": 42}
            with replacing(folder / f"{name}.{ending}") as partial, rc_context(style):
                figure.savefig(partial, format=ending, dpi=130, metadata=FORMATS[ending])
    return paths


def legend_below(figure: Figure, lines: Sequence[Artist], size: float = 10.0, **style: Any) -> None:
    """Names lines below a figure, in as many columns as fit, and makes room for them."""
    longest = max((cell_len(str(line.get_label())) for line in lines), default=0)
    width = (0.62 * longest + 3.5) * size / 72
    figure.set_figwidth(max(width, figure.get_figwidth()))
    columns = min(int(figure.get_figwidth() // width), max(len(lines), 1))
    rows = -(-len(lines) // columns)
    figure.set_figheight(figure.get_figheight() + (1.4 * rows + 1) * size / 72)
    style = {"loc": "outside lower center", "frameon": False, **style}
    figure.legend(handles=lines, ncols=columns, fontsize=size, labelspacing=0.3, **style)


def colours(count: int, few: Sequence[str]) -> list[str]:
    """Returns a colour for each of several things: distinct colours, or a scale for many things."""
    if count <= len(few):
        return list(few[:count])
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colormaps["viridis"](k / (count - 1))) for k in range(count)]
