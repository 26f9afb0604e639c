"""What methods may ask of the training loop, each against PyTorch by hand, in float64."""

from __future__ import annotations

import copy
from itertools import count

import pytest
import torch
from torch import nn

from medfed.common.tensors import digest
from medfed.federation.budget import LocalBudget
from medfed.federation.engine.gradients import Gradients, WatchedForward
from medfed.federation.local_client import LocalClient
from medfed.federation.round import Round
from medfed.personalize.ditto import Ditto
from medfed.personalize.fedper import FedPer
from medfed.personalize.fedrep import FedRep
from medfed.personalize.pfednet import PFedNet
from medfed.standalone.errors import ConfigError
from tests.references.pairing import drawn_in
from tests.toys import ToyTask, toy_data, toy_federation

LR = 0.05
DOUBLE = torch.float64


def client(*, norm: bool = True, batch: int | None = 4, clip=None, **changes) -> LocalClient:
    """A client of 8 samples; without a batch size, a batch is all of them."""
    data = toy_data(dtype=DOUBLE, batch=batch)
    data = drawn_in(data, batch) if batch else data
    task = ToyTask(norm=norm, dtype=DOUBLE)
    _, federation, _ = toy_federation(FedPer(), task, data, lr=LR, clip=clip, **changes)
    found = federation.clients["c1"]
    found.begin(0, "fit", 0)
    return found


def loss(network: nn.Module, x, y):
    return (network(x).squeeze(-1) - y).square().mean() / 2


def gradient(found: LocalClient, at, x, y):
    network = copy.deepcopy(found.trainer.network).train()
    network.load_state_dict(at, strict=False)
    weights = dict(network.named_parameters())
    value = loss(network, torch.as_tensor(x), torch.as_tensor(y))
    return dict(zip(weights, torch.autograd.grad(value, weights.values()), strict=True))


def assert_close(found, expected):
    assert set(expected) <= set(found)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-12, atol=1e-13)


def test_parts_may_have_their_own_step_sizes():
    found = client(momentum=0.9, steps=3)
    start = found.weights
    plain = found.train(start)
    found.begin(0, "fit", 0)
    same = found.train(start, rates={"shared": LR, "personal": LR})
    found.begin(0, "fit", 0)
    half = found.train(start, rates={"shared": LR, "personal": 0.0})
    assert digest(plain) == digest(same)
    assert digest({n: half[n] for n in found.split.personal}) == digest(
        {n: start[n] for n in found.split.personal}
    )
    found.begin(0, "fit", 0)
    other = found.train(start, steps=1, rates={"shared": LR, "personal": 3 * LR})
    g = gradient(found, start, *found.data.drawn[-1])
    assert_close(other, {n: start[n] - (1 + 2 * ("head" in n)) * LR * g[n] for n in g})


def test_a_direction_stands_for_the_gradient():
    """The gradient itself leads where a plain run does, statistics, momentum and clip included."""
    found = client(momentum=0.9, steps=3, clip=0.3)
    start = found.weights
    plain = found.train(start)
    loss_before, passes = found.loss, found.passes
    found.begin(0, "fit", 0)
    again = found.train(start, direction=lambda weights, grad_at: grad_at(weights))
    assert digest(plain) == digest(again)
    assert found.loss == loss_before
    assert found.passes == tuple(2 * p for p in passes)


def test_a_second_gradient_may_be_of_the_next_batch():
    """Which no step sees again, and whose statistics nobody takes; it is kept for the step."""
    found = client(steps=2)
    start, seen = found.weights, []

    def direction(weights, grad_at):
        own, other = grad_at(weights), grad_at(weights, fresh=1)
        assert digest(grad_at(weights, fresh=1)) == digest(other)
        seen.append(({n: t.clone() for n, t in weights.items()}, own, other))
        return own

    end = found.train(start, direction=direction)
    drawn = found.data.drawn[:4]
    for (weights, own, other), x, y in zip(seen, drawn[::2], drawn[1::2], strict=True):
        assert_close(own, gradient(found, {**start, **weights}, *x))
        assert_close(other, gradient(found, {**start, **weights}, *y))
    assert found.passes == (6, 0)
    network = copy.deepcopy(found.trainer.network).train()
    network.load_state_dict(start, strict=False)
    network(torch.as_tensor(drawn[0][0]))
    network.load_state_dict(seen[1][0], strict=False)
    network(torch.as_tensor(drawn[2][0]))
    assert_close(end, {n: t for n, t in network.named_buffers() if "running" in n})


