"""Steps as graphs leave the bits of ordinary steps; what no graph can repeat takes ordinary ones.

On the CPU a stand-in records nothing and takes the step when it is replayed. All else is what runs
on a GPU: inputs and the optimizer's state in fixed memory, steps before the capture undone.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from medfed.federation.assemble import assemble
from medfed.federation.budget import LocalBudget
from medfed.federation.engine import batches, graphs
from medfed.federation.engine.gradients import Gradients
from medfed.federation.engine.graphs import obstacle
from medfed.federation.hospital import ArrayClient
from medfed.federation.reference import run_reference
from medfed.personalize.ditto import Ditto
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.fedrep import FedRep
from medfed.personalize.scaffold import Scaffold


class StandIn:
    """Records by remembering the step; counts what is recorded and replayed."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, step, optimizer):
        self.recorded += 1
        loss = torch.zeros(())

        def replay() -> None:
            self.replayed += 1
            loss.copy_(step())

        return loss, replay


@pytest.fixture
def stand_in(monkeypatch):
    made = StandIn()
    monkeypatch.setattr(graphs, "record", made)
    monkeypatch.setattr(batches, "DEVICES", {"cpu"})
    return made


class Network(nn.Module):
    """A perceptron with a middle."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.middle, self.head = nn.Linear(3, 4), middle, nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.middle(self.body(x)))


def trained(algorithm=None, optimizer=None, middle=None, device="cpu", **budget: Any):
    """Two clients, whose last batches are short; returns all hashes, and passes."""
    network, rounds = Network(middle or nn.BatchNorm1d(4)).to(device), 2
    torch.manual_seed(1)
    data = [ArrayClient(f"c{n}", torch.randn(8, 3), torch.arange(8) % 2, 3) for n in range(2)]
    federation, local = assemble(
        algorithm or FedAvg(),
        network,
        lambda batch: nn.functional.cross_entropy(network(batch["image"]), batch["label"]),
        data,
        personal="head.*",
        optimizer=optimizer or partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5),
        rounds=rounds,
        budget=LocalBudget(**{"steps": 7, **budget}),
    )
    federation.to(torch.device(device))
    run_reference(federation, rounds)
    passes = {name: (c.passes, c.training_loss) for name, c in federation.clients.items()}
    states = {name: c.state_dict() for name, c in federation.clients.items()}
    return federation.digests(), passes, states, local


def assert_equal_runs(first, second):
    assert first[:2] == second[:2]
    for name, saved in first[2].items():
        for slot, tensors in saved["optimizers"].items():
            for field, tensor in tensors.items():
                other = second[2][name]["optimizers"][slot][field]
                # Not torch.equal: the sign of a zero counts, too.
                both = [t.cpu().numpy().tobytes() for t in (tensor, other)]
                assert both[0] == both[1], (slot, field)


OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("state", ["fresh", "kept"])
def test_graphs_leave_the_bits_of_ordinary_steps(name, state, stand_in):
    budget = {"optimizer_state": state, "clip": 0.5}
    plain = trained(optimizer=OPTIMIZERS[name], **budget)
    assert not stand_in.recorded
    graphed = trained(optimizer=OPTIMIZERS[name], graphs=True, **budget)
    assert_equal_runs(plain, graphed)
    assert stand_in.recorded == 2  # one for each step size
    # Seven steps of 3, 3, 2, 3, 3, 2, 3 samples: those of 2 are ordinary.
    assert stand_in.replayed == 2 * 2 * 5


METHODS = {"ditto": Ditto(), "fedrep": FedRep(), "scaffold": Scaffold()}


@pytest.mark.parametrize("name", METHODS)
def test_methods_leave_their_bits(name, stand_in, caplog):
    plain = trained(METHODS[name])
    with caplog.at_level(logging.WARNING):
        assert_equal_runs(plain, trained(METHODS[name], graphs=True))
    acting = "local.graphs=true has no effect on some steps: a function of the method."
    assert caplog.messages == [acting] * (name != "fedrep")
    assert bool(stand_in.replayed) is (name != "scaffold")


class Counting(nn.Module):
    """Keeps a number, which no graph repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += self.training
        return x * (1 + 0.01 * self.calls)


