"""k-means centres against scikit-learn, and new statistics against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from medfed.common.errors import ConfigError
from medfed.delivery.bundle.weights import kmeans
from medfed.delivery.export.client_model import choose_bits
from medfed.delivery.export.export import measured_statistics
from medfed.federation.split import float_entries
from tests.sweeps import sweep

NET = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(4, 1))


class Rows:
    """Regression data of one batch."""

    id, batch_size, num_samples = "a", 8, 8

    def __init__(self, dtype: torch.dtype = torch.float64):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(8, 3, generator=generator, dtype=dtype)
        self.y = torch.randn(8, 1, generator=generator, dtype=dtype)

    def train_batches(self, seed):
        yield {"image": self.x, "label": self.y}


def test_statistics_are_those_of_the_batches():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    weights = {n: t.detach().clone() for n, t in float_entries(network).items()}
    data = Rows()
    found = measured_statistics(network, weights, data, 0)
    hidden = data.x @ weights["0.weight"].T + weights["0.bias"]
    np.testing.assert_allclose(found["1.running_mean"], hidden.mean(0), atol=1e-12)
    np.testing.assert_allclose(found["1.running_var"], hidden.var(0, unbiased=True), atol=1e-12)
    assert all(torch.equal(found[n], t) for n, t in weights.items() if "running" not in n)
    assert network[1].momentum == 0.1
    assert (
        measured_statistics(
            nn.Sequential(nn.Linear(3, 1)).double(),
            {"0.weight": torch.zeros(1, 3), "0.bias": torch.zeros(1)},
            data,
            0,
        )
        is None
    )


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_codebooks_are_no_worse_than_those_of_scikit_learn(bits):
    cluster = pytest.importorskip("sklearn.cluster")
    x = torch.randn(2000, generator=torch.Generator().manual_seed(bits))
    own = (kmeans(x, bits).dense() - x).double().square().sum().item()
    best = cluster.KMeans(2**bits, n_init=3, random_state=0).fit(x[:, None].double().numpy())
    assert own <= best.inertia_ * 1.001


def test_few_numbers_need_few_centres():
    book = kmeans(torch.tensor([1.0, -1.0, 1.0, 1.0]), bits=4)
    assert book.centers.tolist() == [-1.0, 1.0]
    assert book.bits == 1


def test_later_patterns_win_and_the_ends_can_be_named():
    assert choose_bits(NET, 2) == {"1.weight": 2, "2.weight": 2}
    assert choose_bits(NET, 32) == {}
    chosen = choose_bits(NET, 2, {"*": 3, "0.*": 8, "2.*": 32})
    assert chosen == {"0.weight": 8, "1.weight": 3, "3.weight": 3}


@sweep(
    ("bits", "layers", "message"),
    [
        (0, None, "bits=0 must be a whole number from 1 to 8, or 32"),
        (2, {"1.*": 16}, r"layers\.1\.\*=16 must be"),
        (2, {"5.*": 2}, r"pattern '5\.\*' of layers matches no weight"),
        (2, {"1.bias": 2}, "matches no weight"),
    ],
)
def test_bits_that_cannot_be(bits, layers, message):
    with pytest.raises(ConfigError, match=message):
        choose_bits(NET, bits, layers)
