"""Gradients of single patients: clipped, summed, noisy; against PyTorch by hand, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from medfed.datamodules.client_data import ClientData
from medfed.federation.budget import LocalBudget
from medfed.federation.engine.loop import LocalTrainer
from medfed.federation.engine.private import (
    ClientPrivacy,
    ExamplePrivacy,
    FromSystem,
    PrivateGradients,
    rate_of,
)
from medfed.federation.local_client import LocalClient
from medfed.federation.split import ParameterSplit
from medfed.federation.wire.packet import Message
from medfed.functional.prox import Proximity
from medfed.standalone.errors import ConfigError

CASES = [0, 0, 0, 1, 2, 2, 3, 4, 5, 5]  # patients of ten rows
N = len(CASES)


def data(batch: int = N) -> ClientData:
    rng = torch.Generator().manual_seed(5)
    block = {
        "image": torch.randn(N, 3, generator=rng, dtype=torch.float64),
        "label": torch.randn(N, generator=rng, dtype=torch.float64),
        "case": torch.tensor(CASES),
    }
    return ClientData(
        id="a",
        train=block,
        evaluation={},
        channels=torch.ones(3, dtype=torch.bool),
        label_counts=torch.tensor([float(N)]),
        patients={"train": [f"p{k}" for k in range(6)]},
        batch_size=batch,
    )


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def loss_of(net: nn.Module):
    return lambda batch: (net(batch["image"]).squeeze(-1) - batch["label"]).square().mean() / 2


def client(private: ExamplePrivacy | None, *, batch: int = N, penalty=None, loss=None, **budget):
    """A client and its network; plain without privacy."""
    net = network()
    split = ParameterSplit.of(net, ())
    budget = LocalBudget(**{"steps": 3, **budget})
    optimizer = lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9)  # noqa: E731
    trainer = LocalTrainer(net, loss_of(net), split, optimizer, budget=budget)
    if private is not None:
        loss = loss or loss_of(net)
        trainer.gradients.private = PrivateGradients(net, loss, private, penalty and penalty(net))
    made = LocalClient(data(batch), trainer, trainer.model.initial(), {})
    made.begin(0, "fit", 0)
    return made


def rows_of(net: nn.Module, weights, unit: str):
    """The gradient of every unit, one by one, flat."""
    net.load_state_dict(weights)
    block = data().train
    keys = CASES if unit == "patient" else list(range(N))
    each = []
    for key in dict.fromkeys(keys):
        chosen = torch.tensor([k == key for k in keys])
        loss = loss_of(net)({n: t[chosen] for n, t in block.items()})
        parts = torch.autograd.grad(loss, tuple(net.parameters()))
        each.append(torch.cat([p.flatten() for p in parts]))
    return torch.stack(each)


def flat(gradient) -> torch.Tensor:
    return torch.cat([t.flatten() for t in gradient.values()])


FREE = ExamplePrivacy(clip=math.inf, noises={"a": 0.0}, unit="row")


def test_without_bound_and_noise_it_is_plain_training(subtests):
    """With all rows in every draw; a method's penalty and accumulated batches included."""
    for how in ({}, {"accumulate": 2}, {"clip": 0.1}):
        with subtests.test(**how):
            ends = []
            for private in (None, FREE):
                one = client(private, **how)
                anchor = {n: torch.ones_like(t) for n, t in one.weights.items()}
                ends.append(one.train(one.weights, penalty=Proximity(0.3, anchor)))
                ends.append({"loss": torch.tensor(one.loss)})
            for name in ends[0]:
                torch.testing.assert_close(ends[2][name], ends[0][name], rtol=1e-12, atol=1e-13)
            assert float(ends[1]["loss"]) == pytest.approx(float(ends[3]["loss"]), rel=1e-12)


def test_each_unit_is_clipped_by_itself_in_any_chunk(subtests):
    clip = 0.3
    for unit, chunk in (("row", None), ("row", 3), ("patient", None), ("patient", 1)):
        with subtests.test(unit=unit, chunk=chunk):
            one = client(ExamplePrivacy(clip, {"a": 0.0}, unit, chunk))
            each = rows_of(network(), one.weights, unit)
            norms = each.norm(dim=1, keepdim=True)
            assert (norms > clip).any()
            assert (norms < clip).any()
            expected = (each * (clip / norms).clamp(max=1)).mean(0)
            torch.testing.assert_close(flat(one.gradient(one.weights)), expected)


