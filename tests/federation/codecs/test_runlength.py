"""Run lengths and their codebook."""

import itertools
import math

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans

from medfed.errors import ConfigError
from medfed.federation.codecs import RunLength
from medfed.federation.codecs.base import HEADER_BYTES
from medfed.federation.codecs.codebook import POINTS, _classes, kmeans_line, nearest

RNG = np.random.default_rng(0)


def loss(values, weights, centres):
    gaps = values.astype(np.float64)[:, None] - centres.astype(np.float64)
    return float((weights * (gaps**2).min(1)).sum())


@pytest.mark.parametrize("entries", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_small_codebooks_are_the_best_of_all_partitions(entries, seed):
    source = np.random.default_rng(seed)
    values = (source.standard_normal(11) ** 3).astype(np.float32)
    weights = source.integers(1, 9, 11)
    order = np.argsort(values)
    best = math.inf
    for cuts in itertools.combinations(range(1, 11), entries - 1):
        pieces = np.split(order, cuts)
        means = np.array([np.average(values[p], weights=weights[p]) for p in pieces])
        best = min(best, loss(values, weights, means))
    centres = kmeans_line(values, weights, entries)
    assert centres.size == entries
    assert loss(values, weights, centres) == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize("entries", [2, 16, 256])
@pytest.mark.parametrize("power", [1, 3])
def test_large_codebooks_are_no_worse_than_scikit_learns(entries, power):
    values = (RNG.standard_normal(8_000) ** power).astype(np.float32)
    weights = RNG.integers(1, 5, values.size)
    assert np.unique(values).size > POINTS
    centres = kmeans_line(values, weights, entries)
    theirs = KMeans(entries, n_init=1, max_iter=30, random_state=0)
    theirs.fit(values[:, None], sample_weight=weights)
    assert loss(values, weights, centres) <= 1.01 * theirs.inertia_
    nearest_by_hand = np.abs(values[:500, None] - centres.astype(np.float64)).argmin(1)
    np.testing.assert_array_equal(nearest(values[:500], centres), nearest_by_hand)


@pytest.mark.parametrize("offset", [0, 1000])
def test_classes_of_values_cost_next_to_nothing(offset):
    values = (RNG.standard_normal(200_000) + offset).astype(np.float32)
    weights = RNG.integers(1, 5, values.size)
    x, w = _classes(values, weights)
    assert (x.size == np.unique(values).size) == bool(offset)
    assert x.size > 8 * POINTS
    assert w.sum() == weights.sum()
    assert (np.diff(x) > 0).all()
    centres = kmeans_line(values, weights, 16)
    gaps = np.abs(values[:, None] - centres.astype(np.float64)).argmin(1)
    means = np.bincount(gaps, weights * values.astype(np.float64)) / np.bincount(gaps, weights)
    # The centres are the means of what is nearest to them, almost.
    assert loss(values, weights, centres) <= 1.0001 * loss(values, weights, means)


def test_few_values_are_their_own_codebook():
    assert kmeans_line(np.float32([3, 1, 3, 2]), np.ones(4), 4).tolist() == [1, 2, 3]
    values = torch.tensor([1.0, 7.0, -3.0]).repeat(500)
    codec = RunLength(codebook_bits=2)
    data = codec.encode(values)
    assert torch.equal(codec.decode(data), values)
    assert len(data) == HEADER_BYTES + 9 + 2 + 3 * 4 + 2 * 1500 // 8


def test_outliers_leave_the_small_values_a_centre():
    values = np.float32([-3e38, 3e38, *RNG.standard_normal(10_000)])
    centres = kmeans_line(values, np.ones(values.size), 4)
    assert centres.size == 4
    assert abs(centres[1]) < 2
    assert abs(centres[2]) < 2


def test_an_outlier_and_a_heavy_value_do_not_take_all_centres():
    values = np.float32([1e30, *RNG.standard_normal(4000)])
    weights = np.ones(values.size)
    weights[7] = 1e12
    assert kmeans_line(values, weights, 256).size == 256


def test_bytes_of_runs():
    values = torch.tensor([0.5, -1.5]).repeat_interleave(torch.tensor([1000, 1]))
    data = RunLength().encode(values)
    # Kind, count and the name of the code; 999 and 0 in Elias gamma; two numbers.
    assert len(data) <= HEADER_BYTES + 10 + 3 + 8
    assert torch.equal(RunLength().decode(data), values)


def test_what_does_not_pay_is_sent_as_it_is():
    rough = torch.from_numpy(RNG.standard_normal(1000).astype(np.float32))
    assert len(RunLength().encode(rough)) == HEADER_BYTES + 9 + 4000
    coded = RunLength(codebook_bits=4).encode(rough)
    assert len(coded) == HEADER_BYTES + 9 + 2 + 64 + 500
    # Four numbers and their codes are longer than three numbers.
    assert len(RunLength(codebook_bits=8).encode(rough[:3])) == HEADER_BYTES + 9 + 12


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


def test_four_bits_of_a_gaussian_variable():
    values = RNG.standard_normal(300_000).astype(np.float32)
    centres = kmeans_line(values, np.ones(values.size), 16)
    # The least error of 16 levels is 0.009497 (Max 1960, Table I).
    assert loss(values, 1 / values.size, centres) == pytest.approx(0.009497, rel=0.02)


@pytest.mark.parametrize("bits", [-1, 9])
def test_books_of_other_sizes_are_refused(bits):
    with pytest.raises(ConfigError, match="codebook_bits"):
        RunLength(codebook_bits=bits)
