"""Positions and signs; the selection of the largest magnitudes."""

import numpy as np
import pytest

from medfed.federation.wire.codecs.base import Payload
from medfed.federation.wire.codecs.support import largest, pack_support, unpack_support
from medfed.standalone.errors import CodecError
from tests.sweeps import sweep

RNG = np.random.default_rng(0)
SCATTERED = np.flatnonzero(RNG.random(5000) < 0.03)
BLOCKS = np.concatenate([np.arange(s, s + 50) for s in (0, 50, 200, 4000)])
CASES = {
    "none": (np.empty(0, np.int64), 7),
    "the only one": (np.array([0]), 1),
    "all": (np.arange(100), 100),
    "first and last": (np.array([0, 9]), 10),
    "scattered": (SCATTERED, 5000),
    "blocks": (BLOCKS, 5000),
}


def round_trip(indices, length, negative):
    data = b"".join(pack_support(indices, length, negative))
    payload = Payload(memoryview(data))
    back, signs = unpack_support(payload, length, negative is not None)
    payload.finish()
    np.testing.assert_array_equal(back, indices)
    if negative is not None:
        np.testing.assert_array_equal(signs, negative)
    return data


@sweep("case", CASES)
def test_round_trip(case):
    indices, length = CASES[case]
    round_trip(indices, length, None)
    round_trip(indices, length, np.zeros(indices.size, bool))
    round_trip(indices, length, RNG.random(indices.size) < 0.5)
    # Two neighbouring runs of different signs.
    round_trip(indices, length, np.arange(indices.size) >= 20)


def test_runs_are_used_where_they_are_shorter():
    plus = np.zeros(BLOCKS.size, bool)
    assert round_trip(BLOCKS, 5000, plus)[1] != 0xFF
    assert len(round_trip(BLOCKS, 5000, plus)) < 30
    assert round_trip(SCATTERED, 5000, np.zeros(SCATTERED.size, bool))[1] == 0xFF


def test_positions_outside_are_refused():
    data = b"".join(pack_support(np.array([3, 9]), 10, None))
    with pytest.raises(CodecError):
        unpack_support(Payload(memoryview(data)), 9, signed=False)
    data = b"".join(pack_support(np.arange(40), 40, None))
    with pytest.raises(CodecError):
        unpack_support(Payload(memoryview(data)), 39, signed=False)


@sweep("ties", [False, True])
@sweep("k", [0, 1, 7, 300, 999, 1000, 2000])
def test_largest_is_a_stable_sort(k, ties):
    values = RNG.standard_normal(1000).astype(np.float32)
    if ties:
        values = np.round(values * 2) / 2
    values[::50] = 0
    order = np.argsort(-np.abs(values), kind="stable")[:k]
    expected = np.sort(order[values[order] != 0])
    np.testing.assert_array_equal(largest(values, k), expected)


def test_largest_of_extreme_numbers():
    values = np.float32([0, -0.0, 1e-45, -3.4e38, 3.4e38, 1e-44, 1e-45])
    assert largest(values, 3).tolist() == [3, 4, 5]
    assert largest(values, 4).tolist() == [2, 3, 4, 5]
    assert largest(values, 7).tolist() == [2, 3, 4, 5, 6]
