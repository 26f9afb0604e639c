"""FedFomo against Algorithm 1 in NumPy, on minibatches; whose models are sent; its limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from medfed.functional.graph import epsilon_greedy
from medfed.personalize.fedfomo import FedFomo
from medfed.personalize.local import Local
from medfed.standalone.errors import ConfigError
from tests.references.linear_net import ALL, Model, loss
from tests.references.minibatch_steps import descend
from tests.references.pairing import assert_same, run_both_ways, run_on_minibatches

CASES = {
    "plain": {},
    "momentum-half": {"momentum": 0.9, "lr": 0.01, "fraction": 0.5, "rounds": 7},
}


def flat(w: Model) -> np.ndarray:
    return np.concatenate([w[k].ravel() for k in ALL])


@pytest.mark.parametrize("case", CASES)
def test_equals_algorithm_1_where_everybody_sees_everybody(case):
    federation, p = run_on_minibatches(FedFomo(models=3), **CASES[case])
    data = [federation.clients[c].data for c in federation.ids]
    count = len(data)
    before, models = [dict(p.initial)] * count, [dict(p.initial)] * count
    affinity, mixed = np.zeros((count, count)), 0
    for cohort in p.cohorts:
        sent = list(models)
        for n in cohort:
            v, x, y = before[n], data[n].x.numpy(), data[n].y.numpy()
            gains = np.zeros(count)
            for m, theta in enumerate(sent):
                distance = np.linalg.norm(flat(theta) - flat(v))
                if distance:
                    gains[m] = (loss(v, x, y) - loss(theta, x, y)) / distance
            weights = np.maximum(gains, 0)
            if weights.sum():
                weights /= weights.sum()
                mixed += (weights > 0).sum() > 1
                v = {
                    k: v[k] + sum(a * (t[k] - v[k]) for a, t in zip(weights, sent, strict=True))
                    for k in ALL
                }
            before[n], models[n] = v, descend(p, n, v)
            affinity[n] += gains
    for n, client in enumerate(federation.ids):
        assert_same(federation.personal_model(client), models[n], 1e-10)
        assert_same(federation.server[f"model/{client}"], models[n], 1e-10)
        row = federation.server["affinity"][client].numpy()
        assert row == pytest.approx(affinity[n], abs=1e-10)
    assert mixed


def test_models_are_sent_by_what_they_gained_or_drawn():
    def chosen(row, epsilon, seed=0):
        affinity = dict.fromkeys("abcde", torch.tensor(row))
        rng = np.random.default_rng(seed)
        return tuple(epsilon_greedy(affinity, "a", 2, epsilon, rng))

    row = [9.0, 0.1, 0.5, -1.0, 0.3]
    assert chosen(row, 0.0) == ("c", "e")
    drawn = {chosen(row, 1.0, seed) for seed in range(60)}
    assert len(drawn) == 6  # all pairs of the four others
    ties = {chosen([0.0] * 5, 0.0, seed) for seed in range(60)}
    assert len(ties) == 6
    with pytest.raises(ConfigError, match=r"explore must be in \[0, 1\]"):
        FedFomo(explore=2)


def test_whoever_sees_nobody_and_gains_by_training_trains_alone():
    ends = [run_both_ways(a, clients=1, rounds=3)[0] for a in (FedFomo(), Local())]
    models = [f.personal_model("c0") for f in ends]
    assert_same(models[0], {n: t.numpy() for n, t in models[1].items()}, 1e-14)


def test_the_picture_shows_the_gains():
    federation, _ = run_on_minibatches(FedFomo())
    (figure,) = federation.pictures().values()
    shown = figure.axes[0].images[0].get_array()
    rows = torch.stack(list(federation.server["affinity"].values()))
    assert np.array_equal(np.asarray(shown), rows.numpy())
    assert float(rows.abs().max()) > 0
    assert run_on_minibatches(FedFomo(), rounds=1)[0].pictures() == {}
