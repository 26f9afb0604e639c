import itertools
import math

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans

from medfed.functional.kmeans import POINTS, initial_centers, kmeans
from medfed.functional.quantize import quantize
from tests.sweeps import sweep

GENERATOR = np.random.default_rng(0)
N = 4 * POINTS
LONG = {
    "normal": GENERATOR.standard_normal(N),
    "uniform": GENERATOR.uniform(-1, 1, N),
    "heavy tails": GENERATOR.standard_t(3, N),
    "two groups": np.concatenate([GENERATOR.normal(-4, 1, N // 2), GENERATOR.normal(0, 0.1, N)]),
    "half zero": np.maximum(GENERATOR.standard_normal(N), 0.0),
}


def error(x, centers):
    return float((x - quantize(x, centers)).square().sum())


def best_split(values, m):
    """Brute force over all ways to cut sorted values into m intervals."""
    ordered, least = np.sort(values), math.inf
    for cuts in itertools.combinations(range(1, len(ordered)), m - 1):
        parts = np.split(ordered, cuts)
        least = min(least, sum(float(((p - p.mean()) ** 2).sum()) for p in parts))
    return least


@sweep("bits", [1, 2, 3])
@sweep("seed", range(8))
def test_exact_on_few_values(bits, seed):
    generator = np.random.default_rng(seed)
    values = generator.standard_normal(12) ** 3 if seed % 2 else generator.integers(-9, 9, 12) / 2.0
    x = torch.from_numpy(values)
    found = initial_centers(x, bits)
    assert len(found) == 2**bits
    assert (found.diff() >= 0).all()
    assert error(x, found) == pytest.approx(best_split(values, 2**bits), abs=1e-12)


@sweep("bits", [1, 2, 3])
@sweep("name", LONG)
def test_no_worse_than_another_kmeans(name, bits):
    x = torch.from_numpy(LONG[name])
    model = KMeans(2**bits, n_init=3, random_state=0, tol=1e-8).fit(LONG[name][:, None])
    assert error(x, initial_centers(x, bits)) <= 1.001 * model.inertia_


@sweep("name", LONG)
def test_each_centre_is_the_mean_of_its_values(name):
    x = torch.from_numpy(LONG[name])
    found = initial_centers(x, 2)
    q = quantize(x, found)
    for center in found:
        assert float(x[q == center].mean()) == pytest.approx(float(center), abs=1e-3)


@sweep("bits", [1, 4, 8])
def test_scales_shapes_and_dtypes(bits):
    x = torch.from_numpy(LONG["normal"][:1200])
    found = initial_centers(x, bits)
    assert torch.equal(initial_centers(x.view(30, 40).T, bits), found)
    for factor in (1e-150, 1e150):
        scaled = initial_centers(factor * x, bits)
        torch.testing.assert_close(scaled / factor, found, rtol=1e-9, atol=1e-9)
    for dtype in (torch.float32, torch.float16):
        other = initial_centers(x.to(dtype), bits)
        assert other.dtype == dtype
        assert other.shape == (2**bits,)
        assert (other.diff() >= 0).all()


def test_few_distinct_values_repeat_the_largest():
    x = torch.tensor([2.0, -1.0, 2.0])
    assert initial_centers(x, 2).tolist() == [-1.0, 2.0, 2.0, 2.0]
    assert initial_centers(torch.zeros(5), 1).tolist() == [0.0, 0.0]
    found = initial_centers(x, 8)
    assert torch.equal(quantize(quantize(x, found), found), quantize(x, found))


def test_refuses():
    with pytest.raises(ValueError, match="NaN or infinity"):
        initial_centers(torch.tensor([1.0, math.nan]), 2)


def loss(values, weights, centres):
    gaps = values.astype(np.float64)[:, None] - centres.astype(np.float64)
    return float((weights * (gaps**2).min(1)).sum())


@sweep("entries", [1, 2, 3, 5])
@sweep("seed", range(4))
def test_repeated_values_are_the_best_of_all_partitions(entries, seed):
    source = np.random.default_rng(seed)
    values = (source.standard_normal(11) ** 3).astype(np.float32)
    weights = source.integers(1, 9, 11)
    order = np.argsort(values)
    best = math.inf
    for cuts in itertools.combinations(range(1, 11), entries - 1):
        pieces = np.split(order, cuts)
        means = np.array([np.average(values[p], weights=weights[p]) for p in pieces])
        best = min(best, loss(values, weights, means))
    centres = kmeans(np.repeat(values, weights), entries)
    assert centres.size == entries
    assert loss(values, weights, centres) == pytest.approx(best, rel=1e-5)


@sweep("entries", [2, 16, 256])
@sweep("power", [1, 3])
def test_many_centres_are_no_worse_than_scikit_learns(entries, power):
    values = (GENERATOR.standard_normal(8_000) ** power).astype(np.float32)
    weights = GENERATOR.integers(1, 5, values.size)
    assert np.unique(values).size > POINTS
    theirs = KMeans(entries, n_init=1, max_iter=30, random_state=0)
    theirs.fit(values[:, None], sample_weight=weights)
    centres = kmeans(np.repeat(values, weights), entries)
    assert loss(values, weights, centres) <= 1.01 * theirs.inertia_


@pytest.mark.parametrize("offset", [0, 1000])
def test_centres_are_the_means_of_what_is_nearest_to_them(offset):
    values = (GENERATOR.standard_normal(200_000) + offset).astype(np.float32)
    weights = GENERATOR.integers(1, 5, values.size)
    centres = kmeans(np.repeat(values, weights), 16)
    nearest = np.abs(values[:, None] - centres).argmin(1)
    means = np.bincount(nearest, weights * values.astype(np.float64)) / np.bincount(
        nearest, weights
    )
    assert loss(values, weights, centres) <= 1.0001 * loss(values, weights, means)


def test_few_values_are_their_own_centres():
    assert kmeans(np.float32([3, 1, 3, 2]), 4).tolist() == [1, 2, 3]


@pytest.mark.parametrize("size", [1e12, 3e38])
def test_outliers_leave_the_small_values_a_centre(size):
    values = np.float32([-size, size, *GENERATOR.standard_normal(10_000)])
    centres = kmeans(values, 4).astype(np.float32)
    # Beside 3e38 no float64 tells the squares of the others apart.
    assert np.unique(centres).size == (4 if size == 1e12 else 3)
    assert abs(centres[1]) < 2
    assert abs(centres[2]) < 2


def test_an_outlier_and_a_heavy_value_do_not_take_all_centres():
    values = np.float32([1e30, *GENERATOR.standard_normal(4000)])
    heavy = np.append(values, np.full(10**6, values[7]))
    assert np.unique(kmeans(heavy, 256).astype(np.float32)).size == 256
    # Nor where the heavy value lies among many others.
    for x in (heavy[1:], np.append(heavy[1:], np.float32(50))):
        centres = kmeans(x, 256)
        theirs = KMeans(256, n_init=1, max_iter=30, random_state=0)
        theirs.fit(values[1:, None], sample_weight=np.where(values[1:] == values[7], 1e6, 1.0))
        assert loss(values[1:], np.ones(4000), centres) <= 1.05 * theirs.inertia_


def test_four_bits_of_a_gaussian_variable():
    values = GENERATOR.standard_normal(300_000).astype(np.float32)
    # The least error of 16 levels is 0.009497 (Max 1960, Table I).
    assert loss(values, 1 / values.size, kmeans(values, 16)) == pytest.approx(0.009497, rel=0.02)
