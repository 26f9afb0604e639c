"""Steps on the simplex and Laplacians, against SciPy and sums over pairs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.sparse.csgraph import laplacian as scipy_laplacian
from scipy.spatial.distance import cdist

from medfed.functional.mixing import cosine_affinity, coupling, exponentiated_gradient, laplacian
from tests.sweeps import sweep


def symmetric(n: int, seed: int = 0) -> torch.Tensor:
    upper = torch.rand(n, n, generator=torch.Generator().manual_seed(seed)).double().triu(1)
    return upper + upper.T


def test_a_step_is_the_proximal_point_of_the_entropy():
    """argmin over the simplex of <g, u> + KL(u, c) / step, by a solver for constrained problems."""
    c, g, step = np.array([0.5, 0.3, 0.2]), np.array([0.4, -0.7, 0.1]), 0.8
    solved = minimize(
        lambda u: g @ u + (u * np.log(u / c)).sum() / step,
        np.ones(3) / 3,
        bounds=[(1e-9, 1)] * 3,
        constraints={"type": "eq", "fun": lambda u: u.sum() - 1},
        method="SLSQP",
        options={"ftol": 1e-15},
    ).x
    ours = exponentiated_gradient(torch.tensor(c), torch.tensor(g), step).numpy()
    assert np.abs(ours - solved).max() < 1e-6


@sweep("dtype", [torch.float32, torch.float64])
@sweep("size", [1e-3, 1.0, 1e4, 1e30, "largest"])
def test_steps_stay_on_the_simplex(size, dtype):
    generator = torch.Generator().manual_seed(0)
    size = torch.finfo(dtype).max if size == "largest" else size
    c = torch.full((5, 4), 0.25, dtype=dtype)
    for step in (0.0, 0.5, 1e6):
        for _ in range(20):
            g = (2 * torch.rand(5, 4, generator=generator, dtype=dtype) - 1) * size
            c = exponentiated_gradient(c, g, step)
            assert c.dtype == dtype
            assert bool((c >= 0).all())
            torch.testing.assert_close(c.sum(-1), torch.ones(5, dtype=dtype))


def test_an_entry_that_vanished_can_come_back():
    c = torch.tensor([1.0, 0.0])
    for _ in range(40):
        c = exponentiated_gradient(c, torch.tensor([3.0, 0.0]), 1.0)
    assert float(c[1]) > 0.999


def test_a_constant_gradient_moves_nothing():
    c = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    torch.testing.assert_close(exponentiated_gradient(c, torch.full_like(c, 7.0), 3.0), c)


def test_cosine_affinity_is_one_minus_scipys_distance():
    rows = torch.rand(6, 4, generator=torch.Generator().manual_seed(1)).double()
    expected = 1 - cdist(rows.numpy(), rows.numpy(), "cosine")
    np.fill_diagonal(expected, 0)
    found = cosine_affinity(rows)
    assert np.abs(found.numpy() - expected).max() < 1e-14
    assert torch.equal(found, found.T)
    signed = cosine_affinity(torch.tensor([[1.0, 0.0], [-1.0, 0.1], [0.0, 0.0]]))
    assert signed.tolist() == [[0.0] * 3] * 3


def test_laplacian_is_scipys():
    w = symmetric(5)
    assert np.abs(laplacian(w).numpy() - scipy_laplacian(w.numpy())).max() < 1e-15
    diagonal = w + torch.diag(torch.rand(5).double())
    torch.testing.assert_close(laplacian(diagonal), laplacian(w))


def test_coupling_is_the_gradient_of_the_sum_over_pairs():
    w, c = symmetric(5), torch.rand(5, 3, dtype=torch.float64, requires_grad=True)
    energy = sum(
        0.7 / 2 * w[i, j] * (c[i] - c[j]).square().sum() for i in range(5) for j in range(5)
    )
    (expected,) = torch.autograd.grad(energy, c)
    torch.testing.assert_close(coupling(laplacian(w), c.detach(), 0.7), expected)


@sweep(
    ("entries", "message"),
    [
        ([[0.0, -1.0], [-1.0, 0.0]], r"entry \[0, 1\] is negative: -1"),
        ([[0.0, 1.0], [float("nan"), 0.0]], r"entry \[1, 0\] is not finite: nan"),
        ([[0.0, 1.0], [2.0, 0.0]], r"entry \[0, 1\] is 1 and entry \[1, 0\] is 2"),
        ([[0.0, 1.0]], r"a row and a column per client"),
    ],
)
def test_bad_affinities_are_named(entries, message):
    with pytest.raises(ValueError, match=message):
        laplacian(torch.tensor(entries))


def test_bad_steps_are_refused():
    with pytest.raises(ValueError, match="membership"):
        exponentiated_gradient(torch.tensor([0.5, 0.5]), torch.tensor([1.0, float("inf")]), 1.0)


def test_rows_that_are_no_numbers_are_refused():
    with pytest.raises(ValueError, match="finite numbers"):
        cosine_affinity(torch.tensor([[float("nan")]]))
