"""The graph between clients: planted groups are found, and what cannot be used is named."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from medfed.federation.reference import run_reference
from medfed.personalize.pfednet import PFedNet
from medfed.personalize.similarity import SimilarityGraph
from medfed.standalone.errors import ConfigError
from tests.sweeps import sweep
from tests.toys import ToyData, ToyTask, toy_data, toy_federation

CLIENTS = ("north", "east", "south")


def planted(kind: str) -> list[ToyData]:
    """Six clients of unequal size in two groups, even and odd, that differ in one respect."""
    rng = np.random.default_rng(5)
    data = []
    for k in range(6):
        odd, n = k % 2, 40 + 8 * k
        x = rng.normal(size=(n, 3))
        coefficients, shift = np.array([1.0, -1.0, 0.5]), 0.0
        if kind == "data":
            x = x * ([1.0, 1.0, 3.0] if odd else [3.0, 1.0, 1.0])
        elif kind == "model":
            coefficients = coefficients * (1 - 2 * odd)
        else:
            shift = 1.5 - 3 * odd
        y = x @ coefficients + shift
        data.append(ToyData(f"c{k}", torch.tensor(x), torch.tensor(y)))
    return data


def edges(kind: str, sketch: str) -> set[tuple[int, int]]:
    """The graph after one round of pFedNet over the groups that differ in ``kind``."""
    algorithm = PFedNet(graph=SimilarityGraph(sketch=sketch, neighbours=2))
    _, federation, _ = toy_federation(
        algorithm, ToyTask(norm=False, dtype=torch.float64), planted(kind), steps=20, lr=0.1
    )
    run_reference(federation, 1)
    return {(i, j) for i, j in federation.server["graph"]["edges"].tolist()}


WITHIN = {(i, j) for i in range(6) for j in range(i + 1, 6) if (i - j) % 2 == 0}


@pytest.mark.parametrize(
    ("kind", "sketch"),
    [(k, k) for k in ("data", "label", "model")] + [("data", "kernel"), ("data", "feature")],
)
def test_neighbours_are_members_of_the_same_group(kind, sketch):
    assert edges(kind, sketch) == WITHIN


def test_a_feature_sketch_is_the_covariance_of_what_enters_the_head():
    """The body is linear, so that the covariance of its features is W Cov(x) W^T."""
    algorithm = PFedNet(graph=SimilarityGraph(sketch="feature", neighbours=2))
    data = planted("data")
    _, federation, local = toy_federation(algorithm, ToyTask(norm=False, dtype=torch.float64), data)
    weight = local.model.initial()["body.weight"].numpy()
    run_reference(federation, 1)
    for client in data:
        sketch = federation.server["sketches"][client.id].double().numpy()
        expected = weight @ np.cov(client.x.numpy().T, bias=True) @ weight.T
        assert np.abs(sketch.T @ sketch - expected).max() < 1e-6 * np.abs(expected).max()


def test_features_need_a_head():
    task = ToyTask(norm=False, dtype=torch.float64)
    task.personal = ("*",)
    algorithm = PFedNet(graph=SimilarityGraph(sketch="feature"))
    _, federation, _ = toy_federation(algorithm, task, planted("data"))
    with pytest.raises(ConfigError, match=r"graph\.sketch=feature needs the head"):
        run_reference(federation, 1)


@pytest.mark.parametrize(("kind", "sketch"), [("data", "label"), ("label", "data")])
def test_a_sketch_that_sees_no_difference_mixes_the_groups(kind, sketch):
    assert edges(kind, sketch) != WITHIN


def test_three_neighbours_of_five_clients():
    """The paper's N = 5, k = 3: undirected, without duplicates, at least k edges at each client."""
    algorithm = PFedNet(graph=SimilarityGraph())
    _, federation, _ = toy_federation(algorithm, data=toy_data(5))
    run_reference(federation, 1)
    found = federation.server["graph"]["edges"].tolist()
    assert all(i < j for i, j in found)
    assert len({tuple(e) for e in found}) == len(found) <= 10
    assert min(sum(k in e for e in found) for k in range(5)) >= 3


