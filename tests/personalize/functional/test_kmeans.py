import itertools
import math

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans

from medfed.errors import ConfigError
from medfed.personalize.functional import initial_centers, quantize
from medfed.personalize.functional.kmeans import POINTS

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


@pytest.mark.parametrize("bits", [1, 2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_exact_on_few_values(bits, seed):
    generator = np.random.default_rng(seed)
    values = generator.standard_normal(12) ** 3 if seed % 2 else generator.integers(-9, 9, 12) / 2.0
    x = torch.from_numpy(values)
    found = initial_centers(x, bits)
    assert len(found) == 2**bits
    assert (found.diff() >= 0).all()
    assert error(x, found) == pytest.approx(best_split(values, 2**bits), abs=1e-12)


@pytest.mark.parametrize("bits", [1, 2, 3])
@pytest.mark.parametrize("name", LONG)
def test_no_worse_than_another_kmeans(name, bits):
    x = torch.from_numpy(LONG[name])
    model = KMeans(2**bits, n_init=3, random_state=0, tol=1e-8).fit(LONG[name][:, None])
    assert error(x, initial_centers(x, bits)) <= 1.001 * model.inertia_


@pytest.mark.parametrize("name", LONG)
def test_each_centre_is_the_mean_of_its_values(name):
    x = torch.from_numpy(LONG[name])
    found = initial_centers(x, 2)
    q = quantize(x, found)
    for center in found:
        assert float(x[q == center].mean()) == pytest.approx(float(center), abs=1e-3)


@pytest.mark.parametrize("bits", [1, 4, 8])
@pytest.mark.parametrize("method", ["kmeans", "uniform"])
def test_scales_shapes_and_dtypes(method, bits):
    x = torch.from_numpy(LONG["normal"][:1200])
    found = initial_centers(x, bits, method)
    assert torch.equal(initial_centers(x.view(30, 40).T, bits, method), found)
    for factor in (1e-150, 1e150):
        scaled = initial_centers(factor * x, bits, method)
        torch.testing.assert_close(scaled / factor, found, rtol=1e-9, atol=1e-9)
    for dtype in (torch.float32, torch.float16):
        other = initial_centers(x.to(dtype), bits, method)
        assert other.dtype == dtype
        assert other.shape == (2**bits,)
        assert (other.diff() >= 0).all()


def test_few_distinct_values_repeat_the_largest():
    x = torch.tensor([2.0, -1.0, 2.0])
    assert initial_centers(x, 2).tolist() == [-1.0, 2.0, 2.0, 2.0]
    assert initial_centers(torch.zeros(5), 1).tolist() == [0.0, 0.0]
    for method in ("kmeans", "uniform"):
        found = initial_centers(x, 8, method)
        assert torch.equal(quantize(quantize(x, found), found), quantize(x, found))


@pytest.mark.parametrize("bits", [0, 9, 2.0, True, -1])
def test_bad_bits(bits):
    with pytest.raises(ConfigError, match="bits is"):
        initial_centers(torch.ones(3), bits)


def test_refuses():
    with pytest.raises(ConfigError, match="choose kmeans or uniform"):
        initial_centers(torch.ones(3), 2, "random")
    for x in (torch.zeros(0), torch.ones(3).long()):
        with pytest.raises(ConfigError, match="not empty"):
            initial_centers(x, 2)
    with pytest.raises(ValueError, match="NaN or infinity"):
        initial_centers(torch.tensor([1.0, math.nan]), 2)
