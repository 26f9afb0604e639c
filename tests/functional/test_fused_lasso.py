import math

import cvxpy as cp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import lsq_linear

from benchmarks.speed.kernels import fused_lasso_admm
from medfed.functional.kernels import _backward, _forward, solve_chain
from medfed.functional.prox import fused_lasso
from tests.sweeps import sweep

D = 3000
GENERATOR = np.random.default_rng(0)
STEPS = np.arange(D)
VECTORS = {
    "gaussian": GENERATOR.standard_normal(D),
    "heavy tails": GENERATOR.standard_normal(D) ** 5,
    "walk": GENERATOR.standard_normal(D).cumsum(),
    "tied": GENERATOR.integers(-2, 3, D).astype(float),
    "pieces": GENERATOR.standard_normal(D // 50).repeat(50),
    "constant": np.full(D, 0.7),
    "zero": np.zeros(D),
    "one spike": np.eye(1, D, D // 4)[0],
    "alternating": np.where(STEPS % 2, 1.0, -1.0),
    "growing": np.where(STEPS % 2, 1.0, -1.0) * STEPS,
    "shrinking": np.where(STEPS % 2, 1.0, -1.0) * STEPS[::-1],
    "up": STEPS / 7.0,
    "down": -STEPS / 7.0,
    "offset": 1e6 + GENERATOR.standard_normal(D),
    "tiny": 1e-30 * GENERATOR.standard_normal(D),
    "length 1": np.array([-1.3]),
    "length 2": np.array([0.4, -1.1]),
    "length 3": np.array([2.0, 2.0, -5.0]),
}
FLOATS = st.floats(-1e3, 1e3, width=32, allow_subnormal=False)
RELATIVE = [0.0, 1e-8, 0.01, 0.05, 0.1, 0.5, 1.0, 10.0, 1e3, 1e6, 1e12, math.inf]


def kkt_residual(w, g, gamma):
    """How far w is from optimal, in the unit of g; uses no step of the algorithm.

    With u_i the sum of g - w up to i, w is optimal where |u_i| <= gamma for all i, and
    u_i = gamma sign(w_i - w_{i+1}) where they differ; w_{d+1} = 0. Computed in extended precision.
    """
    w, g = (np.asarray(v, dtype=np.longdouble) for v in (w, g))
    u = np.cumsum(g - w)
    sign = np.sign(w - np.append(w[1:], 0.0))
    if math.isinf(gamma):
        return float(np.abs(sign).max(initial=0.0))
    outside = np.maximum(np.abs(u) - gamma, 0.0)
    return float(np.maximum(outside, np.abs(u - gamma * sign) * (sign != 0)).max(initial=0.0))


def scale(g, gamma):
    largest = float(np.abs(g).max())
    return max(largest, gamma) if math.isfinite(gamma) else largest


def differences(d):
    """The rows w_i - w_{i+1}, and w_d."""
    return np.eye(d) - np.eye(d, k=1)


@sweep("relative", RELATIVE)
@sweep("name", VECTORS)
def test_optimal(name, relative):
    g = VECTORS[name]
    gamma = relative * float(np.abs(g).mean()) if relative else 0.0
    gamma = 1.0 if math.isnan(gamma) else gamma
    w = fused_lasso(torch.from_numpy(g), gamma)
    assert w.dtype == torch.float64
    assert kkt_residual(w.numpy(), g, gamma) <= 1e-9 * scale(g, gamma)
    # The sum rule: the last term may hold back gamma in all.
    if math.isfinite(gamma):
        assert abs(math.fsum(w.tolist()) - math.fsum(g)) <= gamma + 1e-9 * scale(g, gamma)


@given(
    st.lists(FLOATS | st.sampled_from([-1.0, 0.0, 1.0]), min_size=1),
    st.sampled_from(RELATIVE),
)
def test_float32_is_the_exact_solution_rounded_once(values, relative):
    """So its error is half a unit in the last place, and fused neighbours stay equal floats."""
    g = torch.tensor(values)
    gamma = relative * float(g.abs().mean()) if float(g.abs().max()) else 1.0
    gamma = 0.0 if math.isnan(gamma) else gamma
    w, exact = fused_lasso(g, gamma), fused_lasso(g.double(), gamma)
    assert w.dtype == torch.float32
    assert torch.equal(w, exact.float())
    assert kkt_residual(w.numpy(), g.numpy(), gamma) <= 1e-4 * scale(g.numpy(), gamma)
    assert kkt_residual(exact.numpy(), g.numpy(), gamma) <= 1e-9 * scale(g.numpy(), gamma)
    fused = exact[1:] == exact[:-1]
    bits = w.numpy().view(np.int32)
    assert (bits[1:] == bits[:-1])[fused.numpy()].all()


@settings(max_examples=20)
@given(st.integers(1, 20), st.floats(0.02, 4.0))
def test_equals_a_convex_solver(d, gamma):
    """An interior-point solver of another project on the problem as it is stated."""
    g = np.random.default_rng(d).standard_normal(d)
    w = cp.Variable(d)
    penalty = cp.norm1(differences(d) @ w)
    problem = cp.Problem(cp.Minimize(0.5 * cp.sum_squares(w - g) + gamma * penalty))
    problem.solve(solver="CLARABEL", tol_gap_abs=1e-11, tol_gap_rel=1e-11, tol_feas=1e-11)
    found = fused_lasso(torch.from_numpy(g), gamma).numpy()
    np.testing.assert_allclose(found, w.value, atol=1e-6)


@sweep("gamma", [0.02, 0.3, 1.0, 4.0])
@sweep("tied", [False, True])
def test_equals_the_dual_of_total_variation(gamma, tied):
    """w = g - D^T u with the u that brings it closest to 0 in the box |u_i| <= gamma (SciPy)."""
    generator = np.random.default_rng(1)
    g = generator.integers(-2, 3, 40).astype(float) if tied else generator.standard_normal(40)
    matrix = differences(40)
    dual = lsq_linear(matrix.T, g, bounds=(-gamma, gamma), method="bvls", tol=1e-14)
    found = fused_lasso(torch.from_numpy(g), gamma).numpy()
    np.testing.assert_allclose(found, g - matrix.T @ dual.x, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_limits(dtype):
    g = torch.randn(500, generator=torch.Generator().manual_seed(0)).to(dtype)
    same = fused_lasso(g, 0.0)
    assert torch.equal(same, g)
    assert same.data_ptr() != g.data_ptr()
    # 0 is optimal exactly where gamma holds every partial sum.
    needed = float(g.double().cumsum(0).abs().max())
    assert not fused_lasso(g, needed * (1 + 1e-9)).any()
    assert fused_lasso(g, needed * (1 - 1e-6)).any()
    assert not fused_lasso(g, math.inf).any()
    assert fused_lasso(g[:0], 1.0).shape == (0,)


def test_by_hand():
    """One element is soft-thresholded; of two, the first is drawn to the second, that to 0."""
    for g, gamma, expected in [
        ([3.0], 1.0, [2.0]),
        ([-3.0], 1.0, [-2.0]),
        ([0.5], 1.0, [0.0]),
        ([4.0, 1.0], 1.0, [3.0, 1.0]),
        ([4.0, 1.0], 2.0, [2.0, 1.0]),
        ([4.0, 1.0], 3.0, [1.0, 1.0]),
        ([1.0, 4.0], 1.0, [2.0, 2.0]),
    ]:
        assert fused_lasso(torch.tensor(g), gamma).tolist() == expected


@sweep("sign", [1.0, -1.0])
@sweep("gamma", [5.0, 1e3, 3e5])
def test_knots_outgrow_their_first_room(gamma, sign):
    """A flattening ramp keeps thousands of knots alive, a straight one walks through the room."""
    steps = np.arange(30_000)
    for g in (np.sqrt(steps), steps / 7.0):
        for vector in (sign * g, sign * g[::-1]):
            w = fused_lasso(torch.from_numpy(vector), gamma).numpy()
            assert kkt_residual(w, vector, gamma) <= 1e-9 * scale(vector, gamma)


def test_reads_any_layout_and_leaves_it_alone():
    wide = torch.randn(200, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    column = wide[:, 1]
    before = wide.detach().clone()
    w = fused_lasso(column, 0.3)
    assert torch.equal(w, fused_lasso(column.detach().clone(), 0.3))
    assert not w.requires_grad
    assert torch.equal(wide, before)


def test_threads_run_at_once():
    # Only compiled code that gives up the interpreter's lock runs beside other threads.
    for kernel in (solve_chain, _forward, _backward):
        assert kernel.targetoptions["nogil"]


@sweep(
    ("g", "gamma", "message"),
    [
        ([1.0, math.nan], 1.0, r"g\[1\] is nan"),
        ([1.0, 2.0, -math.inf], math.inf, r"g\[2\] is -inf"),
        ([math.inf], 0.0, r"g\[0\] is inf"),
        ([1e308, 1e308], 1.0, "overflows"),
    ],
)
def test_bad_values(g, gamma, message):
    with pytest.raises(ValueError, match=message):
        fused_lasso(torch.tensor(g, dtype=torch.float64), gamma)


@sweep("rho", [2.0, 5.0])
@sweep("name", ["gaussian", "walk", "tied", "pieces", "alternating", "zero"])
def test_equals_the_corrected_admm(name, rho):
    """The limit does not depend on rho, so the threshold is gamma / rho, not the printed rho."""
    g = torch.from_numpy(VECTORS[name][:40].copy())
    for gamma in (0.0, 0.05, 0.5, 2.0):
        found = fused_lasso_admm(g, gamma, rho=rho, iterations=50_000, tol=1e-9)
        assert found.converged
        largest = max(float(g.abs().max()), 1.0)
        torch.testing.assert_close(found.w, fused_lasso(g, gamma), rtol=0, atol=1e-6 * largest)


@sweep("d", [0, 1, 2])
@sweep("dtype", [torch.float32, torch.float64])
def test_admm_of_short_vectors(d, dtype):
    g = torch.tensor([1.5, -2.0], dtype=dtype)[:d]
    for gamma in (0.0, 0.3, 1.0, math.inf):
        found = fused_lasso_admm(g, gamma, tol=1e-9)
        assert found.w.dtype == dtype
        torch.testing.assert_close(found.w, fused_lasso(g, gamma), rtol=0, atol=1e-6)


def test_admm_reports():
    g = torch.randn(300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    loose, tight = (fused_lasso_admm(g, 0.2, tol=tol) for tol in (1e-3, 1e-8))
    assert loose.iterations < tight.iterations
    stopped = fused_lasso_admm(g, 0.2, iterations=3)
    assert (stopped.iterations, stopped.converged) == (3, False)
