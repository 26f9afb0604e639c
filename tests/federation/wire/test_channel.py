"""Messages through a channel: bytes, refusals, and what is shared."""

import math
from typing import Any

import pytest
import torch

from medfed.federation.other_state import OTHER
from medfed.federation.reference import run_reference
from medfed.federation.wire import channel as channel_module
from medfed.federation.wire.channel import CER, Channel, Link, MessageContext, compress
from medfed.federation.wire.codecs.dense import Dense
from medfed.federation.wire.codecs.qsgd import QSGD
from medfed.federation.wire.codecs.stc import STC
from medfed.federation.wire.ledger import Direction, Entry
from medfed.federation.wire.packet import EncodedPart, Message, Packet
from medfed.personalize.fedavg import FedAvg
from medfed.standalone.errors import CodecError, NonFiniteError
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
    lengths = {part: size for part, (size, _) in packet.sizes().items()}
    assert lengths == {"shared": 12 + 4 * 9, "sketch": 12 + 4, "scalars": 16}


def test_directions_have_codecs_of_their_own() -> None:
    channel = Channel(up=Dense("float64"))
    up, down = (sent(channel, MESSAGE, d).sizes()["shared"][0] for d in ("up", "down"))
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
    # Within a process it is what was sent: a large model is not there twice.
    assert {t.data_ptr() for t in decoded} == {shared["w"].data_ptr()}


def test_what_is_sent_has_ordinary_layout_and_no_graph() -> None:
    last = torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last)
    part = {"w": last.requires_grad_(), "b": torch.arange(6.0)[::2]}
    channel = Channel()
    for way in ("up", "down"):
        decoded = received(channel, sent(channel, Message("fit", {"shared": part}), way), way)
        found = decoded.parts["shared"]
        assert all(t.is_contiguous() and not t.requires_grad for t in found.values())
        assert all(torch.equal(found[n], part[n]) for n in part)


def test_another_kind_is_coded_again() -> None:
    channel, part = Channel(), {"w": torch.ones(3)}
    first = sent(channel, Message("fit", {"shared": part}), "down")
    second = sent(channel, Message("fit", {"shared": part}, kinds={"shared": "update"}), "down")
    assert (first.parts["shared"].kind, second.parts["shared"].kind) == ("state", "update")


