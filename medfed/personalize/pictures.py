"""Pictures of what an algorithm knows: the similarity graph of the clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import networkx as nx
from matplotlib.figure import Figure
from torch import Tensor


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
    raised = {c: (x * 1.18, y * 1.18) for c, (x, y) in place.items()}
    nx.draw_networkx_labels(graph, raised, names, ax=axes, font_size=8)
    if len(clients) <= 10:
        shown = {(a, b): f"{d['weight']:.2f}" for a, b, d in graph.edges(data=True)}
        nx.draw_networkx_edge_labels(graph, place, shown, ax=axes, font_size=7, label_pos=0.4)
    axes.set_title("Similarity network of the clients (edge weights: similarity of sketches)")
    axes.title.set_fontsize(10)
    axes.margins(0.25)
    axes.set_axis_off()
    return figure
