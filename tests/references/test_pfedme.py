"""pFedMe and pFedMac against their Algorithm 1 in NumPy, on minibatches, and their optima."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from medfed.federation.reference import onboarded_client, run_onboarding, run_reference
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.pfedmac import PFedMac
from medfed.personalize.pfedme import PFedMe
from medfed.standalone.errors import ConfigError
from tests.personalize.whole_runs import assert_one_sentence, run
from tests.references.linear_net import ALL, Model, gradient
from tests.references.one_layer import personal, spread, vector
from tests.references.pairing import Minibatches, assert_same, run_on_minibatches
from tests.toys import toy_data, toy_federation

# Options of the method, options of the run.
CASES = {
    "plain": ({}, {"steps": 10}),
    "short-last": ({"inner_steps": 3, "outer_step": 0.4}, {"steps": 8}),
    "one-by-one-uniform": ({"inner_steps": 1, "outer_step": 1.6, "weighting": "uniform"}, {}),
    "momentum-half": (
        {"inner_steps": 2, "outer_step": 0.7, "server_lr": 1.5},
        {"momentum": 0.9, "lr": 0.01, "fraction": 0.5, "rounds": 7},
    ),
}
OWN = {PFedMe: {"strength": 2.5}, PFedMac: {"strength": 0.3, "sparsity": 0.2, "width": 0.05}}


def pull(method, theta: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The gradient of what ties theta to w."""
    if type(method) is PFedMac:
        return method.sparsity * np.tanh(theta / method.width) - method.strength * w
    return method.strength * (theta - w)


def loop(p: Minibatches, method) -> tuple[Model, list[Model]]:
    """w and all theta_i after the last round."""
    w, own = dict(p.initial), [dict(p.initial) for _ in p.batches]
    for cohort in p.cohorts:
        anchors = {}
        for n in cohort:
            anchor, theta = dict(w), own[n]
            velocity = {k: np.zeros_like(w[k]) for k in ALL}
            for s, batch in enumerate(islice(p.batches[n], p.steps), start=1):
                g = gradient(theta, *batch)
                g = {k: g[k] + pull(method, theta[k], anchor[k]) for k in ALL}
                velocity = {k: p.momentum * velocity[k] + g[k] for k in ALL}
                theta = {k: theta[k] - p.lr * velocity[k] for k in ALL}
                if s % method.inner_steps == 0 or s == p.steps:
                    anchor = {
                        k: anchor[k] - method.outer_step * (anchor[k] - theta[k]) for k in ALL
                    }
            own[n], anchors[n] = theta, anchor
        present = sum(p.shares[n] for n in cohort)
        mean = {k: sum(p.shares[n] * anchors[n][k] for n in cohort) / present for k in ALL}
        w = {k: (1 - method.server_lr) * w[k] + method.server_lr * mean[k] for k in ALL}
    return w, own


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("case", CASES)
def test_equals_algorithm_1(case, kind):
    options, changes = CASES[case]
    method = kind(**OWN[kind], **options)
    federation, problem = run_on_minibatches(method, **changes)
    w, own = loop(problem, method)
    assert_same(federation.server["shared"], w, 1e-10)
    for client, theta in zip(federation.ids, own, strict=True):
        assert_same(federation.personal_model(client), theta, 1e-10)


def test_pfedme_reaches_the_minimum_of_the_moreau_envelopes():
    """One step a round, warm-started: sum p_i (f_i + lambda/2 |theta_i - w|^2) over w and theta."""
    q, strength = spread(3), 1.5
    for server_lr in (1.0, 2.0):
        method = PFedMe(strength=strength, server_lr=server_lr, weighting="uniform", outer_step=0.8)
        federation = q.run(method, 90, lr=0.4)
        tied = q.a + strength * np.eye(4)
        inverse = np.linalg.inv(tied)
        # theta_i = (A_i + s)^-1 (b_i + s w), and w is their mean
        w = np.linalg.solve(
            np.eye(4) - strength * inverse.mean(0), np.einsum("nij,nj->ni", inverse, q.b).mean(0)
        )
        assert vector(federation.server["shared"]) == pytest.approx(w, abs=1e-10)
        theta = np.einsum("nij,nj->ni", inverse, q.b + strength * w)
        assert personal(federation) == pytest.approx(theta, abs=1e-10)
        assert np.abs(theta - w).max() > 0.1


