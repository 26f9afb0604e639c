"""Pictures of what an algorithm knows: the similarity graph, the path of personal models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import networkx as nx
import numpy as np
from matplotlib import colormaps
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
_GROUPS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")  # Okabe and Ito
_GROUP_MARKERS = "os^D"


def similarity_graph(
    clients: Sequence[str], edges: Tensor, weights: Tensor, labels: Mapping[str, str] | None = None
) -> Figure:
    """Draws the clients' graph, edges as thick as their ends are similar.

    Args:
        clients: Names, in order.
        edges: (M, 2) positions.
        weights: (M,) similarities in (0, 1].
        labels: What to write below a client's name, such as its channels.
    """
    graph = nx.Graph()
    graph.add_nodes_from(clients)
    for (i, j), weight in zip(edges.tolist(), weights.tolist(), strict=True):
        graph.add_edge(clients[i], clients[j], weight=weight)
    figure = Figure(figsize=(6.0, 5.2), layout="constrained")
    axes = figure.subplots()
    place = nx.circular_layout(graph)
    widths = [1 + 5 * d["weight"] for _, _, d in graph.edges(data=True)]
    nx.draw_networkx_edges(graph, place, ax=axes, width=widths, edge_color="#56B4E9", alpha=0.8)
    names = {c: f"{c}\n{labels[c]}" if labels else c for c in clients}
    nx.draw_networkx_nodes(graph, place, ax=axes, node_color="#E69F00", node_size=260)
    for client, (x, y) in place.items():
        side = "center" if abs(x) < 0.15 else "left" if x > 0 else "right"
        axes.text(1.1 * x, 1.13 * y, names[client], ha=side, va="center", fontsize=8)
    if len(clients) <= 10:
        shown = {(a, b): f"{d['weight']:.2f}" for a, b, d in graph.edges(data=True)}
        nx.draw_networkx_edge_labels(graph, place, shown, ax=axes, font_size=7, label_pos=0.24)
    axes.set_title("Similarity network of the clients (edge weights: similarity of sketches)")
    axes.title.set_fontsize(10)
    axes.margins(0.25)
    axes.set_axis_off()
    return figure


def coupling_path(
    strengths: Floats,
    places: Floats,
    variance: Floats,
    coupling: Floats,
    scores: Floats,
    *,
    score_label: str,
    end_label: str,
    p: float = 2.0,
    shares: Floats | None = None,
) -> Figure:
    """Draws how personal models move as λ grows, and what becomes of coupling and metric.

    Args:
        strengths: (K,) λ, ascending.
        places: (K, N, 2) models in two principal components.
        variance: (2,) shares of the variance of these components.
        coupling: (K,) Σ_E ‖z_i − z_j‖_p.
        scores: (K,) a metric, averaged over clients.
        score_label: The metric's name.
        end_label: What the star at the end of the path is.
        p: The norm.
        shares: (N,) share of positives per client, which groups the clients by colour.
    """
    figure = Figure(figsize=(13, 6.4), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(1.55, 1))
    plane = figure.add_subplot(grid[:, 0])
    _paths(plane, strengths, places, shares)
    end = places[-1].mean(0)
    plane.plot(*end, "*", color="black", ms=17, mec="white", mew=1, label=end_label, zorder=6)
    plane.set(
        title=f"Personal models from λ = {strengths[0]:g} (small) to {strengths[-1]:g} (large)",
        xlabel=f"first principal component ({variance[0]:.0%} of the variance)",
        ylabel=f"second principal component ({variance[1]:.0%})",
    )
    plane.legend(
        fontsize=9.5, loc="upper center", bbox_to_anchor=(0.5, -0.1), frameon=False, ncols=5
    )
    plane.margins(0.08)
    plane.grid(alpha=0.25)
    norm = "∞" if np.isinf(p) else f"{p:g}"
    upper = figure.add_subplot(grid[0, 1])
    _against(upper, strengths, coupling, rf"$\sum_E\|z_i-z_j\|_{{{norm}}}$")
    upper.set_title("Distance of neighbours after the last round")
    lower = figure.add_subplot(grid[1, 1])
    _against(lower, strengths, scores, score_label)
    lower.set_title("Metric of the selected round")
    lower.set_xlabel("λ (equal spaces, not to scale)")
    return figure


def _paths(axes: Any, strengths: Floats, places: Floats, shares: Floats | None) -> None:
    """Draws a line per client, small points for small λ, and writes λ along one of them."""
    count, clients, _ = places.shape
    groups = np.zeros(clients) if shares is None else np.round(shares, 2)
    distinct = sorted(set(groups.tolist()))
    sizes = np.linspace(14, 52, count)
    named: set[float] = set()
    for i in range(clients):
        k = distinct.index(groups[i])
        colour = (
            _GROUPS[k]
            if len(distinct) <= len(_GROUPS)
            else to_hex(colormaps["viridis"](0.92 * k / (len(distinct) - 1)))
        )
        x, y = places[:, i].T
        axes.plot(x, y, color=colour, lw=1.1, alpha=0.75)
        label = f"{groups[i]:.0%} positive" if shares is not None else "clients"
        marker = _GROUP_MARKERS[k % len(_GROUP_MARKERS)]
        axes.scatter(
            x,
            y,
            s=sizes,
            color=colour,
            marker=marker,
            edgecolor="white",
            lw=0.5,
            zorder=3,
            label=None if groups[i] in named else label,
        )
        named.add(float(groups[i]))
    _name_strengths(axes, strengths, places)


def _name_strengths(axes: Any, strengths: Floats, places: Floats) -> None:
    """Writes λ along the path that starts farthest from the end, above and below it in turn."""
    far = int(np.linalg.norm(places[0] - places[-1].mean(0), axis=1).argmax())
    extent = np.ptp(places.reshape(-1, 2), axis=0) * (0.14, 0.04)  # of a label
    taken: dict[bool, Floats] = {}
    for k, (strength, place) in enumerate(zip(strengths, places[:, far], strict=True)):
        above = k % 2 == 0
        last = taken.get(above)
        if k == len(strengths) - 1 or (last is not None and (abs(place - last) < extent).all()):
            continue  # the last one is in the legend
        axes.annotate(
            f"λ = {strength:g}",
            place,
            xytext=(-4, 8 if above else -8),
            textcoords="offset points",
            ha="center",
            va="bottom" if above else "top",
            fontsize=9,
            zorder=5,
            path_effects=[withStroke(linewidth=3, foreground="white")],
        )
        taken[above] = place


def _against(axes: Any, strengths: Floats, values: Floats, label: str) -> None:
    """Draws values over λ, equally spaced: 0 has no place on a logarithmic axis."""
    axes.plot(values, "o-", color="#0072B2", lw=1.8, ms=6)
    axes.set_xticks(range(len(strengths)), [f"{s:g}" for s in strengths], fontsize=9)
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
