"""Writes figures as files."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medfed.common.files import refuse_links, replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# Without a date, so that the same figure gives the same file.
FORMATS: dict[str, dict[str, Any]] = {
    "png": {},
    "pdf": {"CreationDate": None},
    "svg": {"Date": None},
}


def save_figures(
    folder: Path,
    figures: Mapping[str, Figure | None],
    kind: str = "png",
    endings: Sequence[str] = (),
) -> dict[str, Path]:
    """Writes figures as complete PNG files and, on request, as vector files.

    Args:
        folder: The folder, which is made if missing.
        figures: Name to figure; ``None`` if there is nothing to draw.
        kind: One of `FORMATS`: ``png``, which reports show; ``pdf`` or ``svg``, in addition to PNG;
            ``none``, which writes nothing.
        endings: The formats, where they are others than PNG and ``kind``.
    """
    if kind == "none":
        return {}
    refuse_links(folder)
    from matplotlib import rc_context

    logging.getLogger("fontTools").setLevel(logging.WARNING)  # it tells of every glyph of a PDF
    paths = {}
    for name, figure in figures.items():
        if figure is None:
            continue
        paths[name] = folder / f"{name}.png"
        for ending in endings or dict.fromkeys(("png", kind)):
            # Text stays text.
            style = {"svg.hashsalt": name, "svg.fonttype": "none", "pdf.fonttype": 42}
            with replacing(folder / f"{name}.{ending}") as partial, rc_context(style):
                figure.savefig(partial, format=ending, dpi=130, metadata=FORMATS[ending])
    return paths


def colours(count: int, few: Sequence[str], end: float = 1.0) -> list[str]:
    """Returns a colour for each of several things: distinct colours, or a scale for many things.

    Args:
        count: The number of things.
        few: Distinct colours for few things.
        end: The end of the scale, where 1 is bright yellow.

    Example:
        >>> colours(2, ["#0072B2", "#D55E00"]), colours(3, ["#0072B2", "#D55E00"])
        (['#0072B2', '#D55E00'], ['#440154', '#21918c', '#fde725'])
    """
    if count <= len(few):
        return list(few[:count])
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colormaps["viridis"](end * k / (count - 1))) for k in range(count)]
