import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from medfed.functional.quantize import (
    assign,
    center_gradient,
    prox_centers,
    step_centers,
)
from tests.sweeps import sweep

GENERATOR = np.random.default_rng(0)
CENTERS = np.array([-1.5, -0.25, 0.125, 2.0])
WEIGHTS = {
    "random": GENERATOR.standard_normal(600),
    "tied": GENERATOR.integers(-8, 9, 600) / 4.0,
    "on centres": np.repeat(CENTERS, [3, 50, 7, 1]),
    "mostly on centres": np.concatenate([np.repeat(CENTERS, 40), GENERATOR.standard_normal(100)]),
    "constant": np.full(100, 0.7),
    "two far apart": np.array([-0.5, 1.05, 2.5, 2.6]),
    "one": np.array([0.3]),
    "none": np.zeros(0),
}
TAUS = [0.0, 1e-6, 1e-3, 0.01, 0.1, 3.0, 1e4]
STEPS = [np.zeros(4), np.array([0.01, -0.01, 0.3, -0.3]), np.array([-2.0, 2.0, -1.0, 5.0])]


def members_of(x, j):
    return x[np.abs(x[:, None] - CENTERS).argmin(1) == j]


def slope(c, mu, members, tau):
    """The two ends of the subdifferential of the cost at c."""
    below, above = (members < c).sum(), (members > c).sum()
    at = len(members) - below - above
    return c - mu + tau * (below - above - at), c - mu + tau * (below - above + at)


def found_by(mu, x, tau):
    arrays = (torch.from_numpy(np.array(a)) for a in (mu, x, CENTERS))
    return prox_centers(*arrays, tau).numpy()


@given(
    st.lists(st.floats(-3, 3) | st.sampled_from([*CENTERS, 0.0])),
    st.sampled_from(TAUS),
    st.tuples(*4 * [st.floats(-5, 5)]),
)
def test_optimal(weights, tau, step):
    """0 lies between the slopes a little to the left and to the right; the cost is convex."""
    x, mu = np.array(weights, float), CENTERS + np.array(step)
    found = found_by(mu, x, tau)
    for j in range(4):
        members, c = members_of(x, j), found[j]
        if not len(members):
            assert c == mu[j]
        near = 1e-9 * max(1.0, abs(c))
        assert slope(c - near, mu[j], members, tau)[0] <= 0
        assert slope(c + near, mu[j], members, tau)[1] >= 0


@sweep("tau", [1e-3, 0.01, 0.1])
@sweep("name", ["random", "mostly on centres", "two far apart"])
def test_equals_a_scalar_minimiser(name, tau):
    """Brent's method of SciPy knows the cost alone; kinks keep it from more than 1e-6."""
    x, mu = WEIGHTS[name], CENTERS + STEPS[1]
    found = found_by(mu, x, tau)
    for j in range(4):
        members = members_of(x, j)

        def cost(c, j=j, members=members):
            return (c - mu[j]) ** 2 / 2 + tau * np.abs(c - members).sum()

        best = minimize_scalar(cost, bounds=(-9, 9), method="bounded", options={"xatol": 1e-10})
        assert cost(found[j]) <= best.fun + 1e-9
        assert abs(found[j] - best.x) <= 1e-3


def test_moves_by_the_count_while_it_passes_nothing():
    """mu + tau (#above - #below): towards the median; the printed sign leads away from it."""
    x = np.array([0.1, 0.2, 0.3, 0.4, -0.05])
    found = found_by(CENTERS, x, 1e-3)
    np.testing.assert_allclose(found[2], 0.125 + 1e-3 * (3 - 2), rtol=1e-15)
    assert list(found[[0, 1, 3]]) == [-1.5, -0.25, 2.0]


