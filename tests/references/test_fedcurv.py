"""FedCurv against Equation 4 in NumPy: every client's penalty over the others, one by one."""

from __future__ import annotations

from itertools import islice

import pytest

from medfed.personalize.fedavg import FedAvg
from medfed.personalize.fedcurv import FedCurv
from tests.references.linear_net import ALL, gradient
from tests.references.minibatch_steps import descend, mean
from tests.references.pairing import assert_same, run_on_minibatches


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize(("weighting", "batches"), [("samples", 1), ("uniform", 2)])
def test_equals_equation_4(fraction, weighting, batches):
    method = FedCurv(strength=0.02, fisher_batches=batches, weighting=weighting)
    federation, p = run_on_minibatches(method, fraction=fraction, rounds=6, lr=0.02)
    w, last = p.initial, {}
    moved = 0.0
    for cohort in p.cohorts:
        ends, now = {}, {}
        for n in cohort:
            others = [known for j, known in last.items() if j != n]

            def term(at, others=others):
                pull = {k: 0 * at[k] for k in ALL}
                for model, fisher in others:
                    pull = {k: pull[k] + 0.04 * fisher[k] * (at[k] - model[k]) for k in ALL}
                return pull

            ends[n] = descend(p, n, w, term)
            moved = max(moved, max(abs(t).max() for t in term(ends[n]).values()))
            drawn = [gradient(ends[n], *b) for b in islice(p.batches[n], batches)]
            now[n] = ends[n], {k: 4 * sum(g[k] ** 2 for g in drawn) / batches for k in ALL}
        w, last = mean(p, ends), now
    assert_same(federation.server["shared"], w, 1e-10)
    assert moved > 1e-2


def test_without_the_penalty_it_is_fedavg():
    limit, _ = run_on_minibatches(FedCurv(strength=0.0), rounds=1)
    plain, _ = run_on_minibatches(FedAvg(), rounds=1)
    assert_same(limit.server["shared"], plain.server["shared"], 1e-12)
