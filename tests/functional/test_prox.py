import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from medfed.functional.prox import dual_norm
from medfed.standalone.errors import ConfigError
from tests.functional.proximal_norm import prox_norm
from tests.sweeps import sweep

NORMS = (1.0, 2.0, math.inf)


def brute_force(a, tau, p):
    """Minimises with an epigraph for each norm, so that SLSQP sees smooth functions only."""
    d = len(a)
    if p == 2.0:
        # A point on the ray through a is optimal; along it the problem is one-dimensional.
        grid = np.linspace(0.0, 1.0, 200001)
        n = np.linalg.norm(a)
        return a * grid[np.argmin(tau * grid * n + 0.5 * (1 - grid) ** 2 * n**2)]
    count = d if p == 1.0 else 1
    start = np.concatenate([np.zeros(d), np.full(count, np.abs(a).max())])
    bounds = [
        {"type": "ineq", "fun": lambda x, s=s: x[d:] * np.ones(d) - s * x[:d]} for s in (1.0, -1.0)
    ]
    found = minimize(
        lambda x: tau * x[d:].sum() + 0.5 * np.sum((x[:d] - a) ** 2),
        start,
        constraints=bounds,
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    return found.x[:d]


@sweep("p", NORMS)
@sweep("tau", [0.01, 0.3, 1.0, 2.5, 20.0])
def test_minimises(p, tau):
    a = torch.randn(6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    expected = brute_force(a.numpy(), tau, p)
    np.testing.assert_allclose(prox_norm(a[None], tau, p)[0].numpy(), expected, atol=2e-5)


@pytest.mark.parametrize("p", NORMS)
def test_moreau_identity_and_optimality(p):
    """a - prox(a) lies in the dual ball, and its product with the prox attains tau ||prox||."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(50, 30, generator=generator, dtype=torch.float64)
    tau = torch.rand(50, generator=generator, dtype=torch.float64) * dual_norm(a, p) * 1.2
    w = prox_norm(a, tau, p)
    assert (dual_norm(a - w, p) <= tau * (1 + 1e-12)).all()
    norm = torch.linalg.vector_norm(w, ord=p, dim=1)
    torch.testing.assert_close(((a - w) * w).sum(1), tau * norm, rtol=1e-10, atol=1e-10)


@sweep("p", NORMS)
@sweep("dtype", [torch.float32, torch.float64])
def test_limits_row_by_row(p, dtype):
    a = torch.tensor([[3.0, -4.0], [0.0, 0.0], [1.0, 2.0]], dtype=dtype)
    w = prox_norm(a, torch.tensor([0.0, 0.5, math.inf]), p)
    assert w.dtype == dtype
    assert torch.equal(w[0], a[0])
    assert not w[1:].any()


def test_ties_in_the_l1_projection():
    """What the map for p = inf takes away is the projection on the ball of radius tau."""
    a = torch.tensor([[1.0, -1.0, 1.0, 0.5], [0.1, 0.1, 0.0, 0.0]])
    expected = torch.tensor([[0.5, -0.5, 0.5, 0.0], [0.1, 0.1, 0.0, 0.0]])
    torch.testing.assert_close(a - prox_norm(a, 1.5, math.inf), expected)
    assert torch.equal(prox_norm(a, 0.0, math.inf), a)
    assert not prox_norm(a, math.inf, math.inf).any()


@sweep("p", NORMS)
@sweep("shape", [(0, 3), (3, 0)])
def test_empty(p, shape):
    assert prox_norm(torch.zeros(shape), 1.0, p).shape == shape
    assert dual_norm(torch.zeros(shape), p).shape == shape[:1]


@sweep("p", [3, 1.5, 0, -1, math.nan, "2", None, True])
def test_unknown_norm(p):
    with pytest.raises(ConfigError, match="p = 1, 2 or inf"):
        prox_norm(torch.zeros(1, 1), 1.0, p)
