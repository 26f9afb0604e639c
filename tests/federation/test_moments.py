"""The server averages the state of the clients' optimizers as it averages their weights."""

from __future__ import annotations

from copy import deepcopy
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from medfed.federation.aggregation import Median
from medfed.federation.algorithm import Cohort
from medfed.federation.assemble import assemble
from medfed.federation.budget import LocalBudget
from medfed.federation.reference import ArrayClient, run_reference
from medfed.federation.round import PART
from medfed.federation.wire.channel import CER, Channel, Link
from medfed.federation.wire.codecs.dense import Dense
from medfed.federation.wire.codecs.stc import STC
from medfed.personalize.ditto import Ditto
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.fedper import FedPer
from medfed.personalize.fedprox import FedProx
from medfed.personalize.fedrep import FedRep
from medfed.personalize.local import Local
from medfed.standalone.errors import ConfigError
from tests.contract.harness import NAMES, algorithm, task

ROUNDS, STEPS = 4, 3
ABSENT = {1: ["b"], 2: ["a"]}
OPTIMIZERS = {
    "adam": partial(torch.optim.Adam, lr=0.02),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5),
}


def network():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def hospitals():
    rng = np.random.default_rng(7)
    made = []
    for name, rows in (("a", 6), ("b", 20), ("c", 11)):
        x = torch.tensor(rng.normal(size=(rows, 3)))
        y = x @ torch.tensor(rng.normal(size=(3, 1))) + float(rng.normal())
        made.append(ArrayClient(name, x, y, rows))  # an epoch is one batch
    return made


def loss(net, data):
    return (net(data.inputs) - data.labels).square().mean()


def federation(method, optimizer, channel=None, state="averaged", **more):
    net = network()
    wire = channel or Channel(Link(Dense("float64")), Link(Dense("float64")))
    made, _ = assemble(
        method,
        net,
        lambda batch: (net(batch["image"]) - batch["label"]).square().mean(),
        hospitals(),
        personal="2.*",
        optimizer=OPTIMIZERS[optimizer],
        rounds=ROUNDS,
        budget=LocalBudget(STEPS, optimizer_state=state),
        channel=lambda _: wire,
        **more,
    )
    return made


def plain_loop(optimizer, personal=()):
    """Weights of the shared part and what the server keeps of optimizers, by PyTorch alone."""
    world, everyone = network(), hospitals()
    names = [n for n, _ in world.named_parameters()]
    kept = {data.id: ({}, {}) for data in everyone}
    moments: dict = {}
    for number in range(ROUNDS):
        ends, states, sizes = [], [], []
        for data in everyone:
            if data.id in ABSENT.get(number, ()):
                continue
            net = deepcopy(world)
            own, remembered = kept[data.id]
            net.load_state_dict({**net.state_dict(), **own})
            running = OPTIMIZERS[optimizer](net.parameters())
            for name, parameter in net.named_parameters():
                source = remembered if name in personal else moments
                if name in source:
                    running.state[parameter] = deepcopy(source[name])
            for _ in range(STEPS):
                running.zero_grad()
                loss(net, data).backward()
                running.step()
            state = {n: deepcopy(dict(running.state[p])) for n, p in net.named_parameters()}
            end = {n: t.clone() for n, t in net.state_dict().items()}
            kept[data.id] = ({n: end[n] for n in personal}, {n: state[n] for n in personal})
            ends.append(end)
            states.append(state)
            sizes.append(data.num_samples)
        weights = np.array(sizes) / sum(sizes)
        shared = [n for n in names if n not in personal]
        mean = {n: sum(w * e[n] for w, e in zip(weights, ends, strict=True)) for n in shared}
        world.load_state_dict({**world.state_dict(), **mean})
        moments = {
            n: {k: sum(w * s[n][k] for w, s in zip(weights, states, strict=True)) for k in first}
            for n in shared
            if (first := states[0][n])
        }
    return {n: world.state_dict()[n] for n in shared}, moments


@pytest.mark.parametrize("personal", [(), ("2.weight", "2.bias")], ids=["all", "but the head"])
@pytest.mark.parametrize("optimizer", ["adam", "momentum", "rmsprop"])
def test_a_plain_loop_gives_the_same(optimizer, personal):
    method = FedPer() if personal else FedAvg()
    cohort = Cohort(absent=ABSENT)
    done = run_reference(federation(method, optimizer, cohort=cohort), ROUNDS)
    weights, moments = plain_loop(optimizer, personal)
    for name, expected in weights.items():
        torch.testing.assert_close(done.server["shared"][name], expected, rtol=1e-12, atol=1e-14)
    found = done.server[PART]
    fields = [(n, k) for n in moments for k in moments[n]]
    assert len(found) == len(fields) > 0
    for number, name in enumerate(moments):
        for field, expected in moments[name].items():
            torch.testing.assert_close(
                found[f"{number}/{field}"].double(), expected.double(), rtol=1e-12, atol=1e-14
            )


