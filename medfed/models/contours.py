"""Contours of predictions, drawn with Matplotlib's object interface (no global pyplot state)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

from medfed.common.console import caption
from medfed.common.figures import legend_below
from medfed.models.segmentation_meter import iou_and_dice, overlap_counts
from medfed.standalone.inference import margins
from medfed.standalone.preparation import bounding_box


class Case(NamedTuple):
    """A slice of a client."""

    image: Tensor  # ``(C, H, W)``
    truth: Tensor  # ``(R, H, W)``
    probabilities: Mapping[str, Tensor]  # ``(R, H, W)`` by method
    channels: Sequence[str] = ()  # names of the channels, if they are known


# Distinct under colour-vision deficiency and bright enough on a grey image (Okabe and Ito).
_COLOURS = ("#E69F00", "#56B4E9", "#CC79A7", "#F0E442", "#D55E00", "#0072B2")
_TRUE = "#32CD32"  # visible on dark tissue and on bright lesions
_PANEL = 2.4  # inches


def region_colours(count: int) -> list[str]:
    """Returns a colour per region."""
    return [_COLOURS[r % len(_COLOURS)] for r in range(count)]


def contour_grid(
    cases: Mapping[str, Case],
    regions: Sequence[str],
    *,
    threshold: float = 0.5,
    exclusive: bool = False,
) -> Figure:
    """Draws true and predicted contours, a row per client and a column per method.

    The background of a row is its client's first channel that is not constant, named at its side.
    The first axis of an image runs to the right and the second upwards, so that heads stand
    upright. True contours are green and dashed, predicted ones coloured by region; the title of a
    panel has the Dice of its slice, averaged over the regions that are present or predicted.

    Example:
        >>> import torch
        >>> truth = torch.zeros(1, 16, 16)
        >>> truth[:, 4:9, 4:9] = 1
        >>> case = Case(truth + 0.1, truth, {"local": truth}, ["FLAIR"])
        >>> axes = contour_grid({"A": case}, ["whole"]).axes[0]
        >>> axes.get_title().split(chr(10)), axes.get_ylabel().split(chr(10))
        (['local', 'slice Dice 1.00'], ['A', 'FLAIR'])
    """
    methods = list(dict.fromkeys(m for case in cases.values() for m in case.probabilities))
    if not methods:
        raise ValueError("A picture needs at least one client with one method's prediction.")
    figure, grid = _panels(len(cases), len(methods))
    for row, (client, (image, truth, probs, names)) in zip(grid, cases.items(), strict=True):
        window, images = _window(image), _arrays(image)
        # The first channel that is not constant: missing channels are filled with zeros.
        channel = next((i for i, c in enumerate(images) if c.max() > c.min()), 0)
        for axes, method in zip(row, methods, strict=True):
            title = "no model"
            if method in probs:
                prob = margins(probs[method]) if exclusive else probs[method]
                _draw(axes, images[channel][window], truth[window], prob[window], threshold)
                title = _title(prob, truth, threshold)
            axes.spines[:].set_visible(method in probs)
            axes.set_title(title, fontsize=9)
        contrast = [caption(names[channel])] if names else []
        row[0].set_ylabel("\n".join([caption(client), *contrast]), fontsize=9)
    for axes, method in zip(grid[0], methods, strict=True):
        axes.set_title(f"{method}\n{axes.get_title()}".strip(), fontsize=9)
    _legend(figure, regions)
    return figure


def prediction_row(
    image: Tensor,
    probabilities: Tensor,
    channels: Sequence[str],
    regions: Sequence[str],
    *,
    title: str,
    aspect: float = 1.0,
) -> Figure:
    """Draws predicted contours on every contrast of one slice, for a scan without known truth.

    `image` is ``(C, H, W)``, first axis to the right and second upwards. `probabilities` is ``(R,
    H, W)``, whose contours at 0.5 are drawn.

    Example:
        >>> import torch
        >>> image = torch.rand(2, 16, 16)
        >>> figure = prediction_row(image, image[:1], ["T1w", "FLAIR"], ["whole"], title="scan")
        >>> [axes.get_title() for axes in figure.axes]
        ['T1w', 'FLAIR']
    """
    figure, grid = _panels(1, len(channels))
    window = _window(image)
    inside = probabilities[window]
    for axes, name, background in zip(grid[0], channels, _arrays(image), strict=True):
        _draw(axes, background[window], inside * 0, inside, 0.5)
        axes.set_aspect(aspect)
        axes.set_title(name, fontsize=9)
    figure.suptitle(title, fontsize=10)
    _legend(figure, regions, true=False)
    return figure


def _panels(rows: int, columns: int) -> tuple[Figure, Any]:
    """Returns a figure, and its axes ``(rows, columns)``."""
    size = (_PANEL * columns + 0.5, (_PANEL + 0.3) * rows + 0.6)
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    bare: dict[str, Any] = {"xticks": [], "yticks": []}
    return figure, figure.subplots(rows, columns, squeeze=False, subplot_kw=bare)


def _draw(axes: Any, background: np.ndarray, truth: Tensor, prob: Tensor, threshold: float) -> None:
    """Draws one panel; a contour exists only where the level is crossed."""
    low, high = np.percentile(background, (1, 99.5))
    # An axial slice of a RAS volume is (right, anterior): its second axis is drawn upwards.
    axes.imshow(background.T, cmap="gray", vmin=low, vmax=max(high, low + 1e-6), origin="lower")
    layers = zip(_arrays(truth), _arrays(prob), region_colours(len(prob)), strict=True)
    for true, predicted, colour in layers:
        if predicted.min() < threshold <= predicted.max():
            axes.contour(predicted.T, levels=[threshold], colors=[colour], linewidths=1.4)
        if true.min() < 0.5 < true.max():
            axes.contour(true.T, levels=[0.5], colors=[_TRUE], linewidths=1.1, linestyles=["--"])


def _title(prob: Tensor, truth: Tensor, threshold: float) -> str:
    counts = overlap_counts((prob > threshold)[None].cpu(), (truth > 0.5)[None].cpu())
    if not counts.any():
        return "nothing here"
    return f"slice Dice {iou_and_dice(counts[0])[1].mean().item():.2f}"


def _legend(figure: Figure, regions: Sequence[str], true: bool = True) -> None:
    lines = [Line2D([], [], color=_TRUE, linestyle="--", label="true")] * true
    lines += [
        Line2D([], [], color=colour, label=f"predicted {caption(name)}")
        for colour, name in zip(region_colours(len(regions)), regions, strict=True)
    ]
    # Green and yellow lines must be seen.
    dark = {"frameon": True, "facecolor": "0.35", "labelcolor": "white"}
    legend_below(figure, lines, 9, **dark)


def _window(image: Tensor, margin: int = 2) -> tuple[Any, ...]:
    """Bounding box of what differs from the corner, over all channels, for their last axes."""
    body = (image != image[:, :1, :1]).any(0).cpu().numpy()
    box = bounding_box(body) if body.any() else ()
    return (..., *(slice(max(s.start - margin, 0), s.stop + margin) for s in box))


def _arrays(images: Tensor) -> np.ndarray:
    array: np.ndarray = images.detach().float().cpu().numpy()
    return array
