import math

import numpy as np
import pytest
import torch

from medfed.functional.quantize import (
    assign,
    prox_quantize,
    quantize,
    soft_quantize,
)
from medfed.standalone.errors import ConfigError
from tests.sweeps import sweep

GENERATOR = np.random.default_rng(0)
CENTERS = np.array([-1.5, -0.25, 0.125, 2.0])
VECTORS = {
    "random": GENERATOR.standard_normal(3001),
    "tied": GENERATOR.integers(-8, 9, 2000) / 4.0,
    "middles": np.repeat((CENTERS[1:] + CENTERS[:-1]) / 2, 3),
    "centres": np.repeat(CENTERS, 3),
    "constant": np.full(1500, 0.7),
    "one": np.array([0.3]),
    "none": np.zeros(0),
}
TAUS = [0.0, 1e-3, 0.125, 0.6, 50.0, math.inf]


def prox_weights(*arguments, **more):
    return prox_quantize(*arguments, **more)[0]


def nearest(x, centers):
    """Brute force: the first of the least distances is that of the lower centre."""
    return np.abs(x[:, None] - centers).argmin(1)


def tensors(*arrays):
    return [torch.from_numpy(np.array(a)) for a in arrays]


@sweep("m", [1, 2, 3, 4, 16, 256])
@sweep("dtype", [np.float32, np.float64])
def test_quantize_finds_the_nearest(m, dtype):
    centers = np.sort(GENERATOR.standard_normal(m)).astype(dtype)
    x = GENERATOR.standard_normal(2500).astype(dtype)
    found = nearest(x.astype(np.float64), centers.astype(np.float64))
    np.testing.assert_array_equal(assign(*tensors(x, centers)).numpy(), found)
    np.testing.assert_array_equal(quantize(*tensors(x, centers)).numpy(), centers[found])


@sweep("name", VECTORS)
def test_ties_go_down_and_twice_is_once(name):
    x, centers = tensors(VECTORS[name], CENTERS)
    once = quantize(x, centers)
    np.testing.assert_array_equal(once.numpy(), CENTERS[nearest(VECTORS[name], CENTERS)])
    assert torch.equal(quantize(once, centers), once)
    assert torch.equal(centers[assign(x, centers)], once)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_centres_without_a_number_between_them_keep_their_own(dtype):
    for start in (0.1, 1.0, -3.0, 1e-30, 1e30):
        low = torch.tensor(start, dtype=dtype)
        high = torch.nextafter(low, torch.tensor(math.inf, dtype=dtype))
        pair = torch.stack([low, high])
        assert torch.equal(quantize(pair, pair), pair)


def test_equal_centres_share_what_is_around_them():
    x, centers = torch.tensor([-1.0, 0.0, 1.0]), torch.zeros(3)
    assert assign(x, centers).tolist() == [0, 0, 2]
    assert quantize(x, centers).tolist() == [0.0, 0.0, 0.0]


def test_centres_are_rounded_to_the_dtype_of_the_weights():
    x, centers = torch.tensor([0.1, 0.9]), torch.tensor([0.1, 0.7], dtype=torch.float64)
    found = quantize(x, centers)
    assert found.dtype == torch.float32
    assert torch.equal(found, centers.float())


@sweep("tau", TAUS)
@sweep("name", VECTORS)
def test_prox_of_weights_is_the_global_minimiser(name, tau):
    """Each |x - z| by itself is minimised by soft-thresholding; the best z wins."""
    y = VECTORS[name]
    found = prox_weights(*tensors(y, CENTERS), tau).numpy()
    if math.isinf(tau):
        np.testing.assert_array_equal(found, CENTERS[nearest(y, CENTERS)])
        return
    gap = y[:, None] - CENTERS
    moved = CENTERS + np.sign(gap) * np.maximum(np.abs(gap) - tau, 0)
    costs = (moved - y[:, None]) ** 2 / 2 + tau * np.abs(moved - CENTERS)
    own = (found - y) ** 2 / 2 + tau * np.abs(found[:, None] - CENTERS).min(1)
    np.testing.assert_allclose(own, costs.min(1), rtol=0, atol=1e-12)
    # Half-way between centres two are best: there, the lower one is approached.
    rows = np.arange(len(y))
    np.testing.assert_allclose(found, moved[rows, nearest(y, CENTERS)], rtol=0, atol=1e-12)


