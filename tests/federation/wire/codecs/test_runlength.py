"""Run lengths and their codebook."""

import itertools

import numpy as np
import pytest
import torch
from scipy.stats import entropy

from medfed.federation.wire.codecs.base import HEADER_BYTES
from medfed.federation.wire.codecs.runlength import RunLength
from medfed.standalone.errors import ConfigError
from tests.sweeps import sweep

RNG = np.random.default_rng(0)


def test_few_values_are_their_own_codebook():
    values = torch.tensor([1.0, 7.0, -3.0]).repeat(500)
    codec = RunLength(codebook_bits=2)
    data = codec.encode(values)
    assert torch.equal(codec.decode(data), values)
    assert len(data) == HEADER_BYTES + 9 + 2 + 3 * 4 + 2 * 1500 // 8


def test_bytes_of_runs():
    values = torch.tensor([0.5, -1.5]).repeat_interleave(torch.tensor([1000, 1]))
    data = RunLength().encode(values)
    # Kind, count and the name of the code; 999 and 0 in Elias gamma; two numbers.
    assert len(data) <= HEADER_BYTES + 10 + 3 + 8
    assert torch.equal(RunLength().decode(data), values)


def test_what_does_not_pay_is_sent_as_it_is():
    rough = torch.from_numpy(RNG.standard_normal(1000).astype(np.float32))
    assert len(RunLength().encode(rough)) == HEADER_BYTES + 9 + 4000
    uniform = torch.from_numpy(RNG.permutation(np.arange(4096) % 16).astype(np.float32))
    coded = RunLength(codebook_bits=4).encode(uniform)
    assert len(coded) == HEADER_BYTES + 9 + 2 + 64 + 2048
    # Four numbers and their codes are longer than three numbers.
    assert len(RunLength(codebook_bits=8).encode(rough[:3])) == HEADER_BYTES + 9 + 12


@pytest.mark.parametrize("bits", [3, 4, 6])
def test_places_in_the_book_take_little_more_than_their_entropy(bits):
    """Shannon's bound, by SciPy; a Golomb code of geometric counts is within 6 % of it."""
    shares = 0.5 ** (np.arange(2**bits) * 6 / 2**bits)
    drawn = RNG.choice(2**bits, 20_000, p=shares / shares.sum())
    values = torch.from_numpy(drawn.astype(np.float32))
    codec = RunLength(codebook_bits=bits)
    data = codec.encode(values)
    assert torch.equal(codec.decode(data), values)
    places = 8 * (len(data) - HEADER_BYTES - 9 - 2 - 1 - 4 * 2**bits)
    bound = entropy(np.bincount(drawn), base=2) * drawn.size
    assert bound <= places <= 1.06 * bound < 0.95 * bits * drawn.size


def test_neighbours_that_become_equal_share_a_run():
    noise = torch.from_numpy(RNG.standard_normal(4000).astype(np.float32)) * 1e-3
    values = torch.tensor([1.0, 5.0]).repeat_interleave(2000) + noise
    codec = RunLength(codebook_bits=1)
    data = codec.encode(values)
    assert len(data) < 40
    assert (codec.decode(data) - values).abs().max() < 5e-3


def test_more_bits_lose_less():
    values = torch.from_numpy(RNG.standard_normal(5000).astype(np.float32))
    losses = [
        float((c.decode(c.encode(values)) - values).square().mean())
        for c in (RunLength(codebook_bits=b) for b in range(1, 9))
    ]
    assert all(a > 3 * b for a, b in itertools.pairwise(losses[1:]))


@sweep("bits", range(1, 9))
@sweep("power", [1, 5])
def test_a_codebook_loses_no_more_than_the_mean_would(bits, power):
    values = torch.from_numpy(RNG.standard_normal(400) ** power).float()
    codec = RunLength(codebook_bits=bits)
    lost = (codec.decode(codec.encode(values)) - values).double().square().sum()
    assert lost <= (values.double() - values.double().mean()).square().sum() * (1 + 1e-6)


@pytest.mark.parametrize("bits", [-1, 9])
def test_books_of_other_sizes_are_refused(bits):
    with pytest.raises(ConfigError, match="codebook_bits"):
        RunLength(codebook_bits=bits)
