"""pFedFDA against its Algorithm 1 in NumPy and SciPy, scikit-learn's LDA, and its limits."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import nn

from medfed.common.seeding import torch_rng
from medfed.common.tensors import digest
from medfed.federation.algorithm import Cohort
from medfed.federation.client import Features
from medfed.federation.reference import onboarded_client, run_onboarding, run_reference
from medfed.personalize.fedbabu import FedBABU
from medfed.personalize.pfedfda import PFedFDA, best_share, discriminant, gaussians, halves
from medfed.standalone.errors import ConfigError
from tests.references.class_net import (
    LEAST,
    LR,
    ROUNDS,
    STEPS,
    K,
    clients,
    cohorts,
    features,
    finished,
    logits,
    present,
)
from tests.references.linear_net import BODY
from tests.references.pairing import assert_same, to_numpy
from tests.references.test_fedrod import Classes, gradient
from tests.toys import toy_federation

E = 1e-4
SETTINGS = {
    "plain": {"share": 0.7},
    "own-share": {"rounds": 2},
    "no-floor": {"floor": 0.0, "share": 1.0},
    "momentum-half": {"share": 0.4, "momentum": 0.9, "lr": 0.02, "cohort": Cohort(0.5)},
}


def head(m, s, counts):
    """Solved by an inverse."""
    a = np.linalg.inv((1 - E) * s + E * np.trace(s) / len(s) * np.eye(len(s)))
    prior = (counts / counts.sum() + E) / (1 + K * E)
    weight = m @ a
    bias = [np.log(prior[k]) - m[k] @ a @ m[k] / 2 for k in range(K)]
    return {"head.weight": weight, "head.bias": np.array(bias)}


def own(z, y, m_g, floor):
    m = np.array([z[y == k].mean(0) if (y == k).any() else m_g[k] for k in range(K)])
    residual = z - m[y]
    return m, residual.T @ residual / (len(y) - 1) + floor * np.eye(z.shape[1])


def mean_loss(z, y, weight, bias):
    o = z @ weight.T + bias
    return (np.log(np.exp(o).sum(1)) - o[range(len(y)), y]).sum()


def chosen(z, y, m_g, s_g, counts, floor):
    """Every other patient, of two samples each, in the order of their classes."""
    first, seen = np.zeros(len(y), bool), {}
    for p in range(len(y) // 2):
        k = int(y[2 * p])
        first[2 * p : 2 * p + 2] = seen[k] = not seen.get(k, False)

    def loss(b):
        total = 0.0
        for side in (first, ~first):
            m, s = own(z[side], y[side], m_g, floor)
            h = head(b * m + (1 - b) * m_g, b * s + (1 - b) * s_g, counts)
            total += mean_loss(z[~side], y[~side], *h.values())
        return total

    best = np.argmin([loss(b) for b in np.linspace(0, 1, 101)]) / 100
    near = np.linspace(max(0, best - 0.01), min(1, best + 0.01), 101)
    return near[np.argmin([loss(b) for b in near])]


@pytest.mark.parametrize("setting", SETTINGS)
def test_equals_algorithm_1(setting):
    """Shares that clients find differ by a grid of 1/5000 here, and the models with them."""
    changes, data = dict(SETTINGS[setting]), clients()
    keys = {k: changes.pop(k) for k in ("share", "floor") if k in changes}
    rounds = changes.get("rounds", ROUNDS)
    floor, fixed = keys.get("floor", 1.0), keys.get("share")
    fed, initial = finished(PFedFDA(seed=4, least_patients=LEAST, **keys), data, **changes)
    lr, momentum = changes.get("lr", LR), changes.get("momentum", 0.0)
    m_g = torch.rand(K, 4, generator=torch_rng(4, "means")).numpy().astype(float)
    s_g, phi = np.eye(4), {k: initial[k] for k in BODY}
    batches, counts = [iter(d.drawn) for d in data], [d.label_counts.numpy() for d in data]

    def share(n, z):
        y = data[n].y.numpy()
        return chosen(z, y, m_g, s_g, counts[n], floor) if fixed is None else fixed

    for cohort in cohorts(fed, rounds):
        ends, moves, squares = {}, np.zeros((K, 4)), np.zeros((4, 4))
        seen, weights = np.zeros(K), {n: data[n].num_samples for n in cohort}
        for n in cohort:
            w = {**phi, **head(m_g, s_g, counts[n])}
            velocity = {k: np.zeros_like(w[k]) for k in BODY}
            for x, y in islice(batches[n], STEPS):
                g = gradient(w, x, y)
                velocity = {k: momentum * velocity[k] + g[k] for k in BODY}
                w = {**w, **{k: w[k] - lr * velocity[k] for k in BODY}}
            z, y = features(w, data[n].x.numpy()), data[n].y.numpy()
            (m, s), b = own(z, y, m_g, floor), share(n, z)
            ends[n] = w
            for k in present(data[n]):
                moves[k] += (y == k).sum() * b * (m[k] - m_g[k])
                seen[k] += (y == k).sum()
            # Only the first hospital has 15 patients, 5 for each class.
            squares += weights[n] * b * (s - s_g) * (len(y) / 2 >= 15)
        total = sum(weights.values())
        phi = {k: sum(weights[n] * ends[n][k] for n in cohort) / total for k in BODY}
        m_g = m_g + np.where(seen[:, None] > 0, moves / np.maximum(seen, 1)[:, None], 0)
        s_g = s_g + squares / total
    close = 1e-10 if fixed is not None else 1e-3
    assert_same(fed.server["shared"], phi, close)
    np.testing.assert_allclose(fed.server["features"]["means"].numpy(), m_g, atol=close)
    np.testing.assert_allclose(fed.server["features"]["scatter"].numpy(), s_g, atol=close)
    for n, client in enumerate(fed.ids):
        z = features(phi, data[n].x.numpy())
        (m, s), b = own(z, data[n].y.numpy(), m_g, floor), share(n, z)
        made = head(b * m + (1 - b) * m_g, b * s + (1 - b) * s_g, counts[n])
        model = {k: t.numpy() for k, t in fed.personal_model(client).items()}
        x = data[n].x.numpy()
        np.testing.assert_allclose(logits(model, x), logits({**phi, **made}, x), atol=30 * close)


def test_the_head_is_the_linear_discriminant():
    """Scikit-learn's covariance is divided by n, and has no ridge, which is taken out here."""
    rng = np.random.default_rng(3)
    y = np.repeat(np.arange(K), (16, 20, 14))
    z = rng.normal(size=(50, 4)) + 2 * np.eye(K, 4)[y]
    lda = LinearDiscriminantAnalysis(solver="lsqr", store_covariance=True).fit(z, y)
    means, scatter = gaussians(
        torch.tensor(z), torch.tensor(y), torch.zeros(K, 4).double(), floor=0.0
    )
    np.testing.assert_allclose(means, lda.means_, atol=1e-12)
    np.testing.assert_allclose(scatter * 49 / 50, lda.covariance_, atol=1e-12)
    unridged = scatter * 49 / 50
    unridged = (unridged - E * unridged.trace() / 4 * torch.eye(4)) / (1 - E)
    weight, bias = discriminant(means, unridged, torch.tensor(lda.priors_).log())
    found = (torch.tensor(z) @ weight.T + bias).softmax(1)
    np.testing.assert_allclose(found, lda.predict_proba(z), atol=1e-10)


