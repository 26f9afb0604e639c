"""pFedNet's options: penalty and weights of the Z step, and how phases divide the budget."""

from __future__ import annotations

import pytest
import torch

from medfed.federation.local_client import LocalClient
from medfed.federation.reference import run_reference
from medfed.functional.graph import edge_similarity
from medfed.functional.network_lasso import solve_network_lasso
from medfed.personalize.pfednet import PFedNet
from medfed.personalize.similarity import SimilarityGraph
from medfed.standalone.errors import ConfigError
from tests.sweeps import sweep
from tests.toys import ToyTask, toy_data, toy_federation

LR = 0.05


def personal(rounds: int = 3, weighted: bool = False, **options) -> tuple[torch.Tensor, dict]:
    graph = SimilarityGraph(neighbours=1, weighted=weighted)
    method = PFedNet(
        graph=graph, shared_rounds=0, tolerance=1e-10, max_iter=5000, **{"strength": 0.3, **options}
    )
    data = toy_data(dtype=torch.float64, batch=4)
    _, federation, _ = toy_federation(method, ToyTask(dtype=torch.float64), data, lr=LR)
    run_reference(federation, rounds)
    server = federation.server
    return torch.cat([t.flatten(1) for t in server["personal"].values()], dim=1), server


def test_a_fixed_penalty_gives_the_same_models():
    balanced, _ = personal()
    fixed, _ = personal(rho=1.0)
    torch.testing.assert_close(fixed, balanced, rtol=0, atol=1e-7)


def test_weighted_edges_enter_the_z_step():
    v, _ = personal(rounds=1, strength=0.0)
    z, server = personal(rounds=1, weighted=True)
    weights = 0.3 * 3 * (2 * LR) * edge_similarity(server["graph"]["distance"])
    expected = solve_network_lasso(v, server["graph"]["edges"], weights).z
    torch.testing.assert_close(z, expected, rtol=0, atol=1e-6)
    assert weights.unique().numel() == len(weights) > 1
    plain, _ = personal(rounds=1)
    assert not torch.allclose(z, plain, atol=1e-4)


@pytest.mark.parametrize("strength", [0.0, float("inf")])
def test_the_limits_need_no_iteration(strength):
    z, server = personal(strength=strength)
    assert float(server["diagnostics"]["iterations"]) == 0
    assert bool((z == z[0]).all()) == (strength > 0)


RING = SimilarityGraph(kind="ring")
VARIANTS = {
    "ring": {"graph": RING},
    "data": {"graph": SimilarityGraph(sketch="data", neighbours=2)},
    "label": {"graph": SimilarityGraph(sketch="label", neighbours=2)},
    "two-x": {"graph": RING, "shared_rounds": 2, "personal_rounds": 1},
    "z-alone": {"graph": RING, "shared_rounds": 0, "personal_rounds": 2},
}


@sweep("variant", VARIANTS)
@sweep("steps", [3, None])
def test_every_variant_has_the_same_budget(variant, steps):
    """One epoch of 6, 8, 10 and 12 samples in batches of 2 is 3, 4, 5 and 6 steps."""
    data = toy_data(4, batch=2)
    algorithm = PFedNet(**VARIANTS[variant])
    _, federation, _ = toy_federation(algorithm, ToyTask(), data, steps=steps)
    run_reference(federation, 3)
    expected = [3, 3, 3, 3] if steps else [3, 4, 5, 6]
    assert [federation.clients[c].steps_done for c in federation.ids] == [3 * n for n in expected]


def test_a_model_sketch_costs_one_more_round_of_steps():
    algorithm = PFedNet(graph=SimilarityGraph(sketch="model", neighbours=1))
    _, federation, _ = toy_federation(algorithm, steps=4)
    run_reference(federation, 3)
    assert {c.steps_done for c in federation.clients.values()} == {4 * (3 + 1)}


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


@pytest.mark.parametrize(
    "wrong", [{"rho": 0.0}, {"rho": -1.0}, {"tolerance": 0.0}, {"max_iter": 0}]
)
def test_an_admm_that_cannot_run_is_refused(wrong):
    (key,) = wrong
    with pytest.raises(ConfigError, match=rf"algorithm\.{key} must be"):
        PFedNet(**wrong)
