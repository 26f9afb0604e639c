import contextlib
import itertools
import math
import warnings

import cvxpy as cp
import numpy as np
import pytest
import torch

from medfed.functional import network_lasso as lasso
from medfed.functional.graph import (
    complete_edges,
    connected_components,
    incidence,
    ring_edges,
    star_edges,
    undirected_edges,
)
from medfed.functional.network_lasso import component_means, smallest_dual, solve_network_lasso
from medfed.functional.prox import dual_norm
from medfed.standalone.errors import ConfigError
from tests.functional.proximal_norm import prox_norm
from tests.sweeps import sweep

NORMS = (1.0, 2.0, math.inf)


def network_lasso(*arguments, **options):
    """The minimiser alone."""
    return solve_network_lasso(*arguments, **options).z


def reference(v, edges, weight, p, mass=None):
    """An interior-point solver of another project, which shares no formula with this one."""
    z = cp.Variable(v.shape)
    norm = "inf" if p == math.inf else int(p)
    fusion = [
        float(w) * cp.norm(z[i] - z[j], norm)
        for (i, j), w in zip(edges.tolist(), weight, strict=True)
    ]
    root = np.ones(len(v)) if mass is None else np.sqrt(mass.numpy())
    distance = cp.multiply(root[:, None] * np.ones(v.shape), z - v.numpy())
    problem = cp.Problem(cp.Minimize(0.5 * cp.sum_squares(distance) + sum(fusion)))
    for tol in (1e-10, 1e-9, 1e-8):
        # With fused nodes and p = 2 it may stall just short of the first tolerance: it then says so
        # in a warning, or gives up. What it returns is good to 1e-5 in each case.
        with warnings.catch_warnings(), contextlib.suppress(cp.SolverError):
            warnings.filterwarnings("ignore", "Solution may be inaccurate")
            problem.solve(solver="CLARABEL", tol_gap_abs=tol, tol_gap_rel=tol)
            return torch.from_numpy(z.value)
    raise AssertionError("the reference solver failed")


def random_graph(generator, n):
    pairs = torch.randint(0, n, (2 * n, 2), generator=generator)
    return undirected_edges(pairs[pairs[:, 0] != pairs[:, 1]])


def data(n=6, d=4, seed=0, dtype=torch.float64):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def fusion(z, edges, p):
    return torch.linalg.vector_norm(z[edges[:, 0]] - z[edges[:, 1]], ord=p, dim=1)


@sweep("p", NORMS)
@sweep("seed", range(6))
def test_against_an_interior_point_solver(p, seed):
    generator = torch.Generator().manual_seed(seed)
    n, d = 4 + seed, 3 + 2 * seed
    edges = random_graph(generator, n)
    v = torch.randn(n, d, generator=generator, dtype=torch.float64) + (seed % 3)
    scale = {1.0: 0.3, 2.0: 0.3 * math.sqrt(d), math.inf: 0.3 * d}[p]
    weight = scale * torch.rand(len(edges), generator=generator, dtype=torch.float64)
    expected = reference(v, edges, weight, p)
    torch.testing.assert_close(network_lasso(v, edges, weight, p), expected, rtol=0, atol=1e-5)
    single = network_lasso(v.float(), edges, weight, p)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), expected, rtol=0, atol=1e-4)


@sweep("p", NORMS)
@sweep("seed", range(4))
def test_masses_against_an_interior_point_solver(p, seed):
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(5 + seed, 4, generator=generator, dtype=torch.float64)
    edges = random_graph(generator, len(v))
    mass = 0.3 + 2 * torch.rand(len(v), generator=generator, dtype=torch.float64)
    weight = torch.full((len(edges),), 0.4, dtype=torch.float64)
    expected = reference(v, edges, weight, p, mass)
    found = network_lasso(v, edges, weight, p, mass=mass)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert float((found - network_lasso(v, edges, weight, p)).abs().max()) > 1e-2


