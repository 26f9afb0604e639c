"""FedALA against Algorithm 1 in NumPy, on minibatches; the slope of its mixture; its limit."""

from __future__ import annotations

import math

import numpy as np
import pytest

from medfed.personalize.fedala import FedALA
from medfed.personalize.fedavg import FedAvg
from medfed.standalone.errors import ConfigError
from tests.references.linear_net import ALL, HEAD, Model, gradient, loss
from tests.references.minibatch_steps import descend, mean
from tests.references.pairing import (
    Minibatches,
    assert_same,
    run_both_ways,
    run_on_minibatches,
    to_numpy,
)

CASES = {
    "plain": ({}, {}),
    "momentum-half": ({"weights_lr": 0.2, "share": 0.5}, {
        "momentum": 0.9, "lr": 0.01, "fraction": 0.5, "rounds": 7,
    }),
    "one-pass": ({"weights_lr": 3.0, "first_passes": 1}, {"weighting": "uniform"}),
}  # fmt: skip
SIZES = (6, 8, 10, 12)


def mixture(v: Model, w: Model, weights: Model) -> Model:
    return {k: v[k] + (w[k] - v[k]) * weights[k] for k in HEAD}


def fedala(p: Minibatches, a: FedALA):
    """w, each client's last model, and its W."""
    w, own, learnt = dict(p.initial), {}, {}
    for cohort in p.cohorts:
        for n in cohort:
            start = dict(w)
            if n in own:
                weights = learnt.get(n, {k: np.ones_like(w[k]) for k in HEAD})
                for _ in range(1 if n in learnt else a.first_passes):
                    before = weights
                    for _ in range(math.ceil(a.share * SIZES[n] / 4)):
                        g = gradient({**w, **mixture(own[n], w, weights)}, *next(p.batches[n]))
                        weights = {
                            k: np.clip(t - a.weights_lr * g[k] * (w[k] - own[n][k]), 0, 1)
                            for k, t in weights.items()
                        }
                    if max(np.abs(weights[k] - before[k]).max() for k in HEAD) <= a.tolerance:
                        break
                learnt[n] = weights
                start |= mixture(own[n], w, weights)
            own[n] = descend(p, n, start)
        w = mean(p, {n: own[n] for n in cohort})
    return w, own, learnt


@pytest.mark.parametrize("case", CASES)
def test_equals_algorithm_1(case):
    options, changes = CASES[case]
    changes = dict(changes)
    algorithm = FedALA(weighting=changes.pop("weighting", "samples"), **options)
    federation, problem = run_on_minibatches(algorithm, **changes)
    w, own, learnt = fedala(problem, algorithm)
    assert_same(federation.server["shared"], w, 1e-10)
    for n, client in enumerate(federation.ids):
        assert_same(federation.personal_model(client), own.get(n, w), 1e-10)
        assert_same(federation.clients[client].state["weights"], learnt.get(n, {}), 1e-10)
    assert any((t < 1).any() for weights in learnt.values() for t in weights.values())


def test_the_mixture_descends_the_loss():
    """Its slope by finite differences."""
    rng = np.random.default_rng(3)
    shapes = {"body.weight": (4, 3), "body.bias": (4,), "head.weight": (1, 4), "head.bias": (1,)}
    w, v, weights = ({k: rng.normal(size=s) for k, s in shapes.items()} for _ in range(3))
    x, y = rng.normal(size=(7, 3)), rng.normal(size=7)
    g = gradient({**w, **mixture(v, w, weights)}, x, y)
    for place in np.ndindex(1, 4):
        ends = []
        for step in (1e-6, -1e-6):
            moved = {k: t.copy() for k, t in weights.items()}
            moved["head.weight"][place] += step
            ends.append(loss({**w, **mixture(v, w, moved)}, x, y))
        slope = (g["head.weight"] * (w["head.weight"] - v["head.weight"]))[place]
        assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(slope, rel=1e-7, abs=1e-8)


def test_if_the_mixture_does_not_move_it_is_fedavg():
    """Apart from the batches that it looks at: at full batches."""
    ends = [run_both_ways(a)[0] for a in (FedALA(weights_lr=0.0), FedAvg())]
    assert_same(ends[0].server["shared"], to_numpy(ends[1].server["shared"]), 1e-12)
    assert set(ends[0].server["shared"]) == set(ALL)
    with pytest.raises(ConfigError, match=r"share must be in \(0, 1\]"):
        FedALA(share=0)