@pytest.mark.parametrize("value", [math.inf, math.nan, 1e300], ids=str)
def test_a_patient_whose_gradient_is_not_finite_counts_as_zero(value, caplog):
    """A sum that is not finite would show that this patient was drawn."""
    clip = 0.3
    one = client(ExamplePrivacy(clip, {"a": 0.0}, "row"))
    each = rows_of(network(), one.weights, "row")
    one.data.train["label"][4] = value
    norms = each.norm(dim=1, keepdim=True)
    kept = each * (clip / norms).clamp(max=1)
    expected = (kept.sum(0) - kept[4]) / N
    torch.testing.assert_close(flat(one.gradient(one.weights)), expected)
    assert "1 patients of a draw count as zero" in caplog.text


def test_mixed_precision_keeps_the_bound_of_each_row(subtests):
    """The losses are in bfloat16; what is clipped, and its sum, are in single precision."""
    net, clip = network().float(), 0.3
    for row in range(N):
        with subtests.test(row=row):
            block = {n: t[row : row + 1] for n, t in data().train.items()}
            block = {n: t.float() if t.is_floating_point() else t for n, t in block.items()}
            one = ClientData(
                id="a", train=block, evaluation={}, channels=torch.ones(3, dtype=torch.bool),
                label_counts=torch.ones(1), patients={"train": ["p"]}, batch_size=1,
            )  # fmt: skip
            private = PrivateGradients(net, loss_of(net), ExamplePrivacy(clip, {"a": 0.0}, "row"))
            private.begin(one, 0)
            net.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                for batch in private.batches(one, 0):
                    private.add(batch, dict(net.named_parameters()), 1.0)
            given = torch.cat([p.grad.flatten() for p in net.parameters()])
            assert given.dtype == torch.float32
            assert float(given.norm()) <= clip * (1 + 1e-6)
            weights = {n: t.double() for n, t in net.state_dict().items()}
            exact = rows_of(network(), weights, "row")[row]
            exact *= (clip / exact.norm()).clamp(max=1)
            torch.testing.assert_close(given.double(), exact, rtol=0.05, atol=0.02)


def test_a_loss_that_vmap_does_not_know_is_computed_one_by_one():
    def awkward(net):
        plain = loss_of(net)
        return lambda batch: plain(batch) * (2.0 if plain(batch).item() >= 0 else 1.0)

    private = ExamplePrivacy(0.3, {"a": 0.0})
    one = client(private)
    one.trainer.gradients.private = PrivateGradients(
        one.trainer.network, awkward(one.trainer.network), private
    )
    each = 2 * rows_of(network(), one.weights, "patient")
    expected = (each * (0.3 / each.norm(dim=1, keepdim=True)).clamp(max=1)).mean(0)
    torch.testing.assert_close(flat(one.gradient(one.weights)), expected)


