"""Packets, messages and codec payloads that nobody sends: one sentence of one error each."""

from __future__ import annotations

import json
import math
import struct
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch

from medfed.federation.reference import run_reference
from medfed.federation.wire.channel import CER, Channel, Link, closest_factor
from medfed.federation.wire.codecs.base import Codec, Payload
from medfed.federation.wire.codecs.dense import Dense
from medfed.federation.wire.codecs.qsgd import QSGD
from medfed.federation.wire.codecs.runlength import RunLength
from medfed.federation.wire.codecs.signsgd import SignSGD
from medfed.federation.wire.codecs.sparse import RandomK, TopK
from medfed.federation.wire.codecs.stc import STC
from medfed.federation.wire.codecs.terngrad import TernGrad
from medfed.federation.wire.ledger import Entry, Ledger
from medfed.federation.wire.packet import EncodedPart, Message, Packet
from medfed.personalize.fedavg import FedAvg
from medfed.sites.wire import Reply, Request, framed
from medfed.standalone.errors import CodecError, MedfedError, NonFiniteError
from tests.sweeps import sweep
from tests.toys import toy_federation

NAN, INF, HUGE = math.nan, math.inf, 3e38
D = 8


def refused(error: pytest.ExceptionInfo[MedfedError], *words: str) -> None:
    """One sentence, with the words that tell what is wrong."""
    text = str(error.value)
    assert "\n" not in text
    assert text
    assert all(word in text for word in words), text


# Heads of packets

HEAD: dict[str, Any] = {
    "phase": "fit",
    "scalars": {"n": 1.0},
    "parts": [["shared", "state", [["w", [2], "float32"]], 20]],
}
BODY = Dense().encode(torch.ones(2))


def packed(head: object, body: bytes = BODY) -> bytes:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + body


def part(name: Any = "shared", kind: Any = "state", rows: Any = None, size: Any = 20) -> bytes:
    rows = [["w", [2], "float32"]] if rows is None else rows
    return packed({**HEAD, "parts": [[name, kind, rows, size]]})


def scalar(value: Any) -> bytes:
    return packed({**HEAD, "scalars": {"n": value}})


