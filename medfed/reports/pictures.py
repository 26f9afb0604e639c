"""Pictures of a run: metric curves per client, the similarity graph, what travelled."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from medfed.federation.callbacks.evaluation import Record
from medfed.federation.ledger import Entry
from medfed.models.pictures import Case

if TYPE_CHECKING:
    from medfed.experiment import Experiment

_GREY = "0.6"


def metric_curves(history: Sequence[Record], metric: str, selected: int | None = None) -> Figure:
    """Draws one line per client and their mean against the round.

    Args:
        history: Validation metrics of every evaluated round.
        metric: The metric's name.
        selected: The round that validation selected, marked by a vertical line.
    """
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    clients = list(dict.fromkeys(r.client for r in history))
    rounds = sorted({r.round for r in history})
    many = len(clients) > 8
    values = {(r.round, r.client): r.metrics[metric] for r in history}
    for client in clients:
        line = [values.get((n, client), math.nan) for n in rounds]
        style: dict[str, Any] = (
            {"color": _GREY, "lw": 0.8} if many else {"lw": 1.4, "label": client}
        )
        axes.plot([n + 1 for n in rounds], line, marker="." if len(rounds) < 30 else None, **style)
    table = np.array([[values.get((n, c), math.nan) for c in clients] for n in rounds])
    known = ~np.all(np.isnan(table), axis=1)
    mean = np.full(len(rounds), np.nan)
    mean[known] = np.nanmean(table[known], axis=1)
    axes.plot([n + 1 for n in rounds], mean, color="black", lw=2.2, ls="--", label="mean")
    if selected is not None:
        axes.axvline(selected + 1, color="black", lw=0.8, ls=":", label="selected round")
    axes.set(xlabel="round", ylabel=f"validation {metric}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return figure


def bytes_per_client(entries: Sequence[Entry]) -> Figure:
    """Draws what each client sent and received, by part."""
    clients = list(dict.fromkeys(e.client for e in entries))
    kinds = list(dict.fromkeys((e.direction, e.part) for e in entries))
    figure = Figure(figsize=(6.4, 0.9 + 0.32 * len(clients) + 0.8), layout="constrained")
    axes = figure.subplots()
    left = np.zeros(len(clients))
    colours = ("#0072B2", "#56B4E9", "#009E73", "#D55E00", "#E69F00", "#CC79A7", "#F0E442", "0.5")
    for k, (direction, part) in enumerate(sorted(kinds)):
        sums = [
            sum(e.bytes for e in entries if (e.client, e.direction, e.part) == (c, direction, part))
            for c in clients
        ]
        width = np.array(sums) / 1e6
        arrow = {"up": "to server", "down": "to client"}[direction]
        axes.barh(
            clients, width, left=left, label=f"{part}, {arrow}", color=colours[k % len(colours)]
        )
        left += width
    axes.invert_yaxis()
    axes.set(xlabel="megabytes in the whole run")
    axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    return figure


def load_cases(folders: Mapping[str, Path]) -> dict[str, Case]:
    """Reads the predictions of several runs on the same slices.

    Args:
        folders: Method to run folder.

    Returns:
        Per client the image, its truth and each method's probabilities.
    """
    cases: dict[str, Case] = {}
    for method, folder in folders.items():
        for path in sorted((folder / "predictions").glob("*.npz")):
            with np.load(path) as saved:
                image, truth, prob = (torch.from_numpy(saved[k]).float() for k in saved.files)
            known = cases.get(path.stem, (image, truth, {}))
            if torch.equal(known[1], truth):
                cases[path.stem] = (known[0], truth, {**known[2], method: prob})
    return cases


def draw_run(experiment: Experiment) -> dict[str, Path]:
    """Draws all pictures of a run into its folder.

    Returns:
        Name to picture file.
    """
    evaluation, federation = experiment.evaluation, experiment.module.federation
    figures: dict[str, Figure | None] = {"bytes": None}
    best = evaluation.best_round()
    if evaluation.history:
        figures[f"val_{evaluation.metric}"] = metric_curves(
            evaluation.history, evaluation.metric, best
        )
    if any(e.bytes for e in federation.ledger.entries):
        figures["bytes"] = bytes_per_client(federation.ledger.entries)
    figures |= federation.algorithm.pictures(federation.server, federation.ids)
    method = type(federation.algorithm).__name__.lower()
    if cases := load_cases({method: experiment.folder}):
        figures["contours"] = experiment.task.picture(cases)
    return save_figures(experiment.folder / "pictures", figures)


def save_figures(folder: Path, figures: Mapping[str, Figure | None]) -> dict[str, Path]:
    """Writes figures as PNG files that are whole or not there."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for name, figure in figures.items():
        if figure is not None:
            paths[name] = folder / f"{name}.png"
            partial = folder / f"{name}.png.partial"
            figure.savefig(partial, format="png", dpi=130)
            os.replace(partial, paths[name])
    return paths