def test_pfedmac_reaches_its_fixed_point():
    """w = mean theta_i and grad f_i(theta_i) = lambda w, where f_i is more convex than lambda."""
    q, strength = spread(3), 0.2
    method = PFedMac(strength=strength, sparsity=0.0, weighting="uniform")
    federation = q.run(method, 60)
    w = vector(federation.server["shared"])
    assert personal(federation).mean(0) == pytest.approx(w, abs=1e-10)
    slopes = q.gradients(personal(federation))
    assert slopes == pytest.approx(np.tile(strength * w, (3, 1)), abs=1e-10)
    assert strength < 1 / np.linalg.eigvalsh(np.linalg.inv(q.a).mean(0)).max()
    assert np.abs(personal(federation) - q.best()).max() > 0.1


def test_a_strong_tie_is_fedavg():
    """With lambda lr = 1 the one inner step is w - g / lambda, whose anchor goes eta of g."""
    strength = 1e6
    tied = PFedMe(strength=strength, inner_steps=1, outer_step=1.0)
    for steps in (1, 3):
        moved = run(tied, lr=1 / strength, steps=steps)
        plain = run(FedAvg(), lr=1 / strength, steps=steps)
        w, expected = moved.server["shared"], plain.server["shared"]
        start = plain.clients["c0"].weights
        far = max(float((t - start[n]).abs().max()) for n, t in expected.items())
        near = max(float((w[n] - expected[n]).abs().max()) for n in w)
        assert near < 1e-4 * far


def test_no_tie_is_local_training_and_leaves_w_behind():
    q = spread(3)
    federation = q.run(PFedMe(strength=0.0, outer_step=0.5), 40)
    own = np.stack([q.best([i]) for i in range(3)])
    assert personal(federation) == pytest.approx(own, abs=1e-10)


def test_an_onboarded_clients_model_is_tied_to_w():
    q, strength = spread(), 2.0
    federation = q.run(PFedMe(strength=strength), 1, steps=60, lr=0.3)
    client = onboarded_client(federation, q.data[0])
    message, _ = run_onboarding(federation, client)
    model = federation.algorithm.onboard(client, message)
    w = vector(federation.server["shared"])
    expected = np.linalg.solve(q.a[0] + strength * np.eye(4), q.b[0] + strength * w)
    assert vector(model) == pytest.approx(expected, abs=1e-10)
    assert np.abs(expected - w).max() > 0.1


def test_statistics_are_averaged_and_never_pushed_beyond_the_mean():
    """beta > 1 overshoots with parameters alone."""

    _, federation, local = toy_federation(PFedMe(server_lr=3.0), data=toy_data(batch=4))
    run_reference(federation, 1)
    sizes = np.array([c.num_samples for c in federation.clients.values()])
    for name in local.split.buffers:
        own = np.stack([c.state["model"][name].numpy() for c in federation.clients.values()])
        mean = np.tensordot(sizes / sizes.sum(), own, 1)
        if name.endswith("running_var"):  # of all samples, with the variance between the means
            means = [c.state["model"][f"{name[:-3]}mean"] for c in federation.clients.values()]
            between = np.stack([m.numpy() for m in means])
            mean += np.cov(between.T, aweights=sizes, ddof=0).diagonal()
        assert federation.server["shared"][name].numpy() == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "options", "culprit"),
    [
        (PFedMe, {"strength": -1.0}, r"algorithm\.strength must not be negative"),
        (PFedMe, {"inner_steps": 0}, r"algorithm\.inner_steps must be 1 or more"),
        (PFedMe, {"outer_step": 2.0}, r"algorithm\.outer_step must be in \(0, 2\), not 2\.0"),
        (PFedMe, {"server_lr": 0.0}, r"algorithm\.server_lr must be positive"),
        (PFedMac, {"sparsity": float("nan")}, r"algorithm\.sparsity must not be negative"),
        (PFedMac, {"width": 0.0}, r"algorithm\.width must be positive"),
    ],
)
def test_bad_values_are_named(kind, options, culprit):
    with pytest.raises(ConfigError, match=culprit) as caught:
        kind(**options)
    assert_one_sentence(caught.value)
