import networkx as nx
import pytest
import torch
from sklearn.neighbors import kneighbors_graph

from medfed.functional.graph import (
    complete_edges,
    connected_components,
    edge_similarity,
    edges_from_names,
    graph_laplacian,
    incidence,
    knn_edges,
    ring_edges,
    star_edges,
)
from medfed.functional.network_lasso import component_means, smallest_dual
from medfed.standalone.errors import ConfigError
from tests.sweeps import sweep

CLIENTS = ["north", "south", "east", "west"]


@pytest.mark.parametrize("k", [1, 3, 11])
def test_knn_against_scikit_learn(k):
    rows = torch.randn(12, 5, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
    edges, distances = knn_edges(rows, k)
    directed = kneighbors_graph(rows.numpy(), k).toarray()
    expected = sorted(zip(*((directed + directed.T) > 0).nonzero(), strict=True))
    assert edges.tolist() == [[i, j] for i, j in expected if i < j]
    torch.testing.assert_close(distances, (rows[edges[:, 0]] - rows[edges[:, 1]]).norm(dim=1))


def test_knn_of_identical_and_single_clients():
    edges, distances = knn_edges(torch.ones(4, 2), 1)
    assert edges.tolist() == [[0, 1], [0, 2], [0, 3]]
    assert not distances.any()
    edges, distances = knn_edges(torch.ones(1, 2), 3)
    assert (edges.shape, edges.dtype, distances.shape) == ((0, 2), torch.long, (0,))


def test_knn_tells_close_clients_apart_far_from_the_origin():
    edges, distances = knn_edges(torch.tensor([[1e6], [1e6 + 1], [1e6 + 3]]), 1)
    assert edges.tolist() == [[0, 1], [1, 2]]
    assert distances.tolist() == [1.0, 2.0]


@sweep("k", [0, -1, 3, 10])
def test_knn_bad_k(k):
    with pytest.raises(ConfigError, match="1 to 2 neighbours"):
        knn_edges(torch.randn(3, 2), k)


def test_knn_bad_sketches():
    with pytest.raises(ValueError, match="NaN or infinity"):
        knn_edges(torch.tensor([[0.0], [torch.nan]]), 1)


@sweep("n", [1, 2, 3, 7])
def test_builders_against_networkx(n):
    known = [
        (complete_edges, nx.complete_graph(n)),
        (star_edges, nx.star_graph(n - 1)),
        (ring_edges, nx.cycle_graph(n)),
    ]
    for build, graph in known:
        expected = sorted(sorted(edge) for edge in graph.edges if edge[0] != edge[1])
        edges = build(n)
        assert edges.tolist() == expected
        assert (edges.shape[1], edges.dtype) == (2, torch.long)


def test_laplacian_and_components_against_networkx():
    graph = nx.gnm_random_graph(15, 12, seed=4)
    edges = torch.tensor(list(graph.edges))
    expected = torch.from_numpy(nx.laplacian_matrix(graph).toarray()).double()
    assert torch.equal(graph_laplacian(15, edges), expected)
    labels = connected_components(15, edges)
    assert sorted(map(sorted, nx.connected_components(graph))) == sorted(
        (labels == c).nonzero().flatten().tolist() for c in labels.unique()
    )
    assert labels[0] == 0
    assert connected_components(3, torch.zeros(0, 2, dtype=torch.long)).tolist() == [0, 1, 2]


def test_consensus_dual_reaches_the_means():
    v = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    edges = torch.tensor([[0, 1], [1, 2], [0, 2], [3, 4]])
    component = connected_components(6, edges)
    means = component_means(v, torch.ones(6, dtype=torch.float64), component)
    omega = smallest_dual(v - means, edges, component)
    torch.testing.assert_close(means[:3], v[:3].mean(0).expand(3, -1))
    torch.testing.assert_close(means[5], v[5])
    torch.testing.assert_close(v - incidence(6, edges) @ omega, means)


def test_edge_similarity():
    assert edge_similarity(torch.zeros(3)).tolist() == [1.0, 1.0, 1.0]
    assert edge_similarity(torch.zeros(0)).shape == (0,)
    assert edge_similarity(torch.tensor([0.0, 0.0, 2.0]))[2] == pytest.approx(0.6065, abs=1e-4)
    unit = edge_similarity(torch.tensor([1.0, 2.0, 5.0]))
    torch.testing.assert_close(edge_similarity(torch.tensor([10.0, 20.0, 50.0])), unit)


@sweep(
    ("pairs", "message"),
    [
        ([["north", "soth"]], r"'soth', which does not take part \(did you mean south"),
        ([["north", "south"], ["east", "east"]], "'east' to itself"),
        ([["north", "south", "east"]], "two client names"),
        ([["north", "south"]], "lacks client 'east' and 1 more"),
        ([["north", "south"], ["east"]], "lacks client 'west';"),
        ([], "lacks client 'north'"),
    ],
)
def test_bad_edges(pairs, message):
    with pytest.raises(ConfigError, match=message):
        edges_from_names(pairs, CLIENTS)


def test_edges_from_names():
    assert edges_from_names([["b", "a"]], ["a", "b"]).tolist() == [[0, 1]]
    empty = edges_from_names([["a"], ["b"]], ["a", "b"])
    assert (empty.shape, empty.dtype) == ((0, 2), torch.long)
    with pytest.raises(ConfigError, match="two client names"):
        edges_from_names(["ab"], ["a", "b"])
