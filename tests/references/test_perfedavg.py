"""Per-FedAvg against Algorithm 1 in NumPy, on minibatches; on quadratics in closed form."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from medfed.personalize.fedavg import FedAvg
from medfed.personalize.perfedavg import PerFedAvg
from medfed.standalone.errors import ConfigError
from tests.references.linear_net import ALL, Model, gradient
from tests.references.minibatch_steps import mean, zeros
from tests.references.pairing import Minibatches, assert_same, run_on_minibatches

CASES = {
    "first-order": ({"inner_lr": 0.05}, {}),
    "momentum-half": (
        {"inner_lr": 0.05}, {"momentum": 0.9, "lr": 0.01, "fraction": 0.5, "rounds": 6},
    ),
    "hessian-free": ({"variant": "hf", "inner_lr": 0.05, "delta": 0.01}, {"fraction": 0.5}),
}  # fmt: skip


def move(w: Model, g: Model, rate: float) -> Model:
    return {k: w[k] + rate * g[k] for k in ALL}


def perfedavg(p: Minibatches, alpha: float, delta: float | None):
    """w, and each client's model after one step from it."""
    w, adapted = dict(p.initial), [p.initial for _ in p.batches]
    for cohort in p.cohorts:
        ends = {}
        for n in cohort:
            y, velocity = dict(w), zeros(p)
            for _ in range(p.steps):
                tilde = move(y, gradient(y, *next(p.batches[n])), -alpha)
                d = g = gradient(tilde, *next(p.batches[n]))
                if delta is not None:
                    third = next(p.batches[n])
                    up = gradient(move(y, g, delta), *third)
                    down = gradient(move(y, g, -delta), *third)
                    d = {k: g[k] - alpha * (up[k] - down[k]) / (2 * delta) for k in ALL}
                velocity = {k: p.momentum * velocity[k] + d[k] for k in ALL}
                y = move(y, velocity, -p.lr)
            ends[n] = y
        w = mean(p, ends)
        for n in cohort:
            adapted[n] = move(w, gradient(w, *next(p.batches[n])), -alpha)
    return w, adapted


@pytest.mark.parametrize("case", CASES)
def test_equals_algorithm_1(case):
    options, changes = CASES[case]
    algorithm = PerFedAvg(**options)
    federation, problem = run_on_minibatches(algorithm, **changes)
    delta = algorithm.delta if algorithm.variant == "hf" else None
    w, adapted = perfedavg(problem, algorithm.inner_lr, delta)
    assert_same(federation.server["shared"], w, 1e-10)
    for client, model in zip(federation.ids, adapted, strict=True):
        assert_same(federation.personal_model(client), model, 1e-10)


def test_the_hessian_free_direction_is_the_gradient_after_a_step():
    """On a quadratic, (1 - alpha A) grad f(w - alpha grad f(w)), which first order misses."""
    rng = np.random.default_rng(0)
    root = rng.normal(size=(5, 5))
    a, b, w = torch.tensor(root @ root.T), torch.tensor(rng.normal(size=5)), torch.ones(5).double()
    ends = {}
    for variant in ("hf", "fo"):
        algorithm = PerFedAvg(variant=variant, inner_lr=0.05)
        ends[variant] = algorithm.direction({"w": w}, lambda at, fresh=0: {"w": a @ (at["w"] - b)})[
            "w"
        ]
    tilde = w - 0.05 * a @ (w - b)
    exact = (torch.eye(5) - 0.05 * a) @ a @ (tilde - b)
    torch.testing.assert_close(ends["hf"], exact, rtol=1e-8, atol=1e-10)
    assert float((ends["fo"] - exact).norm() / exact.norm()) > 0.1


def test_without_an_inner_step_it_is_fedavg_on_every_other_batch():
    federation, p = run_on_minibatches(PerFedAvg(inner_lr=0.0), rounds=1)
    ends = {}
    for n, batches in enumerate(p.batches):
        y, drawn = dict(p.initial), list(batches)
        for batch in drawn[1 : 2 * p.steps : 2]:
            y = move(y, gradient(y, *batch), -p.lr)
        ends[n] = y
    assert_same(federation.server["shared"], mean(p, ends), 1e-12)
    full = [run_on_minibatches(m, rounds=1)[0] for m in (PerFedAvg(inner_lr=0.0), FedAvg())]
    assert not torch.equal(*(f.server["shared"]["head.bias"] for f in full))
    with pytest.raises(ConfigError, match="delta must be positive"):
        PerFedAvg(delta=0)
