"""Messages through a channel: bytes, refusals, and what is shared."""

import math

import pytest
import torch

from medfed.errors import NonFiniteError
from medfed.federation.channel import Channel
from medfed.federation.codecs import Dense
from medfed.federation.ledger import Direction, Entry
from medfed.federation.message import Message
from medfed.federation.packet import Packet
from medfed.federation.reference import run_reference
from medfed.personalize.fedavg import FedAvg
from tests.toys import toy_federation

MESSAGE = Message(
    "fit",
    {"shared": {"w": torch.randn(2, 3), "b": torch.randn(3)}, "sketch": {"s": torch.randn(())}},
    {"loss": 1 / 3, "n": 7.0},
    {"shared": "update"},
)


def sent(channel: Channel, message: Message, direction: Direction) -> Packet:
    """What travels; without a lossy codec nothing is remembered."""
    packet, memory = channel.encode(message, direction)
    assert memory == {}
    return packet


def received(channel: Channel, packet: Packet, direction: Direction) -> Message:
    message, memory = channel.decode(packet, direction)
    assert memory == {}
    return message


def same(a: Message, b: Message) -> bool:
    return (a.phase, dict(a.scalars)) == (b.phase, dict(b.scalars)) and all(
        a.kind(p) == b.kind(p)
        and list(a.parts[p]) == list(b.parts[p])
        and all(torch.equal(t, b.parts[p][n]) for n, t in a.parts[p].items())
        for p in {**a.parts, **b.parts}
    )


def test_dense_channel_returns_the_message() -> None:
    channel = Channel()
    assert same(received(channel, sent(channel, MESSAGE, "up"), "up"), MESSAGE)


def test_packet_as_one_byte_string_returns_the_message() -> None:
    channel = Channel()
    packet = sent(channel, MESSAGE, "up")
    back = Packet.from_bytes(packet.to_bytes())
    assert back.sizes() == packet.sizes()
    assert {p: e.data for p, e in back.parts.items()} == {
        p: e.data for p, e in packet.parts.items()
    }
    assert same(received(channel, back, "up"), MESSAGE)


def test_sizes_are_lengths_of_byte_strings() -> None:
    packet = sent(Channel(), MESSAGE, "up")
    assert packet.sizes() == {"shared": 12 + 4 * 9, "sketch": 12 + 4, "scalars": 16}


def test_directions_have_codecs_of_their_own() -> None:
    channel = Channel(up=Dense("float64"))
    up, down = (sent(channel, MESSAGE, d).sizes()["shared"] for d in ("up", "down"))
    assert (up, down) == (12 + 8 * 9, 12 + 4 * 9)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_tensors_and_scalars_are_named(bad: float) -> None:
    parts = {"shared": {"a": torch.ones(2), "b": torch.tensor([1.0, bad])}}
    with pytest.raises(NonFiniteError, match="shared/b"):
        Channel().encode(Message("fit", parts), "up")
    with pytest.raises(NonFiniteError, match="scalar loss"):
        Channel().encode(Message("fit", {}, {"loss": bad}), "up")


def test_finite_numbers_whose_sum_overflows_pass() -> None:
    huge = Message("fit", {"shared": {"a": torch.full((4,), 3e38)}})
    channel = Channel()
    assert same(received(channel, sent(channel, huge, "up"), "up"), huge)


def test_a_broadcast_is_coded_once_and_decoded_to_one_object() -> None:
    channel, shared = Channel(), {"w": torch.ones(3)}
    packets = [sent(channel, Message("fit", {"shared": shared}), "down") for _ in range(3)]
    assert len({id(p.parts["shared"]) for p in packets}) == 1
    decoded = [received(channel, p, "down").parts["shared"]["w"] for p in packets]
    assert len({t.data_ptr() for t in decoded}) == 1
    assert decoded[0].data_ptr() != shared["w"].data_ptr()


def test_replies_are_never_shared() -> None:
    channel, part = Channel(), {"w": torch.ones(3)}
    packets = [sent(channel, Message("fit", {"shared": part}), "up") for _ in range(2)]
    decoded = [received(channel, p, "up").parts["shared"]["w"] for p in packets]
    assert decoded[0].data_ptr() != decoded[1].data_ptr()


def test_another_kind_is_coded_again() -> None:
    channel, part = Channel(), {"w": torch.ones(3)}
    first = sent(channel, Message("fit", {"shared": part}), "down")
    second = sent(channel, Message("fit", {"shared": part}, kinds={"shared": "update"}), "down")
    assert (first.parts["shared"].kind, second.parts["shared"].kind) == ("state", "update")


def test_ledger_of_a_run_is_what_was_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    encode = Dense.encode

    def counting(self: Dense, flat: torch.Tensor, rng: object = None) -> bytes:
        data = encode(self, flat)
        seen.append(len(data))
        return data

    monkeypatch.setattr(Dense, "encode", counting)
    _, federation, _ = toy_federation(FedAvg())
    run_reference(federation, 2)
    entries = federation.ledger.entries
    assert all(isinstance(e, Entry) for e in entries)
    assert len(set(seen)) == 1  # the one shared part, whatever its direction
    assert [e.bytes for e in entries] == seen[:1] * (2 * 2 * len(federation.ids))
    # Each round codes the broadcast once and a reply per client.
    assert len(seen) == 2 * (1 + len(federation.ids))


def test_clients_of_fedavg_keep_no_model() -> None:
    _, federation, _ = toy_federation(FedAvg())
    run_reference(federation, 2)
    held = [c.state_dict() for c in federation.clients.values()]
    assert held == [
        {"state": {"personal": {}}, "optimizers": {}, "memory": {"up": {}, "down": {}}}
    ] * len(federation.ids)
    weights = {id(c.weights) for c in federation.clients.values()}
    assert len(weights) == 1
