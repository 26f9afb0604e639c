"""FENDA against a NumPy loop over two bodies with ReLU under one head that reads both."""

from __future__ import annotations

import copy
from itertools import islice

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn

import medfed
from medfed.federation.algorithm import Cohort
from medfed.federation.onboarding import rules_of
from medfed.federation.reference import onboarded_client, run_onboarding, run_reference
from medfed.models.networks.canonical import Canonical
from medfed.personalize.fedper import FedPer
from medfed.personalize.fenda import FENDA
from medfed.personalize.local import Local
from medfed.standalone.errors import ConfigError
from tests.references.pairing import assert_same, drawn_in, to_numpy
from tests.toys import ToyTask, toy_data, toy_federation

STEPS, LR, ROUNDS = 4, 0.05, 4
FIRST, SECOND = "canonical.0.network.", "canonical.1.network."
BODY, HEAD = ("body.weight", "body.bias"), ("head.weight", "head.bias")


def network(seed: int) -> nn.Sequential:
    net = nn.Sequential()
    torch.manual_seed(seed)
    net.add_module("body", nn.Linear(3, 4).double())
    net.add_module("relu", nn.ReLU())
    net.add_module("head", nn.Linear(4, 1).double())
    return net


class Bodies(pl.LightningModule):
    """Two networks whose outputs are added, or one."""

    evaluate, loss = ToyTask.evaluate, ToyTask.loss

    def __init__(self, *networks):
        super().__init__()
        self.network, self.personal = networks[0], ("head.*",)
        if len(networks) > 1:
            self.network = Canonical(copy.deepcopy(networks), ["*"], "sum")
            self.personal = self.network.personal_part("head.*")


def finished(method, *networks, **changes):
    data = drawn_in(toy_data(3, dtype=torch.float64), 4)
    _, federation, _ = toy_federation(
        method, Bodies(*networks), data, rounds=ROUNDS, steps=STEPS, lr=LR, **changes
    )
    return run_reference(federation, ROUNDS), data


def gradient(w, x, y):
    """Bodies V and U, and one head on [V, U] with one bias."""
    inner = [x @ w[f"{b}.weight"].T + w[f"{b}.bias"] for b in "VU"]
    features = np.concatenate([np.maximum(z, 0) for z in inner], 1)
    residual = (features @ w["W"] + w["b"] - y) / len(y)
    grads = {"W": features.T @ residual, "b": residual.sum()}
    backs = np.split(np.outer(residual, w["W"]), 2, axis=1)
    for b, z, back in zip("VU", inner, backs, strict=True):
        grads |= {f"{b}.weight": (back * (z > 0)).T @ x, f"{b}.bias": (back * (z > 0)).sum(0)}
    return grads


def start(first, second):
    one, other = (to_numpy(net.state_dict()) for net in (first, second))
    heads = np.concatenate([one["head.weight"][0], other["head.weight"][0]])
    bodies = {f"{b}.{n}": m[f"body.{n}"] for b, m in (("V", one), ("U", other)) for n in PARTS}
    return {**bodies, "W": heads, "b": one["head.bias"][0]}


PARTS = ("weight", "bias")
SHARED = ("V.weight", "V.bias")


@pytest.mark.parametrize("changes", [{}, {"momentum": 0.9, "cohort": Cohort(fraction=0.67)}])
def test_equals_the_papers_loop(changes):
    networks = network(0), network(1)
    federation, data = finished(FENDA(), *networks, **changes)
    w = start(*networks)
    shared = {n: w.pop(n) for n in SHARED}
    own, streams = [dict(w) for _ in data], [iter(d.drawn) for d in data]
    for t in range(ROUNDS):
        ends, sizes = [], []
        for k in (federation.ids.index(c) for c in federation.members(t)):
            model, velocity = {**shared, **own[k]}, dict.fromkeys(start(*networks), 0.0)
            for x, y in islice(streams[k], STEPS):
                g = gradient(model, x, y)
                velocity = {n: changes.get("momentum", 0.0) * velocity[n] + g[n] for n in g}
                model = {n: model[n] - LR * velocity[n] for n in g}
            own[k] = {n: model[n] for n in own[k]}
            ends.append({n: model[n] for n in SHARED})
            sizes.append(data[k].num_samples)
        shared = {
            n: sum(s * e[n] for s, e in zip(sizes, ends, strict=True)) / sum(sizes) for n in SHARED
        }
    for k, client in enumerate(federation.ids):
        found = to_numpy(federation.personal_model(client))
        assert_same({n: found[f"{FIRST}body.{n[2:]}"] for n in SHARED}, shared, 1e-12)
        heads = [found[f"{place}head.weight"][0] for place in (FIRST, SECOND)]
        model = {
            "U.weight": found[f"{SECOND}body.weight"],
            "U.bias": found[f"{SECOND}body.bias"],
            "W": np.concatenate(heads),
            "b": found[f"{FIRST}head.bias"][0],
        }
        assert_same(model, own[k], 1e-12)
    assert set(federation.server["shared"]) == {f"{FIRST}{n}" for n in BODY}


