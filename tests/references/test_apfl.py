"""APFL against Algorithm 1 in NumPy, on minibatches; derivatives by finite differences."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch

from medfed.federation.reference import onboarded_client, run_onboarding
from medfed.personalize.apfl import APFL
from tests.references.linear_net import ALL, Model, gradient, loss
from tests.references.pairing import Drawn, Minibatches, assert_same, run_on_minibatches

# Options of the method, options of the run.
CASES = {
    "plain": ({}, {}),
    "uniform": ({"weighting": "uniform"}, {}),
    "momentum": ({}, {"momentum": 0.9, "lr": 0.01}),
    "half": ({}, {"fraction": 0.5, "rounds": 7}),
    "other-rate": ({"alpha": 0.2, "alpha_lr": 0.3}, {"fraction": 0.5, "rounds": 7}),
    "cut": ({"alpha": 0.9, "alpha_lr": 5.0}, {}),
    "fixed": ({"alpha": 0.3, "alpha_lr": 0.0}, {}),
}


def mixed(alpha: float, v: Model, w: Model) -> Model:
    return {k: alpha * v[k] + (1 - alpha) * w[k] for k in ALL}


def step(alpha: float, v: Model, w: Model, batch, lr: float, alpha_lr: float):
    """v and alpha after one step, both from the old values."""
    g = gradient(mixed(alpha, v, w), *batch)
    slope = sum(((v[k] - w[k]) * g[k]).sum() for k in ALL)
    moved = {k: v[k] - lr * alpha * g[k] for k in ALL}
    return float(np.clip(alpha - alpha_lr * slope, 0, 1)), moved


def apfl(p: Minibatches, start: float, alpha_lr: float | None):
    """w, and v_i and alpha_i of every client, after the last round."""
    rate = p.lr if alpha_lr is None else alpha_lr
    w, count = dict(p.initial), len(p.batches)
    own, alphas = [dict(p.initial) for _ in range(count)], [start] * count
    for cohort in p.cohorts:
        ends = {}
        for n in cohort:
            y, velocity = dict(w), {k: np.zeros_like(w[k]) for k in ALL}
            for batch in islice(p.batches[n], p.steps):
                g = gradient(y, *batch)
                alphas[n], own[n] = step(alphas[n], own[n], y, batch, p.lr, rate)
                velocity = {k: p.momentum * velocity[k] + g[k] for k in ALL}
                y = {k: y[k] - p.lr * velocity[k] for k in ALL}
            ends[n] = y
        present = sum(p.shares[n] for n in cohort)
        w = {k: sum(p.shares[n] * ends[n][k] for n in cohort) / present for k in ALL}
    return w, own, alphas


@pytest.mark.parametrize("case", CASES)
def test_equals_algorithm_1(case):
    options, changes = CASES[case]
    federation, problem = run_on_minibatches(APFL(**options), **changes)
    w, own, alphas = apfl(problem, options.get("alpha", 0.5), options.get("alpha_lr"))
    assert_same(federation.server["shared"], w, 1e-10)
    for client, v, alpha in zip(federation.ids, own, alphas, strict=True):
        state = federation.clients[client].state
        assert_same(state["own"], v, 1e-10)
        assert float(state["alpha"]["alpha"]) == pytest.approx(alpha, abs=1e-10)
        assert float(federation.server["alphas"][client]) == state["alpha"]["alpha"]
        assert_same(federation.personal_model(client), mixed(alpha, v, w), 1e-10)
    (bars,) = federation.pictures()["alphas"].axes[0].containers
    assert [bar.get_width() for bar in bars] == pytest.approx(alphas)
    assert (len(set(alphas)) > 1) == (case != "fixed")
    assert (set(alphas) == {0.0, 1.0}) == (case == "cut")


def test_the_steps_descend_the_loss_of_the_mix():
    """Both derivatives by finite differences: of v it is alpha times the gradient at the mix."""
    rng = np.random.default_rng(3)
    shapes = {
        "body.weight": (4, 3), "body.bias": (4,), "head.weight": (1, 4), "head.bias": (1,),
    }  # fmt: skip
    v, w = ({k: rng.normal(size=s) for k, s in shapes.items()} for _ in range(2))
    batch = rng.normal(size=(7, 3)), rng.normal(size=7)
    new_alpha, new_v = step(0.4, v, w, batch, 1.0, 1e-3)
    ends = [loss(mixed(0.4 + s, v, w), *batch) for s in (1e-6, -1e-6)]
    assert (ends[0] - ends[1]) / 2e-6 == pytest.approx((0.4 - new_alpha) / 1e-3, rel=1e-6)
    for name in ALL:
        place = (0,) * v[name].ndim
        ends = []
        for sign in (1e-6, -1e-6):
            moved = v[name].copy()
            moved[place] += sign
            ends.append(loss(mixed(0.4, {**v, name: moved}, w), *batch))
        assert (ends[0] - ends[1]) / 2e-6 == pytest.approx((v[name] - new_v[name])[place], rel=1e-5)


def test_an_onboarded_client_keeps_w_and_trains_its_part_of_the_mix():
    federation, problem = run_on_minibatches(APFL(alpha_lr=0.2))
    rng = np.random.default_rng(7)
    x = torch.tensor(rng.normal(size=(9, 3)))
    data = Drawn("new", x, 2 * x[:, 0] - x[:, 1] + 0.5, batch_size=4)
    data.drawn = []
    client = onboarded_client(federation, data)
    message, _ = run_onboarding(federation, client)
    model = federation.algorithm.onboard(client, message)
    w = {k: federation.server["shared"][k].numpy() for k in ALL}
    v, alpha = w, 0.5
    assert len(data.drawn) == problem.steps
    for batch in data.drawn:
        alpha, v = step(alpha, v, w, batch, problem.lr, 0.2)
    assert_same(model, mixed(alpha, v, w), 1e-10)
    assert alpha != 0.5
