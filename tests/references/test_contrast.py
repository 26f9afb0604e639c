"""MOON and FedPHP against the papers' loops in NumPy, on minibatches, with derivatives by hand."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from medfed.common.tensors import digest
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.fedphp import FedPHP
from medfed.personalize.moon import MOON
from medfed.standalone.errors import ConfigError
from tests.references.linear_net import ALL, BODY, Model, gradient
from tests.references.minibatch_steps import mean, zeros
from tests.references.pairing import Minibatches, assert_same, run_on_minibatches

SETTINGS = {
    "plain": {},
    "momentum-half": {"momentum": 0.9, "lr": 0.01, "fraction": 0.5, "rounds": 6},
}


def features(w: Model, x: np.ndarray) -> np.ndarray:
    return x @ w["body.weight"].T + w["body.bias"]


def pulled(w: Model, x: np.ndarray, slope: np.ndarray) -> Model:
    """Gradient of a term of the features, given its slope (n, C) there."""
    none = {k: np.zeros_like(w[k]) for k in ALL}
    return {**none, "body.weight": slope.T @ x, "body.bias": slope.sum(0)}


def cosine(z: np.ndarray, a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row by row, and its slopes at z."""
    lengths = np.linalg.norm(z, axis=1, keepdims=True), np.linalg.norm(a, axis=1, keepdims=True)
    c = (z * a).sum(1, keepdims=True) / (lengths[0] * lengths[1])
    return c, a / (lengths[0] * lengths[1]) - c * z / lengths[0] ** 2


def contrast(w: Model, near: Model, far: Model, x: np.ndarray, mu: float, tau: float) -> Model:
    """Gradient of mu * mean softplus((cos(z, far) - cos(z, near)) / tau)."""
    z = features(w, x)
    (s_g, to_g), (s_p, to_p) = (cosine(z, features(m, x)) for m in (near, far))
    weight = mu / (1 + np.exp((s_g - s_p) / tau)) / tau / len(x)
    return pulled(w, x, weight * (to_p - to_g))


def steps(p: Minibatches, n: int, start: Model, change) -> Model:
    """Heavy-ball steps; ``change`` makes the gradient of the batch into that of the step."""
    w, velocity = dict(start), zeros(p)
    for x, y in islice(p.batches[n], p.steps):
        g = change(w, gradient(w, x, y), x)
        velocity = {k: p.momentum * velocity[k] + g[k] for k in ALL}
        w = {k: w[k] - p.lr * velocity[k] for k in ALL}
    return w


def moon(p: Minibatches, mu: float, tau: float) -> Model:
    w, previous = dict(p.initial), {}
    for cohort in p.cohorts:
        for n in cohort:
            last = previous.get(n)

            def change(live: Model, g: Model, x: np.ndarray, w=w, far=last) -> Model:
                if far is None:
                    return g
                more = contrast(live, w, far, x, mu, tau)
                return {k: g[k] + more[k] for k in ALL}

            previous[n] = steps(p, n, w, change)
        w = mean(p, {n: previous[n] for n in cohort})
    return w


def discrepancy_slope(z: np.ndarray, fixed: np.ndarray) -> np.ndarray:
    """Slope at z of the biased MMD^2 under five Gaussian kernels, their widths held."""
    every, n = np.concatenate([z, fixed]), len(z)
    gaps = ((every[:, None] - every[None]) ** 2).sum(2)
    width = gaps.sum() / (len(every) * (len(every) - 1)) + 1e-8
    slope = np.zeros_like(z)
    for b in (width / 4, width / 2, width, width * 2, width * 4):
        for i in range(n):
            for j in range(len(every)):
                pull = np.exp(-gaps[i, j] / b) * -2 * (z[i] - every[j]) / b
                # Of the mean over pairs: within both orders count, across both do, with -1.
                slope[i] += 2 * pull / n**2 if j < n else -2 * pull / (n * len(fixed))
    return slope


def fedphp(p: Minibatches, strength: float, inheritance: float, expected: float):
    """w, and each client's inherited model."""
    w, kept, counts = dict(p.initial), {}, {}
    for cohort in p.cohorts:
        ends = {}
        for n in cohort:
            inherited = kept.get(n)

            def change(live: Model, g: Model, x: np.ndarray, h=inherited) -> Model:
                if h is None:
                    return g
                more = pulled(live, x, discrepancy_slope(features(live, x), features(h, x)))
                return {k: (1 - strength) * g[k] + strength * more[k] for k in ALL}

            ends[n] = steps(p, n, w, change)
            counts[n] = counts.get(n, 0) + 1
            m = min(inheritance * counts[n] / expected, 1.0)
            before = kept.get(n, ends[n])
            kept[n] = {k: m * before[k] + (1 - m) * ends[n][k] for k in ALL}
        w = mean(p, ends)
    return w, kept


@pytest.mark.parametrize("setting", SETTINGS)
def test_moon_equals_algorithm_1(setting):
    algorithm = MOON(mu=5.0, temperature=0.3)
    federation, problem = run_on_minibatches(algorithm, **SETTINGS[setting])
    w = moon(problem, 5.0, 0.3)
    assert_same(federation.server["shared"], w, 1e-10)
    assert_same(federation.personal_model("c0"), w, 1e-10)


def test_moon_is_fedavg_without_its_term_and_in_the_first_round():
    def end(algorithm, rounds):
        return digest(run_on_minibatches(algorithm, rounds=rounds)[0].server["shared"])

    assert end(MOON(mu=0.0), 3) == end(FedAvg(), 3) != end(MOON(), 3)
    assert end(MOON(mu=5.0), 1) == end(FedAvg(), 1)
    with pytest.raises(ConfigError, match="temperature must be positive"):
        MOON(temperature=0)


@pytest.mark.parametrize("setting", SETTINGS)
def test_fedphp_equals_algorithm_1(setting):
    changes = SETTINGS[setting]
    rounds, fraction = changes.get("rounds", 4), changes.get("fraction", 1.0)
    algorithm = FedPHP(strength=0.3, inheritance=0.8, rounds=rounds, fraction=fraction)
    federation, problem = run_on_minibatches(algorithm, **changes)
    w, kept = fedphp(problem, 0.3, 0.8, rounds * fraction)
    assert_same(federation.server["shared"], w, 1e-10)
    for n, client in enumerate(federation.ids):
        assert_same(federation.personal_model(client), kept.get(n, w), 1e-10)


def test_fedphp_without_both_is_fedavg_and_the_model_that_was_just_trained():
    federation, p = run_on_minibatches(FedPHP(strength=0.0, inheritance=0.0), rounds=2)
    plain, _ = run_on_minibatches(FedAvg(), rounds=2)
    assert digest(federation.server["shared"]) == digest(plain.server["shared"])
    w = p.initial
    for _ in p.cohorts:
        ends = {n: steps(p, n, w, lambda live, g, x: g) for n in range(len(p.batches))}
        w = mean(p, ends)
    assert_same(federation.personal_model("c2"), ends[2], 1e-12)
    assert BODY[0] in ends[2]
