"""Solvers and codecs where tensors are on a GPU: the same results."""

from __future__ import annotations

import math

import pytest
import torch

from medfed.federation.wire.codecs.base import largest_on_device
from medfed.federation.wire.codecs.sparse import TopK
from medfed.federation.wire.codecs.stc import STC
from medfed.federation.wire.codecs.support import largest
from medfed.functional.fused_lasso import fused_lasso
from medfed.functional.network_lasso import solve_network_lasso
from medfed.functional.quantize import quantize
from tests.functional.proximal_norm import prox_norm
from tests.sweeps import sweep

EDGES = torch.tensor([[0, 1], [1, 2], [2, 3], [0, 3]])
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


VECTORS = {
    "all different": torch.linspace(-1, 2, 101),
    "ties": torch.tensor([1.0, -2.0, 2.0, 0.0, -1.0, 2.0, -0.0, 1.0]),
    "zeros": torch.zeros(7),
    "tiny": torch.tensor([1e-45, -1e-40, 0.0, 1e-38]),
    "none": torch.empty(0),
}


@sweep("name", VECTORS)
def test_the_largest_are_those_of_the_kernel(name):
    flat = VECTORS[name]
    for k in range(min(len(flat) + 2, 12)):
        assert largest_on_device(flat, k).tolist() == largest(flat.numpy(), k).tolist()


@sweep("codec", [STC(0.1), STC(0.5, runs=False), TopK(0.3), TopK(0.3, "float16")])
@sweep("name", VECTORS)
def test_what_is_packed_on_a_device_is_what_main_memory_packs(codec, name):
    flat = VECTORS[name]
    packed = b"".join((codec.header(flat.numel()), *codec.pack_on_device(flat)))
    assert packed == codec.encode(flat)


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
