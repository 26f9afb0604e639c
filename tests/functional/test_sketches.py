import math

import numpy as np
import pytest
import torch

from medfed.functional.graph import knn_edges
from medfed.functional.sketches import (
    covariance_sketch,
    data_sketch,
    frequent_directions,
    kernel_sketch,
    label_sketch,
    sketch_vector,
)
from tests.sweeps import sweep


def rows(n, d, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spectrum = 0.8 ** torch.arange(d, dtype=torch.float64)
    return torch.randn(n, d, generator=generator, dtype=torch.float64) * spectrum


@sweep(("n", "d", "size"), [(300, 20, 5), (50, 80, 8), (7, 3, 2), (100, 10, 1)])
def test_guarantee(n, d, size):
    a = rows(n, d)
    b = frequent_directions(a, size)
    assert b.shape == (size, d)
    spectrum = torch.linalg.eigvalsh(a.T @ a - b.T @ b)
    largest = float(torch.linalg.eigvalsh(a.T @ a)[-1])
    assert float(spectrum[0]) >= -1e-10 * largest
    assert float(spectrum[-1]) <= float(a.square().sum()) / (size + 1) * (1 + 1e-10)


@pytest.mark.parametrize(("n", "d", "size"), [(3, 10, 5), (40, 4, 6), (40, 4, 4)])
def test_exact_where_the_rank_fits(n, d, size):
    a = rows(n, d)
    b = frequent_directions(a, size)
    torch.testing.assert_close(b.T @ b, a.T @ a)


def test_guarantee_uses_the_tail_only():
    """A matrix of rank 3 survives in 3 rows however many rows it has."""
    a = rows(200, 3) @ rows(3, 30, seed=1)
    b = frequent_directions(a, 3)
    torch.testing.assert_close(b.T @ b, a.T @ a)


def test_empty_and_single_precision():
    assert not frequent_directions(torch.zeros(0, 4), 2).any()
    assert frequent_directions(torch.ones(3, 4), 2).dtype == torch.float32


def test_bad_rows():
    with pytest.raises(ValueError, match="NaN"):
        frequent_directions(torch.full((3, 2), math.nan), 2)


@sweep(
    ("shape", "width"),
    [((9, 2, 20, 20), 2 * 16), ((9, 1, 8, 8, 8), 64), ((9, 13), 13), ((9, 1, 3, 9), 12)],
)
def test_data_sketch_shapes(shape, width):
    assert data_sketch(torch.randn(shape), size=3, pixels=4).shape == (3, width)


def test_data_sketch_resizes_by_averaging():
    images = torch.rand(1, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    sketch = data_sketch(images, size=1, pixels=4)
    expected = torch.nn.functional.adaptive_avg_pool2d(images, 4).flatten(1)
    torch.testing.assert_close(sketch, expected)


def test_data_sketch_does_not_depend_on_order_or_number():
    """Rotated rows are no difference, and neither is a client with every image twice."""
    images = torch.randn(12, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    one = sketch_vector(data_sketch(images, size=12, pixels=2))
    other = sketch_vector(data_sketch(images.flip(0).repeat(2, 1, 1, 1), size=12, pixels=2))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_data_sketches_find_the_scanner():
    """Clients of two scanners, whose shading differs in direction, become neighbours."""
    ramp = torch.linspace(-1, 1, 16).expand(1, 1, 16, 16)
    vectors = []
    for client in range(6):
        generator = torch.Generator().manual_seed(client)
        shading = ramp if client % 2 else ramp.mT
        strength = torch.randn(20 + 5 * client, 1, 1, 1, generator=generator)
        noise = torch.randn(len(strength), 1, 16, 16, generator=generator)
        images = strength * shading + 0.3 * noise
        vectors.append(sketch_vector(data_sketch(images, size=4, pixels=8)))
    edges, _ = knn_edges(torch.stack(vectors), 2)
    assert edges.tolist() == [[0, 2], [0, 4], [1, 3], [1, 5], [2, 4], [3, 5]]


def test_label_sketch():
    assert label_sketch(torch.tensor([0, 0])).tolist() == [0.0, 0.0]
    assert label_sketch(torch.tensor([2.0, 6.0]), torch.tensor([1, 1])).sum() == 2.0


def test_sketch_vector():
    b = rows(4, 5)
    rotation = torch.linalg.qr(rows(4, 4, seed=2)).Q
    torch.testing.assert_close(sketch_vector(rotation @ b), sketch_vector(b))
    other = rows(4, 5, seed=3)
    distance = (sketch_vector(b) - sketch_vector(other)).norm()
    torch.testing.assert_close(distance, (b.T @ b - other.T @ other).norm())
    assert torch.equal(sketch_vector(b[0]), b[0])


def test_a_kernel_sketch_estimates_the_maximum_mean_discrepancy():
    """Against the double sums of the Gaussian kernel; errors go with 1 / sqrt(frequencies)."""
    rng = np.random.default_rng(2)
    a, b = rng.normal(size=(60, 5)), rng.normal(0.7, 1.5, size=(45, 5))

    def mean(x, y):
        return np.mean([[np.exp(-np.sum((u - v) ** 2) / 10) for v in y] for u in x])

    exact = mean(a, a) + mean(b, b) - 2 * mean(a, b)
    sketches = [kernel_sketch(torch.tensor(x), 4096) for x in (a, b)]
    assert exact > 0.05
    assert float((sketches[0] - sketches[1]).square().sum()) == pytest.approx(exact, abs=0.01)
    assert torch.equal(kernel_sketch(torch.tensor(a), 16), kernel_sketch(torch.tensor(a), 16))


def test_a_wide_covariance_sketch_is_the_covariance():
    x = rows(30, 4) @ rows(4, 4, seed=1) + 3.0
    found = covariance_sketch(x, 6)
    assert np.allclose(found.T @ found, np.cov(x.numpy().T, bias=True), rtol=0, atol=1e-12)
