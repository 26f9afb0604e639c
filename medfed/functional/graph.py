"""Graphs between clients: built from sketches, by rule, or read from a file; and their matrices.

An edge list is a long tensor ``(M, 2)`` with i < j in every row, sorted and without duplicates.

What models gain a client, and whose models it is sent next: the maths of FedFomo.

Source: Zhang et al. 2021, Equations 3 to 5; see :mod:`medfed.personalize.fedfomo`.

Cutting a set of vectors in two by how alike they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from medfed.common.tensors import Tensors, weighted_mean
from medfed.standalone.errors import ConfigError, did_you_mean, few

_ROWS = 1024  # of a matrix of all pairs that are in memory together


def undirected_edges(pairs: Tensor) -> Tensor:
    """Orders the ends of every pair, sorts the pairs and drops duplicates.

    Example:
        >>> undirected_edges(torch.tensor([[2, 0], [0, 2], [0, 1]]))
        tensor([[0, 1],
                [0, 2]])
    """
    unique: Tensor = torch.unique(pairs.reshape(-1, 2).long().sort(dim=1).values, dim=0)
    return unique


def knn_edges(sketches: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Joins every client to its k nearest, in either direction.

    Source: pFedNet, its similarity graph (N = 5, k = 3 in the paper). Ties go to the lower
    index.

    Args:
        sketches: ``(N, s)`` tensor, a row per client, comparable by Euclidean distance.
        k: Neighbours of each client, 1 to N - 1; ignored for one client, who has none.

    Returns:
        The edges ``(M, 2)`` and the distance over each ``(M,)`` in float64.

    Example:
        >>> edges, distances = knn_edges(torch.tensor([[0.0], [1.0], [5.0]]), k=1)
        >>> edges.tolist(), distances.tolist()
        ([[0, 1], [1, 2]], [1.0, 4.0])
    """
    n = sketches.shape[0]
    if n > 1 and not 1 <= k < n:
        raise ConfigError(f"k is {k}, but each of {n} clients has 1 to {n - 1} neighbours.")
    if not bool(torch.isfinite(sketches).all()):
        raise ValueError("A sketch holds NaN or infinity, so that it has no nearest neighbours.")
    rows, k = sketches.detach().cpu().double(), min(k, n - 1)
    near = []
    for first in range(0, n, _ROWS):
        distance = _distances(rows[first : first + _ROWS].unsqueeze(0), rows.unsqueeze(0))[0]
        distance.diagonal(first).fill_(torch.inf)
        # The k-th distance, below it all, and of those that equal it the first ones.
        last = distance.kthvalue(k, dim=1, keepdim=True).values if k else distance.new_zeros(n, 1)
        below, equal = distance < last, distance == last
        chosen = below | (equal & (equal.cumsum(1) <= k - below.sum(1, keepdim=True)))
        near.append(chosen.nonzero() + torch.tensor([first, 0]))
    edges = undirected_edges(torch.cat(near))
    return edges, _distances(rows[edges[:, :1]], rows[edges[:, 1:]]).flatten()


def _distances(x: Tensor, y: Tensor) -> Tensor:
    # By differences: the expanded square cancels when clients are close.
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")


def complete_edges(n: int) -> Tensor:
    """All pairs of n clients.

    Example:
        >>> complete_edges(3).tolist()
        [[0, 1], [0, 2], [1, 2]]
    """
    return torch.combinations(torch.arange(n), 2).reshape(-1, 2)


def star_edges(n: int) -> Tensor:
    """The first client joined to every other.

    Example:
        >>> star_edges(3).tolist()
        [[0, 1], [0, 2]]
    """
    others = torch.arange(1, n)
    return torch.stack([torch.zeros_like(others), others], dim=1)


def ring_edges(n: int) -> Tensor:
    """Every client joined to the next, and the last to the first."""
    nodes = torch.arange(n if n > 1 else 0)
    return undirected_edges(torch.stack([nodes, (nodes + 1) % max(n, 1)], dim=1))


