"""L2GD against Algorithm 1 in NumPy, on minibatches, and near its optimum."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from medfed.common.seeding import numpy_rng
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.l2gd import L2GD
from medfed.personalize.local import Local
from medfed.standalone.errors import ConfigError
from tests.references.linear_net import ALL, Model
from tests.references.minibatch_steps import descend, mean
from tests.references.pairing import Minibatches, assert_same, run_on_minibatches
from tests.references.quadratics import CLIENTS, FEATURES, Quadratics, global_model, own_models

CASES = {
    "mean": ({}, {}),
    "uniform": ({"weighting": "uniform"}, {}),
    "momentum": ({}, {"momentum": 0.5, "lr": 0.02}),
    "random": ({"coins": "random"}, {"rounds": 9}),
    "random-seed": ({"coins": "random", "seed": 4, "weighting": "uniform"}, {"rounds": 9}),
}


def geometric(draw: float, again: float) -> int:
    """How often a side falls: P(more than m) = again^m."""
    count = 1
    while draw >= 1 - again**count:
        count += 1
    return count


def l2gd(p: Minibatches, strength: float, runs: list[tuple[int, int]]) -> tuple[Model, list[Model]]:
    """The mean before the last heads, and all x_i after them."""
    x = {n: dict(p.initial) for n in range(len(p.batches))}
    # The steps that a gradient of the k-th last step still moves the model for.
    reach = p.lr * sum(sum(p.momentum**j for j in range(k)) for k in range(1, p.steps + 1))
    kappa, longest = strength * reach, 0
    for tails, heads in runs:
        longest = max(longest, heads)
        stretch = dataclasses.replace(p, steps=tails)
        x = {n: descend(stretch, n, own) for n, own in x.items()}
        middle = mean(p, x)
        for _ in range(heads):  # one after the other: the mean stays
            x = {n: {k: (1 - kappa) * x[n][k] + kappa * middle[k] for k in ALL} for n in x}
            again = mean(p, x)
            assert all(np.allclose(again[k], middle[k], atol=1e-12) for k in ALL)
    assert 0 < kappa < 1
    return middle, [x[n] for n in sorted(x)]


@pytest.mark.parametrize("case", CASES)
def test_equals_algorithm_1(case):
    options, changes = CASES[case]
    method = L2GD(strength=0.7, **options)
    federation, problem = run_on_minibatches(method, **changes)
    runs = [(problem.steps, 1) for _ in problem.cohorts]
    if method.coins == "random":
        chance = 1 / (problem.steps + 1)
        draws = [numpy_rng(method.seed, t, "coins").random(2) for t in range(len(runs))]
        runs = [(geometric(a, 1 - chance), geometric(b, chance)) for a, b in draws]
        assert len({tails for tails, _ in runs}) > 3
    middle, x = l2gd(problem, 0.7, runs)
    assert_same(federation.server["shared"], middle, 1e-10)
    for client, own in zip(federation.ids, x, strict=True):
        assert_same(federation.personal_model(client), own, 1e-10)


def test_without_coupling_it_is_local():
    limit, _ = run_on_minibatches(L2GD(strength=0.0))
    alone, _ = run_on_minibatches(Local())
    for client in alone.ids:
        assert_same(limit.personal_model(client), alone.personal_model(client), 1e-14)


def test_with_a_strong_coupling_it_is_fedavg():
    limit, _ = run_on_minibatches(L2GD(strength=1e9))
    plain, _ = run_on_minibatches(FedAvg())
    for client in plain.ids:
        assert_same(limit.personal_model(client), plain.server["shared"], 1e-12)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_comes_near_the_optimum_as_the_step_shrinks(weighting):
    """Of g_i(x_i) + lambda (x_i - sum p_j x_j) = 0; the distance is of the order of the step."""
    problem, strength = Quadratics(), 0.8
    shares, eye = problem.shares(weighting), np.eye(FEATURES)
    system = np.zeros((CLIENTS, FEATURES, CLIENTS, FEATURES))
    for i in range(CLIENTS):
        system[i, :, i] += problem.hessians[i] + strength * eye
        for j in range(CLIENTS):
            system[i, :, j] -= strength * shares[j] * eye
    size = CLIENTS * FEATURES
    best = np.linalg.solve(system.reshape(size, size), problem.linear.ravel())
    gaps = []
    for lr, rounds in ((0.2, 25), (0.1, 50)):
        method = L2GD(strength=strength, weighting=weighting)
        found = own_models(problem.run(method, rounds, steps=2, lr=lr)).ravel()
        gaps.append(np.abs(found - best).max())
    assert 0.01 < gaps[0] < 0.5
    assert gaps[1] / gaps[0] == pytest.approx(0.5, abs=0.12)


def test_what_is_not_defined_is_refused():
    with pytest.raises(ConfigError, match=r"algorithm\.strength must not be negative"):
        L2GD(strength=-1.0)
    with pytest.raises(ConfigError, match="mask_aware is not for L2GD"):
        L2GD(mask_aware=True)
    with pytest.raises(ConfigError, match="L2GD needs all clients in every round"):
        run_on_minibatches(L2GD(), fraction=0.5)
    with pytest.raises(ConfigError, match="steps in proportion to the gradient"):
        Quadratics().run(L2GD(), 1, optimizer=torch.optim.Adam)


def test_the_mean_is_not_what_is_evaluated():
    federation = Quadratics().run(L2GD(), 2)
    assert np.abs(own_models(federation) - global_model(federation)).max() > 0.01
