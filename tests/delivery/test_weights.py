"""Bit planes and codebooks against loops over single bits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from medfed.delivery.bundle.weights import from_centers, pack
from medfed.standalone.decode import unpack
from medfed.standalone.errors import CheckpointError, ConfigError
from tests.sweeps import sweep


def planes_by_loops(indices: list[int], bits: int) -> np.ndarray:
    planes = np.zeros((bits, math.ceil(len(indices) / 8)), dtype=np.uint8)
    for i, index in enumerate(indices):
        for b in range(bits):
            planes[b, i // 8] |= ((index >> b) & 1) << (i % 8)
    return planes


@sweep("bits", range(1, 9))
@sweep("count", [0, 1, 7, 8, 9, 1000])
def test_planes_are_those_of_a_loop_and_come_back(bits, count):
    indices = torch.randint(2**bits, (count,), generator=torch.Generator().manual_seed(count))
    planes = pack(indices, bits)
    assert planes.dtype == torch.uint8
    np.testing.assert_array_equal(planes.numpy(), planes_by_loops(indices.tolist(), bits))
    assert torch.equal(unpack(planes, count), indices)


def test_a_plane_is_what_numpy_packs():
    indices = torch.randint(2, (77,), generator=torch.Generator().manual_seed(0))
    expected = np.packbits(indices.numpy().astype(np.uint8), bitorder="little")
    np.testing.assert_array_equal(pack(indices, 1)[0].numpy(), expected)


@sweep("bits", [0, 9, 2.5, True])
def test_bits_out_of_range(bits):
    with pytest.raises(ConfigError, match="must be a whole number from 1 to 8"):
        pack(torch.zeros(3, dtype=torch.int64), bits)


@pytest.mark.parametrize("wrong", [4, -1])
def test_integers_that_do_not_fit(wrong):
    with pytest.raises(ValueError, match="do not fit into 2 bits"):
        pack(torch.tensor([0, wrong]), 2)


@pytest.mark.parametrize(
    "planes", [torch.zeros(2, 2, dtype=torch.uint8), torch.zeros(2, 1), torch.zeros(1).byte()]
)
def test_planes_of_another_shape(planes):
    with pytest.raises(ValueError, match=r"\(bits, 1\) uint8"):
        unpack(planes, 5)


@sweep("count", [1, 2, 3, 4, 5, 16, 256])
def test_a_tensor_of_centres_is_found_again(count):
    generator = torch.Generator().manual_seed(count)
    centers = torch.randn(count, generator=generator).sort().values
    tensor = centers[torch.randint(count, (3, 5, 7), generator=generator)]
    book = from_centers(tensor, centers)
    assert torch.equal(book.dense(), tensor)
    assert book.bits == max(1, math.ceil(math.log2(count)))
    assert torch.equal(unpack(pack(book.indices, book.bits), 105), book.indices)


def test_a_weight_that_is_no_centre():
    with pytest.raises(CheckpointError, match="none of its parameter's centres"):
        from_centers(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.0, 1.0]))


@pytest.mark.parametrize("centers", [torch.tensor([1.0, 0.0]), torch.zeros(0), torch.zeros(2, 2)])
def test_centres_out_of_order(centers):
    with pytest.raises(CheckpointError, match="1 to 256 numbers in increasing order"):
        from_centers(torch.zeros(3), centers)