def edge_similarity(distances: Tensor) -> Tensor:
    """Turns distances ``(M,)`` into similarities in (0, 1], for the width of a drawn edge.

    A Gaussian of the median distance, so that the picture depends on no unit.

    Example:
        >>> edge_similarity(torch.tensor([0.0, 1.0, 2.0]))
        tensor([1.0000, 0.6065, 0.1353])
    """
    if distances.numel() == 0:
        return distances.clone()
    scale = distances.median()
    scale = torch.where(scale > 0, scale, distances.max())
    ratio = torch.where(scale > 0, distances / scale, torch.zeros_like(distances))
    return torch.exp(-0.5 * ratio.square())


def edges_from_names(pairs: Iterable[Sequence[str]], clients: Sequence[str]) -> Tensor:
    """Turns pairs of client names, or one name alone, into edges between positions in ``clients``.

    Example:
        >>> edges_from_names([("a", "c"), ("c", "a"), ("b",)], ["a", "b", "c"]).tolist()
        [[0, 2]]
    """
    index, known = {name: i for i, name in enumerate(clients)}, list(pairs)
    for pair in known:
        if isinstance(pair, str) or len(pair) not in (1, 2):
            raise ConfigError(f"An edge is two client names, not {pair!r}.")
        for name in pair:
            if name not in index:
                hint = did_you_mean(name, index)
                raise ConfigError(
                    f"The graph names client {name!r}, which does not take part{hint}."
                )
        if len(pair) == 2 and pair[0] == pair[1]:
            raise ConfigError(f"The graph joins client {pair[0]!r} to itself; leave that out.")
    named = {name for pair in known for name in pair}
    if missing := few([repr(name) for name in clients if name not in named], 1):
        hint = "name a client alone to leave it without neighbours"
        raise ConfigError(f"The graph lacks client {missing}; {hint}.")
    links = [[index[name] for name in pair] for pair in known if len(pair) == 2]
    return undirected_edges(torch.tensor(links, dtype=torch.long))


def graph_laplacian(n: int, edges: Tensor) -> Tensor:
    """``QQ^T`` ``(n, n)``, the degrees minus the adjacency; a repeated edge counts repeatedly.

    Example:
        >>> graph_laplacian(2, torch.tensor([[0, 1]])).tolist()
        [[1.0, -1.0], [-1.0, 1.0]]
    """
    ends = torch.cat([edges, edges.flip(1)]).unbind(1)
    one = torch.ones((), dtype=torch.float64)
    adjacency = torch.zeros(n, n, dtype=torch.float64).index_put_(ends, one, accumulate=True)
    return torch.diag(adjacency.sum(1)) - adjacency


def incidence(n: int, edges: Tensor) -> Tensor:
    """Q, sparse ``(n, M)``, with +1 at the first and -1 at the second end of every edge.

    Example:
        >>> incidence(2, torch.tensor([[0, 1]])).to_dense().tolist()
        [[1.0], [-1.0]]
    """
    ends = torch.stack([edges.T, torch.arange(len(edges)).expand(2, -1)]).reshape(2, -1)
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat_interleave(len(edges))
    return torch.sparse_coo_tensor(ends, signs, (n, len(edges)), check_invariants=True)


def connected_components(n: int, edges: Tensor) -> Tensor:
    """Numbers the components ``(n,)`` in the order of their first node.

    Example:
        >>> connected_components(4, torch.tensor([[1, 3]])).tolist()
        [0, 1, 2, 1]
    """
    from scipy.sparse import coo_array, csgraph

    links = coo_array((np.ones(len(edges)), edges.T.numpy()), shape=(n, n))
    return torch.from_numpy(csgraph.connected_components(links, directed=False)[1]).long()


Model = Mapping[str, Tensor]


def gain_per_distance(gain: float, v: Model, theta: Model) -> float:
    """Returns gain / |theta - v|, over the names of ``v``; 0 where the two are equal.

    Example:
        >>> import torch
        >>> v, theta = {"w": torch.zeros(2)}, {"w": torch.tensor([3.0, 4.0])}
        >>> gain_per_distance(1.0, v, theta), gain_per_distance(1.0, v, v)
        (0.2, 0.0)
    """
    distance = sum(float((theta[n] - t).double().square().sum()) for n, t in v.items()) ** 0.5
    return gain / distance if distance else 0.0


