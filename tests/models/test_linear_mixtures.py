"""PPFL's case of generalised linear models without a common part."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from medfed.models.networks.canonical import Canonical
from medfed.models.networks.small import LinearRegression, LogisticRegression
from medfed.models.regression import RegressionTask
from medfed.standalone.errors import ConfigError
from tests.models.tiny import SGD

C = np.array([0.6, 0.3, 0.1])


def mixture(mix: str, build=LinearRegression, activation: str = "identity") -> Canonical:
    networks = []
    for k in range(len(C)):
        torch.manual_seed(k)
        networks.append(build(5, spread=2.0).double())
    net = Canonical(networks, ["*"], mix, activation)
    with torch.no_grad():
        net.membership.copy_(torch.tensor(C))
    return net


def rows(count: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(5)
    x = torch.randn(count, 5, generator=g, dtype=torch.float64)
    return x, 3 * torch.randn(count, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("mix", ["outputs", "parameters"])
def test_a_mixture_of_linear_models_is_the_model_of_the_mixture(mix):
    """Loss and all gradients, against formulas in NumPy."""
    net, (x, y) = mixture(mix), rows()
    assert [n.split(".")[0] for n, _ in net.named_parameters()][1:] == ["canonical"] * 6
    task = RegressionTask(net, SGD)
    loss = task.loss({"image": x, "label": y})
    loss.backward()
    state = {n: t.detach().numpy() for n, t in net.named_parameters()}
    parts = [
        [state[f"canonical.{k}.network.linear.{n}"] for n in ("weight", "bias")] for k in range(3)
    ]
    weights, biases = np.stack([w[0] for w, _ in parts]), np.stack([b[0] for _, b in parts])
    outputs = x.numpy() @ weights.T + biases
    residual = outputs @ C - y.numpy()
    assert loss.item() == pytest.approx((residual**2).mean(), rel=1e-12)
    of_c = 2 * (residual[:, None] * outputs).mean(0)
    np.testing.assert_allclose(net.membership.grad, of_c, atol=1e-12)
    for k in range(3):
        layer = net.canonical[k].network.linear
        of_weight = 2 * C[k] * (residual[:, None] * x.numpy()).mean(0)
        np.testing.assert_allclose(layer.weight.grad[0], of_weight, atol=1e-12)
        np.testing.assert_allclose(layer.bias.grad[0], 2 * C[k] * residual.mean(), atol=1e-12)


def test_both_mixtures_are_equal_for_linear_models_and_differ_for_logistic_ones():
    """Probabilities are mixed, not logits, so the logistic mixture is no logistic model."""
    x, _ = rows()
    linear = [mixture(m)(x) for m in ("outputs", "parameters")]
    torch.testing.assert_close(*linear, rtol=0, atol=1e-12)
    logistic = [
        mixture(m, LogisticRegression, "softmax")(x).softmax(1) for m in ("outputs", "parameters")
    ]
    assert (logistic[0] - logistic[1]).abs().max() > 1e-2


def test_equal_linear_models_are_refused():
    with pytest.raises(ConfigError, match=r"start as equals .* model\.network\.spread"):
        Canonical([LinearRegression(3), LinearRegression(3)], ["*"], "outputs", "identity")
