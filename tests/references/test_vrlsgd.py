"""VRL-SGD against Algorithm 1 in NumPy, and as SCAFFOLD with half of its traffic."""

from __future__ import annotations

import pytest

from medfed.personalize.scaffold import Scaffold
from medfed.personalize.vrlsgd import VRLSGD
from medfed.standalone.errors import ConfigError
from tests.references.linear_net import ALL
from tests.references.minibatch_steps import descend, mean, zeros
from tests.references.pairing import assert_same, run_on_minibatches

CASES = [{}, {"momentum": 0.9, "lr": 0.01}]


@pytest.mark.parametrize("changes", CASES)
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_equals_algorithm_1(weighting, changes):
    federation, p = run_on_minibatches(VRLSGD(weighting=weighting), **changes)
    w, shift = p.initial, {n: zeros(p) for n in range(len(p.batches))}
    # The steps that a gradient of the k-th last step still moves the model for.
    reach = p.lr * sum(sum(p.momentum**j for j in range(k)) for k in range(1, p.steps + 1))
    for _ in p.cohorts:
        ends = {
            n: descend(p, n, w, lambda _, d=d: {k: -d[k] for k in ALL}) for n, d in shift.items()
        }
        w = mean(p, ends)
        shift = {n: {k: d[k] + (w[k] - ends[n][k]) / reach for k in ALL} for n, d in shift.items()}
    assert_same(federation.server["shared"], w, 1e-10)


@pytest.mark.parametrize("changes", CASES)
def test_is_scaffold_at_half_the_traffic(changes):
    one, _ = run_on_minibatches(VRLSGD(), **changes)
    two, _ = run_on_minibatches(Scaffold(), **changes)
    assert_same(one.server["shared"], two.server["shared"], 1e-11)
    half, whole = (sum(e.bytes for e in f.ledger.entries) for f in (one, two))
    assert 0.45 < half / whole < 0.55


def test_absent_clients_are_refused():
    with pytest.raises(ConfigError, match="VRLSGD needs all clients in every round"):
        run_on_minibatches(VRLSGD(), fraction=0.5)