def helpful_mean(v: Tensors, thetas: Mapping[str, Tensors], gains: Mapping[str, float]) -> Tensors:
    """Returns v + sum_n a_n (theta_n - v), a_n = max(r_n, 0) / sum_m max(r_m, 0).

    Example:
        >>> import torch
        >>> v, one = {"w": torch.zeros(1)}, {"w": torch.ones(1)}
        >>> thetas = {"a": one, "b": one}
        >>> helpful_mean(v, thetas, {"a": 0.5, "b": -1.0})
        {'w': tensor([1.])}
        >>> helpful_mean(v, thetas, {"a": 0.0, "b": -1.0})
        {'w': tensor([0.])}
    """
    helpful = {n: r for n, r in gains.items() if r > 0}
    if not helpful:
        return v
    return weighted_mean([thetas[n] for n in helpful], list(helpful.values()))


def with_gains(affinity: Tensors, gains: Mapping[str, Mapping[str, float]]) -> Tensors:
    """Returns P with what clients have gained added to their rows.

    Example:
        >>> import torch
        >>> affinity = {"a": torch.zeros(2), "b": torch.ones(2)}
        >>> with_gains(affinity, {"a": {"b": 0.5}})
        {'a': tensor([0.0000, 0.5000]), 'b': tensor([1., 1.])}
    """
    grown = dict(affinity)
    for client, gain in gains.items():
        grown[client] = grown[client] + grown[client].new_tensor([gain.get(n, 0.0) for n in grown])
    return grown


def epsilon_greedy(
    affinity: Tensors, client: str, count: int, epsilon: float, rng: np.random.Generator
) -> list[str]:
    """Returns others: the best of a client's row (N,) of P, or with probability epsilon any."""
    worth = dict(zip(affinity, affinity[client].tolist(), strict=True))
    order = [n for n in rng.permutation(list(worth)).tolist() if n != client]
    if rng.random() >= epsilon:
        order.sort(key=lambda n: -worth[n])  # equals stay in the random order
    return [n for n in worth if n in order[:count]]


def cosines(rows: Tensor) -> Tensor:
    """Returns the cosine similarities of vectors ``(N, d)``, 0 with a vector that is 0.

    Example:
        >>> cosines(torch.tensor([[3.0, 4.0], [0.0, 2.0], [0.0, 0.0]])).round(decimals=2).tolist()
        [[1.0, 0.800000011920929, 0.0], [0.800000011920929, 1.0, 0.0], [0.0, 0.0, 0.0]]
    """
    unit = torch.nn.functional.normalize(rows, dim=1)
    return unit @ unit.T


def direction(rows: Tensor) -> Tensor:
    """The unit vector along the mean of the directions of vectors ``(N, d)``.

    Example:
        >>> direction(torch.tensor([[9.0, 0.0], [0.0, 1.0]]))
        tensor([0.7071, 0.7071])
    """
    unit = torch.nn.functional.normalize(rows, dim=1)
    return torch.nn.functional.normalize(unit.mean(0), dim=0)


def bipartition(similarity: Tensor) -> tuple[list[int], list[int]]:
    """Cuts in two so that the largest similarity across is smallest; the first part has item 0.

    By single linkage: the most similar pair is joined until two groups are left.

    Example:
        >>> bipartition(torch.tensor([[1.0, -0.5, 0.9], [-0.5, 1.0, 0.1], [0.9, 0.1, 1.0]]))
        ([0, 2], [1])
    """
    from scipy.cluster.hierarchy import cut_tree, linkage

    apart = 1 - similarity.double().cpu().numpy()
    of = cut_tree(linkage(apart[np.triu_indices(len(apart), 1)], "single"), 2)[:, 0]
    return np.flatnonzero(of == of[0]).tolist(), np.flatnonzero(of != of[0]).tolist()
