"""Integer codes against their definitions, written as strings of bits."""

import math

import numpy as np
import pytest

from medfed.federation.wire.codecs.base import Payload
from medfed.federation.wire.codecs.support import IntegerCode, best_rice, golomb_code
from medfed.standalone.errors import CodecError
from tests.sweeps import sweep

CODES = [IntegerCode("rice", b) for b in (0, 1, 6, 30)]
CODES += [IntegerCode(kind) for kind in ("gamma", "delta", "omega")]
VALUES = [0, 1, 2, 3, 7, 8, 62, 63, 64, 65, 1000, 2**20 - 1]


def word(code: IntegerCode, value: int) -> str:
    """The code word in the order of its bits, low bits first within a group of them."""

    def low(x: int, width: int) -> str:
        return "".join(str(x >> i & 1) for i in range(width))

    def gamma(x: int) -> str:
        n = x.bit_length() - 1
        return "0" * n + "1" + low(x, n)

    x = value + 1
    n = x.bit_length() - 1
    if code.kind == "rice":
        return "0" * (value >> code.b) + "1" + low(value, code.b)
    if code.kind == "gamma":
        return gamma(x)
    if code.kind == "delta":
        return gamma(n + 1) + low(x, n)
    groups = ""
    while x > 1:
        n = x.bit_length() - 1
        groups = "1" + low(x, n) + groups
        x = n
    return groups + "0"


@sweep("code", CODES)
def test_bits_are_those_of_the_definition(code: IntegerCode) -> None:
    values = np.array(VALUES if code.b or code.kind != "rice" else VALUES[:-1])
    text = "".join(word(code, int(v)) for v in values)
    data = code.pack(values)
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    assert code.bits(values) == len(text)
    assert len(data) == math.ceil(len(text) / 8)
    assert "".join(map(str, bits[: len(text)])) == text


@sweep("code", CODES)
def test_round_trip_leaves_the_payload_behind_the_numbers(code: IntegerCode) -> None:
    values = np.random.default_rng(0).geometric(0.01, 5000)
    payload = Payload(memoryview(code.pack(values) + b"rest"))
    back = IntegerCode.from_byte(code.to_byte()).unpack(payload, values.size, limit=10**6)
    np.testing.assert_array_equal(back, values)
    assert bytes(payload.take(4)) == b"rest"


@sweep("code", CODES)
def test_what_is_torn_or_too_large_is_refused(code: IntegerCode) -> None:
    values = np.arange(100)
    data = code.pack(values)
    for cut in (0, 1, len(data) // 2, len(data) - 1):
        with pytest.raises(CodecError):
            code.unpack(Payload(memoryview(data[:cut])), 100, limit=10**6)
    with pytest.raises(CodecError, match="damaged"):
        code.unpack(Payload(memoryview(data)), 100, limit=98)
    for absurd in (2**40, 2**62):
        with pytest.raises(CodecError, match="cannot hold"):
            code.unpack(Payload(memoryview(data)), absurd, limit=10**6)


@sweep(
    ("kind", "pattern"),
    [
        ("gamma", b"\0" * 8 + b"\xff" * 40),
        ("delta", b"\0" * 40),
        ("delta", b"\x80" + b"\xff" * 40),
        ("delta", b"\x40" + b"\xff" * 40),
        ("omega", b"\xff" * 40),
    ],
)
def test_widths_that_no_integer_has_are_refused(kind: str, pattern: bytes) -> None:
    with pytest.raises(CodecError, match="damaged"):
        IntegerCode(kind).unpack(Payload(memoryview(pattern)), 1, limit=2**62)


@pytest.mark.parametrize("p", [0.1, 0.01, 0.001])
def test_golomb_is_within_three_percent_of_the_entropy(p: float) -> None:
    taken = np.flatnonzero(np.random.default_rng(1).random(2_000_000) < p)
    gaps = np.diff(taken, prepend=-1) - 1
    bits = golomb_code(p).bits(gaps) / taken.size + 1
    entropy = (-p * math.log2(p) - (1 - p) * math.log2(1 - p)) / p + 1
    assert 0.99 * entropy < bits < 1.03 * entropy


@sweep("mean", [0.01, 0.6, 1, 3, 10, 1000, 123456])
def test_best_rice_is_the_best_of_all(mean: float) -> None:
    values = np.random.default_rng(2).geometric(1 / (1 + mean), 2000) - 1
    least = min(IntegerCode("rice", b).bits(values) for b in range(40))
    assert best_rice(values).bits(values) == least
