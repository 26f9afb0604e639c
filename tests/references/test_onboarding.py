"""Onboarded clients against NumPy: PPFL's membership, pFedNet's neighbours, Ditto's tie."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from medfed.federation.reference import onboarded_client, run_onboarding, run_reference
from medfed.functional.sketches import data_sketch
from medfed.personalize.ditto import Ditto
from medfed.personalize.pfednet import PFedNet
from medfed.personalize.ppfl import PPFL
from medfed.personalize.similarity import SimilarityGraph
from tests.contract.harness import federation as contract_federation
from tests.personalize.planted import PlantedTask, planted
from tests.references.linear_net import gradient
from tests.references.pairing import assert_same, to_numpy
from tests.references.ppfl_loop import gradients, head
from tests.toys import ToyData, ToyTask, canonical_toy, toy_data, toy_federation

STEPS, COUNT = 6, 3


def arriving(samples=5):
    rng = np.random.default_rng(7)
    x = torch.tensor(rng.normal(size=(samples, 3)))
    return ToyData("new", x, 2 * x[:, 0] - x[:, 1] + 0.5)


def joined(algorithm, task, **changes):
    data = toy_data(4, dtype=torch.float64)
    _, federation, _ = toy_federation(algorithm, task, data, steps=STEPS, **changes)
    run_reference(federation, 3)
    client = onboarded_client(federation, arriving())
    message, ledger = run_onboarding(federation, client)
    return federation, client, message, ledger


@pytest.mark.parametrize("mix", ["outputs", "parameters"])
def test_ppfl_fits_the_membership_of_the_papers_step(mix):
    algorithm = PPFL(membership_lr=0.4, strength=0.2)
    federation, client, message, ledger = joined(algorithm, canonical_toy(COUNT, mix))
    model = algorithm.onboard(client, message)
    theta = to_numpy(federation.server["shared"])
    c, data = np.full(COUNT, 1 / COUNT), (client.data.x.numpy(), client.data.y.numpy())
    for _ in range(STEPS):
        raised = c * np.exp(-0.4 * gradients(theta, c, *data)[1])
        c = raised / raised.sum()
    assert np.abs(c - 1 / COUNT).max() > 0.05
    assert_same(model, {**theta, "membership": c}, 1e-12)
    assert set(message.parts) == {"shared"}
    assert ledger.total(direction="up") == 0


def test_ppfls_comparison_trains_the_heads_at_the_fitted_membership():
    algorithm = PPFL(membership_lr=0.4)
    federation, client, message, _ = joined(algorithm, canonical_toy(COUNT), lr=0.05)
    tuned = algorithm.fine_tune(client, message)
    theta = to_numpy(federation.server["shared"])
    c, data = np.full(COUNT, 1 / COUNT), (client.data.x.numpy(), client.data.y.numpy())
    for _ in range(STEPS // 2):
        raised = c * np.exp(-0.4 * gradients(theta, c, *data)[1])
        c = raised / raised.sum()
    for _ in range(STEPS - STEPS // 2):
        of_theta, _ = gradients(theta, c, *data)
        theta = {n: t - 0.05 * of_theta[n] for n, t in theta.items()}
    assert_same(tuned, {**theta, "membership": c}, 1e-12)
    assert head(theta, c)["head.weight"].shape == (1, 4)


@pytest.mark.parametrize("neighbours", [1, 2, 3, 9])
def test_pfednet_gives_the_mean_of_the_nearest(neighbours):
    algorithm = PFedNet(
        personal="head.*", graph=SimilarityGraph(neighbours=neighbours, sketch_size=2)
    )
    federation, client, message, ledger = joined(
        algorithm, ToyTask(norm=False, dtype=torch.float64)
    )
    moments = {
        c: np.linalg.multi_dot([b.T, b])
        for c, b in (
            (c, data_sketch(local.data.x, 2).numpy().astype(np.float32).astype(float))
            for c, local in [*federation.clients.items(), ("new", client)]
        )
    }
    gaps = [np.linalg.norm(moments[c] - moments["new"]) for c in federation.ids]
    near = np.argsort(gaps)[: min(neighbours, 4)]
    expected = {n: t.numpy()[near].mean(0) for n, t in federation.server["personal"].items()}
    model = algorithm.onboard(client, message)
    assert_same(model, {**to_numpy(federation.server["shared"]), **expected}, 1e-12)
    parts = {(e.direction, e.part) for e in ledger.entries}
    assert parts == {("up", "sketch"), ("down", "shared"), ("down", "personal")}
    assert np.ptp(federation.server["personal"]["head.weight"].numpy(), axis=0).max() > 1e-3


def test_pfednet_without_sketches_takes_the_mean_of_all():
    algorithm = PFedNet(personal="head.*", graph=SimilarityGraph(kind="ring"))
    federation, client, message, ledger = joined(
        algorithm, ToyTask(norm=False, dtype=torch.float64)
    )
    expected = {n: t.numpy().mean(0) for n, t in federation.server["personal"].items()}
    assert_same(message.parts["personal"], expected, 1e-12)
    assert ledger.total(direction="up") == 0
    assert client.steps_done == 0


def test_dittos_model_begins_at_w_and_is_tied_to_it():
    algorithm = Ditto(strength=0.7)
    federation, client, message, _ = joined(algorithm, ToyTask(norm=False, dtype=torch.float64))
    w = to_numpy(federation.server["shared"])
    v = dict(w)
    for _ in range(STEPS):
        g = gradient(v, client.data.x.numpy(), client.data.y.numpy())
        v = {n: v[n] - 0.05 * (g[n] + 0.7 * (v[n] - w[n])) for n in v}
    assert_same(algorithm.onboard(client, message), v, 1e-12)


def test_an_onboarded_client_of_a_planted_group_finds_the_groups_model():
    seed, rounds = 0, 15
    everyone = planted(seed)
    late, early = everyone[-3:], everyone[:-3]
    algorithm = PPFL(membership_lr=1.0, strength=0.0)
    _, federation, _ = toy_federation(
        algorithm, PlantedTask(3, seed), early, rounds=rounds, steps=5, lr=0.3
    )
    run_reference(federation, rounds)
    members = federation.server["membership"]
    assert len({int(row.argmax()) for row in members.values()}) == 3
    for client in late:
        few = ToyData("new", client.x[:6], client.y[:6])
        arrived = onboarded_client(federation, few)
        message, _ = run_onboarding(federation, arrived)
        found = algorithm.fit_membership(arrived, algorithm.onboarding_start(arrived, message), 50)
        group = int(client.id[1:]) % 3
        assert int(found.argmax()) == int(members[f"c{group}"].argmax())
        assert found.sum() == pytest.approx(1)


@pytest.mark.parametrize("name", ["qupel", "quantized"])
def test_an_onboarded_clients_model_is_quantised_like_the_others(name):
    _, federation, _ = contract_federation(name)
    run_reference(federation, 1)
    client = onboarded_client(federation, toy_data(batch=4)[1])
    model = federation.algorithm.onboard(client, run_onboarding(federation, client)[0])
    names = federation.algorithm.names
    assert names
    for entry in names:
        others = federation.personal_model("c0")[entry]
        assert len(model[entry].unique()) <= 2**federation.algorithm.bits < others.numel()
