"""Bytes that are torn, damaged, foreign or made up: refused, or a tensor, and nothing else."""

import time
import tracemalloc

import numpy as np
import pytest
import torch

from medfed.federation.wire.codecs.base import HEADER_BYTES, MAX_UNCHECKED, Codec
from medfed.standalone.errors import CodecError
from tests.federation.wire.codecs.cases import CASES, EVERY
from tests.sweeps import sweep

D = 700
VECTORS = {
    "rough": torch.randn(D, generator=torch.Generator().manual_seed(0)),
    "stairs": torch.randn(D // 20, generator=torch.Generator().manual_seed(1)).repeat_interleave(
        20
    ),
}


def outcome(codec: Codec, data: bytes, length: int | None = None) -> bool:
    """Whether the bytes decode; what does must be whole and finite, all else a CodecError."""
    try:
        values = codec.decode(data, length)
    except CodecError:
        return False
    assert values.dim() == 1
    assert length is None or len(values) == length
    assert bool(torch.isfinite(values).all())
    return True


@EVERY
@sweep("vector", VECTORS)
def test_every_truncation_is_refused(codec, vector):
    data = codec.encode(VECTORS[vector], np.random.default_rng(0))
    assert outcome(codec, data, D)
    cuts = {*range(min(60, len(data))), *range(60, len(data), 13), len(data) - 1}
    assert not any(outcome(codec, data[:cut]) for cut in cuts)
    assert not outcome(codec, data + b"\0")


@EVERY
@sweep("vector", VECTORS)
def test_flipped_bits(codec, vector):
    data = codec.encode(VECTORS[vector], np.random.default_rng(0))
    source = np.random.default_rng(1)
    places = [*range(8 * min(48, len(data))), *source.integers(0, 8 * len(data), 100)]
    for place in places:
        damaged = bytearray(data)
        damaged[place // 8] ^= 1 << (place % 8)
        whole = outcome(codec, bytes(damaged), D)
        # Nothing in the header may be wrong without notice.
        assert not (whole and place < 8 * HEADER_BYTES)


@EVERY
def test_random_payloads(codec):
    source = np.random.default_rng(2)
    for size in [*range(40), *source.integers(40, 3000, 160)]:
        payload = source.integers(0, 256, size, np.uint8)
        if size > 10 and size % 2:
            # Small counts and kinds get further into the decoders.
            payload[:10] = source.integers(0, 3, 10)
        for d in (0, 1, D, 2**20):
            outcome(codec, codec.header(d) + payload.tobytes(), d)
        outcome(codec, payload.tobytes())


@EVERY
def test_bytes_of_other_codecs_and_versions_are_refused(codec):
    for other in CASES.values():
        data = other.encode(VECTORS["rough"])
        assert outcome(codec, data) == (other.code == codec.code)
    mine = codec.encode(VECTORS["rough"])
    assert not outcome(codec, b"MF" + mine[2:])
    assert not outcome(codec, mine[:2] + b"\x02" + mine[3:])


@EVERY
def test_another_length_than_expected_is_refused(codec):
    data = codec.encode(VECTORS["rough"])
    with pytest.raises(CodecError, match="holds 700 elements, but 701 are expected"):
        codec.decode(data, length=D + 1)


@EVERY
@sweep("d", [MAX_UNCHECKED + 1, 2**60])
def test_a_long_vector_in_few_bytes_must_be_expected(codec, d):
    with pytest.raises(CodecError, match="bytes claim"):
        codec.decode(codec.header(d) + bytes(100))


@EVERY
@sweep("d", [2**22, 2**40, 2**64 - 1])
def test_claims_allocate_no_more_than_the_vector(codec, d):
    payloads = [
        bytes([fill]) * n + bytes(200) for fill in (0, 1, 2, 0x7F, 0xFF) for n in (1, 7, 90)
    ]
    tracemalloc.start()
    start = time.process_time()
    try:
        for payload in payloads:
            outcome(codec, codec.header(d) + payload)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The vector, its positions as booleans, and 64 bytes for every bit that was received.
    vector = 5 * d if d <= MAX_UNCHECKED else 0
    assert peak < vector + 300 * 8 * 64 + 100_000
    assert time.process_time() - start < 5
