"""Every algorithm has the same number of local gradient steps, however it divides them."""

from __future__ import annotations

import pytest

from medfed.federation.local_client import LocalClient
from medfed.federation.reference import run_reference
from medfed.personalize.ditto import Ditto
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.fedbn import FedBN
from medfed.personalize.fedper import FedPer
from medfed.personalize.fedprox import FedProx
from medfed.personalize.fedrep import FedRep
from medfed.personalize.finetune import FineTune
from medfed.personalize.local import Local
from medfed.personalize.pfednet import PFedNet
from medfed.personalize.similarity import SimilarityGraph
from tests.toys import ToyTask, toy_data, toy_federation

ROUNDS = 3
RING = SimilarityGraph(kind="ring")
ALGORITHMS = [
    Local(),
    FedAvg(),
    FedProx(),
    FedPer(),
    FedBN(),
    FedRep(),
    FedRep(head_share=0.1),
    FedRep(head_share=0.9),
    Ditto(),
    FineTune(local_share=0.5, rounds=ROUNDS),
    PFedNet(graph=RING),
    PFedNet(graph=SimilarityGraph(sketch="data", neighbours=2)),
    PFedNet(graph=SimilarityGraph(sketch="label", neighbours=2)),
    PFedNet(graph=RING, shared_rounds=2, personal_rounds=1),
    PFedNet(graph=RING, shared_rounds=0, personal_rounds=2),
]


def label(algorithm):
    graph = f"-{algorithm.graph.kind}" if isinstance(algorithm, PFedNet) else ""
    return type(algorithm).__name__ + graph


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=label)
@pytest.mark.parametrize("steps", [3, None], ids=["steps", "epoch"])
def test_every_algorithm_has_the_same_budget(algorithm, steps):
    """One epoch of 6, 8, 10 and 12 samples in batches of 2 is 3, 4, 5 and 6 steps."""
    data = toy_data(4, batch=2)
    _, federation, _ = toy_federation(algorithm, ToyTask(), data, steps=steps)
    run_reference(federation, ROUNDS)
    expected = [3, 3, 3, 3] if steps else [3, 4, 5, 6]
    assert [federation.clients[c].steps_done for c in federation.ids] == [
        ROUNDS * n for n in expected
    ]


def test_a_model_sketch_costs_one_more_round_of_steps():
    algorithm = PFedNet(graph=SimilarityGraph(sketch="model", neighbours=1))
    _, federation, _ = toy_federation(algorithm, steps=4)
    run_reference(federation, ROUNDS)
    assert {c.steps_done for c in federation.clients.values()} == {4 * (ROUNDS + 1)}


@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 0.99])
@pytest.mark.parametrize("steps", [2, 5, 10])
def test_fedrep_divides_its_budget(share, steps, monkeypatch):
    calls = []
    train = LocalClient.train

    def watched(self, start, **options):
        calls.append((options["update"], options["steps"]))
        return train(self, start, **options)

    monkeypatch.setattr(LocalClient, "train", watched)
    _, federation, _ = toy_federation(FedRep(head_share=share), steps=steps)
    run_reference(federation, 1)
    (first, head), (second, body) = calls[:2]
    assert (first, second) == ("personal", "shared")
    assert head + body == steps
    assert min(head, body) >= 1
    assert abs(head - share * steps) <= 1
    assert len(calls) == 2 * 3


def test_an_opening_sketch_does_not_shift_the_shares(monkeypatch):
    """Of 5 steps x has 2 and z has 3, whether or not a phase of sketches comes first."""
    calls = []
    train = LocalClient.train

    def watched(self, start, **options):
        calls.append((options["update"], options["steps"]))
        return train(self, start, **options)

    monkeypatch.setattr(LocalClient, "train", watched)
    for graph in (RING, SimilarityGraph(sketch="label", neighbours=1)):
        calls.clear()
        _, federation, _ = toy_federation(PFedNet(graph=graph), steps=5)
        run_reference(federation, 1)
        assert calls == [("shared", 2)] * 3 + [("personal", 3)] * 3
