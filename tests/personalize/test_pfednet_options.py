"""A fixed penalty changes the way, not the solution; weighted edges change the solution."""

from __future__ import annotations

import pytest
import torch

from medfed.federation.reference import run_reference
from medfed.personalize.functional import edge_similarity, network_lasso
from medfed.personalize.pfednet import PFedNet
from medfed.personalize.similarity import SimilarityGraph
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
    weights = 0.3 * 3 * LR * edge_similarity(server["graph"]["distance"])
    expected = network_lasso(v, server["graph"]["edges"], weights)
    torch.testing.assert_close(z, expected, rtol=0, atol=1e-6)
    assert weights.unique().numel() == len(weights) > 1
    plain, _ = personal(rounds=1)
    assert not torch.allclose(z, plain, atol=1e-4)


@pytest.mark.parametrize("strength", [0.0, float("inf")])
def test_the_limits_need_no_iteration(strength):
    z, server = personal(strength=strength)
    assert float(server["diagnostics"]["iterations"]) == 0
    assert bool((z == z[0]).all()) == (strength > 0)