def test_where_nothing_is_the_client_s_own_the_statistics_stay():
    fed, _ = finished(PFedFDA(share=0.0, least_patients=LEAST), clients())
    start = fed.algorithm.first(torch.zeros(K, 4, dtype=torch.float64))
    for name, tensor in fed.server["features"].items():
        assert torch.equal(tensor, start[name])
    heads = [fed.personal_model(c)["head.weight"] for c in fed.ids]
    assert all(torch.equal(heads[0], head) for head in heads)  # but for the priors


def test_where_nothing_is_the_client_s_own_the_body_is_that_of_fedavg_under_a_fixed_head():
    """FedBABU's head is fixed; where all have the same shares of classes, it is one for all."""
    same = clients(((10, 14, 8),) * 4)
    fed, _ = finished(PFedFDA(share=0.0, seed=4), same)
    means = fed.algorithm.first(torch.zeros(K, 4, dtype=torch.float64))["means"].numpy()
    task, fixed = Classes(), head(means, np.eye(4), same[0].label_counts.numpy())
    with torch.no_grad():
        for name, values in fixed.items():
            task.network.get_parameter(name).copy_(torch.tensor(values))
    method = FedBABU(rounds=100)
    settings = {"rounds": ROUNDS, "steps": STEPS, "lr": LR}
    _, average, _ = toy_federation(method, task, clients(((10, 14, 8),) * 4), **settings)
    run_reference(average, ROUNDS)
    assert_same(fed.server["shared"], to_numpy(average.server["shared"]), 1e-12)


def test_a_class_of_one_hospital_has_its_mean_at_once():
    """Weights by hospital would bring it there by a factor of 4/5 a round."""
    counts = [(10, 10, 0)] * 4
    data = clients((*counts, (6, 6, 8)))
    fed, initial = finished(PFedFDA(share=1.0, least_patients=1), data, 1, lr=1e-30)
    z = features(initial, data[4].x.numpy())[data[4].y.numpy() == 2]
    found = fed.server["features"]["means"].numpy()[2]
    np.testing.assert_allclose(found, z.mean(0), atol=1e-12)


