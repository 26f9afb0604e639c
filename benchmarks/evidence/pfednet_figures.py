"""Two plots of pFedNet's authors, on real patients: accuracy by λ, and compression by CER's γ.

    python benchmarks/evidence/pfednet_figures.py --out docs

draws ``pfednet_lambda.png`` and ``pfednet_gamma.png`` from ``docs/evidence.json``; the first
docstring of ``benchmarks/evidence/evidence.py`` says what computes it. What the authors plot is in
``resultPlotter.py`` of their code (github.com/ApplicationTechnologyOfMedicalBigData/pFedNet-code).
Their γ is absolute; ours is a multiple of the mean magnitude of what is sent.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evidence import (  # type: ignore[import-not-found]
    LAMBDA,
    STORE,
    compressed,
    compression,
    gap_of,
    path_of,
)
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Tasks = Mapping[str, Any]
IMBALANCE = {f"stroke_imbalance/delta_{delta}": f"δ = {delta}" for delta in (1, 2, 4)}
PANELS = (
    ("Strokes, 5 invented hospitals: AUROC", "mean", IMBALANCE),
    ("Strokes, 5 invented hospitals: accuracy", "accuracy", IMBALANCE),
    ("Strokes, 21 hospitals: AUROC", "mean", {"stroke/hospitals": ""}),
    ("Heart disease, 4 hospitals: AUROC", "mean", {"heart/centres": ""}),
    ("Retinas, 3 clinics: Dice", "mean", {"retina_centres/hospitals": ""}),
    ("Gliomas, 4 hospitals: Dice", "mean", {"lgg/hospitals": ""}),
)
SENT = {
    "stroke_imbalance/delta_4": "strokes, δ = 4",
    "retina_centres/hospitals": "retinas",
    "lgg/hospitals": "gliomas",
}
COLOURS = ("#0072b2", "#e69f00", "#009e73")  # Okabe and Ito: told apart by the colour-blind
MARKS = "os^"


def line(
    axes: Axes, values: list[str], points: list[Mapping[str, float]], n: int, of: int, name: str
) -> None:
    """Draws differences with their intervals over values that stand evenly."""
    at = [position + (n - (of - 1) / 2) * 0.12 for position in range(len(values))]
    mean = [point["mean"] for point in points]
    reach = [
        [point["mean"] - point["low"] for point in points],
        [point["high"] - point["mean"] for point in points],
    ]
    look: dict[str, Any] = {"color": COLOURS[n], "marker": MARKS[n], "capsize": 3, "lw": 1}
    axes.errorbar(at, mean, yerr=reach, label=name, **look)


def of_lambda(tasks: Tasks) -> Figure:
    """The score at each λ less that at λ = 0, with 95 % intervals."""
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    for axes, (title, what, named) in zip(figure.subplots(2, 3).flat, PANELS, strict=True):
        longest: list[str] = []
        for n, (name, words) in enumerate(named.items()):
            task = tasks[name]
            arms = task["arms"]
            path = path_of(arms, LAMBDA)
            gaps = [gap_of(arms[a], arms[path["0"]], task["overlap"], what) for a in path.values()]
            line(axes, list(path), gaps, n, len(named), words)
            longest = max(longest, list(path), key=len)
        axes.axhline(0, color="0.6", lw=0.8, zorder=0)
        axes.set_title(title, fontsize=11)
        axes.set(xlabel="λ", ylabel="difference to λ = 0")
        axes.set_xticks(range(len(longest)), longest, fontsize=9)
        if len(named) > 1:
            axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def of_gamma(tasks: Tasks) -> Figure:
    """By how much messages shrink at each γ, to and from hospitals, and what it costs."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    to, back, cost = figure.subplots(1, 3)
    values: list[str] = []
    for n, (name, words) in enumerate(SENT.items()):
        task = tasks[name]
        arms, path = task["arms"], compressed(task["arms"])
        values = list(path)
        at = [position + (n - 1) * 0.25 for position in range(len(values))]
        for axes, way in ((to, "down"), (back, "up")):
            times = list(compression(task, way).values())
            axes.bar(at, times, 0.23, color=COLOURS[n], label=words)
        gaps = [gap_of(arms[a], arms["pfednet"], task["overlap"]) for a in path.values()]
        line(cost, values, gaps, n, len(SENT), words)
    for axes, title, label in (
        (to, "Messages to hospitals", "times smaller than uncompressed"),
        (back, "Messages from hospitals", "times smaller than uncompressed"),
        (cost, "AUROC or Dice", "difference to uncompressed"),
    ):
        axes.set(title=title, xlabel="γ of CER before STC (0: STC alone)", ylabel=label)
        axes.set_xticks(range(len(values)), values)
        axes.spines[["top", "right"]].set_visible(False)
    cost.axhline(0, color="0.6", lw=0.8, zorder=0)
    cost.legend(frameon=False, loc="lower left")
    return figure


def main() -> None:
    """Draws both."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("outputs/evidence"), help="their folder")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    tasks = json.loads(STORE.read_text(encoding="utf-8"))["benchmark"]["tasks"]
    for name, draw in (("lambda", of_lambda), ("gamma", of_gamma)):
        file = out / f"pfednet_{name}.png"
        draw(tasks).savefig(file, dpi=110)
        print(file)


if __name__ == "__main__":
    main()
