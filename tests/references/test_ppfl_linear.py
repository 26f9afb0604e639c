"""PPFL of linear models without a common part against its algorithm in NumPy, matrices only."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from medfed.federation.reference import run_reference
from medfed.models.networks.canonical import Canonical
from medfed.models.networks.small import LinearRegression
from medfed.models.regression import RegressionTask
from medfed.personalize.ppfl import PPFL
from tests.references.pairing import to_numpy
from tests.toys import toy_data, toy_federation

COUNT, ROUNDS, STEPS, LR, MEMBERSHIP_LR = 3, 5, 4, 0.02, 0.05
LAYER = "canonical.{}.network.linear.{}"


def loop(clients, theta, members):
    """Rows of theta are models, their last column the constant; one batch is all data."""
    sizes = np.array([len(y) for _, y in clients])
    weights = sizes / sizes.sum()
    for _ in range(ROUNDS):
        moves = np.zeros_like(theta)
        for i, (x, y) in enumerate(clients):
            design = np.hstack([x, np.ones((len(x), 1))])
            outputs = design @ theta.T
            gradient = 2 / len(y) * outputs.T @ (outputs @ members[i] - y)
            raised = members[i] * np.exp(-MEMBERSHIP_LR * len(clients) * weights[i] * gradient)
            members[i] = raised / raised.sum()
            own = theta.copy()
            for _ in range(STEPS):
                residual = design @ (members[i] @ own) - y
                own -= LR * np.outer(members[i], 2 / len(y) * residual @ design)
            moves += weights[i] * (own - theta)
        theta = theta + moves
    return theta, members


@pytest.mark.parametrize("mix", ["outputs", "parameters"])
def test_equals_the_matrices(mix):
    networks = []
    for k in range(COUNT):
        torch.manual_seed(k)
        networks.append(LinearRegression(3, spread=0.5).double())
    task = RegressionTask(Canonical(networks, ["*"], mix, "identity"), torch.optim.SGD)
    data = toy_data(4, dtype=torch.float64)
    algorithm = PPFL(strength=0.0, membership_lr=MEMBERSHIP_LR)
    _, federation, local = toy_federation(algorithm, task, data, rounds=ROUNDS, steps=STEPS, lr=LR)

    def models(tensors):
        named = to_numpy(tensors)
        return np.stack(
            [
                np.append(named[LAYER.format(k, "weight")][0], named[LAYER.format(k, "bias")])
                for k in range(COUNT)
            ]
        )

    clients = [(d.x.numpy(), d.y.numpy()) for d in data]
    start = models(local.model.initial())
    theta, members = loop(clients, start, np.full((4, COUNT), 1 / COUNT))
    run_reference(federation, ROUNDS)
    np.testing.assert_allclose(models(federation.server["shared"]), theta, rtol=0, atol=1e-12)
    found = np.stack([federation.server["membership"][c].numpy() for c in federation.ids])
    np.testing.assert_allclose(found, members, rtol=0, atol=1e-12)
    assert np.ptp(members, axis=0).max() > 0.05  # the memberships have parted
    assert np.abs(theta - start).max() > 0.05