@sweep("tau", [0.0, 0.1, 0.6, 5.0])
def test_prox_of_weights_on_a_grid(tau):
    """No formula: the cost on a grid of every value that matters."""
    grid = np.linspace(-4, 4, 80_001)
    penalty = tau * np.abs(grid[:, None] - CENTERS).min(1)
    for y in (-3.1, -0.9, -0.25, -0.06, 0.7, 1.07, 3.3):
        found = float(prox_weights(*tensors(y, CENTERS), tau))
        own = (found - y) ** 2 / 2 + tau * np.abs(found - CENTERS).min()
        assert own <= ((grid - y) ** 2 / 2 + penalty).min() + 1e-12


@sweep("dtype", [torch.float32, torch.float64])
@sweep("tau", TAUS)
def test_weights_land_on_their_centre_and_keep_it(tau, dtype):
    y, centers = (t.to(dtype) for t in tensors(VECTORS["random"], CENTERS))
    x, q = prox_quantize(y, centers, tau)
    assert torch.equal(x, prox_weights(y, centers, tau))
    assert torch.equal(q, quantize(y, centers))
    assert torch.equal(q, quantize(x, centers))
    near = (y - q).abs() <= torch.tensor(tau, dtype=dtype)
    assert torch.equal(x[near], q[near])
    assert ((x - q).sign() == (y - q).sign())[~near].all()


def test_nan_stays_or_is_refused():
    x, centers = torch.tensor([math.nan, 0.2, math.inf]), torch.tensor([0.0, 1.0])
    for found in (quantize(x, centers), prox_weights(x, centers, math.inf)):
        assert found[0].isnan()
        assert found[1:].tolist() == [0.0, 1.0]
    with pytest.raises(ValueError, match="NaN"):
        assign(x, centers)


def test_any_layout_and_the_tensor_stays():
    wide = torch.randn(40, 6, generator=torch.Generator().manual_seed(0), requires_grad=True)
    centers, column = torch.tensor([-0.5, 0.5]), wide[:, 1:3]
    before = wide.detach().clone()
    expected = prox_weights(column.detach().clone(), centers, 0.1)
    assert torch.equal(prox_weights(column, centers, 0.1), expected)
    assert torch.equal(quantize(column, centers), quantize(before[:, 1:3].clone(), centers))
    assert torch.equal(wide, before)


@sweep("m", [1, 2, 4, 16])
def test_soft_staircase_has_the_right_gradients_and_limit(m):
    centers = torch.from_numpy(np.sort(GENERATOR.standard_normal(m))).requires_grad_()
    x = torch.from_numpy(GENERATOR.standard_normal((4, 5))).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, c: soft_quantize(x, c, 3.0), (x, centers))
    middles = ((centers[1:] + centers[:-1]) / 2).detach()
    torch.testing.assert_close(soft_quantize(x, centers, 1e12), quantize(x, centers))
    half_way = soft_quantize(middles, centers.detach(), 1e12)
    torch.testing.assert_close(half_way, middles)


@sweep(
    ("centers", "message"),
    [
        (torch.tensor([1.0, 0.0]), r"ascending order, not \[1.0, 0.0\]"),
        (torch.tensor([0.0, math.nan]), "finite"),
        (torch.tensor([math.nan]), "finite"),
        (torch.tensor([-math.inf, 0.0]), "finite"),
        (torch.tensor([0.0, math.inf]), "finite"),
    ],
)
def test_bad_centres(centers, message):
    for action in (quantize, assign, lambda x, c: prox_weights(x, c, 1.0)):
        with pytest.raises(ConfigError, match=message):
            action(torch.zeros(3), centers)


def test_bad_arguments():
    x, centers = torch.zeros(3), torch.zeros(1)
    for wrong in (x.half(), x.long()):
        with pytest.raises(ConfigError, match="float32 or float64"):
            quantize(wrong, centers)
