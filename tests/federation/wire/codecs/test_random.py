"""What random codecs draw: the variance from its definition, the published streams, few bytes."""

import math

import numpy as np
import pytest
import torch

from medfed.federation.wire.codecs.base import HEADER_BYTES
from medfed.federation.wire.codecs.qsgd import QSGD
from medfed.federation.wire.codecs.sparse import RandomK, random_positions
from medfed.federation.wire.codecs.support import round_randomly
from medfed.federation.wire.codecs.terngrad import TernGrad
from tests.federation.wire.codecs.test_codecs import cycle, gaussian, rng
from tests.sweeps import sweep


def qsgd_error(codec, v):
    """E||C(v) - v||^2 of rounding to whole units of each bucket's norm."""
    n, s, q = min(codec.bucket or len(v), len(v)), codec.levels, codec.norm
    total = 0.0
    for start in range(0, len(v), n):
        part = v[start : start + n]
        unit = np.linalg.norm(part, q) / s
        share = part / unit - np.floor(part / unit)
        total += (unit**2 * share * (1 - share)).sum()
    return total


def terngrad_error(codec, v):
    return v.max() * v.sum() - (v**2).sum()


def randomk_error(codec, v):
    return (len(v) / math.ceil(codec.fraction * len(v)) - 1) * (v**2).sum()


@sweep(
    ("codec", "definition"),
    [
        *((codec, qsgd_error) for codec in (QSGD(), *QSGD.examples())),
        (TernGrad(), terngrad_error),
        (RandomK(), randomk_error),
        (RandomK(0.4), randomk_error),
    ],
)
def test_variance(codec, definition):
    d, repeats = 60, 1000
    values = gaussian(d, 3)
    values[5] = 0
    truth, source = values.double(), rng(11)
    draws = torch.stack([cycle(codec, values, source) for _ in range(repeats)]).double()
    expected = definition(codec, np.abs(truth.numpy()))
    assert (draws - truth).square().sum(1).mean() == pytest.approx(expected, rel=0.1, abs=1e-12)
    assert expected <= codec.error_bound(d) * float(truth.square().sum()) * (1 + 1e-12)


def test_delta_of_unscaled_random_k():
    values = gaussian(100_000)
    lost = float((cycle(RandomK(0.3, scaled=False), values) - values).square().sum())
    assert lost / float(values.square().sum()) == pytest.approx(0.7, abs=0.01)


def test_a_result_beyond_float32_is_refused():
    values = torch.full((100,), 3e38)
    with pytest.raises(ValueError, match="scaled by d/k"):
        RandomK(0.5).encode(values)
    with pytest.raises(ValueError, match="2-norm of a bucket"):
        QSGD().encode(values)


@pytest.mark.parametrize(("d", "bucket"), [(1, 1), (70_000, 9), (200_000, 200_000)])
def test_random_rounding_is_numpys(d, bucket):
    values = gaussian(d).numpy()
    units = rng(1).random(-(-d // bucket))
    exact = np.abs(values.astype(np.float64)) / np.repeat(units, bucket)[:d]
    # Uniform numbers of 53 bits: with 24, tiny magnitudes would come out too large.
    up = rng(2).random(d) < exact - np.floor(exact)
    np.testing.assert_array_equal(
        round_randomly(values, units, bucket, rng(2)), np.floor(exact) + up
    )


def splitmix(state):
    while True:
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        yield z ^ (z >> 31)


def test_random_positions_are_those_of_the_published_stream():
    # The first numbers of SplitMix64 for this seed, as its author's C program prints them.
    assert next(splitmix(1234567)) == 6457827717110365317
    stream, taken = splitmix(2**64 - 5), set()
    for last in range(700, 1000):
        at = int((next(stream) >> 11) / 2**53 * (last + 1))
        taken.add(last if at in taken else at)
    assert random_positions(1000, 300, 2**64 - 5).tolist() == sorted(taken)


def test_random_positions_are_uniform():
    counts = torch.zeros(50)
    source = rng(5)
    for _ in range(2000):
        counts += RandomK(0.2).decode(RandomK(0.2).encode(torch.ones(50), source)) > 0
    expected = 2000 * 0.2
    # Chi-squared with 49 degrees of freedom, corrected for draws without replacement.
    assert float(((counts - expected) ** 2 / (expected * 0.8)).sum()) < 49 + 4 * math.sqrt(98)


def test_small_messages_are_small():
    assert len(RandomK(0.01).encode(gaussian(10_000))) == HEADER_BYTES + 17 + 400
    # Log2(3) bits would be needed if all three were equally frequent.
    assert len(TernGrad().encode(gaussian(100_000))) < 100_000 * math.log2(3) / 8
