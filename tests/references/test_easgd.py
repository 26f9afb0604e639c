"""EASGD against Equations 5 and 6 in NumPy, on minibatches, and at its fixed point."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from medfed.personalize.easgd import EASGD
from medfed.standalone.errors import ConfigError
from tests.references.linear_net import ALL, Model, gradient
from tests.references.minibatch_steps import zeros
from tests.references.pairing import Minibatches, assert_same, run_on_minibatches
from tests.references.quadratics import CLIENTS, FEATURES, Quadratics, global_model, own_models

CASES = {
    "plain": ({}, {}),
    "uniform": ({"weighting": "uniform"}, {}),
    "half": ({}, {"fraction": 0.5, "rounds": 7}),
    "half-uniform-momentum": (
        {"weighting": "uniform"}, {"fraction": 0.5, "rounds": 7, "momentum": 0.5, "lr": 0.02},
    ),
}  # fmt: skip


def easgd(p: Minibatches, beta: float) -> tuple[Model, list[Model]]:
    """The centre and all x_i after the last exchange; x_i is yet to take its pull."""
    centre, x = dict(p.initial), [dict(p.initial) for _ in p.batches]
    gaps = [zeros(p) for _ in p.batches]
    alpha = beta / len(x)
    for cohort in p.cohorts:
        step = zeros(p)
        for n in cohort:
            velocity = zeros(p)
            for j, (inputs, target) in enumerate(islice(p.batches[n], p.steps)):
                g = gradient(x[n], inputs, target)
                velocity = {k: p.momentum * velocity[k] + g[k] for k in ALL}
                pull = alpha if j == 0 else 0.0
                x[n] = {k: x[n][k] - p.lr * velocity[k] - pull * gaps[n][k] for k in ALL}
            gaps[n] = {k: x[n][k] - centre[k] for k in ALL}
            step = {k: step[k] + alpha * len(x) * p.shares[n] * gaps[n][k] for k in ALL}
        centre = {k: centre[k] + step[k] for k in ALL}
    return centre, x


@pytest.mark.parametrize("case", CASES)
def test_equals_equations_5_and_6(case):
    options, changes = CASES[case]
    federation, problem = run_on_minibatches(EASGD(beta=0.8, alpha=None, **options), **changes)
    centre, x = easgd(problem, 0.8)
    assert_same(federation.server["shared"], centre, 1e-10)
    for client, own in zip(federation.ids, x, strict=True):
        assert_same(federation.clients[client].state["model"], own, 1e-10)
        assert_same(federation.personal_model(client), centre, 1e-10)


@pytest.mark.parametrize("alpha", [None, 0.4])
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_one_step_between_exchanges_comes_to_the_joint_optimum(weighting, alpha):
    """argmin sum p_i (f_i(x_i) + (rho / 2) |x_i - c|^2), rho = alpha / eta, over all x_i and c."""
    problem, lr, beta = Quadratics(), 0.3, 0.8
    federation = problem.run(
        EASGD(beta=beta, alpha=alpha, weighting=weighting), 120, steps=1, lr=lr
    )
    shares, eye = problem.shares(weighting), np.eye(FEATURES)
    rho = (beta / CLIENTS if alpha is None else alpha) / lr
    size = FEATURES * (CLIENTS + 1)
    system, right = np.zeros((size, size)), np.zeros(size)
    last = slice(FEATURES * CLIENTS, size)
    for i, share in enumerate(shares):
        own = slice(FEATURES * i, FEATURES * (i + 1))
        system[own, own] = problem.hessians[i] + rho * eye
        system[own, last] = -rho * eye
        system[last, own] = -share * eye
        right[own] = problem.linear[i]
    system[last, last] = eye
    best = np.linalg.solve(system, right)
    np.testing.assert_allclose(global_model(federation), best[last], atol=1e-8)
    models = [federation.clients[c].state["model"]["weight"].numpy() for c in federation.ids]
    np.testing.assert_allclose(np.ravel(models), best[: last.start], atol=1e-7)
    assert np.abs(own_models(federation) - best[last]).max() < 1e-8  # what is evaluated


def test_what_is_not_defined_is_refused():
    for beta in (0.0, 1.5):
        with pytest.raises(ConfigError, match=rf"algorithm\.beta must be in \(0, 1\], not {beta}"):
            EASGD(beta=beta)
    with pytest.raises(ConfigError, match=r"algorithm\.alpha must be in \(0, 1\], not 0\.0"):
        EASGD(alpha=0.0)
    with pytest.raises(ConfigError, match="mask_aware is not for EASGD"):
        EASGD(mask_aware=True)