@pytest.mark.parametrize("p", NORMS)
def test_masses_of_one_change_no_bit_and_large_weights_give_means_by_mass(p):
    v, edges = data(), ring_edges(6)
    ones = torch.ones(6, dtype=torch.float64)
    assert torch.equal(network_lasso(v, edges, 0.4, p), network_lasso(v, edges, 0.4, p, mass=ones))
    mass = torch.arange(1.0, 7.0, dtype=torch.float64)
    mean = (mass @ v / mass.sum()).expand(6, -1)
    torch.testing.assert_close(network_lasso(v, edges, 1e4, p, mass=mass), mean)
    assert torch.equal(network_lasso(v, edges, 0.0, p, mass=mass), v)


@sweep("p", NORMS)
@sweep("scale", [1e-6, 1e6])
def test_scales_with_its_input(p, scale):
    v, edges = data(), ring_edges(6)
    plain = network_lasso(v, edges, 0.4, p)
    scaled = network_lasso(scale * v, edges, scale * 0.4, p) / scale
    torch.testing.assert_close(scaled, plain, rtol=0, atol=1e-6)


@pytest.mark.parametrize("p", NORMS)
def test_optimality_conditions(p):
    """Z = V - Omega Q^T with Omega in the dual ball and aligned with ZQ."""
    v, edges, weight = data(8, 20), ring_edges(8), 0.8
    found = solve_network_lasso(v, edges, weight, p, tol=1e-11)
    rho = float(found.state.rho)
    point = found.state.point
    omega = rho * (point - prox_norm(point, weight / rho, p))
    q = incidence(8, edges).to_dense()
    torch.testing.assert_close(found.z, v - q @ omega, rtol=0, atol=1e-8)
    assert (dual_norm(omega, p) <= weight * (1 + 1e-9)).all()
    gaps = q.T @ found.z
    torch.testing.assert_close(
        (omega * gaps).sum(1), weight * fusion(found.z, edges, p), rtol=0, atol=1e-8
    )


@pytest.mark.parametrize("p", NORMS)
def test_weight_zero_is_the_input_exactly(p):
    v = data()
    z = network_lasso(v, ring_edges(6), 0.0, p)
    assert torch.equal(z, v)
    assert z.data_ptr() != v.data_ptr()


@pytest.mark.parametrize("p", NORMS)
def test_many_nodes_against_an_interior_point_solver(p):
    """Above 32 nodes gradient steps stand for the solution of Z's system."""
    generator = torch.Generator().manual_seed(3)
    edges, v = random_graph(generator, 80), data(80, 3)
    weight = 0.5 * torch.rand(len(edges), generator=generator, dtype=torch.float64)
    mass = 0.5 + torch.rand(80, generator=generator, dtype=torch.float64)
    expected = reference(v, edges, weight, p, mass)
    found = solve_network_lasso(v, edges, weight, p, mass=mass, tol=1e-9)
    torch.testing.assert_close(found.z, expected, rtol=0, atol=2e-5)
    warm = solve_network_lasso(v, edges, weight, p, mass=mass, tol=1e-9, state=found.state)
    torch.testing.assert_close(warm.z, found.z, rtol=0, atol=1e-6)
    assert warm.iterations < found.iterations


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_smallest_dual_of_many_nodes(dtype, monkeypatch):
    """By a sparse factorisation, in several components, against NumPy's least squares."""
    monkeypatch.setattr(lasso, "_DENSE", 50)
    edges = torch.cat([ring_edges(60), 60 + star_edges(30), torch.tensor([[95, 99]])])
    v = data(100, 70, dtype=dtype)
    component = connected_components(100, edges)
    pull = v - component_means(v, torch.ones(100, dtype=torch.float64), component)
    expected = np.linalg.lstsq(
        incidence(100, edges).to_dense().double().numpy(), pull.double().numpy()
    )[0]
    tol = 1e-4 if dtype == torch.float32 else 1e-10
    np.testing.assert_allclose(smallest_dual(pull, edges, component), expected, rtol=0, atol=tol)


@pytest.mark.parametrize("p", NORMS)
def test_consensus_of_many_nodes(p):
    """On a tree the least weight is known; on both sides of it the right path is taken."""
    v, edges = data(80, 6), star_edges(80)
    pull = v - v.mean(0)
    least = float(dual_norm(smallest_dual(pull, edges, torch.zeros(80).long()), p).max())
    above = solve_network_lasso(v, edges, 1.0001 * least, p)
    assert above.iterations == 0
    torch.testing.assert_close(above.z, v.mean(0).expand_as(v), rtol=0, atol=1e-12)
    below = solve_network_lasso(v, edges, 0.9 * least, p)
    assert below.iterations > 0
    assert float(fusion(below.z, edges, p).max()) > 1e-2


