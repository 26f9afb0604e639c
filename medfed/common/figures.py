"""Figures as files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medfed.common.console import caption
from medfed.common.files import refuse_links, replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Files of the same figure are the same, so they do not tell the time.
FORMATS: dict[str, dict[str, Any]] = {
    "png": {},
    "pdf": {"CreationDate": None},
    "svg": {"Date": None},
}


def save_figures(
    folder: Path, figures: Mapping[str, Figure | None], kind: str = "png"
) -> dict[str, Path]:
    """Writes figures as PNG files that are whole or not there, and as vectors where wanted.

    Args:
        folder: Made where it is not there.
        figures: Name to figure; ``None`` for one that there is nothing to draw for.
        kind: Of `FORMATS`; beside PNG, which reports show, ``pdf`` or ``svg``. With ``none``
            nothing is written.

    Returns:
        Name to PNG file.

    Raises:
        ConfigError: If the folder is a link.
    """
    if kind == "none":
        return {}
    refuse_links(folder)
    from matplotlib import rc_context

    paths = {}
    for name, figure in figures.items():
        if figure is None:
            continue
        paths[name] = folder / f"{name}.png"
        for ending in dict.fromkeys(("png", kind)):
            style = {"svg.hashsalt": name, "pdf.fonttype": 42}  # text stays text
            with replacing(folder / f"{name}.{ending}") as partial, rc_context(style):
                figure.savefig(partial, format=ending, dpi=130, metadata=FORMATS[ending])
    return paths


def stacked_bars(
    axes: Axes, values: Mapping[str, Mapping[str, float]], colours: Sequence[str], **style: Any
) -> float:
    """Draws a horizontal bar per name, the first on top, of one piece per label.

    Args:
        axes: Where to draw.
        values: By label the length of the piece of each name.
        colours: A colour for each label, from the start again where there are more labels.
        style: As :meth:`matplotlib.axes.Axes.barh` takes it.

    Returns:
        The length of the longest bar.
    """
    ends: dict[str, float] = {}
    names: list[str] = []
    for k, (label, lengths) in enumerate(values.items()):
        left = [ends.get(name, 0.0) for name in lengths]
        style |= {"label": label, "color": colours[k % len(colours)]}
        names = list(lengths)
        axes.barh(range(len(names)), list(lengths.values()), left=left, **style)
        ends |= {name: start + lengths[name] for start, name in zip(left, lengths, strict=True)}
    axes.set_yticks(range(len(names)), [caption(name) for name in names])
    return max(ends.values())


def legend_above(axes: Axes, columns: int) -> None:
    """Puts a legend above a panel."""
    axes.legend(
        fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=columns, frameon=False
    )


def legend_right(
    axes: Axes, of: Axes | None = None, title: str | None = None, fontsize: int = 9
) -> None:
    """Puts a legend right of a panel, by default its own."""
    named = (of or axes).get_legend_handles_labels()
    place: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5), "frameon": False}
    axes.legend(*named, title=title, fontsize=fontsize, **place)


def colours(count: int, few: Sequence[str], end: float = 1.0) -> list[str]:
    """Returns a colour for each of several things: distinct ones, or a scale where there are many.

    Args:
        count: How many things.
        few: Colours that can be told apart.
        end: The end of the scale, of which 1 is bright yellow.

    Example:
        >>> colours(2, ["#0072B2", "#D55E00"]), colours(3, ["#0072B2", "#D55E00"])
        (['#0072B2', '#D55E00'], ['#440154', '#21918c', '#fde725'])
    """
    if count <= len(few):
        return list(few[:count])
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colormaps["viridis"](end * k / (count - 1))) for k in range(count)]