def test_outputs_may_change_before_the_loss():
    found = client(norm=False, batch=None, steps=1)
    start, data = found.weights, found.data
    end = found.train(start, outputs=lambda out: out + 1, after_step=lambda w, grad_at: None)
    g = gradient(found, start, data.x, data.y - 1)
    assert_close(end, {n: start[n] - LR * g[n] for n in g})


def test_a_penalty_may_see_the_batch_and_the_forward_pass():
    """Its gradient passes through the live features; other weights are as they are evaluated."""
    found = client(batch=None, steps=1)
    start, data = found.weights, found.data
    other = {n: t + 0.1 for n, t in start.items()}
    seen = {}

    def penalty(batch, live, forward):
        assert torch.equal(batch["image"], data.x)
        seen["other"] = (forward(other), forward(other, features=True))
        seen["live"] = forward(live).detach()
        return forward(live, features=True).square().sum() / 7 - forward.loss / 2

    end = found.train(start, batch_penalty=penalty)
    network = copy.deepcopy(found.trainer.network).train()
    network.load_state_dict(start, strict=False)
    features = network.norm(network.body(data.x))
    torch.testing.assert_close(seen["live"], network.head(features))
    value = loss(network.head, features, data.y) / 2 + features.square().sum() / 7
    weights = dict(network.named_parameters())
    g = dict(zip(weights, torch.autograd.grad(value, weights.values()), strict=True))
    assert_close(end, {n: start[n] - LR * g[n] for n in g})
    network.load_state_dict(other, strict=False)
    network.eval()
    assert_close(
        dict(zip("ab", seen["other"], strict=True)),
        {"a": network(data.x), "b": network.norm(network.body(data.x))},
    )
    assert found.passes == (1, 2)
    assert found.trainer.network.training
    assert not found.trainer.network._forward_hooks


def test_features_of_positions_are_averaged_and_a_model_without_a_head_has_none():
    network, x = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Conv1d(2, 1, 1)), torch.randn(4, 1, 9)
    live = dict(network.named_parameters())
    for head, known in ((["1.weight", "1.bias"], True), (["membership"], False)):
        watched = WatchedForward(network, live, head, lambda *_: None, None, Gradients(lambda _: x))
        with watched.watching():
            network(x)
        if known:
            expected = network[0](x).mean(2)
            assert torch.equal(watched(live, features=True), expected)
            assert torch.equal(watched({**live}, features=True), expected)
        else:
            with pytest.raises(ConfigError, match=r"model\.personal"):
                watched(live, features=True)


def test_loss_of_validation():
    found = client(steps=1)
    at = {n: t + 0.1 for n, t in found.weights.items()}
    network = copy.deepcopy(found.trainer.network).eval()
    network.load_state_dict(at, strict=False)
    expected = loss(network, found.data.x, found.data.y).item()
    assert found.loss_at(at, split="val") == pytest.approx(expected, rel=1e-12)
    assert found.passes == (0, 1)
    found.trainer.measure = lambda batches: 3.0 * len(list(batches))
    assert found.loss_at(at, split="val") == 3
    found.data.eval_batches = lambda split: iter(())
    with pytest.raises(ConfigError, match="Client c1 has no val data; give it some"):
        found.loss_at(at, split="val")


@pytest.mark.parametrize("budget", ["equal", "paper"])
def test_budgets_are_divided_or_given_to_each_phase(budget):
    """What is reported is what was done."""
    for algorithm, share in ((Ditto(), 0.5), (FedRep(), 0.5), (PFedNet(), 0.5), (FedPer(), 1)):
        _, federation, local = toy_federation(algorithm, steps=6)
        local.budget = LocalBudget(6, budget=budget)
        current = Round(federation, 0)
        for _ in count():
            for client in current.recipients:
                current.receive(client, current.fit(client))
            if not current.close_phase():
                break
        expected = 6 if budget == "equal" else 6 / share
        for found in federation.clients.values():
            assert found.steps_done == expected
            assert found.passes == (expected, 0)