PACKETS = {
    "empty": (b"", "cut short"),
    "half a length": (b"\1\0\0", "cut short"),
    "a length beyond the end": ((2**63).to_bytes(8, "little") + b"{}", "cut short"),
    "no JSON": (packed(b"hello"), "head of a packet"),
    "no text": (packed(b"\xff\xfe\xfd"), "head of a packet"),
    "an empty head": (packed(b""), "head of a packet"),
    "deep JSON": (packed(b"[" * 100_000), "head of a packet"),
    "a list": (packed([]), "it: expected object, got array"),
    "a number": (packed(7), "head of a packet"),
    "null": (packed(None), "head of a packet"),
    "no keys": (packed({}), "phase is missing"),
    "no parts": (packed({"phase": "fit", "scalars": {}}), "parts is missing"),
    "another key": (packed({**HEAD, "run": "x"}), "run is unknown"),
    "a phase of a number": (packed({**HEAD, "phase": 3}), "phase: expected str, got int"),
    "a phase of two lines": (packed({**HEAD, "phase": "a\nb"}), "is no name"),
    "half a letter": (packed({**HEAD, "phase": "\ud800"}), "it holds half a character"),
    "scalars in a list": (packed({**HEAD, "scalars": [1]}), "head of a packet"),
    "a scalar of text": (scalar("1"), "scalars[...]: expected float, got str"),
    "a scalar that is NaN": (scalar(NAN), "NaN is no finite number"),
    "a scalar that is infinite": (scalar(INF), "Infinity is no finite number"),
    "a scalar that is true": (scalar(True), "scalars[...]: expected float, got bool"),
    "a scalar of 400 digits": (scalar(10**400), "head of a packet"),
    "a scalar of 5000 digits": (packed(b'{"scalars": ' + b"1" * 5000), "head of a packet"),
    "parts in an object": (packed({**HEAD, "parts": {"shared": 1}}), "head of a packet"),
    "a part without a size": (packed({**HEAD, "parts": [["shared", "state", []]]}), "head of"),
    "a part of null": (packed({**HEAD, "parts": [None]}), "head of a packet"),
    "a part without a name": (part(name=None), "parts[0][0]: expected str, got null"),
    "another kind": (part(kind="gradient"), "parts[0][1]: invalid enum value 'gradient'"),
    "a kind that is a list": (part(kind=[]), "parts[0][1]: expected str, got array"),
    "two parts of a name": (
        packed({**HEAD, "parts": 2 * HEAD["parts"]}, 2 * BODY),
        "the part shared twice",
    ),
    "a negative size": (part(size=-1), "parts[0][3]: expected int >= 0"),
    "a size of a half": (part(size=19.5), "parts[0][3]: expected int, got float"),
    "a size of text": (part(size="20"), "parts[0][3]: expected int, got str"),
    "a size that is true": (part(size=True), "parts[0][3]: expected int, got bool"),
    "a size beyond the end": (part(size=21), "cut short: 21 more bytes"),
    "a size beyond all": (part(size=2**60), "parts[0][3]: expected int <= 281474976710655"),
    "a size that is too small": (part(size=19), "1 bytes too many"),
    "bytes behind": (packed(HEAD, BODY + b"\0"), "1 bytes too many"),
    "a shape of text": (
        part(rows=[["w", "22", "float32"]]),
        "parts[0][2][0][1]: expected array, got str",
    ),
    "a negative shape": (
        part(rows=[["w", [-2], "float32"]]),
        "parts[0][2][0][1][0]: expected int >= 0",
    ),
    "a shape beyond all": (
        part(rows=[["w", [2**63], "float32"]]),
        "parts[0][2][0][1][0]: expected int <= 281474976710655",
    ),
    "many elements": (part(rows=[["w", [2**40], "float32"]]), "claim 1099511627776 elements"),
    "a product of elements": (part(rows=[["w", [2**20] * 9, "float32"]]), "elements, which is"),
    "many axes": (
        part(rows=[["w", [1] * 99, "float32"]]),
        "parts[0][2][0][1]: expected array of length <= 32",
    ),
    "another dtype": (
        part(rows=[["w", [2], "load"]]),
        "parts[0][2][0][2]: invalid enum value 'load'",
    ),
    "a dtype of whole numbers": (
        part(rows=[["w", [2], "int64"]]),
        "parts[0][2][0][2]: invalid enum value 'int64'",
    ),
    "a dtype of complex numbers": (
        part(rows=[["w", [2], "complex64"]]),
        "parts[0][2][0][2]: invalid enum value 'complex64'",
    ),
    "a dtype of null": (part(rows=[["w", [2], None]]), "parts[0][2][0][2]: expected str, got null"),
    "a tensor without a name": (
        part(rows=[[1, [2], "float32"]]),
        "parts[0][2][0][0]: expected str, got int",
    ),
    "two tensors of a name": (part(rows=[["w", [1], "float32"]] * 2), "two tensors of a part"),
    "a layout of text": (part(rows="abc"), "head of a packet"),
    "a row that is too short": (part(rows=[["w", [2]]]), "head of a packet"),
}


