"""Pictures of one run: metrics over rounds, bytes sent, memberships in canonical models.

A run on candidates also has an FROC picture; one on survival has the curves of each client.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle
from matplotlib.ticker import MaxNLocator

from medfed.common.console import caption
from medfed.common.figures import legend_below
from medfed.common.scores import Record, mean_of_known
from medfed.federation.wire.ledger import Ledger
from medfed.functional.detection import ALARM, HIT, SCAN, lesion_curve
from medfed.functional.scores import ALARMS, Floats, sensitivities
from medfed.functional.survival import SURVIVAL, kaplan_meier
from medfed.records.folder import read_predictions
from medfed.run.experiment import Experiment
from medfed.run.intervals import SplitCases, joined
from medfed.run.memberships import Memberships, leaf_order, matched

_EACH = "a line per client"
_MANY = 8  # number of clients from which on their lines are grey


def froc_curves(tested: SplitCases) -> Figure | None:
    """Draws a line per client and one for all candidates together; the legend gives the CPM."""
    lines: dict[str, tuple[Floats, Floats]] = {}
    among = ", among the candidates kept", "nodule candidates"
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
        if "lesions" in cases and cases["lesions"].any():
            every = cases, np.ones((1, len(cases["score"])))
            curve, points = (lesion_curve(*every, of)[0] for of in (tuple(grid), ALARMS))
            lines[name], among = (curve, points), ("", "nodules, the missed ones among them")
    if not lines:
        return None
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    for n, (name, (curve, points)) in enumerate(lines.items()):
        style: dict[str, Any] = {"lw": 1.2, "label": f"{caption(name)} ({points.mean():.3f})"}
        if len(lines) > _MANY:
            style = {"lw": 0.8, "color": "0.65", "label": _EACH if n == 0 else None}
        if name == "pooled":
            style = {"lw": 2.4, "color": "black", "label": f"all together ({points.mean():.3f})"}
        (line,) = axes.plot(grid, curve, **style)
        axes.plot(ALARMS, points, "o", ms=3.5, color=line.get_color())
    axes.set_xscale("log", base=2)
    axes.set_xticks(ALARMS, ["1/8", "1/4", "1/2", "1", "2", "4", "8"])
    axes.set(xlabel=f"false positives per scan{among[0]}", ylim=(0, 1.02))
    axes.set_ylabel(f"sensitivity to {among[1]}".replace(", ", ",\n"))
    axes.grid(alpha=0.3)
    legend_below(figure, axes.get_legend_handles_labels()[0], 8, title="mean sensitivity (CPM)")
    return figure


def detections(tested: SplitCases) -> Figure | None:
    """Draws a hit, a miss and a false alarm of each client, of the first 8, on axial slices.

    Circles are nodules, crosses the centres of boxes: the hit and the false alarm of the highest
    score, and the largest nodule that no box hits.
    """
    clients = [c for c, cases in tested.cases.items() if "lesions" in cases][:8]
    if not clients:
        return None
    figure = Figure(figsize=(6.4, 0.6 + 2.1 * len(clients)), layout="constrained")
    rows = figure.subplots(len(clients), 3, squeeze=False)
    for row, client in zip(rows, clients, strict=True):
        tiles = _tiles(tested, client)
        for axes, title in zip(row, ("hit", "miss", "false alarm"), strict=True):
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
            if title not in tiles:
                axes.text(0.5, 0.5, f"no {title}", ha="center", transform=axes.transAxes)
                continue
            _, image, at, lesions, score = tiles[title]
            x, y, z = np.rint(at - 0.5).astype(int).clip(0, np.array(image.shape) - 1)
            axes.imshow(image[..., z], cmap="gray", vmin=0, vmax=1)
            for box in lesions[(lesions[:, 2] <= z + 0.5) & (lesions[:, 5] >= z + 0.5)]:
                centre = (box[1] + box[4] - 1) / 2, (box[0] + box[3] - 1) / 2
                axes.add_patch(Circle(centre, (box[3] - box[0]) / 2, fill=False, ec="#56B4E9"))
            if score is not None:
                axes.plot(at[1] - 0.5, at[0] - 0.5, "x", color="#D55E00", ms=7)
            axes.set(xlim=(y - _HALF, y + _HALF), ylim=(x + _HALF, x - _HALF))
            score_text = "" if score is None else f", score {score:.2f}"
            axes.set_title(f"{caption(client)}: {title}{score_text}", fontsize=8)
    return figure


_Tile = tuple[float, Any, Floats, Floats, float | None]


def _tiles(tested: SplitCases, client: str) -> dict[str, _Tile]:
    """The best example of each kind: its rank, the scan, a place, the nodules and the score."""
    cases = tested.cases[client]
    best: dict[str, _Tile] = {}
    for batch in tested.data.clients[client].eval_batches(tested.split):
        image, label = batch["image"][0, 0].numpy(), batch["label"][0].double().numpy()
        lesions = label[label[:, 6] == 1, :6]
        here = (cases["case"] == int(batch["case"][0])) & (cases["found"] != SCAN)
        places = np.stack([cases[n][here] for n in "xyz"], 1)
        kinds, scores = cases["found"][here], cases["score"][here]
        for title, kind in (("hit", HIT), ("false alarm", ALARM)):
            for n in np.flatnonzero(kinds == kind)[:1]:  # boxes are sorted by their scores
                tile: _Tile = float(scores[n]), image, places[n], lesions, float(scores[n])
                best[title] = max(best.get(title, tile), tile, key=lambda one: one[0])
        for box in lesions:
            centre, radius = (box[:3] + box[3:]) / 2, (box[3:] - box[:3]) / 2
            if not (np.square((places - centre) / radius).sum(1) <= 1).any():
                lost: _Tile = float(radius.max()), image, centre, lesions, None
                best["miss"] = max(best.get("miss", lost), lost, key=lambda one: one[0])
    return best


def survival_curves(tested: SplitCases) -> Figure | None:
    """Draws each client's Kaplan-Meier curve and its mean predicted survival, of the largest 12.

    Both end where fewer than ten patients are at risk: beyond, single patients make the curve.
    """
    parts = sorted(tested.cases.items(), key=lambda part: -len(part[1]["case"]))[:_PANELS]
    named = {c: [n for n in cases if n.startswith(SURVIVAL[:-2])] for c, cases in parts}
    if not any(named.values()):
        return None
    rows, width = -(-len(parts) // 4), min(len(parts), 4)
    figure = Figure(figsize=(2.6 * width, 0.4 + 2.3 * rows), layout="constrained")
    panels = figure.subplots(rows, width, squeeze=False, sharex=True, sharey=True).ravel()
    for axes, (client, cases) in zip(panels, parts, strict=False):
        ones = np.ones((1, len(cases["time"])))
        times, at_risk, curve = kaplan_meier(cases["time"], cases["event"], ones)
        visible = at_risk[0] >= _AT_RISK
        axes.step([0, *times[visible]], [1, *curve[0][visible]], color="black", where="post")
        alive = {float(n.rpartition("/")[2]): float(cases[n].mean()) for n in named[client]}
        alive = {cut: s for cut, s in alive.items() if cut <= times[visible].max(initial=0)}
        axes.plot([0, *alive], [1, *alive.values()], marker=".", color=_PARTS[3])
        axes.set_title(caption(client), fontsize=8)
        axes.set_ylim(0, 1.02)
    for axes in panels[len(parts) :]:
        axes.set_visible(False)
    figure.supxlabel("time", fontsize=9)
    figure.suptitle("survival: Kaplan-Meier (steps), mean prediction (points)", fontsize=9)
    return figure


_HALF = 24  # voxels around a place
_AT_RISK, _PANELS = 10, 12  # patients behind a curve; clients with one
_PARTS = ("#0072B2", "#56B4E9", "#009E73", "#D55E00", "#E69F00", "#CC79A7", "#F0E442", "0.5")
_UNITS = ((1e9, "gigabytes"), (1e6, "megabytes"), (1e3, "kilobytes"), (1, "bytes"))
_NAMES = 45  # largest number of clients whose names are written
_MOST = 20  # clients with most bytes to show, if there are too many clients
_LINES = 60  # largest number of clients with a line each


def metric_curves(history: Sequence[Record], metric: str, selected: int | None = None) -> Figure:
    """Draws one line per client and their mean against the round."""
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    clients = list(dict.fromkeys(r.client for r in history))
    rounds = sorted({r.round for r in history})
    many = len(clients) > 8
    crowd = len(clients) > _LINES
    values = {(r.round, r.client): r.metrics[metric] for r in history}
    table = np.array([[values.get((n, c), math.nan) for c in clients] for n in rounds])
    x = np.array(rounds) + 1
    if crowd:
        _bands(axes, x, table)
    for n, (client, line) in enumerate(zip(clients, () if crowd else table.T, strict=False)):
        style: dict[str, Any] = {"lw": 1.4, "label": caption(client)}
        if many:
            style = {"color": "0.6", "lw": 0.8, "label": _EACH if n == 0 else None}
        axes.plot(x, line, marker="." if len(rounds) < 30 else None, **style)
    mean = mean_of_known(table, 1)
    axes.plot(x, mean, color="black", lw=2.2, ls="--", label="mean")
    if selected is not None:
        axes.axvline(selected + 1, color="black", lw=0.8, ls=":", label="selected round")
    axes.set(xlabel="round", ylabel=f"validation {metric}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    legend_below(figure, axes.get_legend_handles_labels()[0], 8)
    return figure


def bytes_per_client(ledger: Ledger) -> Figure:
    """Draws the bytes that each client sent and received, by part; of many clients, the largest."""
    everyone = ledger.totals("client")
    clients = [str(c) for (c,) in everyone]
    if crowd := len(clients) > _NAMES:
        clients.sort(key=lambda c: -everyone[(c,)])
    drawn = clients[:_MOST] if crowd else clients
    left = [everyone[(c,)] for c in clients[len(drawn) :]]
    sums = ledger.totals("client", "direction", "part")
    kinds = sorted({(e.direction, e.part) for e in ledger.entries})
    arrows = {"up": "to server", "down": "to client"}
    figure = Figure(figsize=(6.4, 0.9 + 0.32 * len(drawn) + 0.8), layout="constrained")
    axes = figure.subplots()
    most = max(everyone.values())
    power, unit = next((p, u) for p, u in _UNITS if most >= p)
    ends = np.zeros(len(drawn))
    for k, (way, part) in enumerate(kinds):
        lengths = np.array([sums.get((c, way, part), 0) / power for c in drawn])
        label, colour = f"{part}, {arrows[way]}", _PARTS[k % len(_PARTS)]
        axes.barh(range(len(drawn)), lengths, left=ends, label=label, color=colour)
        ends += lengths
    axes.set_yticks(range(len(drawn)), [caption(c) for c in drawn])
    axes.invert_yaxis()
    note = f"\nthe {_MOST} of {len(clients):,} clients with most bytes; " if crowd else ""
    note += f"the others down to {min(left) / power:.2g}" if crowd else ""
    axes.set(xlabel=f"{unit} in the whole run{note}")
    legend_below(figure, axes.get_legend_handles_labels()[0], 8)
    return figure


def _bands(axes: Axes, x: Floats, table: Floats) -> None:
    """Draws the ranges that hold half, eight tenths and all of very many clients."""
    for low, high, shade in ((0, 100, "0.92"), (10, 90, "0.82"), (25, 75, "0.7")):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "All-NaN slice")
            ends = np.nanpercentile(table, [low, high], axis=1)
        label = f"{high - low} % of {table.shape[1]:,} clients"
        axes.fill_between(x, *ends, color=shade, lw=0, label=label)


def draw_run(
    experiment: Experiment, best: int | None, memberships: Memberships | None
) -> dict[str, Figure | None]:
    """Draws all pictures of a run; a picture is None if there is nothing to draw."""
    evaluation, federation = experiment.evaluation, experiment.module.federation
    figures: dict[str, Figure | None] = {"bytes": None}
    if evaluation.history:
        name = evaluation.metric
        figures[f"val_{name}"] = metric_curves(evaluation.history, name, best)
    if federation.ledger.total():
        figures["bytes"] = bytes_per_client(federation.ledger)
    if len(federation.clients) == len(federation.ids):  # otherwise the server is elsewhere
        figures |= federation.pictures()
    figures["froc"] = froc_curves(experiment.tested_cases())
    figures["detections"] = detections(experiment.tested_cases())
    figures["survival"] = survival_curves(experiment.tested_cases())
    method = type(federation.algorithm).__name__.lower()
    if cases := read_predictions(method, experiment.folder, federation.ids):
        figures["contours"] = experiment.task.picture(cases)
    return figures if memberships is None else {**figures, **membership_figures(memberships)}


def membership_figures(memberships: Memberships) -> dict[str, Figure]:
    """Draws the memberships of the selected round, beside the true mixtures, and over rounds."""
    order, last = leaf_order(memberships.rows), memberships.round == memberships.final
    title = f"after round {memberships.final}" if last else f"round {memberships.round}, selected"

    def heatmaps(panels: Sequence[tuple[str, Floats]], width: float) -> tuple[Figure, list[Axes]]:
        """A row per client in every panel; the clients are named if there are few enough."""
        figure = Figure(figsize=(width, min(1.6 + 0.21 * len(order), 9.5)), layout="constrained")
        row = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0].tolist()
        scale = {"cmap": "viridis", "vmin": 0, "vmax": 1, "aspect": "auto"}
        for axes, (name, values) in zip(row, panels, strict=True):
            image = axes.imshow(values[order], interpolation="nearest", **scale)
            axes.set_title(name, fontsize=10)
        if len(order) <= _NAMES:
            names = [caption(memberships.clients[i]) for i in order]
            row[0].set_yticks(range(len(order)), names, fontsize=7)
        else:
            row[0].set_yticks([])
            row[0].set_ylabel(f"{len(order)} clients, similar ones next to each other")
        figure.colorbar(image, ax=row, label="membership")
        return figure, row

    panels = [(title, memberships.rows)]
    if (truth := memberships.truth) is not None:
        rows = matched(memberships.rows, truth)
        true = np.pad(truth, ((0, 0), (0, rows.shape[1] - truth.shape[1])))
        panels = [(f"learned ({title}),\nrenumbered", rows), ("true mixtures", true)]
    models = panels[0][1].shape[1]
    selected, row = heatmaps(panels, 1.6 + len(panels) * (1.4 + 0.5 * models))
    for axes in row:
        axes.set(xticks=range(models), xlabel="canonical model")
    history = np.moveaxis(memberships.history, 2, 0)  # (K, R + 1, N)
    panels = [(f"canonical model {k}", values.T) for k, values in enumerate(history)]
    course, row = heatmaps(panels, 2.6 + 2.1 * len(panels))
    for axes in row:
        if not last:
            axes.axvline(memberships.round, color="white", lw=2.6)
            axes.axvline(memberships.round, color="black", lw=1.2, ls="--")
        axes.set_xlabel("round")
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    if not last:
        course.suptitle(f"Memberships over rounds (dashed: {title})", fontsize=10)
    return {"memberships": selected, "memberships_over_rounds": course}
