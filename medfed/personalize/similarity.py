"""The graph that couples clients: built from sketches that they send, by rule, or given.

pFedNet, section "Similarity graph": k nearest neighbours over distances between client sketches,
made undirected. A sketch leaves its client, so it travels in a message and its bytes are counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from medfed.errors import ConfigError, did_you_mean
from medfed.federation.client import Client
from medfed.federation.tensors import Tensors, flatten, select
from medfed.personalize.functional.graph import (
    complete_edges,
    edges_from_file,
    edges_from_names,
    knn_edges,
    ring_edges,
    star_edges,
)
from medfed.personalize.functional.sketches import data_sketch, label_sketch, sketch_vector

KINDS = ("knn", "complete", "star", "ring", "edges")
SKETCHES = ("data", "label", "model")


@dataclass(frozen=True)
class SimilarityGraph:
    """How the clients' graph comes about.

    Attributes:
        kind: ``knn`` over sketches, ``complete``, ``star``, ``ring`` or ``edges``.
        sketch: What clients compare in ``knn``: ``data`` (Frequent Directions of the inputs),
            ``label`` (normalised label counts and channel availability) or ``model`` (the
            personal part after one round of local training).
        neighbours: k of ``knn``.
        sketch_size: Rows of a data sketch.
        sketch_inputs: Training inputs that a data sketch summarises, at most.
        edges: For ``edges``: pairs of client ids, or the path of a file with a pair per line.
        weighted: Couple similar neighbours more strongly: an edge's weight is its similarity,
            in (0, 1]; by default all edges weigh 1.

    Raises:
        ConfigError: If a value is unknown or the edges are missing.
    """

    kind: Literal["knn", "complete", "star", "ring", "edges"] = "knn"
    sketch: Literal["data", "label", "model"] = "data"
    neighbours: int = 3
    sketch_size: int = 8
    sketch_inputs: int = 256
    edges: Sequence[Sequence[str]] | str | None = None
    weighted: bool = False

    def __post_init__(self) -> None:
        for name, known in (("kind", KINDS), ("sketch", SKETCHES)):
            if (value := getattr(self, name)) not in known:
                raise ConfigError(
                    f"algorithm.graph.{name}={value!r} is unknown"
                    f"{did_you_mean(str(value), known)}; "
                    f"choose one of {', '.join(known)}."
                )
        if (self.kind == "edges") != (self.edges is not None):
            raise ConfigError("algorithm.graph.edges goes with algorithm.graph.kind=edges.")
        if self.neighbours < 1:
            raise ConfigError(
                f"algorithm.graph.neighbours must be 1 or more, not {self.neighbours}."
            )

    @property
    def needs_sketches(self) -> bool:
        """Whether clients must send a sketch before there is a graph."""
        return self.kind == "knn"

    def describe(self, client: Client, start: Tensors) -> Tensors:
        """Returns a client's sketch.

        Args:
            client: The client.
            start: All entries of its present model, from which a model sketch is trained.
        """
        if self.sketch == "data":
            inputs = client.data.train_inputs(self.sketch_inputs)
            return {"data": data_sketch(inputs, self.sketch_size).to(torch.float32)}
        if self.sketch == "label":
            return {"label": label_sketch(client.data.label_counts, client.data.channels).float()}
        names = client.split.parameters("personal")
        return {"model": flatten(select(client.train(start), names))}

    def build(self, clients: Sequence[str], sketches: Mapping[str, Tensor]) -> Tensors:
        """Returns ``edges`` (M, 2) between positions in ``clients``, and ``distance`` (M,).

        Args:
            clients: All clients, in order.
            sketches: Of ``knn``: the sketch of each client that has sent one; a client that has
                not taken part yet has no edge.

        Raises:
            ConfigError: If a given edge names an unknown client or a client is left out.
        """
        if self.kind == "knn":
            return self._nearest(clients, sketches)
        if self.kind == "edges":
            edges = (
                edges_from_file(Path(self.edges), clients)
                if isinstance(self.edges, str)
                else edges_from_names([tuple(e) for e in self.edges or ()], clients)
            )
        else:
            make = {"complete": complete_edges, "star": star_edges, "ring": ring_edges}
            edges = make[self.kind](len(clients))
        return {"edges": edges, "distance": torch.zeros(len(edges), dtype=torch.float64)}

    def nearest(self, sketch: Tensor, known: Mapping[str, Tensor]) -> list[str]:
        """Returns the clients that a newcomer resembles most, the nearest first.

        Args:
            sketch: The newcomer's sketch.
            known: The sketches of the clients that the server knows.

        Returns:
            ``neighbours`` of them, or all where there are fewer; of equals the one named first.

        Example:
            >>> known = {c: torch.tensor([x]) for c, x in (("a", 9.0), ("b", 2.0), ("c", 0.0))}
            >>> SimilarityGraph(sketch="model", neighbours=2).nearest(torch.tensor([1.5]), known)
            ['b', 'c']
        """
        own = sketch_vector(sketch.cpu()).double()
        gaps = {c: float((sketch_vector(s.cpu()).double() - own).norm()) for c, s in known.items()}
        return sorted(gaps, key=lambda c: gaps[c])[: self.neighbours]

    def _nearest(self, clients: Sequence[str], sketches: Mapping[str, Tensor]) -> Tensors:
        known = [i for i, c in enumerate(clients) if c in sketches]
        if len(known) < 2:
            return {
                "edges": torch.zeros(0, 2, dtype=torch.long),
                "distance": torch.zeros(0, dtype=torch.float64),
            }
        rows = torch.stack([sketch_vector(sketches[clients[i]].cpu()) for i in known])
        edges, distance = knn_edges(rows, min(self.neighbours, len(known) - 1))
        return {"edges": torch.tensor(known)[edges], "distance": distance}
