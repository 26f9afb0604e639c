"""Server optimizers against Hsu et al. 2019 and Reddi et al. 2021, Algorithm 2, in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from medfed.federation.reference import run_reference
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi
from medfed.standalone.errors import ConfigError
from tests.references.linear_net import ALL, Model
from tests.references.minibatch_steps import mean, moved, zeros
from tests.references.pairing import Minibatches, assert_same, run_on_minibatches
from tests.references.quadratics import Quadratics, global_model
from tests.toys import toy_federation

HALF = {"fraction": 0.5, "rounds": 7}
RUNS = {"plain": {}, "half": HALF, "momentum": {**HALF, "momentum": 0.5, "lr": 0.02}}
ADAPTIVE = {"adagrad": FedAdagrad, "adam": FedAdam, "yogi": FedYogi}


def fedavgm(p: Minibatches, beta: float, server_lr: float) -> tuple[Model, Model]:
    """w and m after the last round."""
    w, m = dict(p.initial), zeros(p)
    for cohort in p.cohorts:
        delta = mean(p, moved(p, cohort, w))
        m = {k: beta * m[k] + delta[k] for k in ALL}
        w = {k: w[k] + server_lr * m[k] for k in ALL}
    return w, m


def adaptive(
    p: Minibatches, kind: str, server_lr: float, beta1: float, tau: float, beta2: float = 0.0
) -> tuple[Model, Model, Model]:
    """x, m and v after the last round: lines 10 to 15 of Algorithm 2."""
    w, m = dict(p.initial), zeros(p)
    v = {k: np.full_like(t, tau**2) for k, t in m.items()}
    for cohort in p.cohorts:
        delta = mean(p, moved(p, cohort, w))
        for k in ALL:
            d2 = delta[k] ** 2
            m[k] = beta1 * m[k] + (1 - beta1) * delta[k]
            if kind == "adagrad":
                v[k] = v[k] + d2
            elif kind == "yogi":
                v[k] = v[k] - (1 - beta2) * d2 * np.sign(v[k] - d2)
            else:
                v[k] = beta2 * v[k] + (1 - beta2) * d2
            w[k] = w[k] + server_lr * m[k] / (np.sqrt(v[k]) + tau)
    return w, m, v


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("case", RUNS)
def test_fedavgm(case, weighting):
    method = FedAvgM(beta=0.7, server_lr=0.6, weighting=weighting)
    federation, problem = run_on_minibatches(method, **RUNS[case])
    w, m = fedavgm(problem, 0.7, 0.6)
    assert_same(federation.server["shared"], w, 1e-10)
    assert_same(federation.server["momentum"], m, 1e-10)
    assert_same(federation.personal_model("c0"), w, 1e-10)


@pytest.mark.parametrize("kind", ADAPTIVE)
@pytest.mark.parametrize("case", RUNS)
def test_algorithm_2(case, kind):
    options = {"server_lr": 0.05, "beta1": 0.8, "tau": 0.02}
    if kind != "adagrad":
        options["beta2"] = 0.9
    federation, problem = run_on_minibatches(ADAPTIVE[kind](**options), **RUNS[case])
    w, m, v = adaptive(problem, kind, **options)
    assert_same(federation.server["shared"], w, 1e-10)
    assert_same(federation.server["momentum"], m, 1e-10)
    assert_same(federation.server["square"], v, 1e-10)


def test_without_momentum_it_is_fedavg():
    plain, _ = run_on_minibatches(FedAvg())
    limit, _ = run_on_minibatches(FedAvgM(beta=0.0, server_lr=1.0))
    assert_same(limit.server["shared"], plain.server["shared"], 1e-14)


def test_one_step_with_momentum_comes_to_the_optimum():
    problem = Quadratics()
    found = global_model(problem.run(FedAvgM(beta=0.5), 50, steps=1, lr=0.5))
    np.testing.assert_allclose(found, problem.optimum(), atol=1e-8)
    several = global_model(problem.run(FedAvgM(beta=0.5), 50, steps=5))
    assert np.abs(several - problem.optimum()).max() > 0.05


def first_step(method) -> tuple[np.ndarray, np.ndarray]:
    """The first displacement of the server, and the mean of the clients'."""
    problem = Quadratics()
    return global_model(problem.run(method, 1)), global_model(problem.run(FedAvg(), 1))


def test_first_steps_have_closed_forms():
    """From 0, so that weights are displacements; there is no correction of bias."""
    tau = 0.05
    found, delta = first_step(FedAdagrad(server_lr=0.3, beta1=0.0, tau=tau))
    root = np.sqrt(tau**2 + delta**2)
    np.testing.assert_allclose(found, 0.3 * delta / (root + tau), atol=1e-12)
    found, _ = first_step(FedAdam(server_lr=0.3, beta1=0.0, beta2=0.9, tau=tau))
    root = np.sqrt(0.9 * tau**2 + 0.1 * delta**2)
    np.testing.assert_allclose(found, 0.3 * delta / (root + tau), atol=1e-12)
    found, _ = first_step(FedYogi(server_lr=0.3, beta1=0.0, beta2=0.9, tau=tau))
    root = np.sqrt(tau**2 + 0.1 * delta**2 * np.sign(delta**2 - tau**2))
    np.testing.assert_allclose(found, 0.3 * delta / (root + tau), atol=1e-12)
    found, _ = first_step(FedAdam(server_lr=0.3, beta1=0.0, beta2=0.0, tau=1e-12))
    np.testing.assert_allclose(found, 0.3 * np.sign(delta), atol=1e-9)
    # A large tau leaves momentum SGD of step size server_lr / tau, up to 2 from the start of v.
    found, _ = first_step(FedAdam(server_lr=2e9, beta1=0.0, tau=1e9))
    np.testing.assert_allclose(found, delta * 2 / (1 + np.sqrt(0.99)), rtol=1e-6)


@pytest.mark.parametrize("method", [FedAvgM(server_lr=0.0), FedAdam(server_lr=0.0)])
def test_statistics_are_averaged_as_in_fedavg(method):
    """A server that does not move parameters moves statistics, and never makes a variance < 0."""
    _, still, local = toy_federation(method, rounds=3)
    _, plain, _ = toy_federation(FedAvg(), rounds=1)
    start = local.model.initial()
    run_reference(still, 1)
    run_reference(plain, 1)
    for name in local.split.shared:
        buffer = name in local.split.buffers
        expected = plain.server["shared"][name] if buffer else start[name]
        assert torch.equal(still.server["shared"][name], expected)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (FedAvgM, {"beta": 1.0}, r"algorithm\.beta must be in \[0, 1\), not 1\.0"),
        (FedAdam, {"beta2": -0.1}, r"algorithm\.beta2 must be in"),
        (FedYogi, {"beta1": 1}, r"algorithm\.beta1 must be in"),
        (FedAdagrad, {"tau": 0.0}, r"algorithm\.tau must be positive, not 0\.0"),
        (FedAvgM, {"server_lr": -1.0}, r"algorithm\.server_lr must not be negative"),
    ],
)
def test_values_out_of_range_are_refused(kind, options, said):
    with pytest.raises(ConfigError, match=said):
        kind(**options)
