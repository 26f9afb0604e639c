"""The FROC picture of a run on candidates: sensitivity against false positives per scan."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from medfed.common.figures import legend_right
from medfed.common.names import caption
from medfed.functional.froc import ALARMS, sensitivities
from medfed.functional.weighted_scores import Floats
from medfed.run.intervals import Examined, joined

_MANY = 8  # clients from which on they are grey


def froc_curves(tested: Examined) -> Figure | None:
    """Draws a line per client and one of all candidates together, whose legend has the CPM.

    Args:
        tested: What the test has left.

    Returns:
        A figure; None where the samples are no candidates, or no client has a lesion.
    """
    lines: dict[str, tuple[Floats, Floats]] = {}
    grid = np.geomspace(ALARMS[0], ALARMS[-1], 97)
    parts = {c: (cases, tested.patients(c)) for c, cases in tested.cases.items()}
    if len(parts) > 1 and tested.complete:
        everything = joined([*tested.cases.values()])
        parts["pooled"] = everything, sum(map(tested.patients, tested.cases))
    for name, (cases, scans) in parts.items():
        if "lesion" in cases and cases["lesion"].any():
            of = cases["score"], cases["lesion"], np.ones((1, len(cases["score"])))
            count = np.array([float(scans)])
            curve = sensitivities(*of, count, tuple(grid))[0]
            lines[name] = curve, sensitivities(*of, count)[0]
    if not lines:
        return None
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    for name, (curve, points) in lines.items():
        style: dict[str, Any] = {"lw": 1.2, "label": f"{caption(name)} ({points.mean():.3f})"}
        if len(lines) > _MANY:
            style = {"lw": 0.8, "color": "0.65"}
        if name == "pooled":
            style = {"lw": 2.4, "color": "black", "label": f"all together ({points.mean():.3f})"}
        (line,) = axes.plot(grid, curve, **style)
        axes.plot(ALARMS, points, "o", ms=3.5, color=line.get_color())
    axes.set_xscale("log", base=2)
    axes.set_xticks(ALARMS, ["1/8", "1/4", "1/2", "1", "2", "4", "8"])
    axes.set(
        xlabel="false positives per scan, of the candidates kept",
        ylabel="sensitivity to nodule candidates",
        ylim=(0, 1.02),
    )
    axes.grid(alpha=0.3)
    legend_right(axes, title="mean of the points (CPM)", fontsize=8)
    return figure
