import math

import numpy as np
import pytest
import torch

from medfed.functional.graph import complete_edges, incidence, ring_edges
from medfed.functional.kernels import clip_levels
from medfed.functional.network_lasso import AdmmSteps, ResidualNorms, block_width
from medfed.functional.prox import dual_norm
from tests.functional.proximal_norm import prox_norm
from tests.sweeps import sweep

NORMS = (1.0, 2.0, math.inf)


class TorchSteps(AdmmSteps):
    """The same in plain PyTorch."""

    def _prepare(self):
        self.inverse = self._inverse().to(self.v)
        self.tau = (self.weight / self.rho).to(self.v)
        self.heads, self.tails = self.edges.to(self.v.device).unbind(1)
        # A product, as index_add_ adds in no fixed order on an accelerator.
        self.ends = incidence(self.v.shape[0], self.edges).to_dense().to(self.v)
        self.column = self.mass.to(self.v).unsqueeze(1)

    def rescale(self, rho):
        w = prox_norm(self.a, self.tau, self.p)
        self.a.sub_(w).mul_(self.rho / rho).add_(w)
        self.rho = rho
        self._prepare()

    def step(self):
        w = prox_norm(self.a, self.tau, self.p)
        u = self.a.sub_(w)
        self.z = self.inverse @ (self.column * self.v + self.rho * self._to_nodes(w.sub_(u)))
        del w
        self.a = u.add_(self._gaps())

    def residuals(self):
        w = prox_norm(self.a, self.tau, self.p)
        gaps = self._gaps()
        pull = self.rho * self._to_nodes(self.a - w)
        parts = (gaps - w, self.column * (self.v - self.z) - pull, gaps, w, pull)
        # Norms in double: the squares of a long float32 row lose digits.
        norms = [torch.linalg.vector_norm(x, dtype=torch.float64) for x in parts]
        return ResidualNorms(*torch.stack(norms).tolist())

    def _gaps(self):
        return self.z[self.heads] - self.z[self.tails]

    def _to_nodes(self, rows):
        return self.ends @ rows


def both(p, dtype, n=6, d=700, weight=None):
    generator = torch.Generator().manual_seed(1)
    v = torch.randn(n, d, generator=generator, dtype=dtype)
    edges = ring_edges(n)
    a = torch.randn(len(edges), d, generator=generator, dtype=dtype)
    if weight is None:
        weight = 0.3 * dual_norm(a, p).double()
    mass = torch.linspace(0.5, 1.5, n, dtype=torch.float64)
    return [kind(v, mass, edges, weight, p, a.clone(), 0.7) for kind in (AdmmSteps, TorchSteps)]


@sweep("p", NORMS)
@sweep(("dtype", "tol"), [(torch.float32, 2e-5), (torch.float64, 1e-12)])
def test_fused_steps_equal_the_reference(p, dtype, tol):
    fused, plain = both(p, dtype)
    for rho in (None, 2.0, 0.3):
        for steps in (fused, plain):
            if rho is not None:
                steps.rescale(rho)
            for _ in range(4):
                steps.step()
        torch.testing.assert_close(fused.a, plain.a, rtol=tol, atol=tol)
        torch.testing.assert_close(fused.z, plain.z, rtol=tol, atol=tol)
        np.testing.assert_allclose(fused.residuals(), plain.residuals(), rtol=100 * tol, atol=tol)


@pytest.mark.parametrize("p", NORMS)
def test_infinite_weights_stay_finite(p):
    weight = torch.tensor([math.inf, 1e300, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    for steps in both(p, torch.float32, weight=weight):
        for _ in range(5):
            steps.step()
        steps.rescale(3.0)
        assert steps.a.isfinite().all()
        assert np.isfinite(steps.residuals()).all()


@pytest.mark.parametrize("p", NORMS)
def test_residuals_are_those_of_the_textbook(p):
    """The dual residual rho (W - W_before) Q^T equals V - Z - Omega Q^T after a step."""
    _, steps = both(p, torch.float64)
    before = prox_norm(steps.a, steps.tau, p)
    steps.step()
    after = prox_norm(steps.a, steps.tau, p)
    expected = steps.rho * steps._to_nodes(after - before).norm()
    assert steps.residuals().dual == pytest.approx(float(expected), rel=1e-10)


def test_blocks_cover_every_column():
    for d in (1, 5, 255, 256, 257, 1000):
        v = torch.randn(5, d, dtype=torch.float64)
        a = torch.zeros(10, d, dtype=torch.float64)
        weight, ones = torch.ones(10, dtype=torch.float64), torch.ones(5, dtype=torch.float64)
        steps = AdmmSteps(v, ones, complete_edges(5), weight, 2.0, a, 1.0)
        steps.step()
        expected = torch.linalg.solve(torch.eye(5).double() * 6 - 1, v)
        torch.testing.assert_close(steps.z, expected)


def test_block_width_fits():
    assert block_width(5000, 100, 10**6, 8) == 64
    assert block_width(1, 2, 1, 4) == 1
    assert block_width(1, 2, 10**6, 4) == 1024


@sweep("start", [0.0, 0.1, 1.0, 1e9])
def test_clip_levels_from_any_start(start):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(6, 3000, generator=generator, dtype=torch.float64)
    a[5] = 0
    tau = torch.tensor([1e-9, 1.0, 100.0, 1e6, math.inf, 1.0], dtype=torch.float64)
    levels = np.full(6, start)
    clip_levels(a.numpy(), tau.numpy(), levels)
    clipped = torch.clamp(a, min=-torch.from_numpy(levels)[:, None]).minimum(
        torch.from_numpy(levels)[:, None]
    )
    torch.testing.assert_close(clipped, prox_norm(a, tau, math.inf), rtol=0, atol=1e-12)