def test_terms_of_the_weights_are_neither_clipped_nor_noisy():
    """A penalty of a method and the task's l2 come on top; a bound near 0 leaves only them."""
    private = ExamplePrivacy(1e-12, {"a": 0.0})

    def l2(net):
        return lambda: 0.5 * sum(p.square().sum() for p in net.parameters())

    one = client(private, penalty=l2, steps=1)
    anchor = {n: torch.ones_like(t) for n, t in one.weights.items()}
    end = one.train(one.weights, penalty=Proximity(0.3, anchor))
    for name, start in one.weights.items():
        step = start + 0.3 * (start - 1)
        torch.testing.assert_close(end[name], start - 0.05 * step, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("system", [False, True])
def test_noise_has_the_stated_variance_and_is_new_in_every_call(system):
    private = ExamplePrivacy(0.5, {"a": 4.0}, system=system)
    one, exact = client(private), client(ExamplePrivacy(0.5, {"a": 0.0}))
    mean = flat(exact.gradient(exact.weights))
    drawn = torch.stack([flat(one.gradient(one.weights)) - mean for _ in range(200)])
    expected = 0.5 * 4.0 / 6  # over six patients
    assert drawn.std().item() == pytest.approx(expected, rel=0.06)
    assert abs(drawn.mean().item()) < 4 * expected / math.sqrt(drawn.numel())
    assert len(drawn.unique(dim=0)) == 200
    # Both noises of a pair of numbers: neither neighbours nor calls go together.
    correlation = torch.corrcoef(drawn.T) - torch.eye(drawn.shape[1])
    assert correlation.abs().max() < 0.35


def test_noise_of_a_hospital_does_not_follow_from_the_seed():
    ends = [
        flat((one := client(ExamplePrivacy(0.5, {"a": 1.0}, system=system))).train(one.weights))
        for system in (False, False, True, True)
    ]
    assert torch.equal(ends[0], ends[1])
    assert not any(torch.equal(ends[k], ends[3]) for k in range(3))


def test_patients_enter_draws_by_chance_and_draws_may_be_empty():
    private = PrivateGradients(network(), lambda b: b, ExamplePrivacy(1.0, {"a": 1.0}))
    small = data(batch=1)
    assert rate_of(small) == 0.1
    draws = [b["unit"] for seed in range(400) for b in private.batches(small, seed)]
    entered = torch.stack([torch.bincount(d.unique(), minlength=6) for d in draws]).double()
    assert entered.mean(0).sub(0.1).abs().max() < 0.02
    empty = sum(not len(d) for d in draws) / len(draws)
    assert empty == pytest.approx(0.9**6, abs=0.03)
    for unit in draws:  # a patient comes with all of its rows
        counts = torch.bincount(unit, minlength=6)
        assert all(c in (0, CASES.count(k)) for k, c in enumerate(counts.tolist()))
    everybody = ExamplePrivacy(1.0, {"a": 1.0}, system=True)
    assert len(next(PrivateGradients(network(), print, everybody).batches(data(), 0))["unit"]) == N


def test_an_empty_draw_is_still_a_noisy_step():
    one = client(ExamplePrivacy(0.5, {"a": 1.0}))
    private = one.trainer.gradients.private
    private.begin(one.data, 0)
    none = {n: t[:0] for n, t in one.data.samples(torch.arange(N)).items()}
    trained = {n: t.requires_grad_() for n, t in one.weights.items()}
    loss = private.add({**none, "unit": torch.zeros(0, dtype=torch.int64)}, trained, 1.0)
    assert loss == 0
    assert all(t.grad.abs().min() > 0 for t in trained.values())


def test_numbers_of_the_system_are_uniform_and_normal():
    random = FromSystem()
    numbers = random.uniform(4000)
    assert 0 <= numbers.min() < 0.01 < 0.99 < numbers.max() < 1
    assert numbers.mean().item() == pytest.approx(0.5, abs=0.03)
    normal = random.normal(torch.zeros(50, 80))
    assert normal.shape == (50, 80)
    assert (normal.abs() < 1).float().mean().item() == pytest.approx(0.683, abs=0.04)
    assert random.normal(torch.zeros(0)).shape == (0,)


def test_a_hospital_that_was_not_planned_gets_no_noise():
    one = client(ExamplePrivacy(0.5, {"b": 1.0}))
    with pytest.raises(ConfigError, match=r"Client a was not part of the run, so priv"):
        one.train(one.weights)


def update(*sizes: float) -> Message:
    parts = {f"p{k}": {"w": torch.full((500,), s)} for k, s in enumerate(sizes)}
    return Message("fit", parts, kinds=dict.fromkeys(parts, "update"))


def test_a_client_is_clipped_over_all_parts_and_adds_its_share_of_noise():
    short, long = update(1e-3, 1e-3), update(3.0, 4.0)
    exact = ClientPrivacy(clip=1.0, sigma=0.0, seed=0)
    for name, part in exact.protect(short, 9).parts.items():
        assert torch.equal(part["w"], short.parts[name]["w"])
    parts = exact.protect(long, 9).parts
    whole = torch.cat([part["w"] for part in parts.values()])
    assert whole.norm().item() == pytest.approx(1.0)
    assert (parts["p1"]["w"] / parts["p0"]["w"]).mean().item() == pytest.approx(4 / 3)
    noisy = ClientPrivacy(clip=1.0, sigma=6.0, seed=0)
    replies = [noisy.protect(long, 9, f"c{k}") for k in range(9)]
    each = torch.cat([part["w"] for part in replies[0].parts.values()]) - whole
    assert each.std().item() == pytest.approx(2.0, rel=0.08)
    sums = sum(reply.parts["p0"]["w"] for reply in replies) - 9 * parts["p0"]["w"]
    assert sums.std().item() == pytest.approx(6.0, rel=0.1)
    system = ClientPrivacy(clip=1.0, sigma=6.0)
    first, second = (system.protect(long, 9).parts["p0"]["w"] for _ in range(2))
    assert not torch.equal(first, second)
    with pytest.raises(ConfigError, match="the part p0 holds weights"):
        noisy.protect(Message("fit", long.parts), 9)
