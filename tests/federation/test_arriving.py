"""Replies are added up as they arrive: the same bits in any order, and less memory."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from medfed.common.tensors import Tensors, weighted_mean
from medfed.federation.aggregation import PhaseReplies
from medfed.federation.client import Client
from medfed.federation.federation import Federation
from medfed.federation.reference import run_reference
from medfed.federation.round import Round
from medfed.federation.wire.channel import Channel
from medfed.federation.wire.fixed_point import FixedPoint
from medfed.federation.wire.packet import Message, Packet
from medfed.personalize.fedavg import FedAvg
from medfed.standalone.errors import ConfigError
from tests.contract.harness import algorithm, federation, lossy
from tests.contract.shapes import PARTS

ROUNDS = 2


def received_in(order: Callable[[list[str]], list[str]], federation: Federation) -> None:
    """Runs rounds whose replies arrive as bytes and in another order."""
    for number in range(ROUNDS):
        current, is_open = Round(federation, number), True
        while is_open:
            packets = {c: current.fit(c).to_bytes() for c in current.recipients}
            for client in order(list(packets)):
                current.receive(client, Packet.from_bytes(packets[client]))
            is_open = current.close_phase()


@pytest.mark.parametrize("codec", ["fp32", "stc"])
@pytest.mark.parametrize("name", [n for n in PARTS if not algorithm(n).trains_centrally])
def test_any_order_gives_the_same_bits(name, codec):
    """Also with codecs that remember, whose memory must advance once."""
    channel = {} if codec == "fp32" else {"channel": lossy(codec)}
    expected, made = (federation(name, **channel)[1] for _ in range(2))
    run_reference(expected, ROUNDS)
    received_in(lambda clients: clients[::-1], made)
    assert made.digests() == expected.digests()
    assert made.ledger.entries == expected.ledger.entries


def test_the_mean_of_a_round_is_that_of_its_replies():
    made = federation("fedavg")[1]
    before, current = made.server["shared"], Round(made, 0)
    packets = {c: current.fit(c) for c in current.recipients}
    updates = [made.channel.decode(p, "up")[0].parts["shared"] for p in packets.values()]
    for client, packet in packets.items():
        current.receive(client, packet)
    current.close_phase()
    mean = weighted_mean(updates, [made.samples[c] for c in packets])
    for name in mean.keys() - {"norm.running_var"}:  # variances are of all patients together
        assert torch.equal(made.server["shared"][name], before[name] + mean[name])


SHAPES: dict[str, tuple[int, ...]] = {"a": (3, 2), "large": (2**13,), "b": (), "c": (5,)}
LAST: dict[str, Callable[[Tensors], Tensors]] = {
    "alike": lambda named: named,
    "in another order": lambda named: dict(reversed(named.items())),
    "in double precision": lambda named: {n: t.double() for n, t in named.items()},
}


@pytest.mark.parametrize("as_bytes", [False, True], ids=["tensors", "bytes"])
@pytest.mark.parametrize("last", LAST.values(), ids=LAST)
def test_small_tensors_are_added_together_with_the_bits_of_each_alone(last, as_bytes):
    rng, channel = torch.Generator().manual_seed(0), Channel()
    replies = [{n: torch.randn(s, generator=rng) for n, s in SHAPES.items()} for _ in range(4)]
    replies[2] = last(replies[2])
    weights = {"c0": 1.0, "c1": 5.0, "c2": 2.0, "c3": 3.0}
    made = PhaseReplies(weights, ["shared"])
    for client, named in zip(weights, replies, strict=True):
        packet = channel.encode(Message("fit", {"shared": named}), "up")[0]
        packet = Packet.from_bytes(packet.to_bytes()) if as_bytes else packet
        made.add(client, channel.decode(packet, "up")[0], packet.parts)
        length = math.sqrt(math.fsum(float(t.double().square().sum()) for t in named.values()))
        assert made.norms["shared"][client] == pytest.approx(length, rel=1e-5)
    mean = made.summed("shared")
    assert [*mean] == [*SHAPES]
    for name, tensor in mean.items():
        total = replies[0][name] * (1 / 11)
        for named, weight in zip(replies[1:], (5 / 11, 2 / 11, 3 / 11), strict=True):
            total.add_(named[name], alpha=weight)
        assert torch.equal(tensor, total)


def test_a_reply_of_another_shape_is_refused():
    channel, made = Channel(), PhaseReplies({"a": 1.0, "b": 1.0}, ["shared"])
    for client, shape in (("a", 2), ("b", 1)):
        named = {n: torch.ones(shape) for n in "xyz"}
        packet = channel.encode(Message("fit", {"shared": named}), "up")[0]
        decoded = channel.decode(packet, "up")[0]
        if client == "a":
            made.add(client, decoded, packet.parts)
    with pytest.raises(ValueError, match=r"x has the shapes \[2\] and \[1\]"):
        made.add("b", decoded, packet.parts)


def test_no_reply_is_kept_that_is_averaged():
    made = federation("fedavg")[1]
    current, alive = Round(made, 0), []
    for client in current.recipients:
        packet = current.fit(client)
        alive += [weakref.ref(t) for t in packet.parts["shared"].content.values()]
        current.receive(client, packet)
        del packet
    assert alive
    assert not any(tensor() is not None for tensor in alive)


@dataclass(frozen=True)
class ReadsReplies(FedAvg):
    """Declares that it only averages, and reads single replies all the same."""

    how: str = "item"

    def closed(self, server, replies):
        for reply in replies.values():
            reply.parts["shared"] if self.how == "item" else reply.parts.get("shared")
        return super().closed(server, replies)


@dataclass(frozen=True)
class SomeLackIt(FedAvg):
    """Whose last client sends nothing."""

    def fit(self, client: Client, message: Message) -> Message:
        reply = super().fit(client, message)
        return replace(reply, parts={}, kinds={}) if client.id == "c2" else reply


@pytest.mark.parametrize("how", ["item", "get"])
@pytest.mark.parametrize("sums", [None, FixedPoint(("shared",))], ids=["plain", "masks"])
def test_a_method_that_reads_single_replies_must_say_so(how, sums):
    made = federation("fedavg", channel=Channel(sums=sums))[1]
    made.algorithm = ReadsReplies(how=how)
    with pytest.raises(
        ConfigError, match=r"reads the part shared of a single reply.*parts_averaged"
    ):
        run_reference(made, 1)


def test_a_part_that_some_lack_has_no_mean():
    made = federation("fedavg")[1]
    made.algorithm = SomeLackIt()
    with pytest.raises(ConfigError, match="reads the part shared of replies"):
        run_reference(made, 1)


@dataclass(frozen=True)
class ChangesWhatItReceives(FedAvg):
    """Steps in place on the tensors of the server's message."""

    def fit(self, client: Client, message: Message) -> Message:
        for tensor in message.parts["shared"].values():
            tensor.mul_(1)
        return super().fit(client, message)


def test_a_method_that_changes_a_message_in_place_is_refused():
    made = federation("fedavg")[1]
    made.algorithm = ChangesWhatItReceives()
    with pytest.raises(ValueError, match=r"ChangesWhatItReceives changes .* shared .*in place"):
        run_reference(made, 1)


def test_a_mean_holds_one_item_at_a_time():
    alive: list[int] = []

    class Counted(dict):
        def __init__(self) -> None:
            super().__init__(w=torch.ones(1))
            alive.append(1)

        def __del__(self) -> None:
            alive.pop()

    def items():
        for _ in range(5):
            yield Counted()
            assert len(alive) <= 2

    assert weighted_mean(items(), [1, 1, 1, 1, 4])["w"] == 1
