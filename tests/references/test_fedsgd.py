"""FedSGD against gradient descent on the clients' mean loss."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from medfed.federation.reference import run_reference
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.fedsgd import FedSGD
from tests.references.linear_net import ALL, gradient
from tests.references.pairing import assert_same, run_both_ways
from tests.references.quadratics import Quadratics, global_model
from tests.toys import toy_federation


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_is_gradient_descent(fraction, weighting):
    """Whatever the batches, the budget of steps and the optimizer's momentum."""
    federation, p = run_both_ways(
        FedSGD(weighting=weighting), rounds=6, batch=4, momentum=0.9, fraction=fraction
    )
    w = p.initial
    for cohort in p.cohorts:
        ends = []
        for n in cohort:
            g = gradient(w, *p.clients[n])
            ends.append({k: w[k] - p.lr * g[k] for k in ALL})
        w = p.average(cohort, ends)
    assert_same(federation.server["shared"], w, 1e-10)


def test_is_fedavg_with_one_step_on_everything():
    one, _ = run_both_ways(FedAvg(), steps=1)
    limit, _ = run_both_ways(FedSGD(), steps=1)
    assert_same(limit.server["shared"], one.server["shared"], 1e-12)


def test_comes_to_the_optimum():
    problem = Quadratics()
    found = global_model(problem.run(FedSGD(), 40, lr=0.5))
    np.testing.assert_allclose(found, problem.optimum(), atol=1e-12)


@pytest.mark.parametrize("policy", ["averaged", "local"])
def test_statistics_follow_the_batches(policy):
    _, federation, local = toy_federation(FedSGD(), rounds=1, buffers=policy)
    start = local.model.initial()
    run_reference(federation, 1)
    for client in federation.ids:
        model = federation.personal_model(client)
        assert all(not torch.equal(model[n], start[n]) for n in local.split.buffers)
