"""FPFC against Algorithm 1 in NumPy, its proximal map against a grid, its clusters and optima."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch

from medfed.federation.reference import onboarded_client, run_onboarding
from medfed.personalize.fpfc import FPFC
from medfed.personalize.local import Local
from medfed.standalone.errors import ConfigError
from tests.personalize.whole_runs import assert_one_sentence, gap, run
from tests.references.linear_net import ALL, Model, gradient
from tests.references.one_layer import Quadratics, personal, spread, two_groups, vector
from tests.references.pairing import Minibatches, assert_same, run_on_minibatches

# Options of the method, options of the run.
CASES = {
    "plain": ({}, {}),
    "weak": ({"strength": 0.2, "rho": 0.6}, {}),
    "half": ({"strength": 0.25, "rho": 1.5, "a": 3.0}, {"fraction": 0.5, "rounds": 7}),
    "half-momentum": ({"strength": 0.3}, {"momentum": 0.9, "lr": 0.01, "fraction": 0.5}),
}


def theta_of(delta: np.ndarray, m: FPFC) -> np.ndarray:
    """The four cases of the paper's prox, in their order."""
    n, lam, rho, a, xi = np.sqrt((delta**2).sum()), m.strength, m.rho, m.a, m.smoothing
    if n <= xi + lam / rho:
        return xi * rho / (lam + xi * rho) * delta
    if n <= lam + lam / rho:
        return (1 - lam / (rho * n)) * delta
    if n <= a * lam:
        return max(0, 1 - a * lam / ((a - 1) * rho * n)) / (1 - 1 / ((a - 1) * rho)) * delta
    return delta


def fpfc(p: Minibatches, m: FPFC) -> tuple[list[Model], dict]:
    """All w_i, and theta_ij and v_ij for both orders of every pair that has met."""
    shapes = {k: p.initial[k].shape for k in ALL}
    flat = lambda w: np.concatenate([w[k].ravel() for k in ALL])  # noqa: E731
    own, zero, seen = [dict(p.initial) for _ in p.batches], np.zeros(flat(p.initial).size), set()
    theta, v, used = {}, {}, set()
    for cohort in p.cohorts:
        seen |= set(cohort)
        anchors = {}
        for i in cohort:
            terms = [
                flat(own[j]) + theta.get((i, j), zero) - v.get((i, j), zero) / m.rho for j in seen
            ]
            zeta, cuts = sum(terms) / len(seen), np.cumsum([np.prod(s) for s in shapes.values()])
            pieces = np.split(zeta, cuts[:-1].astype(int))
            anchors[i] = {k: x.reshape(shapes[k]) for k, x in zip(ALL, pieces, strict=True)}
        for i in cohort:
            w, velocity = own[i], {k: np.zeros(shapes[k]) for k in ALL}
            for batch in islice(p.batches[i], p.steps):
                g = gradient(w, *batch)
                g = {k: g[k] + m.rho * (w[k] - anchors[i][k]) for k in ALL}
                velocity = {k: p.momentum * velocity[k] + g[k] for k in ALL}
                w = {k: w[k] - p.lr * velocity[k] for k in ALL}
            own[i] = w
        for i in seen:
            for j in seen:
                if i < j and (i in cohort or j in cohort):
                    before = v.get((i, j), zero)
                    delta = flat(own[i]) - flat(own[j]) + before / m.rho
                    theta[i, j] = theta_of(delta, m)
                    v[i, j] = before + m.rho * (flat(own[i]) - flat(own[j]) - theta[i, j])
                    theta[j, i], v[j, i] = -theta[i, j], -v[i, j]
                    n = np.linalg.norm(delta)
                    limits = [m.smoothing + m.strength / m.rho, m.strength * (1 + 1 / m.rho)]
                    used.add(int(np.searchsorted([*limits, m.a * m.strength], n)))
    return own, {"theta": theta, "v": v, "used": used}


@pytest.mark.parametrize("case", CASES)
def test_equals_algorithm_1(case):
    options, changes = CASES[case]
    method = FPFC(**options)
    federation, problem = run_on_minibatches(method, **changes)
    own, pairs = fpfc(problem, method)
    for client, expected in zip(federation.ids, own, strict=True):
        assert_same(federation.personal_model(client), expected, 1e-10)
    rows = [(i, j) for i in range(4) for j in range(i + 1, 4)]
    for name in ("theta", "v"):
        expected = np.stack([pairs[name][pair] for pair in rows])
        assert federation.server["pairs"][name].numpy() == pytest.approx(expected, abs=1e-10)
    assert pairs["used"] >= ({0, 1, 2} if case == "plain" else {0, 1, 2, 3})