@sweep(("data", "word"), PACKETS.values())
def test_packets_that_nobody_sends(data: bytes, word: str) -> None:
    tracemalloc.start()
    began = time.process_time()
    try:
        with pytest.raises(CodecError) as error:
            Packet.from_bytes(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    refused(error, word)
    assert peak < 10_000_000
    assert time.process_time() - began < 1


def test_the_packet_that_is_damaged_above_is_whole() -> None:
    message, _ = Channel().decode(Packet.from_bytes(packed(HEAD)), "up")
    assert message.parts["shared"]["w"].tolist() == [1, 1]


def test_a_receiver_that_expects_more_takes_more() -> None:
    data = part(rows=[["w", [2**24], "float32"]])
    with pytest.raises(CodecError, match="claim 16777216 elements"):
        Packet.from_bytes(data)
    assert Packet.from_bytes(data, most=2**24).parts["shared"].layout[0][1] == (2**24,)


# Payloads of codecs


def payload(codec: Codec, *pieces: bytes, length: int = D) -> tuple[Codec, bytes]:
    return codec, b"".join((codec.header(length), *pieces))


def f4(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


def after(codec: Codec, at: int, piece: bytes) -> tuple[Codec, bytes]:
    """A valid message with some bytes of its payload replaced."""
    data = bytearray(codec.encode(torch.arange(-3.0, D - 3), np.random.default_rng(0)))
    data[12 + at : 12 + at + len(piece)] = piece
    return codec, bytes(data)


PAYLOADS = {
    "no header": ((Dense(), b"mf"), "too few"),
    "another codec": ((Dense(), STC().header(D) + bytes(32)), "not written by Dense"),
    "another length": (payload(Dense(), bytes(28), length=7), "7 elements, but 8 are expected"),
    "cut short": (payload(Dense(), bytes(31)), "cut short"),
    "too long": (payload(Dense(), bytes(33)), "1 bytes too many"),
    "fp32 NaN": (payload(Dense(), f4(NAN, *[0] * 7)), "NaN or infinity"),
    "fp32 infinity": (payload(Dense(), f4(*[0] * 7, -INF)), "NaN or infinity"),
    "fp64 NaN": (after(Dense("float64"), 8, struct.pack("<d", NAN)), "NaN or infinity"),
    "fp16 infinity": (after(Dense("float16"), 2, b"\x00\x7c"), "NaN or infinity"),
    "fp16 exponent": (after(Dense("float16"), 0, struct.pack("<h", 30000)), "30000"),
    "fp16 overflow": (after(Dense("float16"), 0, struct.pack("<h", -142)), "NaN or infinity"),
    "bf16 NaN": (after(Dense("bfloat16"), 0, b"\xc0\x7f"), "NaN or infinity"),
    "STC, mu NaN": (after(STC(0.5), 0, f4(NAN)), "magnitude"),
    "STC, mu infinite": (after(STC(0.5), 0, f4(INF)), "magnitude"),
    "STC, mu negative": (after(STC(0.5), 0, f4(-1)), "magnitude"),
    "STC, many positions": (after(STC(0.5), 6, b"\xff\xff\xff\x7f"), "positions were announced"),
    "STC, wide gaps": (after(STC(0.5), 4, b"\x3d"), "cannot hold"),
    "signs, scale NaN": (after(SignSGD(), 0, f4(NAN)), "magnitude"),
    "signs, scale negative": (after(SignSGD(), 0, f4(-HUGE)), "magnitude"),
    "TernGrad, scale infinite": (after(TernGrad(), 0, f4(INF)), "magnitude"),
    "QSGD, no levels": (after(QSGD(), 0, bytes(4)), "0 levels"),
    "QSGD, many levels": (after(QSGD(), 0, b"\xff" * 4), "levels in buckets"),
    "QSGD, no bucket": (after(QSGD(), 4, bytes(8)), "buckets of 0"),
    "QSGD, small buckets": (after(QSGD(), 4, b"\1" + bytes(7)), ""),
    "QSGD, norm NaN": (after(QSGD(), 12, f4(NAN)), "magnitude"),
    "QSGD, norm negative": (after(QSGD(), 12, f4(-1)), "magnitude"),
    "QSGD, norm too large": (after(QSGD(1), 12, f4(INF)), "magnitude"),
    "random, too many": (after(RandomK(0.5), 8, b"\x09" + bytes(7)), "9 elements were announced"),
    "random, beyond all": (after(RandomK(0.5), 8, b"\xff" * 8), "elements were announced"),
    "random, unknown type": (after(RandomK(0.5), 16, b"\x05"), "type 5"),
    "random, NaN": (after(RandomK(0.5), 17, f4(NAN)), "NaN or infinity"),
    "top k, no payload": (payload(TopK()), "cut short"),
    "runs of another kind": (payload(RunLength(), b"\xfc" + bytes(8)), "kind 252"),
    "runs, too many": (payload(RunLength(), b"\1" + b"\xff" * 8), "values of kind 1"),
    "runs, too short": (payload(RunLength(), bytes(9)), "do not make 8"),
    "no book": (payload(RunLength(3), b"\2\x08" + bytes(7) + bytes(2)), "0 entries"),
    "a large book": (payload(RunLength(3), b"\2\x08" + bytes(7) + b"\1\2"), "513 entries"),
    "a code outside": (
        payload(RunLength(2), b"\2\x08" + bytes(7) + b"\3\0" + f4(0, 1, 2) + b"\xff\xff"),
        "outside of a codebook",
    ),
}


@sweep(("case", "word"), PAYLOADS.values())
def test_payloads_that_no_codec_writes(case: tuple[Codec, bytes], word: str) -> None:
    codec, data = case
    with pytest.raises(CodecError) as error:
        codec.decode(data, D)
    refused(error, word)
    # Through a channel, part and codec are named, too.
    layout = (("w", (D,), "float32"),)
    packet = Packet("fit", {}, {"head": EncodedPart("update", data, layout)})
    with pytest.raises(CodecError) as error:
        Channel(Link(codec, feedback=False)).decode(packet, "up")
    refused(error, word, f"head cannot be decoded by {type(codec).__name__}")


class Careless(Codec):
    """Trusts its bytes, as codecs of others may."""

    codes = (211,)

    def _pack(self, values: Any, rng: np.random.Generator) -> Any:
        return (values.data,)

    def _unpack(self, payload: Payload, length: int) -> Any:
        raw = bytes(payload.take(payload.left))
        if raw[:1] == b"k":
            return {}["scale"]
        if raw[:1] == b"m":
            raise MemoryError
        return np.zeros(length + raw[0], np.float32)


@sweep(("raw", "word"), [(b"k", "'scale'"), (b"m", "MemoryError"), (b"", "index"), (b"\1", "(3,)")])
def test_a_careless_codec_of_others(raw: bytes, word: str) -> None:
    with pytest.raises(CodecError) as error:
        Careless().decode(Careless().header(2) + raw, 2)
    refused(error, word)


# Links with memory

ROWS = (("w", (2,), "float32"),)
TERN = TernGrad()


def coded(factor: float, *values: float) -> bytes:
    return f4(factor) + TERN.encode(torch.tensor(values), np.random.default_rng(0))


LINKS: dict[str, tuple[Link, str, bytes, list[float] | None, str]] = {
    f"{mode}, factor {factor}": (Link(TERN, **given), kind, coded(factor, 1.0, 0.0), kept, "factor")
    for factor in (NAN, INF, -INF, HUGE, 1025.0)
    for mode, kind, given, kept in (
        ("residual", "update", {"feedback": True}, None),
        ("reference", "state", {}, [0.0, 1.0]),
        ("shift", "update", {"shift": "auto"}, None),
    )
} | {
    "no factor": (Link(TERN, feedback=True), "update", b"\0\0", None, "hold a factor"),
    "factor overflows": (
        *(Link(TERN, feedback=True), "update", coded(1000.0, HUGE, 0.0), None),
        "scaled message would hold NaN or infinity",
    ),
    "reference overflows": (Link(TERN), "state", coded(1.0, HUGE, 0.0), [HUGE, 0.0], "reference"),
    "shift overflows": (
        *(Link(TERN, shift=1.0), "update", coded(1.0, HUGE, 0.0)[4:], [HUGE, 0.0]),
        "shift and its message",
    ),
    "the next shift overflows": (
        *(Link(TERN, shift="auto"), "update", coded(1000.0, 1e37, 0.0), [0.0, 0.0]),
        "next shift",
    ),
    "first weights NaN": (
        *(Link(TERN), "state", Dense().header(2) + f4(NAN, 0.0), None),
        "NaN or infinity",
    ),
}


@sweep("case", LINKS.values())
def test_what_is_added_to_memory_is_finite(case: Any) -> None:
    link, kind, data, kept, word = case
    channel, memory = Channel(link), {}
    if kept is not None:
        message = Message("fit", {"head": {"w": torch.ones(2)}}, kinds={"head": kind})
        name = next(iter(channel.encode(message, "up")[1]))
        memory = {name: torch.tensor(kept)}
    packet = Packet("fit", {}, {"head": EncodedPart(kind, data, ROWS)})
    with pytest.raises(CodecError) as error:
        channel.decode(packet, "up", memory)
    refused(error, word, "head cannot be decoded by TernGrad")
    assert [t.tolist() for t in memory.values()] == ([] if kept is None else [pytest.approx(kept)])


def test_a_number_beyond_its_tensors_type() -> None:
    layout = (("w", (2,), "float16"),)
    packet = Packet(
        "fit", {}, {"head": EncodedPart("state", Dense().header(2) + f4(1, 1e6), layout)}
    )
    with pytest.raises(CodecError) as error:
        Channel().decode(packet, "up")
    refused(error, "head cannot be decoded by Dense", "w is beyond the range of torch.float16")


@sweep(
    ("link", "values", "kept", "words"),
    [
        (Link(STC(1), feedback=True), [HUGE, 1.0], [HUGE, 0.0], ["Element 0 is inf"]),
        (Link(STC(1), shift=1.0), [HUGE, 1.0], [-HUGE, 0.0], ["Element 0 is inf"]),
        (Link(RandomK(0.5), feedback=False), [HUGE, HUGE], None, ["RandomK", "too large"]),
        (Link(QSGD(norm=1)), [HUGE, HUGE], None, ["QSGD", "beyond float32"]),
    ],
)
def test_what_leaves_the_range_before_it_is_sent(
    link: Link, values: list[float], kept: list[float] | None, words: list[str]
) -> None:
    def message(numbers: list[float]) -> Message:
        return Message("fit", {"head": {"w": torch.tensor(numbers)}}, kinds={"head": "update"})

    channel = Channel(link)
    _, memory = channel.encode(message([1.0, 1.0]), "up")
    memory = {name: torch.tensor(kept) for name in memory}
    with pytest.raises(NonFiniteError) as error:
        channel.encode(message(values), "up", memory=memory)
    refused(error, "head cannot be coded by", *words)
    assert [t.tolist() for t in memory.values()] == ([] if kept is None else [pytest.approx(kept)])


def test_whole_numbers_do_not_travel() -> None:
    message = Message("fit", {"head": {"steps": torch.tensor([2**25 + 1])}})
    with pytest.raises(CodecError) as error:
        Channel().encode(message, "up")
    refused(error, "head/steps is torch.int64", "convert it")


def test_a_factor_is_cut_off_where_cer_left_next_to_nothing() -> None:
    vector = torch.tensor([1e4, 1e4])
    assert closest_factor(vector, vector * 1e-6) == 1024
    link = Link(TERN, feedback=True, cer=CER(gamma=0.999999, relative=True))
    data, _, _ = link.encode(vector, ROWS, "update", None, np.random.default_rng(0))
    link.decode(data, ROWS, "update", None, torch.device("cpu"))


# A round


class Poisoned(Dense):
    """A sender whose bytes are damaged after they were made."""

    codes = (212,)
    __module__ = "elsewhere"

    def encode(self, flat: torch.Tensor, rng: np.random.Generator | None = None) -> bytes:
        return super().encode(flat, rng)[:-4] + f4(NAN)


def test_a_round_stops_and_names_client_part_and_codec() -> None:
    codec = Poisoned()
    _, federation, _ = toy_federation(FedAvg())
    federation.channel = Channel(Link(codec), Link(), buffers=federation.channel.buffers)
    before, client = federation.digests()["server"], federation.ids[0]
    with pytest.raises(CodecError) as error:
        run_reference(federation, 1)
    refused(error, f"Client {client}, round 1, phase fit: shared cannot be decoded by Poisoned")
    assert federation.digests()["server"] == before


# Ledgers

LINE = "round,phase,client,direction,part,bytes,dense\n"
LEDGERS = {
    "empty": ("", "columns"),
    "other columns": ("a,b\n1,2\n", "is none, a,b (these are other columns)"),
    "a column less": (LINE.replace(",dense", "") + "0,fit,a,up,s,1\n", "its columns are"),
    "a cell less": (LINE + "0,fit,a,up,s,1\n", "length 7, got 6"),
    "a cell more": (LINE + "0,fit,a,up,s,1,2,3\n", "length 7, got 8"),
    "no number": (LINE + "0,fit,a,up,s,x,2\n", "Line 2"),
    "a fraction": (LINE + "0,fit,a,up,s,1.5,2\n", "1.5"),
    "NaN": (LINE + "0,fit,a,up,s,nan,2\n", "nan"),
    "an underscore": (LINE + "0,fit,a,up,s,1_0,2\n", "1_0"),
    "other digits": (LINE + "0,fit,a,up,s,\u0663,2\n", "Expected `int`"),
    "a negative size": (LINE + "0,fit,a,up,s,-1,2\n", "Expected `int` >= 0"),
    "5000 digits": (LINE + "0,fit,a,up,s," + "1" * 5000 + ",2\n", "Line 2"),
    "beyond 64 bits": (LINE + f"0,fit,a,up,s,{2**64},2\n", "Expected `int` <"),
    "sideways": (LINE + "0,fit,a,left,s,1,2\n", "Invalid enum value 'left'"),
    "an open quote": (LINE + '0,fit,"a,up,s,1,2\n', "Line 2"),
    "a long field": (LINE + "0,fit," + "a" * 200_000 + ",up,s,1,2\n", "field larger"),
}


@sweep(("text", "word"), LEDGERS.values())
def test_ledgers_that_no_run_writes(text: str, word: str) -> None:
    with pytest.raises(CodecError) as error:
        Ledger.from_csv(text)
    refused(error, word)


def test_names_of_clients_come_back() -> None:
    entries = [Entry(-1, "join", 'a "b", c', "up", "s", 0, 2)]
    assert Ledger.from_csv(Ledger(entries).to_csv()).entries == entries


# Heads of what sites and their coordinator send


def head(kind: str, **members: object) -> bytes:
    """A request or reply with any head."""
    text = json.dumps({"kind": kind, "site": "a", "session": "s", **members}).encode()
    return framed(len(text).to_bytes(4, "little"), text, b"")


def clients(samples: object) -> bytes:
    return head("begin", clients=[{"id": "a", "num_samples": samples}], job="j")


def facts(samples: object) -> bytes:
    return head("agree", facts={"num_samples": samples, "weights": "", "data": {}})


SITES: dict[str, tuple[type[Request | Reply], bytes, str]] = {
    "negative samples": (Request, clients(-5), r"clients\[0\].num_samples: expected int >= 1"),
    "samples of 400 digits": (Request, clients(10**400), "more than 64 bits"),
    "samples of text": (Request, clients("5"), "expected int, got str"),
    "another key": (Request, head("load", x=1), "x is unknown"),
    "no key": (Request, head("commit"), "needed is missing"),
    "a body in the head": (Request, head("load", body=""), "its head holds a body"),
    "a fact that is none": (
        Reply,
        head("agree", facts={"num_samples": 5, "weights": "", "data": {}, "rows": []}),
        "facts.rows is unknown",
    ),
    "a greeting with more": (
        Reply,
        head("hello", greeting={"agreed": {}, "data": {}, "rows": []}),
        "greeting.rows is unknown",
    ),
    "a kind that is none": (Request, head("stop"), "kind: invalid value 'stop'"),
    "a kind of reply": (Request, head("declined", of="fit", status="busy"), "kind: invalid value"),
    "a round before all": (Request, head("load", round=-2), "round: expected int >= -1"),
    "a split that is none": (Request, head("evaluate", split="x", trained=True), "split: invalid"),
    "a metric of 400 digits": (
        Reply,
        head("evaluate", metrics={"auroc": 10**400}),
        "more than 64 bits",
    ),
    "a metric of text": (Reply, head("evaluate", metrics={"auroc": "1"}), "float, got str"),
    "one count of passes": (Reply, head("fit", steps=1, passes=[1]), "passes: expected array of"),
    "negative steps": (Reply, head("fit", steps=-1, passes=[1, 1]), "steps: expected int >= 0"),
    "a reason that is none": (
        Reply,
        head("declined", of="fit", status="refused", reason="Anna"),
        "'Anna' is not a reason",
    ),
    "an error's text": (
        Reply,
        head("declined", of="fit", status="failed", reason="no Anna"),
        "the type of an error is not a name",
    ),
    "a refusal of nothing": (
        Reply,
        head("declined", of="stop", status="busy"),
        "'stop' is no kind of request",
    ),
}


@pytest.mark.parametrize(("kind", "sent", "word"), SITES.values(), ids=SITES)
def test_heads_that_no_site_sends(kind: type[Request | Reply], sent: bytes, word: str) -> None:
    with pytest.raises(CodecError, match=word) as error:
        kind.from_bytes(sent)
    refused(error)


@pytest.mark.parametrize(
    "samples", [0, -5, 10**400, 2.5, "3", None], ids=lambda samples: f"{samples!s:.6}"
)
def test_facts_that_no_site_has(samples: object) -> None:
    with pytest.raises(CodecError, match=r"num_samples: |more than 64 bits") as error:
        Reply.from_bytes(facts(samples))
    refused(error)
