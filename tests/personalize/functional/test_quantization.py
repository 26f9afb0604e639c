import math

import numpy as np
import pytest
import torch

from medfed.personalize.functional import (
    prox_centers,
    prox_weights,
    quantize,
)

GENERATOR = np.random.default_rng(0)


def nearest(x, centers):
    """Brute force: the first of the least distances is that of the lower centre."""
    return np.abs(x[:, None] - centers).argmin(1)


@pytest.mark.parametrize("m", [1, 2, 3, 4, 16])
def test_quantize_finds_the_nearest(m):
    centers = np.sort(GENERATOR.standard_normal(m))
    x = GENERATOR.standard_normal(500)
    found = quantize(torch.from_numpy(x), torch.from_numpy(centers))
    np.testing.assert_array_equal(found.numpy(), centers[nearest(x, centers)])


@pytest.mark.parametrize("tau", [0.0, 0.1, 0.6, 50.0, math.inf])
def test_prox_of_weights_is_the_global_minimiser(tau):
    centers = np.sort(GENERATOR.standard_normal(4))
    y = GENERATOR.standard_normal(50)
    found = prox_weights(torch.from_numpy(y), torch.from_numpy(centers), tau).numpy()
    # Each |x - z| by itself is minimised by soft-thresholding; the best z wins.
    gap = y[:, None] - centers
    moved = centers + np.sign(gap) * np.maximum(np.abs(gap) - tau, 0)
    if math.isinf(tau):
        np.testing.assert_array_equal(found, centers[nearest(y, centers)])
        return
    costs = (moved - y[:, None]) ** 2 / 2 + tau * np.abs(moved - centers)
    np.testing.assert_allclose(found, moved[np.arange(50), costs.argmin(1)], atol=1e-12)


@pytest.mark.parametrize("tau", [0.0, 1e-3, 0.02, 0.3, 50.0])
def test_prox_of_centers_minimises(tau):
    centers = np.sort(GENERATOR.standard_normal(4))
    x = GENERATOR.standard_normal(60).round(1)
    mu = centers + 0.3 * GENERATOR.standard_normal(4)
    found = prox_centers(*map(torch.from_numpy, (mu, x, centers)), tau).numpy()
    for j in range(4):
        members = x[nearest(x, centers) == j]
        grid = found[j] + np.linspace(-1, 1, 200001)
        costs = (grid - mu[j]) ** 2 / 2 + sum(tau * np.abs(grid - v) for v in members)
        at = (found[j] - mu[j]) ** 2 / 2 + tau * np.abs(found[j] - members).sum()
        assert at <= costs.min() + 1e-12
