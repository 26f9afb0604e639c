"""DIANA against Algorithm 1 in NumPy, and at the optimum that compression alone does not reach."""

from __future__ import annotations

import numpy as np
import pytest

from medfed.federation.wire.channel import Channel, Link
from medfed.federation.wire.codecs.dense import Dense
from medfed.federation.wire.codecs.sparse import RandomK
from medfed.personalize.diana import DIANA
from medfed.personalize.fedsgd import FedSGD
from tests.references.linear_net import ALL, gradient
from tests.references.pairing import assert_same, run_both_ways
from tests.references.quadratics import FEATURES, Quadratics, global_model


def prox(y: np.ndarray, step: float, l1: float, l2: float) -> np.ndarray:
    return np.sign(y) * np.maximum(np.abs(y) - step * l1, 0) / (1 + step * l2)


@pytest.mark.parametrize(
    ("beta", "l1", "l2"), [(0.0, 0.0, 0.0), (0.7, 0.05, 0.0), (0.5, 0.02, 0.4)]
)
def test_equals_algorithm_1(beta, l1, l2):
    federation, p = run_both_ways(DIANA(beta=beta, l1=l1, l2=l2), rounds=8, batch=4)
    w, v = p.initial, {k: np.zeros_like(t) for k, t in p.initial.items()}
    for cohort in p.cohorts:
        g = p.average(cohort, [gradient(w, *p.clients[n]) for n in cohort])
        v = {k: beta * v[k] + g[k] for k in ALL}
        w = {k: prox(w[k] - p.lr * v[k], p.lr / (1 - beta), l1, l2) for k in ALL}
    assert_same(federation.server["shared"], w, 1e-10)


def test_without_momentum_and_penalty_it_is_gradient_descent():
    limit, _ = run_both_ways(DIANA(beta=0.0))
    plain, _ = run_both_ways(FedSGD())
    assert_same(limit.server["shared"], plain.server["shared"], 1e-12)


def test_with_shifts_compression_comes_to_the_sparse_optimum():
    """One entry of three travels; without shifts the clients' gradients never get small."""
    problem, l1 = Quadratics(), 0.02
    best, p = np.zeros(FEATURES), problem.shares()
    for _ in range(2000):  # proximal gradient descent
        g = sum(q * problem.gradient(i, best) for i, q in enumerate(p))
        best = prox(best - 0.3 * g, 0.3, l1, 0.0)
    assert 0 < (best == 0).sum() < FEATURES
    gaps = []
    for shift in (0.33, None):
        channel = Channel(Link(RandomK(0.34), shift=shift, feedback=False), Dense("float64"))
        method = DIANA(beta=0.3, l1=l1)
        found = global_model(problem.run(method, 120, lr=0.2, channel=channel))
        gaps.append(np.abs(found - best).max())
    assert gaps[0] < 1e-5
    assert gaps[1] > 1e-2
