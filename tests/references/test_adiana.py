"""ADIANA against Algorithm 2 in NumPy, on flat vectors, and at the optimum."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from medfed.common.seeding import coin, derive_seed, torch_rng
from medfed.functional.sketches import acceleration, random_entries
from medfed.personalize.adiana import ADIANA
from medfed.standalone.errors import ConfigError
from tests.references.quadratics import CLIENTS, FEATURES, Quadratics, global_model

CASES = {
    "all": {"keep": 1.0, "lr": 0.3},
    "some": {"keep": 0.67, "lr": 0.2},
    "one": {"keep": 0.34, "lr": 0.05},
    "uniform": {"keep": 0.67, "lr": 0.2, "weighting": "uniform", "seed": 3},
}


def adiana(q: Quadratics, method: ADIANA, rounds: int) -> tuple[np.ndarray, ...]:
    """y, z, w, h and all h_i after the last round, given which entries travel and the coins."""
    size, eta, mu = FEATURES, method.lr, method.convexity
    kept = round(method.keep * size)
    omega = size / kept - 1
    alpha, theta2 = 1 / (omega + 1), 0.5
    root = np.sqrt(CLIENTS / (32 * omega)) if omega else np.inf
    chance = min(1, max(1, root - 1) / (2 * (1 + omega)))
    theta1 = min(0.25, np.sqrt(eta * mu / chance))
    gamma = eta / (2 * (theta1 + eta * mu))
    beta = 1 - gamma * mu
    found = acceleration(eta, mu, size, method.keep, CLIENTS)
    assert found == pytest.approx((alpha, theta1, gamma, chance))
    shares = q.shares(method.weighting)
    y, z, w, h = (np.zeros(size) for _ in range(4))
    own = np.zeros((CLIENTS, size))
    for number in range(rounds):
        x = theta1 * z + theta2 * w + (1 - theta1 - theta2) * y
        g, moved = h.copy(), np.zeros(size)
        for i in range(CLIENTS):
            draw = derive_seed(method.seed, number, f"c{i}", "entries")
            masks = np.zeros((2, size))
            for mask, part in zip(masks, ("gradient", "shift"), strict=True):
                where = random_entries(torch.zeros(size), method.keep, torch_rng(draw, part))
                mask[where.numpy()] = size / kept
            g += shares[i] * masks[0] * (q.gradient(i, x) - own[i])
            difference = masks[1] * (q.gradient(i, w) - own[i])
            own[i] += alpha * difference
            moved += shares[i] * difference
        h = h + alpha * moved
        ahead = x - eta * g
        z = beta * z + (1 - beta) * x + gamma / eta * (ahead - x)
        w = y if coin(chance, method.seed, number, "anchor") else w
        y = ahead
    return y, z, w, h, own


@pytest.mark.parametrize("case", CASES)
def test_equals_algorithm_2(case):
    problem, method = Quadratics(), ADIANA(convexity=0.5, **CASES[case])
    federation = problem.run(method, 12)
    y, z, w, h, own = adiana(problem, method, 12)
    for group, expected in (("shared", y), ("momentum", z), ("anchor", w), ("shift", h)):
        found = federation.server[group]["weight"].numpy().ravel()
        np.testing.assert_allclose(found, expected, atol=1e-10)
    for client, expected in zip(federation.ids, own, strict=True):
        found = federation.clients[client].state["shift"]["weight"].numpy().ravel()
        np.testing.assert_allclose(found, expected, atol=1e-10)
    np.testing.assert_allclose(federation.personal_model("c0")["weight"].ravel(), y, atol=1e-10)


def test_the_anchor_moves_as_often_as_it_should():
    method = ADIANA(keep=0.67, convexity=0.5)
    share = np.mean([coin(1 / 3, method.seed, number, "anchor") for number in range(1000)])
    assert share == pytest.approx(1 / 3, abs=0.05)


@pytest.mark.parametrize(
    ("keep", "lr", "rounds", "gap"), [(1.0, 0.5, 50, 1e-9), (0.67, 0.25, 80, 1e-8)]
)
def test_comes_to_the_optimum(keep, lr, rounds, gap):
    problem = Quadratics()
    found = global_model(problem.run(ADIANA(keep=keep, convexity=0.7, lr=lr), rounds))
    np.testing.assert_allclose(found, problem.optimum(), atol=gap)


def test_only_some_entries_travel():
    federation = Quadratics().run(ADIANA(keep=0.34), 1)
    parts = {"gradient", "shift"}
    sent = {e.part: e.bytes for e in federation.ledger.entries if e.direction == "up"}
    assert parts <= set(sent)
    assert all(sent[p] - 12 == 8 for p in parts)  # one float64 of three


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"keep": 0.0}, r"algorithm\.keep must be in \(0, 1\], not 0\.0"),
        ({"convexity": 0.0}, r"algorithm\.convexity must be positive, not 0\.0"),
        ({"lr": -1.0}, r"algorithm\.lr must be positive"),
        ({"personal": "task"}, "ADIANA has one model for all"),
    ],
)
def test_what_is_not_defined_is_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        ADIANA(**options)