@sweep("p", NORMS)
@sweep("weight", [1e3, 1e30, 1e300, math.inf])
@sweep("dtype", [torch.float32, torch.float64])
def test_large_weights_give_component_means(p, weight, dtype):
    v = data(7, 5, dtype=dtype)
    edges = torch.tensor([[0, 1], [1, 4], [2, 3], [5, 3]])
    z = network_lasso(v, edges, weight, p)
    for members in ([0, 1, 4], [2, 3, 5], [6]):
        assert (z[members] == z[members[0]]).all()
        torch.testing.assert_close(z[members[0]], v[members].mean(0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("p", NORMS)
def test_consensus_above_a_finite_weight(p):
    """Just above the smallest weight that the dual allows, the points agree; far below, not."""
    v, edges = data(5, 6), star_edges(5)
    # On a tree the dual at consensus is unique, so that the least weight is known.
    least = float(
        dual_norm(
            torch.linalg.lstsq(incidence(5, edges).to_dense(), v - v.mean(0)).solution, p
        ).max()
    )
    above = network_lasso(v, edges, 1.0001 * least, p)
    torch.testing.assert_close(above, v.mean(0).expand_as(v), rtol=0, atol=1e-6)
    below = network_lasso(v, edges, 0.9 * least, p)
    assert float(fusion(below, edges, p).max()) > 1e-2


@pytest.mark.parametrize("p", NORMS)
def test_infinite_next_to_finite_weights(p):
    """Infinite edges glue nodes together: the same as a problem on their means."""
    v = data(4, 3)
    edges = torch.tensor([[0, 1], [1, 2], [2, 3]])
    for large in (math.inf, 1e300):
        z = network_lasso(v, edges, torch.tensor([large, 0.4, 0.0]), p)
        torch.testing.assert_close(z[0], z[1], rtol=0, atol=1e-6)
        assert torch.equal(z[3], v[3])
        u = torch.stack([v[0], v[1], v[2]])
        expected = reference(u, edges[:2], [50.0, 0.4], p)
        torch.testing.assert_close(z[:3], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("p", NORMS)
def test_fusion_falls_along_a_path(p):
    v, edges = data(8, 6), complete_edges(8)
    path = [0.0, *(0.02 * 1.6**k for k in range(12)), math.inf]
    total = [float(fusion(network_lasso(v, edges, w, p), edges, p).sum()) for w in path]
    assert all(b <= a + 1e-6 for a, b in itertools.pairwise(total))
    assert total[0] > 1.0
    assert total[-1] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("p", NORMS)
def test_warm_start(p):
    v, edges = data(8, 10), ring_edges(8)
    first = solve_network_lasso(v, edges, 0.7, p)
    kept = first.state.point.clone()
    moved = v + 1e-3 * data(8, 10, seed=1)
    cold = solve_network_lasso(moved, edges, 0.72, p)
    warm = solve_network_lasso(moved, edges, 0.72, p, state=first.state)
    assert warm.iterations < cold.iterations
    assert warm.converged
    torch.testing.assert_close(warm.z, cold.z, rtol=0, atol=1e-6)
    assert torch.equal(first.state.point, kept)


def test_warm_start_with_another_penalty():
    v, edges = data(8, 10), ring_edges(8)
    first = solve_network_lasso(v, edges, 0.7, rho=1.0)
    again = solve_network_lasso(v, edges, 0.7, rho=0.25, state=first.state)
    assert float(first.state.rho) == 1.0
    assert float(again.state.rho) == 0.25
    assert again.iterations < solve_network_lasso(v, edges, 0.7, rho=0.25).iterations
    torch.testing.assert_close(again.z, first.z, rtol=0, atol=1e-6)


def test_state_survives_where_edges_have_no_weight():
    v, edges = data(), ring_edges(6)
    weight = torch.tensor([0.3, 0.0, 0.3, 0.3, 0.0, 0.3])
    first = solve_network_lasso(v, edges, weight)
    assert first.state.point.shape == (6, 4)
    warm = solve_network_lasso(v, edges, weight, state=first.state)
    assert warm.iterations < first.iterations
    kept = edges[weight > 0]
    torch.testing.assert_close(warm.z, network_lasso(v, kept, 0.3), rtol=0, atol=1e-6)


def test_warns_at_max_iter_and_reports():
    with pytest.warns(RuntimeWarning, match="max_iter=3"):
        found = solve_network_lasso(data(), ring_edges(6), 0.3, max_iter=3)
    assert (found.iterations, found.converged) == (3, False)
    assert found.primal > 0
    assert found.dual > 0


@pytest.mark.parametrize("p", NORMS)
def test_same_bits_for_any_number_of_threads(p):
    v, edges = data(5, 3000), complete_edges(5)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            results.append(network_lasso(v, edges, 0.1 * v.shape[1] ** (1 - 1 / p), p))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_edges_may_be_repeated_and_reversed():
    v = data(3)
    twice = network_lasso(v, [[0, 1], [1, 0], [2, 1]], 0.2)
    once = network_lasso(v, [[0, 1], [1, 2]], torch.tensor([0.4, 0.2]))
    torch.testing.assert_close(twice, once, rtol=0, atol=1e-6)


@pytest.mark.parametrize("p", NORMS)
def test_degenerate_sizes(p):
    v = data()
    assert torch.equal(network_lasso(v, [], 1.0, p), v)
    assert torch.equal(network_lasso(v, torch.zeros(0, 2, dtype=torch.long), 1.0, p), v)
    assert torch.equal(network_lasso(v[:1], [], 1.0, p), v[:1])
    assert network_lasso(v[:, :0], ring_edges(6), 1.0, p).shape == (6, 0)
    # Equal rows stay what they are, up to the rounding of the linear algebra at hand.
    equal = network_lasso(v[:1].expand(6, -1), ring_edges(6), 0.1, p)
    torch.testing.assert_close(equal, v[:1].expand(6, -1), rtol=1e-12, atol=1e-12)
    assert torch.equal(network_lasso(torch.zeros(3, 2), [[0, 1]], 0.1, p), torch.zeros(3, 2))


def test_half_precision_strides_and_gradients():
    v = data().half().requires_grad_()
    z = network_lasso(v, ring_edges(6), 0.2)
    assert z.dtype == torch.float16
    assert not z.requires_grad
    strided = data(4, 6).T
    expected = network_lasso(strided.contiguous(), ring_edges(6), 0.2)
    assert torch.equal(network_lasso(strided, ring_edges(6), 0.2), expected)


def test_input_is_left_alone():
    v = data()
    before = v.clone()
    network_lasso(v, ring_edges(6), 0.3)
    assert torch.equal(v, before)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_points(bad):
    v = data()
    v[2, 1] = bad
    with pytest.raises(ValueError, match="NaN or infinity in row 2"):
        network_lasso(v, ring_edges(6), 1.0)


@sweep(
    ("change", "message"),
    [
        ({"edges": [[0, 6]]}, "does not join two of the nodes 0 to 5"),
        ({"edges": [[-1, 2]]}, "does not join two of the nodes 0 to 5"),
        ({"edges": [[1, 1]]}, "does not join two"),
        ({"weight": -0.1}, "0 or more"),
        ({"weight": math.nan}, "0 or more"),
        ({"p": 3.0}, "p = 1, 2 or inf"),
    ],
)
def test_bad_input(change, message):
    arguments = {"v": data(), "edges": ring_edges(6), "weight": 1.0, **change}
    with pytest.raises(ConfigError, match=message):
        solve_network_lasso(**arguments)


def test_large_single_precision_offset():
    """A common offset of 1e4 leaves 1e-3 in float32; the solver must end, without a warning."""
    v = data(5, 200) + 1e4
    edges = complete_edges(5)
    expected = network_lasso(v, edges, 0.5)
    single = network_lasso(v.float(), edges, 0.5)
    np.testing.assert_allclose(single.numpy(), expected.numpy(), atol=1e-2)