def without_body(net):
    nn.init.zeros_(net.body.weight)
    nn.init.zeros_(net.body.bias)
    return net


def test_a_personal_body_of_zeros_is_fedper():
    one = network(0)
    found, _ = finished(FENDA(), one, without_body(network(1)))
    plain, _ = finished(FedPer(), one)
    for client in found.ids:
        model = found.personal_model(client)
        first = {n: model[f"{FIRST}{n}"] for n in BODY + HEAD}
        assert_same(first, to_numpy(plain.personal_model(client)), 1e-12)
        assert not model[f"{SECOND}body.weight"].any()


def test_a_shared_body_of_zeros_is_local_training():
    other, first = network(1), without_body(network(0))
    with torch.no_grad():
        first.head.bias.copy_(other.head.bias)
    found, _ = finished(FENDA(), first, other)
    alone, _ = finished(Local(), network(1))
    for client in found.ids:
        model = found.personal_model(client)
        second = {n: model[f"{SECOND}{n}"] for n in (*BODY, "head.weight")}
        second["head.bias"] = model[f"{FIRST}head.bias"]
        assert_same(second, to_numpy(alone.personal_model(client)), 1e-12)


def test_bodies_that_start_as_equals_would_stay_so():
    """One client; so instances that start as equals are refused."""
    data = toy_data(1, dtype=torch.float64)
    task = Bodies(network(0), network(1))
    with torch.no_grad():
        for n, tensor in task.network.canonical[0].named_parameters():
            if n != "network.head.bias":
                task.network.canonical[1].get_parameter(n).copy_(tensor)
    _, federation, _ = toy_federation(FENDA(), task, data, steps=STEPS, lr=LR)
    model = run_reference(federation, ROUNDS).personal_model("c0")
    for n in (*BODY, "head.weight"):
        torch.testing.assert_close(model[f"{FIRST}{n}"], model[f"{SECOND}{n}"], rtol=0, atol=1e-12)
    with pytest.raises(ConfigError, match="start as equals"):
        Canonical([network(0), network(0)], ["*"], "sum")


def test_a_newcomer_trains_its_body_and_head_beside_a_fixed_body():
    federation, _ = finished(FENDA(), network(0), network(1))
    client = onboarded_client(federation, toy_data(3, dtype=torch.float64)[1])
    model = rules_of(federation.algorithm).onboard(client, run_onboarding(federation, client)[0])
    for n in BODY:
        assert torch.equal(model[f"{FIRST}{n}"], federation.server["shared"][f"{FIRST}{n}"])
        assert not torch.equal(model[f"{SECOND}{n}"], client.weights[f"{SECOND}{n}"])


def test_one_network_is_refused_and_a_list_of_two_is_taken():
    with pytest.raises(ConfigError, match=r"set canonical=two_bodies"):
        toy_federation(FENDA(), Bodies(network(0)))
    data = toy_data(3, dtype=torch.float64, batch=4)
    done = medfed.federate(
        "fenda", [network(0), network(1)], squares, data, rounds=1, steps=1, personal=["head.*"]
    )
    shared = set(done.federation.server["shared"])
    assert shared == {f"{FIRST}{n}" for n in BODY}


def squares(net, batch):
    return (net(batch["image"])[:, 0] - batch["label"]).square().mean()
