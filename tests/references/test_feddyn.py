"""FedDyn against Algorithm 1 in NumPy, on minibatches, and at its optimum."""

from __future__ import annotations

import numpy as np
import pytest

from medfed.personalize.fedavg import FedAvg
from medfed.personalize.feddyn import FedDyn
from medfed.standalone.errors import ConfigError
from tests.references.linear_net import ALL, Model
from tests.references.minibatch_steps import descend, mean, zeros
from tests.references.pairing import Minibatches, assert_same, run_on_minibatches
from tests.references.quadratics import Quadratics, global_model

HALF = {"fraction": 0.5, "rounds": 7}
CASES = {
    "plain": ({"strength": 2.0}, {}),
    "uniform": ({"strength": 2.0, "weighting": "uniform"}, {}),
    "half": ({"strength": 2.0}, HALF),
    "half-uniform-momentum": (
        {"strength": 3.0, "weighting": "uniform"}, {**HALF, "momentum": 0.5, "lr": 0.02},
    ),
}  # fmt: skip


def feddyn(p: Minibatches, strength: float) -> tuple[Model, Model, list[Model]]:
    """w, h and all gamma_i after the last round."""
    w, h, own = dict(p.initial), zeros(p), [zeros(p) for _ in p.batches]
    for cohort in p.cohorts:
        ends = {}
        for n in cohort:
            at, dual = w, own[n]

            def term(theta: Model, at: Model = at, dual: Model = dual) -> Model:
                return {k: strength * (theta[k] - at[k]) - dual[k] for k in ALL}

            ends[n] = descend(p, n, w, term)
            own[n] = {k: dual[k] - strength * (ends[n][k] - w[k]) for k in ALL}
        h = {
            k: h[k] - strength * sum(p.shares[n] * (ends[n][k] - w[k]) for n in cohort) for k in ALL
        }
        middle = mean(p, ends)
        w = {k: middle[k] - h[k] / strength for k in ALL}
    return w, h, own


@pytest.mark.parametrize("case", CASES)
def test_equals_algorithm_1(case):
    options, changes = CASES[case]
    federation, problem = run_on_minibatches(FedDyn(**options), **changes)
    w, h, own = feddyn(problem, options["strength"])
    assert_same(federation.server["shared"], w, 1e-10)
    assert_same(federation.server["drift"], h, 1e-10)
    for client, dual in zip(federation.ids, own, strict=True):
        assert_same(federation.clients[client].state["dual"], dual, 1e-10)
    # h = sum p_i gamma_i, also where some clients were away.
    total = {k: sum(s * o[k] for s, o in zip(problem.shares, own, strict=True)) for k in ALL}
    assert_same(federation.server["drift"], total, 1e-10)
    assert max(np.abs(h[k]).max() for k in ALL) > 1e-2


@pytest.mark.parametrize(
    ("weighting", "rounds", "changes"),
    [
        ("samples", 35, {}),
        ("uniform", 35, {}),
        ("samples", 80, {"fraction": 0.5}),
        ("samples", 35, {"momentum": 0.9, "lr": 0.03}),
    ],
    ids=["all", "uniform", "half", "momentum"],
)
def test_comes_to_the_optimum_where_fedavg_does_not(weighting, rounds, changes):
    problem = Quadratics()
    federation = problem.run(FedDyn(strength=1.0, weighting=weighting), rounds, **changes)
    best = problem.optimum(weighting)
    np.testing.assert_allclose(global_model(federation), best, atol=1e-6)
    plain = global_model(problem.run(FedAvg(weighting=weighting), 8, **changes))
    assert np.abs(plain - best).max() > 0.01
    # Every gamma_i is the client's gradient there.
    for i, client in enumerate(federation.ids):
        dual = federation.clients[client].state["dual"]["weight"].numpy().ravel()
        np.testing.assert_allclose(dual, problem.gradient(i, best), atol=1e-5)


def test_what_is_not_defined_is_refused():
    with pytest.raises(ConfigError, match=r"algorithm\.strength must be positive, not 0"):
        FedDyn(strength=0.0)
    with pytest.raises(ConfigError, match="mask_aware is not for FedDyn"):
        FedDyn(mask_aware=True)
