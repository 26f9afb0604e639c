"""The mixture of global and local models against Jacobi ADMM in NumPy, and at its optimum."""

from __future__ import annotations

import numpy as np
import pytest

from medfed.personalize.mixture_admm import MixtureADMM
from medfed.standalone.errors import ConfigError
from tests.references.linear_net import ALL, Model
from tests.references.minibatch_steps import descend, zeros
from tests.references.pairing import Minibatches, assert_same, run_on_minibatches
from tests.references.quadratics import CLIENTS, FEATURES, Quadratics, own_models

CASES = {
    "plain": ({}, {}),
    "rho": ({"rho": 1.7}, {}),
    "uniform": ({"weighting": "uniform"}, {}),
    "momentum": ({}, {"momentum": 0.5, "lr": 0.02}),
}


def jacobi(p: Minibatches, strength: float, rho: float) -> tuple[Model, list[Model]]:
    """z and all x_i after the last round, with the dual y kept as the survey keeps it.

    f~_i = c_i (f_i + (lambda / 2) |x|^2) with c_i = N p_i, subject to N z = sum c_i x_i.
    """
    count = len(p.batches)
    c, z = p.shares * count, dict(p.initial)
    x = [dict(z) for _ in range(count)]
    y = {k: strength * z[k] for k in ALL}
    for _ in p.cohorts:
        others = {k: sum(c[j] * x[j][k] for j in range(count)) - count * z[k] for k in ALL}
        new = []
        for i in range(count):

            def term(at: Model, i: int = i, x: list = x, others: Model = others, y=y) -> Model:
                """Of the augmented Lagrangian in x_i alone, over c_i."""
                left = {k: c[i] * (at[k] - x[i][k]) + others[k] for k in ALL}
                return {k: strength * at[k] - y[k] + rho * left[k] for k in ALL}

            new.append(descend(p, i, x[i], term))
        x = new
        total = {k: sum(c[j] * x[j][k] for j in range(count)) for k in ALL}
        z = {k: (rho * total[k] - y[k]) / (rho * count - strength) for k in ALL}
        y = {k: y[k] + rho * (count * z[k] - total[k]) for k in ALL}
        for k in ALL:  # which is why nobody keeps it
            np.testing.assert_allclose(y[k], strength * z[k], atol=1e-10)
    assert max(np.abs(z[k]).max() for k in zeros(p)) > 1e-2
    return z, x


@pytest.mark.parametrize("case", CASES)
def test_equals_the_admm(case):
    options, changes = CASES[case]
    federation, problem = run_on_minibatches(MixtureADMM(strength=1.5, **options), **changes)
    z, x = jacobi(problem, 1.5, options.get("rho", 1.5))
    assert_same(federation.server["shared"], z, 1e-10)
    for client, own in zip(federation.ids, x, strict=True):
        assert_same(federation.personal_model(client), own, 1e-10)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_comes_to_the_optimum_of_the_objective(weighting):
    """g_i(x_i) + lambda (x_i - sum p_j x_j) = 0 for all i: one linear system."""
    problem, strength = Quadratics(), 0.8
    method = MixtureADMM(strength=strength, weighting=weighting)
    federation = problem.run(method, 45, steps=4, lr=0.3)
    shares, eye = problem.shares(weighting), np.eye(FEATURES)
    system = np.zeros((CLIENTS, FEATURES, CLIENTS, FEATURES))
    for i in range(CLIENTS):
        system[i, :, i] += problem.hessians[i] + strength * eye
        for j in range(CLIENTS):
            system[i, :, j] -= strength * shares[j] * eye
    size = CLIENTS * FEATURES
    best = np.linalg.solve(system.reshape(size, size), problem.linear.ravel())
    np.testing.assert_allclose(own_models(federation).ravel(), best, atol=1e-7)


def test_what_is_not_defined_is_refused():
    with pytest.raises(ConfigError, match=r"algorithm\.strength must be positive, not 0"):
        MixtureADMM(strength=0.0)
    with pytest.raises(ConfigError, match=r"at least algorithm\.strength=1\.0, below which"):
        MixtureADMM(rho=0.5)
    with pytest.raises(ConfigError, match="mask_aware is not for MixtureADMM"):
        MixtureADMM(mask_aware=True)
    with pytest.raises(ConfigError, match="MixtureADMM needs all clients in every round"):
        run_on_minibatches(MixtureADMM(), fraction=0.5)
