"""What every algorithm promises a client that joins later; once per shape of onboarding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from medfed.common.tensors import digest
from medfed.federation.onboarding import rules_of
from medfed.federation.other_state import OTHER
from medfed.federation.reference import onboarded_client, run_onboarding, run_reference
from medfed.federation.wire.channel import Channel
from tests.contract.harness import LOSSY, POLICIES, Serialising, federation, lossy
from tests.contract.shapes import ONBOARDINGS
from tests.toys import ToyData, in_classes

pytestmark = pytest.mark.parametrize("name", ONBOARDINGS)


class Wire(Channel):
    """Remembers what travels, in which direction and how long it is."""

    def __init__(self):
        super().__init__()
        self.sent = []

    def encode(self, message, direction, *where):
        packet, memory = super().encode(message, direction, *where)
        length = sum(len(e.data) for e in packet.parts.values()) + 8 * len(packet.scalars)
        self.sent.append((direction, message, length))
        return packet, memory


def arriving(samples: int = 7) -> ToyData:
    rng = np.random.default_rng(5)
    x = torch.tensor(rng.normal(size=(samples, 3)), dtype=torch.float32)
    return ToyData("new", x, x.sum(1) + 1, batch_size=4)


def trained(name, rounds=2, **changes):
    _, fed, _ = federation(name, **changes)
    return run_reference(fed, rounds)


def newcomer(fed, data=None):
    data = data or arriving()
    return onboarded_client(fed, in_classes(data) if fed.algorithm.by_class else data)


def joined(fed, data=None):
    client = newcomer(fed, data)
    message, ledger = run_onboarding(fed, client)
    return rules_of(fed.algorithm).onboard(client, message), ledger, client


def test_an_onboarded_client_gets_a_whole_model_and_nothing_else_changes(name):
    for policy in POLICIES:
        fed = trained(name, buffers=policy)
        before, entries = fed.digests(), fed.ledger.to_csv()
        model, ledger, client = joined(fed)
        assert set(model) - {OTHER} == set(client.weights)
        assert all(bool(torch.isfinite(t).all()) for t in model.values())
        assert fed.digests() == before
        assert fed.ledger.to_csv() == entries
        assert {e.client for e in ledger.entries} <= {"new"}
        start = client.weights
        stay = client.split.buffers if policy == "frozen" else set()
        assert all(torch.equal(model[n], start[n]) for n in stay)


def test_the_data_decide_what_is_personal(name):
    fed = trained(name, buffers="local")
    far = arriving()
    far.x, far.y = 3 + 2 * far.x, -far.y
    first, second = joined(fed)[0], joined(fed, far)[0]
    assert (
        digest(first) != digest(second)
    ) != fed.algorithm.trains_centrally  # one model, whoever joins


def test_joining_twice_gives_the_same(name):
    fed = trained(name)
    first, sent, _ = joined(fed)
    again, sent_again, _ = joined(fed)
    assert digest(first) == digest(again)
    assert sent.to_csv() == sent_again.to_csv()


def test_serialised_messages_change_nothing(name):
    plain, serial = trained(name), trained(name, channel=Serialising())
    assert digest(joined(plain)[0]) == digest(joined(serial)[0])


def test_bytes_are_those_of_the_messages_and_only_declared_parts_leave(name):
    channel = Wire()
    fed = trained(name, channel=channel)
    channel.sent.clear()
    _, ledger, client = joined(fed)
    for direction in ("up", "down"):
        lengths = sum(n for d, _, n in channel.sent if d == direction)
        assert ledger.total(direction=direction) == lengths
    sent = {
        d: {p for way, m, _ in channel.sent if way == d for p in m.parts} for d in ("up", "down")
    }
    assert sent["up"] <= set(fed.algorithm.parts_sent)
    if fed.server.get("shared"):
        assert "shared" in sent["down"]
        shared = [m.parts["shared"] for d, m, _ in channel.sent if "shared" in m.parts]
        assert len(shared) == 1  # once, and downwards
        assert set(shared[0]) == set(client.split.shared)


def test_no_rule_takes_more_steps_than_it_may(name):
    fed = trained(name)
    models, rules = {}, rules_of(fed.algorithm)
    for rule in ("onboard", "fine_tune", "alone"):
        client = newcomer(fed)
        message, _ = run_onboarding(fed, client)
        before = client.steps_done  # a sketch may have needed some
        arguments = (client,) if rule == "alone" else (client, message)
        models[rule] = getattr(rules, rule)(*arguments)
        assert set(models[rule]) - {OTHER} == set(client.weights)
        assert client.steps_done - before <= client.steps
        assert rule == "onboard" or client.steps_done > before
        if fed.algorithm.mixes:
            membership = models[rule]["membership"]
            assert float(membership.sum()) == pytest.approx(1)
            assert float(membership.min()) >= 0
    assert digest(models["fine_tune"]) != digest(rules.onboarding_start(client, message))


def test_a_lossy_channel_begins_with_the_whole_state(name):
    for setting in LOSSY:
        fed = trained(name, channel=lossy(setting))
        before = fed.digests()
        client = newcomer(fed)
        message, _ = run_onboarding(fed, client)
        assert fed.digests() == before
        for entry, tensor in message.parts.get("shared", {}).items():
            assert torch.equal(tensor, fed.server["shared"][entry])
