"""How similar clients are: a graph or weights from sketches, from a rule, or given by the user.

A sketch summarises a client's training data (second moments of the inputs, shares of labels and
channels) or is its trained personal part. Clients send sketches in messages, so their bytes are
counted. pFedNet, section "Similarity graph"; PPFL, W of its objective.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from pathlib import Path
from typing import Literal

import numpy as np

from medfed.functional import graph
from medfed.functional import sketches as sketching
from medfed.functional.mixing import cosine_affinity, laplacian, spread_rows
from medfed.method import *

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SimilarityGraph:
    """How the clients' graph is made.

    Attributes:
        kind: ``knn`` over sketches, ``complete``, ``star``, ``ring`` or ``edges``.
        sketch: What clients compare in ``knn``: ``data`` (Frequent Directions of the inputs),
            ``label`` (normalised label counts and channel availability), ``model`` (the
            personal part, or the whole model if there is none, after one round of local training),
            ``feature`` (the covariance of what enters the head of the common model) or ``kernel``
            (the distance of the inputs' distributions under a Gaussian kernel).
        neighbours: k of ``knn``.
        sketch_size: Rows of a data or feature sketch; of a kernel sketch 64 frequencies each.
        sketch_inputs: Training inputs that such a sketch summarises, at most.
        edges: For ``edges``: pairs of client ids; an id alone has no neighbours.
        weighted: Couple similar neighbours more strongly: an edge's weight is its similarity,
            in (0, 1]; by default all edges weigh 1.
    """

    kind: Literal["knn", "complete", "star", "ring", "edges"] = "knn"
    sketch: Literal["data", "label", "model", "feature", "kernel"] = "data"
    neighbours: Annotated[int, check_count] = 3
    sketch_size: int = 8
    sketch_inputs: int = 256
    edges: Sequence[Sequence[str]] | None = None
    weighted: bool = False

    def __post_init__(self) -> None:
        check_fields("algorithm.graph", self)
        if (self.kind == "edges") != (self.edges is not None):
            raise ConfigError("algorithm.graph.edges goes with algorithm.graph.kind=edges.")
        if isinstance(self.edges, str):
            raise ConfigError("algorithm.graph.edges must be pairs, such as [[a,b],[b,c]].")

    @property
    def needs_sketches(self) -> bool:
        """Whether the graph needs sketches from the clients."""
        return self.kind == "knn"

    def describe(self, client: Client, start: Tensors) -> Tensors:
        """Returns a client's sketch."""
        if self.sketch == "data":
            return {"data": _data_sketch(client, self.sketch_inputs, self.sketch_size)}
        if self.sketch == "label":
            shares = sketching.label_sketch(client.data.label_counts, client.data.channels)
            return {"label": shares.float()}
        if self.sketch == "kernel":
            rows = client.data.train_inputs(self.sketch_inputs)
            return {"kernel": sketching.kernel_sketch(rows, 64 * self.sketch_size).float()}
        if self.sketch == "feature":
            client.split.check("features", "algorithm.graph.sketch=feature")
            rows = client.features(start, limit=self.sketch_inputs).z
            return {"feature": sketching.covariance_sketch(rows, self.sketch_size).float()}
        names = client.split.parameters("personal") or client.split.parameters("all")
        return {"model": flatten(select(client.train(start), names))}

    def summaries(self, data: ClientData) -> list[Statistic]:
        """Returns what a client's sketch is computed from; a model sketch is weights."""
        if not self.needs_sketches or self.sketch == "model":
            return []
        return _statistics("algorithm.graph", self.sketch, self, data)

    def build(self, clients: Sequence[str], sketches: Mapping[str, Tensor]) -> Tensors:
        """Returns ``edges`` (M, 2) between positions in ``clients``, and ``distance`` (M,)."""
        if self.kind == "knn":
            return self._nearest(clients, sketches)
        if self.kind == "edges":
            edges = graph.edges_from_names([tuple(e) for e in self.edges or ()], clients)
        else:
            edges = getattr(graph, f"{self.kind}_edges")(len(clients))
        return {"edges": edges, "distance": torch.zeros(len(edges), dtype=torch.float64)}

    def _nearest(self, clients: Sequence[str], sketches: Mapping[str, Tensor]) -> Tensors:
        known, rows = _rows(clients, sketches)
        if len(known) < 2:
            none = torch.zeros(0, 2, dtype=torch.long)
            return {"edges": none, "distance": torch.zeros(0, dtype=torch.float64)}
        if self.neighbours >= len(clients) == len(known):
            words = "algorithm.graph.neighbours=%d joins all %d clients: each has only %d others."
            _log.warning(words, self.neighbours, len(clients), len(clients) - 1)
        edges, distance = graph.knn_edges(rows, min(self.neighbours, len(known) - 1))
        return {"edges": known[edges], "distance": distance}

    def weights(self, count: int, built: Tensors) -> Tensor:
        """Returns the weights of all pairs, ``(N, N)`` symmetric float64, 0 without an edge.

        Example:
            >>> graph = SimilarityGraph(kind="ring").build(["a", "b", "c"], {})
            >>> SimilarityGraph(kind="ring").weights(3, graph).tolist()
            [[0.0, 1.0, 1.0], [1.0, 0.0, 1.0], [1.0, 1.0, 0.0]]
        """
        distance, (i, j) = built["distance"].cpu(), built["edges"].cpu().T
        ties = torch.zeros(count, count, dtype=torch.float64)
        weights = graph.edge_similarity(distance) if self.weighted else torch.ones_like(distance)
        ties[i, j] = ties[j, i] = weights.double()
        return ties

    def find_neighbours(
        self, clients: Sequence[str], sketches: Mapping[str, Tensor]
    ) -> Generator[Message, Message, list[str]]:
        """Asks a client that joins for its sketch; returns which clients are its neighbours."""
        if not sketches:
            return list(clients)
        reply = yield Message("sketch")
        sketch = next(iter(reply.parts["sketch"].values()))
        return self.nearest(sketch, {c: s for c, s in sketches.items() if c in clients})

    def nearest(self, sketch: Tensor, known: Mapping[str, Tensor]) -> list[str]:
        """Returns the clients that an onboarded client resembles most, the nearest first.

        Example:
            >>> known = {c: torch.tensor([x]) for c, x in (("a", 9.0), ("b", 2.0), ("c", 0.0))}
            >>> SimilarityGraph(sketch="model", neighbours=2).nearest(torch.tensor([1.5]), known)
            ['b', 'c']
        """
        here = sketching.sketch_vector(sketch.cpu()).double()
        there = {c: sketching.sketch_vector(s.cpu()).double() for c, s in known.items()}
        gaps = {c: float((vector - here).norm()) for c, vector in there.items()}
        return sorted(gaps, key=lambda c: gaps[c])[: self.neighbours]


@dataclass(frozen=True)
class Affinity:
    """The source of the weights w_ij between clients.

    Attributes:
        kind: Cosine similarity of ``label`` counts, of available ``channel`` s or of ``data``
            sketches (second moments of the inputs), all of training data; or ``given``.
        weights: Of ``given``: a row per client in the order of the clients, or the path of a CSV
            file with them.
        sketch_size: Rows of a data sketch.
        sketch_inputs: Training inputs that a data sketch summarises, at most.
    """

    kind: Literal["label", "channel", "data", "given"] = "label"
    weights: Sequence[Sequence[float]] | str | None = None
    sketch_size: int = 8
    sketch_inputs: int = 256

    def __post_init__(self) -> None:
        check_fields("algorithm.affinity", self)
        if (self.kind == "given") != (self.weights is not None):
            raise ConfigError("algorithm.affinity.weights goes with algorithm.affinity.kind=given.")

    @property
    def needs_sketches(self) -> bool:
        """Whether the weights need descriptions from the clients."""
        return self.kind != "given"

    def describe(self, client: Client) -> Tensors:
        """Returns what a client sends about itself."""
        if self.kind == "data":
            return {"data": _data_sketch(client, self.sketch_inputs, self.sketch_size)}
        data = client.data
        counts = data.label_counts if self.kind == "label" else data.channels
        return {self.kind: sketching.label_sketch(counts).float()}

    def summaries(self, data: ClientData) -> list[Statistic]:
        """Returns what a client's sketch is computed from; channels are no statistic."""
        if self.kind in ("given", "channel"):
            return []
        return _statistics("algorithm.affinity", self.kind, self, data)

    def spread(self, clients: Sequence[str], sketches: Mapping[str, Tensor]) -> Tensor:
        """Returns the rows of :func:`spread_rows`, ``(N, s)``: for very many clients."""
        known, rows = _rows(clients, sketches)
        rows_of_all = torch.zeros(len(clients), rows.shape[1], dtype=torch.float64)
        rows_of_all[known] = spread_rows(rows if self.kind == "data" else rows.clamp(min=0))
        return rows_of_all

    def laplacian(self, clients: Sequence[str], sketches: Mapping[str, Tensor]) -> Tensor:
        """Returns L = D - W, ``(N, N)`` in float64."""
        if self.kind == "given":
            return self._from_user(len(clients))
        weights = torch.zeros(len(clients), len(clients), dtype=torch.float64)
        known, rows = _rows(clients, sketches)
        if len(known):
            # A lossy codec may turn a count of 0 negative. Second moments may have any sign.
            cosine = cosine_affinity(rows if self.kind == "data" else rows.clamp(min=0))
            weights[known.unsqueeze(1), known] = cosine
        return laplacian(weights)

    def _from_user(self, count: int) -> Tensor:
        try:
            rows = (
                np.loadtxt(Path(self.weights), delimiter=",", ndmin=2)
                if isinstance(self.weights, str)
                else np.array(self.weights, dtype=np.float64)
            )
            matrix = laplacian(torch.as_tensor(rows))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"algorithm.affinity.weights cannot be used: {error}") from error
        if len(matrix) != count:
            raise ConfigError(
                f"algorithm.affinity.weights has {len(matrix)} rows for {count} clients; give a "
                "row and a column per client."
            )
        return matrix


def _data_sketch(client: Client, inputs: int, size: int) -> Tensor:
    return sketching.data_sketch(client.data.train_inputs(inputs), size).to(torch.float32)


def _statistics(key: str, kind: str, of: Any, data: ClientData) -> list[Statistic]:
    if kind == "label":
        patients = data.patients_behind(data.num_samples)
        return [Statistic(data.id, "counts of labels", key, len(data.label_counts), patients)]
    patients, keys = data.patients_behind(of.sketch_inputs), f"{key}.sketch_inputs and sketch_size"
    return [Statistic(data.id, "a sketch of training rows", keys, of.sketch_size, patients)]


def _rows(clients: Sequence[str], sketches: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the positions (n,) of the clients that have sent a sketch, and a row for each."""
    known = [i for i, c in enumerate(clients) if c in sketches]
    rows = [sketching.sketch_vector(sketches[clients[i]].cpu()) for i in known]
    return torch.tensor(known, dtype=torch.long), torch.stack(rows) if rows else torch.zeros(0, 0)
