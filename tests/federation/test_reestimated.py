"""Statistics of normalisation, estimated again on each client's own training batches."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from itertools import chain, count, islice

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn

from medfed.common.seeding import derive_seed
from medfed.common.tensors import digest
from medfed.federation.engine.loop import STATISTICS_BATCHES, LocalTrainer
from medfed.federation.other_state import OTHER
from medfed.federation.reference import ArrayClient, federate
from medfed.personalize.fedavg import FedAvg
from medfed.standalone.errors import ConfigError
from medfed.standalone.neighbours import store_in
from tests.contract.harness import NAMES, algorithm, recorded


def batches(data, seed=0):
    """The training batches that statistics are estimated from: none of a single sample."""
    key = derive_seed(seed, data.id, "statistics")
    epochs = (data.train_batches(derive_seed(key, "epoch", epoch)) for epoch in count())
    several = (batch for batch in chain.from_iterable(epochs) if len(batch["image"]) > 1)
    return islice(several, STATISTICS_BATCHES)


DECIDES = [name for name in NAMES if algorithm(name).normalization]
CASES = [*((n, "averaged") for n in NAMES if n not in DECIDES)]
CASES += [(n, "local") for n in ("fedavg", "ditto")]


@pytest.mark.parametrize(("name", "policy"), CASES)
def test_pytorch_gives_the_same_statistics_to_every_method(name, policy, monkeypatch):
    federation, local, _ = recorded(name, policy)
    monkeypatch.setattr(federation.trainer, "normalization", "kept")
    kept = {client: federation.personal_model(client, "val") for client in federation.ids}
    before, random = federation.digests(), torch.get_rng_state()
    monkeypatch.setattr(federation.trainer, "normalization", "reestimated")
    for client in federation.ids:
        model = federation.personal_model(client, "val")
        moved = {n for n in model if not torch.equal(model[n], kept[client][n])}
        statistics = {n for n in local.split.buffers if "running_" in n}
        computed = "computed from" in federation.algorithm.card.keeps  # the head, by features
        features = {OTHER} if store_in(local.split.base) else set()  # of the cases it remembers
        assert moved - {*(local.split.head if computed else ())} - features == statistics
        local.model.load(kept[client])
        network = deepcopy(local.network)
        for layer in network.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0  # update_bn trains it, and dropout belongs to training alone
        update_bn((batch["image"] for batch in batches(federation.clients[client].data)), network)
        expected = network.state_dict()
        for n in statistics:
            torch.testing.assert_close(model[n], expected[n], rtol=1e-6, atol=1e-7)
        assert model.keys() == kept[client].keys()
    assert federation.digests() == before
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("name", DECIDES)
def test_a_method_may_decide_itself(name, monkeypatch):
    federation, _, _ = recorded(name)
    found = []
    for wanted in ("kept", "reestimated"):
        monkeypatch.setattr(federation.trainer, "normalization", wanted)
        found.append({c: digest(federation.personal_model(c)) for c in federation.ids})
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["fedavg", "ditto", "pfednet"])
def test_frozen_statistics_stay(name, monkeypatch):
    federation, _, _ = recorded(name, "frozen")
    monkeypatch.setattr(federation.trainer, "normalization", "kept")
    kept = federation.personal_model("c0")
    monkeypatch.setattr(federation.trainer, "normalization", "reestimated")
    model = federation.personal_model("c0")
    assert all(torch.equal(model[n], kept[n]) for n in kept)


def network(last=0.1):
    torch.manual_seed(3)
    first = nn.BatchNorm1d(4, momentum=last)
    return nn.Sequential(
        nn.Linear(3, 4), first, nn.ReLU(), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 2)
    ).double()


def hospitals():
    rng = np.random.default_rng(5)
    for name, rows, centre in (("small", 9, -2.0), ("large", 31, 3.0)):
        labels = torch.tensor(rng.integers(0, 2, rows))
        yield ArrayClient(name, torch.tensor(rng.normal(centre, 1.5, (rows, 3))), labels, 4)


def federated(normalization, **more):
    return federate(
        FedAvg(),
        network(**more),
        lambda net, batch: nn.functional.cross_entropy(net(batch["image"]), batch["label"]),
        hospitals(),
        rounds=2,
        steps=3,
        optimizer=partial(torch.optim.SGD, lr=0.05),
        normalization=normalization,
    )


@pytest.mark.parametrize("last", [0.1, None], ids=["moving", "cumulative"])
def test_a_loop_by_hand_gives_the_same_statistics(last):
    kept, again = federated("kept", last=last), federated("reestimated", last=last)
    assert again.federation.digests() == kept.federation.digests()
    assert again.ledger.to_csv() == kept.ledger.to_csv()
    for data in hospitals():
        w = {n: t.numpy() for n, t in kept.weights(data.id).items()}
        sums = np.zeros((4, 4))
        for batch in (b["image"].numpy() for b in batches(data)):
            h = batch @ w["0.weight"].T + w["0.bias"]
            mean, variance = h.mean(0), h.var(0)
            out = w["1.weight"] * (h - mean) / np.sqrt(variance + 1e-5) + w["1.bias"]
            out = np.maximum(out, 0)  # dropout is off, as in every evaluation
            n = len(h)
            sums += [mean, h.var(0, ddof=1), out.mean(0), out.var(0) * n / (n - 1)]
        model = again.weights(data.id)
        names = ["1.running_mean", "1.running_var", "4.running_mean", "4.running_var"]
        for name, expected in zip(names, sums / STATISTICS_BATCHES, strict=True):
            np.testing.assert_allclose(model[name].numpy(), expected, rtol=1e-12, atol=1e-14)
        for name in w.keys() - set(names):
            np.testing.assert_array_equal(model[name].numpy(), w[name])
    layer = again.federation.trainer.network[1]
    assert layer.momentum == last


def test_a_model_is_evaluated_and_handed_over_with_them():
    done, kept = federated("reestimated"), federated("kept")
    for data in hospitals():
        with torch.no_grad():
            loss = nn.functional.cross_entropy(done.model(data.id)(data.inputs), data.labels)
        assert done.losses()[data.id] == pytest.approx(float(loss), rel=1e-12)
        assert done.losses()[data.id] != pytest.approx(kept.losses()[data.id], rel=1e-3)


@pytest.mark.parametrize(
    "layer",
    [nn.LayerNorm(3), nn.BatchNorm1d(3, track_running_stats=False), nn.InstanceNorm1d(3)],
    ids=["layer", "no running", "instance"],
)
def test_without_running_statistics_nothing_is_done(layer):
    network = nn.Sequential(layer, nn.Linear(3, 2))
    split = FedAvg().split(network, (), "averaged")
    trainer = LocalTrainer(network, lambda _: 1 / 0, split, partial(torch.optim.SGD, lr=0.1))
    model = trainer.model.initial()
    assert trainer.reestimated(next(iter(hospitals())), model) is model


def test_a_single_sample_leaves_them_as_they_are():
    done, alone = federated("reestimated"), next(iter(hospitals()))
    one = ArrayClient("one", alone.inputs[:1], alone.labels[:1], 4)
    trainer = done.federation.trainer
    model = trainer.model.initial()
    assert trainer.reestimated(one, model) is model
    layer = trainer.network[1]
    assert (layer.training, layer.momentum) == (False, 0.1)


def test_a_value_that_is_unknown_is_named():
    with pytest.raises(ConfigError, match="normalization"):
        federated("again")
