"""FedMGDA+ against Algorithm 1 in NumPy, with the weights by enumerating active sets."""

from __future__ import annotations

from itertools import product

import cvxpy as cp
import numpy as np
import pytest
import torch

from medfed.federation.reference import run_reference
from medfed.functional.mixing import minimum_norm
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.fedmgda import FedMGDA
from medfed.standalone.errors import ConfigError
from tests.references.linear_net import ALL, Model
from tests.references.minibatch_steps import moved
from tests.references.pairing import Minibatches, assert_same, run_on_minibatches
from tests.references.quadratics import Quadratics, global_model
from tests.toys import toy_federation

HALF = {"fraction": 0.5, "rounds": 7}
CASES = {
    "plain": ({"epsilon": 0.1, "decay": 1.0}, {}),
    "whole": ({"epsilon": 1.0, "decay": 0.9}, {}),
    "none": ({"epsilon": 0.0, "decay": 1.0, "weighting": "uniform"}, {}),
    "half-momentum": ({"epsilon": 0.3, "decay": 1.0}, {**HALF, "momentum": 0.5, "lr": 0.02}),
}


def by_active_sets(gram: np.ndarray, prior: np.ndarray, radius: float) -> np.ndarray:
    """The best of all points that are stationary with some weights at a bound."""
    low, high = np.maximum(prior - radius, 0), np.minimum(prior + radius, 1)
    best, found = np.inf, prior
    for where in product("lfh", repeat=len(prior)):
        free = np.array([w == "f" for w in where])
        point = np.where([w == "l" for w in where], low, high)
        if free.any():
            # G_ff x + G_fb x_b = nu and sum x = 1.
            size = free.sum()
            system = np.block(
                [[gram[np.ix_(free, free)], -np.ones((size, 1))], [np.ones((1, size)), 0]]
            )
            right = [*(-gram[np.ix_(free, ~free)] @ point[~free]), 1 - point[~free].sum()]
            point[free] = np.linalg.solve(system, right)[:-1]
        inside = (point >= low - 1e-12).all() and (point <= high + 1e-12).all()
        if inside and abs(point.sum() - 1) < 1e-12 and point @ gram @ point < best:
            best, found = point @ gram @ point, point
    return found


def fedmgda(p: Minibatches, epsilon: float, server_lr: float, decay: float = 1.0) -> Model:
    w = dict(p.initial)
    for number, cohort in enumerate(p.cohorts):
        moves = moved(p, cohort, w)
        flat = np.array([np.concatenate([moves[n][k].ravel() for k in ALL]) for n in cohort])
        norms = np.linalg.norm(flat, axis=1)
        units = flat / norms[:, None]
        prior = p.shares[cohort] / p.shares[cohort].sum()
        weights = by_active_sets(units @ units.T, prior, epsilon)
        for k in ALL:
            step = sum(weights[j] * moves[n][k] / norms[j] for j, n in enumerate(cohort))
            w[k] = w[k] + server_lr * decay**number * step
    return w


@pytest.mark.parametrize("case", CASES)
def test_equals_algorithm_1(case):
    options, changes = CASES[case]
    federation, problem = run_on_minibatches(FedMGDA(server_lr=0.2, **options), **changes)
    rest = {k: v for k, v in options.items() if k != "weighting"}
    assert_same(federation.server["shared"], fedmgda(problem, server_lr=0.2, **rest), 1e-9)
    assert_same(federation.personal_model("c1"), federation.server["shared"], 0)


@pytest.mark.parametrize("radius", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("count", [2, 5, 9])
def test_weights_are_those_of_a_solver(count, radius):
    rng = np.random.default_rng(count)
    units = rng.normal(size=(count, 12))
    units /= np.linalg.norm(units, axis=1, keepdims=True)
    prior = rng.dirichlet(np.ones(count))
    found = minimum_norm(units @ units.T, prior, radius)
    x = cp.Variable(count)
    limits = [cp.sum(x) == 1, x >= 0, cp.abs(x - prior) <= radius]
    cp.Problem(cp.Minimize(cp.sum_squares(units.T @ x)), limits).solve(solver=cp.CLARABEL)
    np.testing.assert_allclose(found, x.value, atol=1e-5)
    assert found.sum() == pytest.approx(1, abs=1e-12)
    assert np.linalg.norm(found @ units) <= np.linalg.norm(x.value @ units) + 1e-9
    if radius == 1:  # common descent: every client gains at least as much
        way = found @ units
        assert (units @ way >= way @ way - 1e-9).all()


def test_equal_clients_weigh_anything():
    units = np.ones((3, 1))
    assert minimum_norm(units @ units.T, np.full(3, 1 / 3)).sum() == pytest.approx(1)


def test_a_client_at_its_optimum_stops_the_step():
    problem = Quadratics()
    problem.y[2] = np.zeros(problem.sizes[2])  # 0 is where all start
    np.testing.assert_array_equal(global_model(problem.run(FedMGDA(), 2)), 0)


def test_no_step_is_longer_than_it_may_be():
    found = global_model(Quadratics().run(FedMGDA(server_lr=0.3, epsilon=0.0), 1))
    assert 0 < np.linalg.norm(found) <= 0.3


def test_steps_fall_by_default():
    """The second step of the default is shorter than one without decay by the factor of a round."""
    first, second = (global_model(Quadratics().run(FedMGDA(), n)) for n in (1, 2))
    without = global_model(Quadratics().run(FedMGDA(decay=1.0), 2))
    np.testing.assert_allclose(second - first, FedMGDA.decay * (without - first), atol=1e-12)
    assert FedMGDA.decay < 1


def test_statistics_are_averaged_as_in_fedavg():
    _, still, local = toy_federation(FedMGDA(server_lr=0.0), rounds=1)
    _, plain, _ = toy_federation(FedAvg(), rounds=1)
    start = local.model.initial()
    run_reference(still, 1)
    run_reference(plain, 1)
    for name in local.split.shared:
        expected = plain.server["shared"] if name in local.split.buffers else start
        assert torch.equal(still.server["shared"][name], expected[name])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"epsilon": 1.5}, r"algorithm\.epsilon must be in \[0, 1\], not 1\.5"),
        ({"decay": 0.0}, r"algorithm\.decay must be in \(0, 1\], not 0\.0"),
        ({"server_lr": -1.0}, r"algorithm\.server_lr must not be negative"),
        ({"mask_aware": True}, r"mask_aware is not for FedMGDA"),
    ],
)
def test_what_is_not_defined_is_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        FedMGDA(**options)
