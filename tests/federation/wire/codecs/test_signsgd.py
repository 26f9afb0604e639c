"""The scaled sign: how much it keeps, and how little it sends."""

import math

import pytest
import torch

from medfed.federation.wire.codecs.base import HEADER_BYTES
from medfed.federation.wire.codecs.signsgd import SignSGD


def test_delta_of_gaussian_elements():
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    lost = (SignSGD().decode(SignSGD().encode(values)) - values).square().sum()
    assert float(lost / values.square().sum()) == pytest.approx(1 - 2 / math.pi, abs=0.005)


def test_one_bit_per_element():
    assert len(SignSGD().encode(torch.randn(800))) == HEADER_BYTES + 4 + 100
