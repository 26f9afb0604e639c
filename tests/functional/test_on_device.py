"""Solvers and codecs where tensors are on a GPU: the same results."""

from __future__ import annotations

import math

import pytest
import torch

from medfed.federation.wire.codecs.sparse import TopK
from medfed.federation.wire.codecs.stc import STC
from medfed.functional.network_lasso import solve_network_lasso
from medfed.functional.prox import fused_lasso
from medfed.functional.quantize import quantize
from tests.functional.proximal_norm import prox_norm

EDGES = torch.tensor([[0, 1], [1, 2], [2, 3], [0, 3]])
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize(
    "solve",
    [
        pytest.param(
            lambda x: solve_network_lasso(x.reshape(4, -1), EDGES, 0.3).z, marks=GPU, id="lasso"
        ),
        pytest.param(lambda x: fused_lasso(x, 0.2), marks=GPU, id="fused lasso"),
        pytest.param(lambda x: prox_norm(x.reshape(4, -1), 0.5, math.inf), marks=GPU, id="prox"),
        pytest.param(
            lambda x: quantize(x, torch.tensor([-1.0, 0.0, 1.0], device=x.device)),
            marks=GPU,
            id="quantize",
        ),
    ],
)
def test_a_gpu_gives_what_the_cpu_gives(solve):
    torch.manual_seed(0)
    x = torch.randn(400)
    assert torch.allclose(solve(x.cuda()).cpu(), solve(x), atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("codec", [STC(0.1), TopK(0.3)])
def test_a_gpu_sends_the_bytes_of_the_cpu(codec):
    torch.manual_seed(0)
    x = torch.randn(1000).round(decimals=1)
    assert codec.encode(x.cuda()) == codec.encode(x)
