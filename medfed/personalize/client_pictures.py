"""Pictures of clients: a graph between them, a number for each, or for each pair."""

from __future__ import annotations

import numpy as np

from medfed.common.console import caption
from medfed.functional.graph import edge_similarity
from medfed.method import *

NAMED = 45  # clients, at most, that are named or drawn one by one


def _axes(width: float, height: float, title: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # imported here: pictures need it, training does not

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, fontsize=10)
    return figure, axes


def draw_matrix(clients: Sequence[str], rows: Tensor, title: str) -> Any:
    """Draws a value for each pair of clients, in two colours if values have a sign."""
    names, values = [caption(client) for client in clients], rows.cpu().double().numpy()
    size = min(max(4.0, 0.35 * len(names) + 2), 18.0)
    figure, axes = _axes(size + 1, size, title)
    axes.set_facecolor("0.9")
    most = float(np.nanmax(np.abs(values), initial=0.0)) or 1.0
    low, colours = (-most, "PuOr") if np.nanmin(values, initial=0.0) < 0 else (0.0, "Blues")
    picture = axes.imshow(values, cmap=colours, vmin=low, vmax=most)
    if named := len(names) <= NAMED:
        axes.set_xticks(range(len(names)), names, rotation=90, fontsize=8)
        axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_xlabel("model of")
    axes.set_ylabel("client" if named else f"{len(names)} clients, in order")
    figure.colorbar(picture, ax=axes, shrink=0.8)
    return figure


def draw_shares(shares: Tensors, title: str) -> Any:
    """Draws a number between 0 and 1 for every client."""
    many = len(shares) > NAMED
    figure, axes = _axes(6.0, 3.6 if many else 0.3 * len(shares) + 1.2, title)
    names, values = [caption(client) for client in shares], [float(t) for t in shares.values()]
    if many:
        axes.hist(values, bins=25, range=(0, 1), color="#56B4E9")
        axes.set_ylabel(f"of {len(shares):,} clients")
        return figure
    bars = axes.barh(names, values, color="#56B4E9")
    axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    axes.set_xlim(0, 1.1)
    axes.set_xticks([0, 0.5, 1])
    axes.invert_yaxis()
    axes.tick_params(labelsize=8)
    return figure


def draw_graph(clients: Sequence[str], graph: Tensors) -> Any:
    """Draws the clients' graph, edges as thick as their ends are similar."""
    if len(clients) > NAMED:
        return _draw_neighbours(len(clients), graph["edges"])
    angles = 2 * np.pi * np.arange(len(clients)) / len(clients)
    places = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    weights = edge_similarity(graph["distance"].cpu()).tolist()
    title = "Similarity network of the clients (edge weights: similarity of sketches)"
    figure, axes = _axes(6.0, 5.2, title)
    for (i, j), weight in zip(graph["edges"].tolist(), weights, strict=True):
        line = places[[i, j]].T
        axes.plot(*line, linewidth=1 + 5 * weight, color="#56B4E9", alpha=0.8, zorder=1)
        if len(clients) <= 10:
            x, y = 0.76 * places[i] + 0.24 * places[j]  # away from the middle, where edges cross
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
            axes.text(x, y, f"{weight:.2f}", ha="center", va="center", fontsize=7, bbox=box)
    axes.scatter(places[:, 0], places[:, 1], s=260, color="#E69F00", zorder=2)
    for client, (x, y) in zip(clients, places, strict=True):
        side = "center" if abs(x) < 0.15 else "left" if x > 0 else "right"
        axes.text(1.1 * x, 1.13 * y, caption(client), ha=side, va="center", fontsize=8)
    axes.margins(0.25)
    axes.set_axis_off()
    return figure


def _draw_neighbours(count: int, edges: Tensor) -> Any:
    """Draws how many neighbours clients have: single edges would be illegible."""
    from matplotlib.ticker import MaxNLocator

    degrees = np.bincount(edges.cpu().flatten().numpy(), minlength=count)
    figure, axes = _axes(6.0, 3.6, f"Similarity network of the clients: {len(edges):,} edges")
    axes.hist(degrees, bins=[n - 0.5 for n in range(int(degrees.max()) + 2)], color="#56B4E9")
    axes.set(xlabel="neighbours", ylabel=f"of {count:,} clients")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def draw_clusters(of: Mapping[str, int], rows: Tensor, title: str) -> Any:
    """Draws a number for every pair of clients, cluster by cluster."""
    clients = list(of)
    order = sorted(range(len(clients)), key=lambda i: of[clients[i]])
    names = [f"{clients[i]} ({of[clients[i]] + 1})" for i in order]
    told = "number of the cluster" if len(names) <= NAMED else "cluster by cluster"
    return draw_matrix(names, rows[order][:, order], f"{title} ({told})")