@pytest.mark.parametrize(("floor", "alike"), [(0.0, True), (1.0, False)])
def test_only_without_a_floor_the_scale_of_features_does_not_matter(floor, alike):
    rng = np.random.default_rng(5)
    y = torch.arange(40) % K
    z = torch.tensor(rng.normal(size=(40, 4))) + torch.eye(K, 4, dtype=torch.double)[y]
    answers = []
    for scale in (1.0, 50.0):
        means, scatter = gaussians(scale * z, y, torch.zeros(K, 4).double(), floor)
        weight, bias = discriminant(means, scatter, torch.zeros(K).double())
        answers.append(scale * z @ weight.T + bias)
    gap = float((answers[0] - answers[1]).abs().max())
    assert (gap < 1e-9) is alike
    assert alike or gap > 0.1


def test_at_fixed_features_the_means_are_those_of_all_patients():
    """At once with a share of 1, geometrically with a half."""
    still = {"lr": 1e-30}
    whole, initial = finished(PFedFDA(share=1.0, least_patients=1), clients(), 1, **still)
    data = clients()
    z = np.concatenate([features(initial, d.x.numpy()) for d in data])
    y = np.concatenate([d.y.numpy() for d in data])
    pooled = np.array([z[y == k].mean(0) for k in range(K)])
    np.testing.assert_allclose(whole.server["features"]["means"].numpy(), pooled, atol=1e-12)
    gaps = []
    for rounds in (1, 2, 4):
        half, _ = finished(PFedFDA(share=0.5, least_patients=1), clients(), rounds, **still)
        gaps.append(np.abs(half.server["features"]["means"].numpy() - pooled).max())
    np.testing.assert_allclose(gaps[1:], [gaps[0] / 2, gaps[0] / 8], rtol=1e-9)


def test_a_hospital_unlike_all_keeps_its_own_and_a_small_one_like_all_takes_theirs():
    """In the mean of twenty, as so few patients say little of themselves."""
    rng = np.random.default_rng(1)

    def drawn(count: int, sign: float = 1.0) -> Features:
        y = torch.arange(count) % K
        z = torch.tensor(rng.normal(size=(count, 4))) + 2 * torch.eye(K, 4, dtype=torch.double)[y]
        return Features(sign * z, y, torch.arange(count), None)

    many = drawn(3000)
    common = gaussians(many.z, many.labels, torch.zeros(K, 4, dtype=torch.double), 0.0)
    prior = torch.zeros(K, dtype=torch.double)
    far = [best_share(drawn(90, -1.0), common, prior, 0.0) for _ in range(3)]
    alike = [best_share(drawn(12), common, prior, 0.0) for _ in range(20)]
    assert np.mean(alike) < 0.5 < 0.8 < min(far)
    assert best_share(drawn(3), common, prior, 0.0) == 0.0


def test_no_patient_is_in_both_halves():
    seen = Features(
        torch.zeros(8, 1), torch.tensor([0, 1, 0, 1, 2, 2, 0, 0]), torch.arange(8) // 2, None
    )
    half = halves(seen)
    assert half[::2].tolist() == half[1::2].tolist()
    assert 0 < int(half.sum()) < 8


def test_few_patients_move_nothing():
    fed, _ = finished(PFedFDA(share=1.0), clients())
    start = fed.algorithm.first(torch.zeros(K, 4, dtype=torch.float64))
    assert digest(fed.server["features"]) == digest(start)
    of_class, of_all = fed.algorithm.summaries(clients()[0])
    assert of_class.too_few() is of_all.too_few() is None
    assert of_all.too_few(least=30)


def test_a_newcomer_computes_its_head_without_a_step():
    fed, _ = finished(PFedFDA(least_patients=LEAST), clients())
    client = onboarded_client(fed, clients(((9, 0, 7),), seed=9)[0])
    model = fed.algorithm.onboard(client, run_onboarding(fed, client)[0])
    assert client.steps_done == 0
    assert all(torch.equal(model[n], fed.server["shared"][n]) for n in BODY)
    assert bool(torch.isfinite(model["head.weight"]).all())  # a class is missing


def test_a_head_of_several_layers_is_refused():
    task = Classes()
    task.network.head = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, K)).double()
    with pytest.raises(ConfigError, match=r"must be one linear layer .* here is head\.0\.weight"):
        toy_federation(PFedFDA(), task, clients())