def test_bytes_are_counted_and_nothing_personal_travels():
    done = run_reference(federation(FedPer(), "adam"), ROUNDS)
    sent = {(e.round, e.direction): e.dense for e in done.ledger.entries if e.part == PART}
    head = 12  # what a part begins with
    size = head + 4 * (2 * 20 + 2)  # two moments of 20 weights, the steps of two tensors, in fp32
    places = [(n, "up") for n in range(ROUNDS)] + [(n, "down") for n in range(1, ROUNDS)]
    assert sent == dict.fromkeys(places, size)
    assert all(n.split("/")[0] in "01" for n in done.server[PART])


def test_a_run_from_saved_states_equals_a_straight_one():
    straight = run_reference(federation(FedAvg(), "adam"), ROUNDS)
    begun = run_reference(federation(FedAvg(), "adam"), 2)
    resumed = federation(FedAvg(), "adam")
    resumed.server = deepcopy(begun.server)
    for name, client in resumed.clients.items():
        client.load_state_dict(deepcopy(begun.clients[name].state_dict()))
    assert run_reference(resumed, ROUNDS, start=2).digests() == straight.digests()
    assert (
        straight.digests() != run_reference(federation(FedAvg(), "adam", state="kept"), 4).digests()
    )


def test_an_optimizer_without_memory_has_nothing_to_average():
    plain = run_reference(federation(FedAvg(), "sgd"), ROUNDS)
    fresh = run_reference(federation(FedAvg(), "sgd", state="fresh"), ROUNDS)
    assert plain.ledger.to_csv() == fresh.ledger.to_csv()
    torch.testing.assert_close(plain.server["shared"], fresh.server["shared"], rtol=0, atol=0)
    assert not plain.server[PART]


LOSSY = {
    "rounded up": ({"up": Link(Dense("float16"))}, "codec.up"),
    "few down": ({"down": Link(STC(0.5))}, "codec.down"),
    "alike up": ({"up": Link(Dense("float32"), cer=CER(0.1))}, "channel.up"),
}


@pytest.mark.parametrize("case", LOSSY)
def test_a_channel_that_changes_them_is_refused(case):
    links, named = LOSSY[case]
    with pytest.raises(ConfigError, match=f"optimizer_state=averaged.*{named}"):
        federation(FedAvg(), "adam", Channel(**links))


OTHERS = {
    "twice": (Ditto(), "Ditto"),
    "in turns": (FedRep(), "FedRep"),
    "alone": (Local(), "Local"),
    "by channels": (FedAvg(mask_aware=True), "FedAvg with algorithm.mask_aware"),
    "by medians": (FedAvg(aggregation=Median()), "aggregation=median"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_method_without_such_a_mean_is_refused(case):
    method, named = OTHERS[case]
    with pytest.raises(ConfigError, match=f"optimizer_state=averaged.*{named}"):
        federation(method, "adam")


@pytest.mark.parametrize(
    "name", [n for n in NAMES if vars(type(algorithm(n))).get("averages_moments")]
)
def test_who_declares_it_trains_once_what_is_averaged(name):
    toy = task(name)
    made, _ = assemble(
        algorithm(name),
        toy.network,
        toy.loss,
        hospitals_in_float(),
        personal=toy.personal,
        optimizer=OPTIMIZERS["adam"],
        rounds=2,
        budget=LocalBudget(STEPS, optimizer_state="averaged"),
    )
    calls = []
    for client in made.clients.values():
        plain = client.train
        client.train = lambda *a, plain=plain, **k: calls.append(k.get("update")) or plain(*a, **k)
    run_reference(made, 1)
    assert calls == [None] * len(made.clients)
    assert made.algorithm.phases(0) == ("fit",)
    assert "shared" in made.algorithm.parts_averaged


def hospitals_in_float():
    return [ArrayClient(d.id, d.inputs.float(), d.labels.float()[:, 0]) for d in hospitals()]


def test_others_do_not_inherit_the_declaration():
    class Twice(FedProx):
        pass

    with pytest.raises(ConfigError, match="Twice does not send"):
        federation(Twice(), "adam")