def test_ledger_of_a_run_is_what_was_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is handed over within the process counts as many bytes as it would travel in."""
    seen: list[int] = []

    def counting(*given: Any) -> EncodedPart:
        part = EncodedPart(*given)
        seen.append(len(part.data))
        return part

    monkeypatch.setattr(channel_module, "EncodedPart", counting)
    _, federation, _ = toy_federation(FedAvg())
    run_reference(federation, 2)
    entries = federation.ledger.entries
    assert all(isinstance(e, Entry) for e in entries)
    assert len(set(seen)) == 1  # the one shared part, whatever its direction
    assert [e.bytes for e in entries] == seen[:1] * (2 * 2 * len(federation.ids))
    # Each round codes the broadcast once and a reply per client.
    assert len(seen) == 2 * (1 + len(federation.ids))


@pytest.mark.parametrize("wire", [torch.float32, torch.float64])
def test_what_is_handed_over_equals_its_bytes(wire: torch.dtype) -> None:
    """Zeros of both signs, subnormal and extreme numbers keep their bits."""
    numbers = torch.tensor([0.0, -0.0, 1e-45, torch.finfo(wire).max, -1.5], dtype=wire)
    codec = Dense("float64" if wire is torch.float64 else "float32")
    channel = Channel(codec, codec)
    packet, _ = channel.encode(Message("fit", {"shared": {"w": numbers}}), "up")
    assert isinstance(packet.parts["shared"].content, dict)
    travelled = Packet.from_bytes(packet.to_bytes())
    assert isinstance(travelled.parts["shared"].content, bytes)
    assert travelled.sizes() == packet.sizes()
    for each in (packet, travelled):
        received = channel.decode(each, "up")[0].parts["shared"]["w"]
        assert received.numpy().tobytes() == numbers.numpy().tobytes()


def test_clients_of_fedavg_keep_no_model() -> None:
    _, federation, _ = toy_federation(FedAvg())
    run_reference(federation, 2)
    for client in federation.clients.values():
        held = client.state_dict()
        state = held.pop("state")
        assert set(state) == {"personal"}
        assert set(state["personal"]) <= {OTHER}
        assert held == {"optimizers": {}, "memory": {"up": {}, "down": {}}}
    weights = {id(c.weights) for c in federation.clients.values()}
    assert len(weights) == 1


# Lossy channels with memory

MODEL = {"w": torch.randn(30, 2), "mean": torch.randn(4), "b": torch.randn(2)}
UPDATE = Message("fit", {"shared": MODEL}, {"n": 3.0}, {"shared": "update"})


def lossy(**options: Any) -> Channel:
    return Channel(Link(STC(0.1), **options), Link(STC(0.1), **options), buffers={"mean"})


def test_buffers_travel_dense_behind_what_the_codec_gets() -> None:
    channel = lossy()
    packet, memory = channel.encode(UPDATE, "up")
    message, _ = channel.decode(Packet.from_bytes(packet.to_bytes()), "up")
    got = message.parts["shared"]
    assert list(got) == list(MODEL)
    assert torch.equal(got["mean"], MODEL["mean"])
    assert int(torch.count_nonzero(torch.cat([got["w"].flatten(), got["b"]]))) == 7  # of 62
    assert [t.shape for t in memory.values()] == [(62,)]
    coded = STC(0.1).encode(torch.cat([MODEL["w"].flatten(), MODEL["b"]]))
    dense = 12 + 4 * 66
    assert packet.sizes() == {"shared": (len(coded) + 12 + 4 * 4, dense), "scalars": (8, 8)}


def test_a_part_of_buffers_alone() -> None:
    message = Message(
        "fit", {"statistics": {"mean": MODEL["mean"]}}, kinds={"statistics": "update"}
    )
    channel = lossy(shift="auto")
    packet, memory = channel.encode(message, "up")
    assert memory == {}
    assert packet.sizes() == {"statistics": (12 + 4 * 4, 12 + 4 * 4)}
    assert torch.equal(channel.decode(packet, "up")[0].parts["statistics"]["mean"], MODEL["mean"])


def test_other_parts_and_phases_travel_as_they_are() -> None:
    channel = lossy(parts=["fit/shared", "head*"])
    for phase, part, exact in (
        ("fit", "shared", False),
        ("late", "shared", True),
        ("late", "heads", False),
        ("fit", "personal", True),
    ):
        message = Message(phase, {part: {"w": MODEL["w"]}}, kinds={part: "update"})
        packet, memory = channel.encode(message, "up")
        got = channel.decode(packet, "up")[0].parts[part]["w"]
        assert torch.equal(got, MODEL["w"]) == exact == (memory == {})


def test_parts_of_one_name_but_other_tensors_have_memories_of_their_own() -> None:
    channel, memory = lossy(), {}
    for names in (["w"], ["b"], ["w"]):
        part = {n: MODEL[n] for n in names}
        message = Message("fit", {"shared": part}, kinds={"shared": "update"})
        _, memory = channel.encode(message, "up", memory=memory)
    assert sorted(t.numel() for t in memory.values()) == [2, 60]


@pytest.mark.parametrize("level", [1, 19])
def test_the_last_stage_loses_nothing(level: int) -> None:
    pytest.importorskip("zstandard")
    zeros = Message("fit", {"shared": {"w": torch.zeros(5000)}})
    plain, packed = Channel(), Channel(Link(zstd=level), Link(zstd=level))
    assert same(received(packed, sent(packed, MESSAGE, "up"), "up"), MESSAGE)
    size, dense = sent(packed, zeros, "up").sizes()["shared"]
    assert size < 60
    assert sent(plain, zeros, "up").sizes()["shared"] == (dense, dense)
    torn = sent(packed, zeros, "up").parts["shared"]
    for data in (torn.data[:-1], b"", b"no frame", compress(bytes(200_000), level)):
        packet = Packet("fit", {}, {"shared": EncodedPart("state", data, torn.layout)})
        with pytest.raises(CodecError):
            packed.decode(packet, "up")


def test_a_message_that_cannot_be_sent_changes_no_memory() -> None:
    channel = lossy()
    _, memory = channel.encode(UPDATE, "up")
    kept = {name: t.clone() for name, t in memory.items()}
    bad = {"shared": MODEL, "sketch": {"s": torch.tensor([math.nan])}}
    with pytest.raises(NonFiniteError, match="sketch/s"):
        channel.encode(Message("fit", bad, kinds={"shared": "update"}), "up", memory=memory)
    assert list(memory) == list(kept)
    assert all(torch.equal(t, kept[name]) for name, t in memory.items())


def test_numbers_beyond_a_codec_are_named() -> None:
    huge = Message("fit", {"shared": {"w": torch.tensor([1.0, 1e300], dtype=torch.float64)}})
    with pytest.raises(
        NonFiniteError, match=r"shared cannot be coded by STC: Element 1 is 1e\+300"
    ):
        lossy().encode(huge, "up")
    updates = Message("fit", huge.parts, kinds={"shared": "update"})
    with pytest.raises(NonFiniteError, match="shared cannot be coded"):
        lossy(cer=CER(gamma=0.1)).encode(updates, "up")


def test_draws_depend_on_the_place_and_on_nothing_else() -> None:
    def data(direction: Direction, *place: Any, seed: int = 0, scale: float = 1.0) -> bytes:
        channel = Channel(QSGD(levels=2), QSGD(levels=2), seed=seed)
        part = {"w": scale * MODEL["w"]}
        message = Message("fit", {"shared": part}, kinds={"shared": "update"})
        return channel.encode(message, direction, MessageContext(*place))[0].parts["shared"].data

    once = data("up", "a", 1, 0)
    assert once == data("up", "a", 1, 0)
    others = [data("up", *p) for p in (("b", 1, 0), ("a", 2, 0), ("a", 1, 1))]
    assert len({once, *others, data("up", "a", 1, 0, seed=1), data("down", "a", 1, 0)}) == 6
    # Downwards whoever is sent the same gets the same.
    assert data("down", "a", 1, 0) == data("down", "b", 1, 0)
    # Another content draws differently: twice the values would be twice the levels otherwise.
    doubled = QSGD().decode(data("down", "a", 1, 0, scale=2.0))
    assert not torch.equal(doubled, 2 * QSGD().decode(data("down", "a", 1, 0)))


def test_clients_in_the_same_position_share_a_packet_and_a_reference() -> None:
    channel = lossy()
    first, second = ({"w": torch.randn(50)} for _ in range(2))
    memory: dict[str, Any] = {c: {} for c in "abcd"}

    def send(part: dict[str, torch.Tensor], clients: str) -> list[EncodedPart]:
        packets = []
        for c in clients:
            message = Message("fit", {"shared": part})
            packet, memory[c] = channel.encode(message, "down", MessageContext(c, 0), memory[c])
            packets.append(packet.parts["shared"])
        return packets

    assert len({id(p) for p in send(first, "abd")}) == 1
    a, c, b, d = send(second, "acbd")
    assert a is b is d
    assert c.data != a.data  # the first transfer of c
    vectors = [next(iter(memory[x].values())) for x in "abcd"]
    assert vectors[0] is vectors[1] is vectors[3]
    assert torch.equal(vectors[2], second["w"])