def test_comes_to_rest_at_the_median_and_passes_none_beyond_it():
    x = np.array([0.0, 0.1, 0.4, 0.5, 0.6])
    for tau in (0.5, 10.0, 1e6, math.inf):
        assert found_by(CENTERS, x, tau)[2] == 0.4
    even = x[:4]
    # Between two middle elements nothing pulls: mu where it lies there, else the nearer of them.
    for mu, expected in [(-0.5, 0.1), (0.2, 0.2), (0.9, 0.4)]:
        start = np.array([-1.5, -0.25, mu, 2.0])
        for tau in (1e6, math.inf):
            np.testing.assert_allclose(found_by(start, even, tau)[2], expected, rtol=1e-15)


def test_weights_on_a_centre_hold_it():
    x = np.full(100, 0.125)
    for shift, expected in [(0.05, 0.125), (-0.05, 0.125), (0.25, 0.275), (-0.25, -0.025)]:
        start = CENTERS + np.array([0, 0, shift, 0])
        np.testing.assert_allclose(found_by(start, x, 1e-3)[2], expected, rtol=1e-12)


@sweep("dtype", [torch.float32, torch.float64])
@sweep("name", WEIGHTS)
def test_gradient_is_the_sum_over_the_assigned(name, dtype):
    x = torch.from_numpy(WEIGHTS[name]).to(dtype)
    centers = torch.from_numpy(CENTERS).to(dtype)
    gradient = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = center_gradient(gradient, x, centers)
    owner = assign(x, centers).numpy()
    expected = [math.fsum(gradient.numpy()[owner == j]) for j in range(4)]
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-12)


def test_gradient_is_that_of_the_loss_at_the_quantised_weights():
    """By autograd through an indexed table of centres."""
    x = torch.from_numpy(WEIGHTS["random"]).view(20, 30)
    table = torch.from_numpy(CENTERS).requires_grad_()
    quantized = table[assign(x, table)]
    quantized.retain_grad()
    (quantized.sin() * torch.arange(600).view(20, 30)).sum().backward()
    found = center_gradient(quantized.grad, x, table)
    torch.testing.assert_close(found, table.grad, rtol=1e-12, atol=1e-9)


@sweep("tau", TAUS)
@sweep("dtype", [torch.float32, torch.float64])
@sweep("name", WEIGHTS)
def test_step_is_the_gradient_step_and_the_map(name, dtype, tau):
    x = torch.from_numpy(WEIGHTS[name]).to(dtype)
    centers = torch.from_numpy(CENTERS)
    gradient = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = step_centers(centers, gradient, x, lr=0.01, tau=tau)
    mu = centers - 0.01 * center_gradient(gradient, x, centers)
    assert torch.equal(found, prox_centers(mu, x, centers, tau).sort().values)


def test_keeps_the_dtype_of_mu_and_takes_any_shape():
    x = torch.from_numpy(WEIGHTS["random"][:60]).float().view(3, 4, 5)
    centers = torch.from_numpy(CENTERS).float()
    for dtype in (torch.float32, torch.float64):
        found = prox_centers(centers.to(dtype), x, centers, 1e-3)
        assert found.dtype == dtype
        assert torch.equal(found, prox_centers(centers.to(dtype), x.flatten(), centers, 1e-3))
        strided = x.transpose(0, 2)
        assert torch.equal(found, prox_centers(centers.to(dtype), strided, centers, 1e-3))


def test_refuses():
    x, centers = torch.zeros(3), torch.zeros(2)
    with pytest.raises(ValueError, match="not finite"):
        prox_centers(torch.tensor([0.0, math.nan]), x, centers, 1.0)
    with pytest.raises(ValueError, match="not finite"):
        step_centers(centers, torch.tensor([0.0, math.inf, 0.0]), x, 1.0, 1.0)
    for action in (
        lambda bad: prox_centers(centers, bad, centers, 1.0),
        lambda bad: center_gradient(x, bad, centers),
    ):
        with pytest.raises(ValueError, match="NaN"):
            action(torch.tensor([0.0, math.nan, 1.0]))
