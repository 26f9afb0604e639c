"""SuPerFed-MM against Algorithm 1 in NumPy, on minibatches and the same draws of the mixture."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from medfed.common.seeding import torch_rng
from medfed.common.tensors import digest
from medfed.functional.mixing import shuffled
from medfed.personalize import superfed
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.superfed import SuPerFed
from medfed.standalone.errors import ConfigError
from tests.references.linear_net import ALL, Model, gradient, loss
from tests.references.minibatch_steps import descend, mean, zeros
from tests.references.pairing import Minibatches, assert_same, run_on_minibatches, to_numpy

CASES = {
    "plain": {},
    "momentum-half": {"momentum": 0.9, "lr": 0.01, "fraction": 0.5, "rounds": 7},
}


def mixed(a: Model, b: Model, share: float) -> Model:
    return {k: (1 - share) * a[k] + share * b[k] for k in ALL}


def squared_cosine(a: Model, b: Model) -> Model:
    """Gradient at a of (a.b)^2 / (|a|^2 |b|^2)."""
    u, v = (np.concatenate([m[k].ravel() for k in ALL]) for m in (a, b))
    dot, aa, bb = u @ v, u @ u, v @ v
    return {k: 2 * dot * b[k] / (aa * bb) - 2 * dot**2 * a[k] / (aa**2 * bb) for k in ALL}


def train(p: Minibatches, n: int, w: Model, own: Model, draws, mu: float, nu: float):
    """w_f and w_l after the client's steps."""
    y, velocity = dict(w), zeros(p)
    for x, label in islice(p.batches[n], p.steps):
        share = next(draws)
        g = gradient(mixed(y, own, share), x, label)
        to_y, to_own = squared_cosine(y, own), squared_cosine(own, y)
        step = {k: (1 - share) * g[k] + 2 * mu * (y[k] - w[k]) + nu * to_y[k] for k in ALL}
        own = {k: own[k] - p.lr * (share * g[k] + nu * to_own[k]) for k in ALL}
        velocity = {k: p.momentum * velocity[k] + step[k] for k in ALL}
        y = {k: y[k] - p.lr * velocity[k] for k in ALL}
    return y, own


@pytest.fixture
def drawn(monkeypatch) -> list[float]:
    found, draw = [], superfed.draw
    monkeypatch.setattr(superfed, "draw", lambda: found.append(draw()) or found[-1])
    return found


@pytest.mark.parametrize("case", CASES)
def test_equals_algorithm_1(case, drawn):
    rounds = CASES[case].get("rounds", 4)
    algorithm = SuPerFed(start=0.3, proximity=0.7, orthogonality=0.4, rounds=rounds, grid=3)
    federation, p = run_on_minibatches(algorithm, **CASES[case])
    data = [federation.clients[c].data for c in federation.ids]
    start = federation.clients["c0"].weights
    rngs = [torch_rng(0, c, "another model") for c in federation.ids]
    own = [to_numpy(shuffled(start, rng)) for rng in rngs]
    w, draws, shares = dict(p.initial), iter(drawn), [None] * len(own)
    for number, cohort in enumerate(p.cohorts):
        ends = {}
        for n in cohort:
            if number < int(0.3 * rounds):
                ends[n] = descend(p, n, w)
                continue
            ends[n], own[n] = train(p, n, w, own[n], draws, 0.7, 0.4)
            x, y = data[n].x.numpy(), data[n].y.numpy()
            losses = [loss(mixed(ends[n], own[n], s), x, y) for s in (0.0, 0.5, 1.0)]
            shares[n] = 0.5 * int(np.argmin(losses))
        w = mean(p, ends)
    assert_same(federation.server["shared"], w, 1e-10)
    assert len(set(shares)) > 1
    for n, client in enumerate(federation.ids):
        expected = w if shares[n] is None else mixed(w, own[n], shares[n])
        assert_same(federation.personal_model(client), expected, 1e-10)
    assert 0 < min(drawn) < max(drawn) < 1
    assert len(set(drawn)) == len(drawn)


def test_clients_draw_models_of_their_own():
    federation, p = run_on_minibatches(SuPerFed(start=0.0, rounds=1), rounds=1, lr=0.0)
    models = [to_numpy(c.state["own"]) for c in federation.clients.values()]
    for model in models:
        for k in ALL:
            assert (np.sort(model[k].ravel()) == np.sort(p.initial[k].ravel())).all()
    weights = [m["body.weight"].tobytes() for m in (*models, p.initial)]
    assert len(set(weights)) == len(weights)


def test_before_models_are_mixed_and_at_share_0_it_is_fedavg(monkeypatch):
    monkeypatch.setattr(superfed, "draw", lambda: 0.0)
    plain = digest(run_on_minibatches(FedAvg(), momentum=0.9)[0].server["shared"])
    for method in (
        SuPerFed(start=1.0, rounds=4),
        SuPerFed(start=0.0, proximity=0.0, orthogonality=0.0, rounds=4),
    ):
        found = run_on_minibatches(method, momentum=0.9)[0].server["shared"]
        assert digest(found) == plain
    with pytest.raises(ConfigError, match=r"algorithm\.grid must be in \[2, inf\)"):
        SuPerFed(grid=1)
