"""FedPD against Algorithm 1 in NumPy, on minibatches, and at its optimum."""

from __future__ import annotations

import numpy as np
import pytest

from medfed.personalize.fedavg import FedAvg
from medfed.personalize.feddyn import FedDyn
from medfed.personalize.fedpd import FedPD
from medfed.standalone.errors import ConfigError
from tests.references.linear_net import ALL, Model
from tests.references.minibatch_steps import descend, mean, zeros
from tests.references.pairing import Minibatches, assert_same, run_on_minibatches
from tests.references.quadratics import Quadratics, global_model

CASES = {
    "plain": ({}, {}),
    "uniform": ({"weighting": "uniform"}, {}),
    "momentum": ({}, {"momentum": 0.5, "lr": 0.02}),
    "skip": ({"skip": 0.5}, {"rounds": 9}),
    "skip-uniform-momentum": (
        {"skip": 0.5, "seed": 2, "weighting": "uniform"},
        {"rounds": 9, "momentum": 0.5, "lr": 0.02},
    ),
}  # fmt: skip


def fedpd(p: Minibatches, eta: float, sends: list[bool]) -> tuple[Model, list[Model]]:
    """The last mean and all lambda_i after the last round."""
    w, duals = dict(p.initial), [zeros(p) for _ in p.batches]
    anchors = [dict(w) for _ in p.batches]
    for everybody_sends in sends:
        plus = {}
        for n in range(len(p.batches)):
            x0, dual = anchors[n], duals[n]

            def term(x: Model, x0: Model = x0, dual: Model = dual) -> Model:
                return {k: dual[k] + (x[k] - x0[k]) / eta for k in ALL}

            x = descend(p, n, x0, term)
            duals[n] = {k: dual[k] + (x[k] - x0[k]) / eta for k in ALL}
            plus[n] = {k: x[k] + eta * duals[n][k] for k in ALL}
        if everybody_sends:
            w = mean(p, plus)
            anchors = [w for _ in anchors]
        else:
            anchors = [plus[n] for n in range(len(anchors))]
    return w, duals


@pytest.mark.parametrize("case", CASES)
def test_equals_algorithm_1(case):
    options, changes = CASES[case]
    method = FedPD(eta=0.4, **options)
    federation, problem = run_on_minibatches(method, **changes)
    coins = [method.phases(t) == ("fit",) for t in range(len(problem.cohorts))]
    assert all(coins) == (method.skip == 0)
    w, duals = fedpd(problem, 0.4, coins)
    assert_same(federation.server["shared"], w, 1e-10)
    for client, dual in zip(federation.ids, duals, strict=True):
        assert_same(federation.clients[client].state["dual"], dual, 1e-10)
        assert_same(federation.personal_model(client), w, 1e-10)
    # In silent rounds nothing travels, neither then nor before the next round that is silent, too.
    told = {(e.round, e.direction) for e in federation.ledger.entries if e.part == "shared"}
    expected = {(t, "up") for t, coin in enumerate(coins) if coin}
    expected |= {(t, "down") for t in range(len(coins)) if t == 0 or coins[t - 1]}
    assert told == expected


def test_the_coin_falls_as_often_as_it_should():
    silent = [FedPD(skip=0.3).phases(t) == ("silent",) for t in range(1000)]
    assert 0.25 < np.mean(silent) < 0.35
    assert silent != [FedPD(skip=0.3, seed=1).phases(t) == ("silent",) for t in range(1000)]


def test_is_feddyn_where_all_send():
    """alpha = 1 / eta and gamma_i = -lambda_i."""
    primal, _ = run_on_minibatches(FedPD(eta=0.4))
    dynamic, _ = run_on_minibatches(FedDyn(strength=2.5))
    assert_same(primal.server["shared"], dynamic.server["shared"], 1e-12)
    dual = {n: -t for n, t in primal.clients["c0"].state["dual"].items()}
    assert_same(dynamic.clients["c0"].state["dual"], dual, 1e-12)


def test_comes_to_the_optimum_where_fedavg_does_not():
    problem = Quadratics()
    best = problem.optimum()
    np.testing.assert_allclose(global_model(problem.run(FedPD(eta=1.0), 35)), best, atol=1e-6)
    assert np.abs(global_model(problem.run(FedAvg(), 8)) - best).max() > 0.05
    # A constant share of silent rounds does not.
    assert np.abs(global_model(problem.run(FedPD(eta=1.0, skip=0.3), 35)) - best).max() > 1e-3


def test_what_is_not_defined_is_refused():
    with pytest.raises(ConfigError, match=r"algorithm\.eta must be positive, not 0"):
        FedPD(eta=0.0)
    with pytest.raises(ConfigError, match=r"algorithm\.skip must be in \[0, 1\), not 1"):
        FedPD(skip=1.0)
    with pytest.raises(ConfigError, match="mask_aware is not for FedPD"):
        FedPD(mask_aware=True)
    with pytest.raises(ConfigError, match="FedPD needs all clients in every round"):
        run_on_minibatches(FedPD(), fraction=0.5)
