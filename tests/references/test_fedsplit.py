"""FedSplit against Algorithm 1 in NumPy, on minibatches, and at its optimum."""

from __future__ import annotations

import numpy as np
import pytest

from medfed.personalize.fedavg import FedAvg
from medfed.personalize.fedprox import FedProx
from medfed.personalize.fedsplit import FedSplit
from medfed.standalone.errors import ConfigError
from tests.references.linear_net import ALL, Model
from tests.references.minibatch_steps import descend, mean
from tests.references.pairing import Minibatches, assert_same, run_on_minibatches
from tests.references.quadratics import Quadratics, global_model

CASES = {
    "plain": ({}, {}),
    "uniform": ({"weighting": "uniform"}, {}),
    "momentum": ({}, {"momentum": 0.5, "lr": 0.02}),
}


def fedsplit(p: Minibatches, s: float) -> tuple[Model, list[Model]]:
    """x and all z_i after the last round; x is the mean of the z_i."""
    w = dict(p.initial)
    z = {n: dict(w) for n in range(len(p.batches))}
    for _ in p.cohorts:
        for n, own in z.items():
            centre = {k: 2 * w[k] - own[k] for k in ALL}

            def term(y: Model, centre: Model = centre) -> Model:
                return {k: (y[k] - centre[k]) / s for k in ALL}

            y = descend(p, n, w, term)
            z[n] = {k: own[k] + 2 * (y[k] - w[k]) for k in ALL}
        w = mean(p, z)
    return w, [z[n] for n in sorted(z)]


@pytest.mark.parametrize("case", CASES)
def test_equals_algorithm_1(case):
    options, changes = CASES[case]
    federation, problem = run_on_minibatches(FedSplit(step=0.5, **options), **changes)
    w, z = fedsplit(problem, 0.5)
    assert_same(federation.server["shared"], w, 1e-10)
    for client, own in zip(federation.ids, z, strict=True):
        assert_same(federation.clients[client].state["copy"], own, 1e-10)


@pytest.mark.parametrize("changes", [{}, {"momentum": 0.9, "lr": 0.03}], ids=["plain", "momentum"])
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_comes_to_the_optimum_where_fedavg_does_not(weighting, changes):
    problem = Quadratics()
    best = problem.optimum(weighting)
    # s = 1 / sqrt(mu L) with curvatures from 0.7 to 2.
    method = FedSplit(step=1 / np.sqrt(0.7 * 2), weighting=weighting)
    found = global_model(problem.run(method, 18, **changes))
    np.testing.assert_allclose(found, best, atol=1e-9)
    for other in (FedAvg(weighting=weighting), FedProx(mu=np.sqrt(1.4), weighting=weighting)):
        assert np.abs(global_model(problem.run(other, 8, **changes)) - best).max() > 0.01


def test_what_is_not_defined_is_refused():
    with pytest.raises(ConfigError, match=r"algorithm\.step must be positive, not 0"):
        FedSplit(step=0.0)
    with pytest.raises(ConfigError, match="mask_aware is not for FedSplit"):
        FedSplit(mask_aware=True)
    with pytest.raises(ConfigError, match="FedSplit needs all clients in every round"):
        run_on_minibatches(FedSplit(), fraction=0.5)
