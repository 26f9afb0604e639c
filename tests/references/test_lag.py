"""LAG against Algorithm 1 (LAG-WK) in NumPy: who sends, and what the server makes of it."""

from __future__ import annotations

import numpy as np
import pytest

from medfed.personalize.fedsgd import FedSGD
from medfed.personalize.lag import LAG
from tests.references.linear_net import ALL, Model, gradient
from tests.references.pairing import assert_same, run_both_ways
from tests.references.quadratics import CLIENTS, Quadratics, global_model


def square(a: Model, b: Model) -> float:
    return sum(((a[k] - b[k]) ** 2).sum() for k in ALL)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_equals_algorithm_1(weighting):
    method, rounds = LAG(laziness=0.15, memory=3, weighting=weighting), 12
    federation, p = run_both_ways(method, rounds=rounds)
    sizes = [len(y) if weighting == "samples" else 1 for _, y in p.clients]
    shares = np.array(sizes) / sum(sizes)
    zero = {k: np.zeros_like(v) for k, v in p.initial.items()}
    path, sent, g, count = [p.initial], [zero] * len(shares), zero, set()
    for t in range(rounds):
        steps = [square(path[-d], path[-d - 1]) for d in range(1, 4) if d < len(path)]
        least = sum(0.05 * s for s in steps) / p.lr**2
        for n, share in enumerate(shares):
            now = gradient(path[-1], *p.clients[n])
            if square(now, sent[n]) > least:
                g = {k: g[k] + share * (now[k] - sent[n][k]) for k in ALL}
                sent[n] = now
                count.add((t, federation.ids[n]))
        path.append({k: path[-1][k] - p.lr * g[k] for k in ALL})
    assert_same(federation.server["shared"], path[-1], 1e-10)
    uploads = {(e.round, e.client) for e in federation.ledger.entries if e.part == "difference"}
    assert uploads == count
    assert len(shares) < len(count) < 0.9 * rounds * len(shares)


def test_without_laziness_it_is_gradient_descent():
    limit, _ = run_both_ways(LAG(laziness=0.0))
    plain, _ = run_both_ways(FedSGD())
    assert_same(limit.server["shared"], plain.server["shared"], 1e-12)


def test_comes_to_the_optimum_with_fewer_messages():
    problem = Quadratics()
    federation = problem.run(LAG(laziness=0.3), 80, lr=0.3)
    uploads = [e for e in federation.ledger.entries if e.part == "difference"]
    assert np.abs(global_model(federation) - problem.optimum()).max() < 1e-6
    assert len(uploads) < 0.5 * 80 * CLIENTS