class Replacing(nn.Module):
    """Puts another tensor in a buffer's place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Drawing(nn.Module):
    """Drops values without a layer that says so."""

    def forward(self, x):
        return nn.functional.dropout(x, 0.5, self.training)


REFUSED = {
    "counting": (Counting, "the network changes more than tensors in place"),
    "replacing": (Replacing, "the network changes more than tensors in place"),
    "drawing": (Drawing, "they draw random numbers"),
    "dropout": (nn.Dropout, "dropout"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_graph_repeats_takes_ordinary_steps_and_says_so_once(name, stand_in, caplog):
    make, reason = REFUSED[name]
    plain = trained(middle=make())
    with caplog.at_level(logging.WARNING):
        assert_equal_runs(plain, trained(middle=make(), graphs=True))
    assert caplog.messages == [f"local.graphs=true has no effect on some steps: {reason}."]
    assert not stand_in.recorded


def test_a_refused_capture_takes_ordinary_steps_and_says_so_once(stand_in, monkeypatch, caplog):
    def refuse(step, optimizer):
        raise RuntimeError("operation not permitted when stream is capturing\nCompile with ...")

    plain = trained(optimizer=OPTIMIZERS["adam"], optimizer_state="kept")
    monkeypatch.setattr(graphs, "record", refuse)
    with caplog.at_level(logging.WARNING):
        refused = trained(optimizer=OPTIMIZERS["adam"], optimizer_state="kept", graphs=True)
    assert_equal_runs(plain, refused)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].endswith(": operation not permitted when stream is capturing.")


def test_auto_and_false_make_no_graph(stand_in):
    for chosen in ("auto", False):
        trained(graphs=chosen)
    assert not stand_in.recorded
    assert LocalBudget().graphs == "auto"


def test_a_cpu_says_once_what_only_a_gpu_does(caplog):
    with caplog.at_level(logging.WARNING):
        assert_equal_runs(trained(), trained(graphs=True))
    sentence = "local.graphs=true has no effect on some steps: the network is on no GPU."
    assert caplog.messages == [sentence]


LAYER = nn.Linear(2, 2)


def made(kind=torch.optim.SGD, **options):
    return kind(LAYER.parameters(), **{"lr": 0.1, **options})


def computed(**how):
    gradients = Gradients(lambda batch: batch["image"].sum())
    vars(gradients).update(how)
    return gradients


class Own(torch.optim.SGD):
    """A user's."""


TABLE: dict[str, tuple[dict[str, Any], str | None]] = {
    "plain": ({}, None),
    "clip, momentum": ({"budget": LocalBudget(clip=1.0), "optimizer": made(momentum=0.9)}, None),
    "adam": ({"optimizer": made(torch.optim.Adam)}, None),
    "adamw": ({"optimizer": made(torch.optim.AdamW)}, None),
    "kept": ({"budget": LocalBudget(optimizer_state="kept")}, None),
    "a part": ({"how": {"update": "shared", "rates": {"shared": 0.1}, "penalty": None}}, None),
    "penalty": ({"how": {"penalty": len}}, "a function of the method"),
    "batch penalty": ({"how": {"batch_penalty": len}}, "a function of the method"),
    "outputs": ({"how": {"outputs": len}}, "a function of the method"),
    "direction": ({"how": {"direction": len}}, "a function of the method"),
    "after step": ({"how": {"after_step": len}}, "a function of the method"),
    "accumulation": ({"budget": LocalBudget(accumulate=2)}, "local.accumulate"),
    "private": ({"gradients": computed(private=object())}, "privacy.example"),
    "float16": ({"gradients": computed(half=True)}, "trainer.precision"),
    "compiled": ({"budget": LocalBudget(compile=True)}, "local.compile"),
    "other optimizer": ({"optimizer": made(torch.optim.RMSprop)}, "the optimizer"),
    "own optimizer": ({"optimizer": made(Own)}, "the optimizer"),
    "dampening": ({"optimizer": made(momentum=0.9, dampening=0.1)}, "the optimizer"),
    "a tensor": ({"optimizer": made(lr=torch.tensor(0.1))}, "the optimizer"),
    "differentiable": ({"optimizer": made(differentiable=True)}, "the optimizer"),
    "dropout": ({"network": nn.Sequential(LAYER, nn.Dropout2d(0.1))}, "dropout"),
    "no dropout": ({"network": nn.Sequential(LAYER, nn.Dropout(0.0))}, None),
}


@pytest.mark.parametrize("name", TABLE)
def test_what_may_be_a_graph_follows_from_the_plan(name, stand_in):
    facts, expected = TABLE[name]
    plain = {"how": {}, "budget": LocalBudget(), "optimizer": made(), "network": LAYER}
    assert obstacle(**{**plain, "gradients": computed(), **facts}) == expected
