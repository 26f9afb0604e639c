"""k-means and fine-tuned centres, against the steps written out in NumPy."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from medfed.delivery.bundle.weights import kmeans
from medfed.delivery.export.client_model import choose_bits, quantise
from medfed.delivery.export.finetuning import distil, measured_statistics
from medfed.federation.split import float_entries
from medfed.standalone.decode import fill
from medfed.standalone.errors import ConfigError
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


def three_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1)).double()


def test_fine_tuning_is_adam_on_the_centres():
    """The gradient of a centre is the sum over its weights; the trained logits are the target."""
    rate, steps, data, network = 0.05, 3, Rows(), three_layers()
    trained = {n: t.detach().clone() for n, t in network.state_dict().items()}
    books = quantise(trained, {"1.weight": 2})
    index, centers = books["1.weight"].indices.numpy(), books["1.weight"].centers.numpy().copy()
    x = data.x.numpy()
    w, b = (
        [trained[f"{i}.{kind}"].numpy().copy() for i in range(3)] for kind in ("weight", "bias")
    )
    teacher = ((x @ w[0].T + b[0]) @ w[1].T + b[1]) @ w[2].T + b[2]
    state = {"c": centers, **{f"w{i}": w[i] for i in (0, 2)}, **{f"b{i}": b[i] for i in range(3)}}
    first, second = ({n: np.zeros_like(v) for n, v in state.items()} for _ in range(2))
    for step in range(1, steps + 1):
        inner = state["c"][index].reshape(4, 4)
        h0 = x @ state["w0"].T + state["b0"]
        h1 = h0 @ inner.T + state["b1"]
        d2 = 2 * (h1 @ state["w2"].T + state["b2"] - teacher) / len(x)
        d1 = d2 @ state["w2"]
        d0 = d1 @ inner
        flat = (d1.T @ h0).ravel()
        gradients = {
            "c": np.array([flat[index == j].sum() for j in range(len(centers))]),
            "w0": d0.T @ x,
            "w2": d2.T @ h1,
            "b0": d0.sum(0),
            "b1": d1.sum(0),
            "b2": d2.sum(0),
        }
        for n, g in gradients.items():
            first[n] = 0.9 * first[n] + 0.1 * g
            second[n] = 0.999 * second[n] + 0.001 * g**2
            mean, square = first[n] / (1 - 0.9**step), second[n] / (1 - 0.999**step)
            state[n] = state[n] - rate * mean / (np.sqrt(square) + 1e-8)
    tuned, moved = distil(network, trained, trained, books, data, steps, rate, 0)
    np.testing.assert_allclose(moved["1.weight"].dense().ravel(), state["c"][index], atol=1e-12)
    np.testing.assert_allclose(tuned["1.weight"].ravel(), state["c"][index], atol=1e-12)
    for n in ("w0", "w2", "b0", "b1", "b2"):
        entry = f"{n[1]}.{'weight' if n[0] == 'w' else 'bias'}"
        np.testing.assert_allclose(tuned[entry], state[n], atol=1e-12)
    assert all(torch.equal(t, trained[n]) for n, t in network.state_dict().items())


def test_no_steps_change_nothing():
    network = three_layers()
    weights = {n: t.detach().clone() for n, t in network.state_dict().items()}
    books = quantise(weights, {"1.weight": 1})
    tuned, same = distil(network, weights, weights, books, Rows(), 0, 0.1, 0)
    assert same["1.weight"] is books["1.weight"]
    assert torch.equal(tuned["1.weight"], books["1.weight"].dense())
    assert torch.equal(tuned["0.weight"], weights["0.weight"])


class Tied(nn.Module):
    """Two layers of one weight, and one that stands in two places."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight
        self.again = self.a

    def forward(self, x):
        return self.again(torch.relu(self.b(torch.relu(self.a(x)))))


def test_weights_of_several_names_keep_the_same_centres():
    torch.manual_seed(0)
    network, data = Tied(), Rows(torch.float32)
    trained = {n: t.detach().clone() for n, t in float_entries(network).items()}
    assert "b.weight" not in trained
    books = quantise(trained, {"a.weight": 1})
    loss = partial(apart, network, trained, data)
    tuned, moved = distil(network, trained, trained, books, data, 30, 0.01, 0)
    assert set(tuned) == set(trained)
    assert tuned["a.weight"].unique().tolist() == moved["a.weight"].centers.tolist()
    assert loss(tuned) < 0.9 * loss({**trained, "a.weight": books["a.weight"].dense()})


@torch.no_grad()
def apart(network, trained, data, weights) -> float:
    """Mean squared distance of the answers from those of the trained model."""
    answers = [fill(network, state)(data.x) for state in (trained, weights)]
    return float((answers[0] - answers[1]).square().mean())


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
