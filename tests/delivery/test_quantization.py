"""k-means and fine-tuned centres, against the steps written out in NumPy."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from medfed.common.errors import ConfigError
from medfed.delivery.bundle.weights import Codebook, fit
from medfed.delivery.export.finetuning import finetune, mean_of_clusters
from medfed.delivery.export.quantization import choose_bits, quantise
from medfed.federation.split import ParameterSplit
from medfed.federation.training import LocalTrainer

NET = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(4, 1))


class Rows:
    """Regression data of one batch."""

    id, batch_size, num_samples = "a", 8, 8

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(8, 3, generator=generator, dtype=torch.float64)
        self.y = torch.randn(8, 1, generator=generator, dtype=torch.float64)

    def train_batches(self, seed):
        yield {"image": self.x, "label": self.y}


def trainer(rate: float) -> LocalTrainer:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1)).double()

    def loss(batch):
        return (net(batch["image"]) - batch["label"]).square().mean()

    split = ParameterSplit.of(net)
    return LocalTrainer(net, loss, split, partial(torch.optim.SGD, lr=rate))


def test_fine_tuning_is_gradient_descent_on_the_centres():
    rate, steps, data = 0.05, 3, Rows()
    run = trainer(rate)
    weights = run.initial()
    books = quantise(weights, {"1.weight": 2})
    index, centers = books["1.weight"].indices.numpy(), books["1.weight"].centers.numpy().copy()
    w = [weights[f"{i}.weight"].numpy().copy() for i in range(3)]
    b = [weights[f"{i}.bias"].numpy().copy() for i in range(3)]
    x, y = data.x.numpy(), data.y.numpy()
    for _ in range(steps):
        w[1] = centers[index].reshape(4, 4)
        h0 = x @ w[0].T + b[0]
        h1 = h0 @ w[1].T + b[1]
        d2 = 2 * (h1 @ w[2].T + b[2] - y) / len(x)
        d1 = d2 @ w[2]
        d0 = d1 @ w[1]
        gradients = [d0.T @ x, d1.T @ h0, d2.T @ h1]
        for j in range(len(centers)):
            members = gradients[1].ravel()[index == j]
            centers[j] -= rate / len(members) * members.sum()  # the sum over the cluster
        for i, d in ((0, d0), (2, d2)):
            w[i] = w[i] - rate * gradients[i]
            b[i] = b[i] - rate * d.sum(0)
        b[1] = b[1] - rate * d1.sum(0)
    tuned, moved = finetune(run, data, weights, books, steps, rate)
    np.testing.assert_allclose(moved["1.weight"].dense().ravel(), centers[index], atol=1e-12)
    np.testing.assert_allclose(tuned["1.weight"].ravel(), centers[index], atol=1e-12)
    for i in (0, 2):
        np.testing.assert_allclose(tuned[f"{i}.weight"], w[i], atol=1e-12)
        np.testing.assert_allclose(tuned[f"{i}.bias"], b[i], atol=1e-12)


def test_no_steps_change_nothing():
    run = trainer(0.1)
    weights = run.initial()
    books = quantise(weights, {"1.weight": 1})
    tuned, same = finetune(run, Rows(), weights, books, 0, 0.1)
    assert same["1.weight"] is books["1.weight"]
    assert torch.equal(tuned["1.weight"], books["1.weight"].dense())
    assert torch.equal(tuned["0.weight"], weights["0.weight"])


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_codebooks_are_no_worse_than_those_of_scikit_learn(bits):
    cluster = pytest.importorskip("sklearn.cluster")
    x = torch.randn(2000, generator=torch.Generator().manual_seed(bits))
    own = (fit(x, bits).dense() - x).double().square().sum().item()
    best = cluster.KMeans(2**bits, n_init=3, random_state=0).fit(x[:, None].double().numpy())
    assert own <= best.inertia_ * 1.001


def test_few_numbers_need_few_centres():
    book = fit(torch.tensor([1.0, -1.0, 1.0, 1.0]), bits=4)
    assert book.centers.tolist() == [-1.0, 1.0]
    assert book.bits == 1


def test_the_mean_of_a_cluster_is_summed_in_double_precision():
    book = Codebook(torch.zeros(10**6, dtype=torch.int64), torch.zeros(1), (10**6,))
    assert mean_of_clusters(torch.full((10**6,), 0.1), book).item() == np.float32(0.1)


def test_later_patterns_win_and_the_ends_can_be_named():
    assert choose_bits(NET, 2) == {"1.weight": 2, "2.weight": 2}
    assert choose_bits(NET, 32) == {}
    chosen = choose_bits(NET, 2, {"*": 3, "0.*": 8, "2.*": 32})
    assert chosen == {"0.weight": 8, "1.weight": 3, "3.weight": 3}


@pytest.mark.parametrize(
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