@pytest.mark.parametrize("rho", [0.5, 1.0, 3.0])
def test_the_map_is_the_prox_of_the_smoothed_penalty(rho):
    """argmin over a grid of P(t) + (rho/2) (t - n)^2, P by the integral of its slope."""
    strength, a, xi = 0.8, 3.7, 0.05
    t = np.linspace(0, 6, 600_001)
    slope = np.where(t <= xi, strength * t / xi, strength)
    beyond = np.clip((a * strength - t) / (a - 1), 0, None)
    slope = np.where(t > strength, beyond, slope)
    penalty = np.concatenate([[0], np.cumsum((slope[1:] + slope[:-1]) / 2)]) * (t[1] - t[0])
    method = FPFC(strength=strength, rho=rho, a=a, smoothing=xi)
    lengths = np.linspace(0.01, 5, 60)
    for n in lengths:
        best = t[np.argmin(penalty + rho / 2 * (t - n) ** 2)]
        found = n * float(method.shrink(torch.tensor(n)))
        assert found == pytest.approx(best, abs=3e-5), n


@pytest.mark.parametrize("fraction", [1.0, 0.4])
def test_a_force_above_all_differences_of_gradients_makes_one_model(fraction):
    """lambda >= max |g_i(w*) - g_j(w*)|: all at the common optimum, up to the smoothing."""
    q = spread()
    best = q.best()
    slopes = q.gradients(best)
    strength = 1.05 * max(np.linalg.norm(a - b) for a in slopes for b in slopes)
    rounds = 60 if fraction == 1 else 130
    federation = q.run(FPFC(strength=strength, smoothing=1e-6), rounds, lr=0.4, fraction=fraction)
    w = personal(federation)
    assert w == pytest.approx(np.tile(best, (5, 1)), abs=1e-5)
    assert set(federation.algorithm.clusters(federation.server).values()) == {0}
    # g_i + (1/N) sum_j v_ij = 0
    rows = [(i, j) for i in range(5) for j in range(i + 1, 5)]
    sums = np.zeros((5, 4))
    for (i, j), v in zip(rows, federation.server["pairs"]["v"].numpy(), strict=True):
        sums[i], sums[j] = sums[i] + v, sums[j] - v
    assert q.gradients(w) + sums / 5 == pytest.approx(np.zeros((5, 4)), abs=1e-5)


def test_two_groups_are_found_and_each_is_at_its_own_optimum():
    q = two_groups()
    federation = q.run(FPFC(strength=0.4, smoothing=1e-6), 60, lr=0.4)
    of = federation.algorithm.clusters(federation.server)
    assert list(of.values()) == [0, 1, 0, 1, 0, 1]
    expected = np.stack([q.best([0, 2, 4]), q.best([1, 3, 5])])[[0, 1, 0, 1, 0, 1]]
    assert personal(federation) == pytest.approx(expected, abs=1e-5)
    assert np.linalg.norm(expected[0] - expected[1]) > 3.7 * 0.4
    figure = federation.pictures()["clusters"]
    names = [t.get_text() for t in figure.axes[0].get_yticklabels()]
    assert names == ["c0 (1)", "c2 (1)", "c4 (1)", "c1 (2)", "c3 (2)", "c5 (2)"]


def test_an_onboarded_client_is_tied_to_the_nearest_clusters_mean():
    q, steps, lr = two_groups(), 6, 0.4
    method = FPFC(strength=0.4)
    federation = q.run(method, 12, steps=steps, lr=lr)
    new = Quadratics.drawn(np.array([[-2.2, 2.0, -1.0, 0.1]]))
    client = onboarded_client(federation, new.data[0])
    message, _ = run_onboarding(federation, client)
    mean = np.mean([vector(federation.server[f"model/c{i}"]) for i in (1, 3, 5)], axis=0)
    assert vector(message.parts["model"]) == pytest.approx(mean, abs=1e-12)
    w = np.zeros(4)
    for s in range(steps):
        w = w - lr * (new.gradients(w)[0] + (s >= steps // 2) * (w - mean))
    assert vector(method.onboard(client, message)) == pytest.approx(w, abs=1e-12)


def test_no_force_is_local_training():
    """Where clients then end: on the way rho still holds them back."""
    q = spread(3)
    w = personal(q.run(FPFC(strength=0.0, rho=0.5), 40))
    assert w == pytest.approx(np.stack([q.best([i]) for i in range(3)]), abs=1e-6)
    assert gap(run(FPFC(strength=0.0)), run(Local())) > 1e-3


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        ({"strength": -1.0}, r"algorithm\.strength must not be negative"),
        ({"a": 2.0}, r"algorithm\.a must be above 2, not 2\.0"),
        ({"rho": 0.37}, r"algorithm\.rho must be above 1 / \(a - 1\) = 0\.37, not 0\.37"),
        ({"smoothing": 0.0}, r"algorithm\.smoothing must be positive"),
    ],
)
def test_bad_values_are_named(options, culprit):
    with pytest.raises(ConfigError, match=culprit) as caught:
        FPFC(**options)
    assert_one_sentence(caught.value)