def test_neighbours_are_the_nearest_by_brute_force():
    rng = np.random.default_rng(0)
    sketches = {c: torch.tensor(rng.normal(size=4)) for c in "abcdefg"}
    built = SimilarityGraph(neighbours=2).build(list("abcdefg"), sketches)
    rows = np.stack([s.numpy() for s in sketches.values()])
    distance = np.sqrt(((rows[:, None] - rows) ** 2).sum(-1))
    expected = {
        (min(i, j), max(i, j)) for i in range(7) for j in np.argsort(distance[i])[1:3].tolist()
    }
    assert {(i, j) for i, j in built["edges"].tolist()} == expected
    for (i, j), length in zip(built["edges"].tolist(), built["distance"].tolist(), strict=True):
        assert length == pytest.approx(distance[i, j], abs=1e-12)


@pytest.mark.parametrize("neighbours", [2, 3])
def test_more_neighbours_than_there_are_others_are_said(neighbours, caplog):
    sketches = {c: torch.tensor([float(n)]) for n, c in enumerate(CLIENTS)}
    built = SimilarityGraph(sketch="model", neighbours=neighbours).build(CLIENTS, sketches)
    assert len(built["edges"]) == 3
    assert ("neighbours=3 joins all 3 clients" in caplog.text) == (neighbours == 3)


def test_clients_without_a_sketch_have_no_edge():
    sketches = {c: torch.tensor([float(i)]) for i, c in ((0, "a"), (9, "c"), (1, "d"))}
    built = SimilarityGraph(neighbours=1).build(list("abcd"), sketches)
    assert built["edges"].tolist() == [[0, 3], [2, 3]]
    assert len(SimilarityGraph().build(list("abcd"), {"b": torch.ones(1)})["edges"]) == 0


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("complete", [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]),
        ("ring", [[0, 1], [0, 3], [1, 2], [2, 3]]),
        ("star", [[0, 1], [0, 2], [0, 3]]),
    ],
)
def test_graphs_by_rule(kind, expected):
    assert SimilarityGraph(kind=kind).build(list("abcd"), {})["edges"].tolist() == expected


@sweep(
    ("options", "culprit"),
    [
        ({"kind": "rign"}, r"graph\.kind='rign' is unknown \(did you mean ring"),
        ({"sketch": "lable"}, r"graph\.sketch='lable' is unknown \(did you mean label"),
        ({"sketch": None}, r"graph\.sketch=None is unknown"),
        ({"neighbours": 0}, r"graph\.neighbours must be 1 or more, not 0"),
        ({"kind": "edges"}, r"graph\.edges goes with algorithm\.graph\.kind=edges"),
        ({"kind": "ring", "edges": [["a", "b"]]}, r"graph\.edges goes with"),
        ({"kind": "edges", "edges": [["north", "west"]]}, "'west', which does not take part"),
        ({"kind": "edges", "edges": [["north", "east"]]}, "lacks client 'south'"),
        ({"kind": "edges", "edges": [["north"]]}, "lacks client 'east' and 1 more"),
        ({"kind": "edges", "edges": [["east", "east"]]}, "'east' to itself"),
        ({"kind": "edges", "edges": [["east", "north", "south"]]}, "An edge is two client names"),
        ({"kind": "edges", "edges": "/nowhere/edges.txt"}, "must be pairs"),
    ],
)
def test_bad_graphs_are_named(options, culprit):
    with pytest.raises(ConfigError, match=culprit) as caught:
        SimilarityGraph(**options).build(CLIENTS, {})
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith(".")


def test_a_bad_graph_is_refused_before_the_first_round():
    graph = SimilarityGraph(kind="edges", edges=[["c0", "c1"], ["c2", "c9"]])
    with pytest.raises(ConfigError, match="'c9', which does not take part"):
        toy_federation(PFedNet(graph=graph))


def test_the_picture_shows_every_client_and_edge():
    algorithm = PFedNet(graph=SimilarityGraph(kind="ring"))
    _, federation, _ = toy_federation(algorithm, data=toy_data(4))
    assert algorithm.pictures({**federation.server, "graph": {}}, federation.ids) == {}
    figure = algorithm.pictures(federation.server, federation.ids)["graph"]
    texts = [t.get_text() for t in figure.axes[0].texts]
    assert sorted(t for t in texts if t in federation.ids) == federation.ids
    assert len(texts) == 4 + 4
