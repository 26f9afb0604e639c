"""Fed-RoD against Equations 5 to 8 in NumPy: three classes, one of which a client lacks."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from medfed.federation.algorithm import Cohort
from medfed.federation.reference import onboarded_client, run_onboarding, run_reference
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.fedrod import FedRoD
from medfed.standalone.errors import ConfigError
from tests.references.linear_net import ALL, BODY, HEAD, Model
from tests.references.pairing import Drawn, assert_same, to_numpy
from tests.toys import ToyTask, toy_federation

STEPS, LR = 5, 0.1
SETTINGS = {
    "plain": {},
    "momentum-half": {"momentum": 0.9, "cohort": Cohort(fraction=0.5)},
}


class Classes(pl.LightningModule):
    """Two layers and three classes."""

    personal = ("head.*",)
    evaluate = ToyTask.evaluate

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential()
        self.network.add_module("body", nn.Linear(3, 4).double())
        self.network.add_module("head", nn.Linear(4, 3).double())

    def loss(self, batch):
        return cross_entropy(self.network(batch["image"]), batch["label"])


def clients(even: bool = False) -> list[Drawn]:
    """Eight samples each; the first client has no sample of class 1, unless all have the same."""
    rng, found = np.random.default_rng(2), []
    for n in range(4):
        y = [0, 0, 0, 2, 2, 0, 2, 0] if n == 0 else [0, 1, 2, 1, 1, 1, n % 3, 0]
        y = [0, 1, 2] * 2 if even else y
        data = Drawn(f"c{n}", torch.tensor(rng.normal(size=(len(y), 3))), torch.tensor(y), 4)
        data.label_counts, data.drawn = torch.bincount(data.y, minlength=3), []
        found.append(data)
    return found


def finished(algorithm, data, **changes):
    _, federation, local = toy_federation(
        algorithm, Classes(), data, rounds=4, steps=STEPS, lr=LR, **changes
    )
    initial = to_numpy(local.model.initial())
    return run_reference(federation, 4), initial


def gradient(w: Model, x: np.ndarray, y: np.ndarray, prior: np.ndarray | float = 0.0) -> Model:
    """Of cross-entropy with the prior added to the logits."""
    hidden = x @ w["body.weight"].T + w["body.bias"]
    logits = hidden @ w["head.weight"].T + w["head.bias"] + prior
    share = np.exp(logits - logits.max(1, keepdims=True))
    residual = (share / share.sum(1, keepdims=True) - np.eye(3)[y]) / len(y)
    back = residual @ w["head.weight"]
    return {
        "body.weight": back.T @ x,
        "body.bias": back.sum(0),
        "head.weight": residual.T @ hidden,
        "head.bias": residual.sum(0),
    }


def fedrod(w: Model, data: list[Drawn], cohorts, momentum: float):
    batches = [iter(d.drawn) for d in data]
    own = [{k: np.zeros_like(w[k]) for k in HEAD} for _ in data]
    for cohort in cohorts:
        ends = {}
        for n in cohort:
            with np.errstate(divide="ignore"):
                prior = np.log(data[n].label_counts.double().numpy())
            y, velocity = dict(w), {k: np.zeros_like(w[k]) for k in ALL}
            for x, label in islice(batches[n], STEPS):
                g = gradient(y, x, label, prior)
                both = {**y, **{k: y[k] + own[n][k] for k in HEAD}}
                second = gradient(both, x, label)
                own[n] = {k: own[n][k] - LR * second[k] for k in HEAD}
                velocity = {k: momentum * velocity[k] + g[k] for k in ALL}
                y = {k: y[k] - LR * velocity[k] for k in ALL}
            ends[n] = y
        sizes = {n: data[n].num_samples for n in cohort}
        w = {k: sum(s * ends[n][k] for n, s in sizes.items()) / sum(sizes.values()) for k in ALL}
    return w, own


@pytest.mark.parametrize("setting", SETTINGS)
def test_equals_both_terms(setting):
    data, changes = clients(), SETTINGS[setting]
    federation, initial = finished(FedRoD(), data, **changes)
    cohorts = [[federation.ids.index(c) for c in federation.members(t)] for t in range(4)]
    w, own = fedrod(initial, data, cohorts, changes.get("momentum", 0.0))
    assert_same(federation.server["shared"], w, 1e-10)
    for client, head in zip(federation.ids, own, strict=True):
        assert_same(federation.clients[client].state["head"], head, 1e-10)
        model = {**w, **{k: w[k] + head[k] for k in HEAD}}
        assert_same(federation.personal_model(client), model, 1e-10)


def test_where_classes_are_even_the_common_model_is_that_of_fedavg():
    """So that no gradient of the second term reaches it."""
    (both, _), (plain, _) = (finished(a, clients(even=True)) for a in (FedRoD(), FedAvg()))
    assert_same(both.server["shared"], to_numpy(plain.server["shared"]), 1e-12)
    ends = [finished(a, clients())[0].server["shared"]["head.bias"] for a in (FedRoD(), FedAvg())]
    assert float((ends[0] - ends[1]).abs().max()) > 1e-2


def test_a_newcomer_trains_its_head_alone():
    federation, _ = finished(FedRoD(), clients())
    client = onboarded_client(federation, clients()[1])
    model = federation.algorithm.onboard(client, run_onboarding(federation, client)[0])
    w = federation.server["shared"]
    assert all(torch.equal(model[k], w[k]) for k in BODY)
    assert not any(torch.equal(model[k], w[k]) for k in HEAD)
    task = Classes()
    task.personal = ()
    with pytest.raises(ConfigError, match=r"name its head alone by model\.personal"):
        toy_federation(FedRoD(), task, clients())
