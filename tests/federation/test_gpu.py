"""What only a GPU can show: `pytest -m gpu` where there is one."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from medfed.datamodules.augmentation import Augmentation
from medfed.federation.budget import LocalBudget
from medfed.federation.engine.gpu.graphs import CudaGraphs, Graphs
from medfed.federation.engine.gpu.steps import Samples
from medfed.federation.reference import run_reference
from tests.federation.test_graphs import ADAM, METHODS, MOMENTUM, NEVER, dropping
from tests.federation.test_samples import client
from tests.sweeps import sweep
from tests.toys import ToyTask, toy_data, toy_federation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def federated(algorithm: Any, often: int, optimizer: Any, network: Any = None, **budget: Any):
    """Runs three rounds on a GPU."""
    device, task = torch.device("cuda", 0), ToyTask()
    task.network = task.network if network is None else network()
    federation, local = toy_federation(algorithm, task, toy_data(batch=4), rounds=3)[1:]
    task.network.to(device)
    federation.to(device)
    local.model.make_optimizer = optimizer
    local.rates = [0.05, 0.02, 0.01]
    local.budget = LocalBudget(**{"steps": 12, **budget})
    assert local.model.entries
    assert isinstance(local.gpu.graphs, Graphs)  # nobody has to ask for them
    local.gpu.graphs = Graphs(CudaGraphs(device), often, often)
    run_reference(federation, 3)
    return federation, local.gpu.graphs


@sweep("optimizer", [MOMENTUM, ADAM])
@sweep("name", METHODS)
def test_captured_steps_equal_the_others(name, optimizer):
    plain, _ = federated(METHODS[name], NEVER, optimizer, clip=0.5)
    captured, graphs = federated(METHODS[name], 1, optimizer, clip=0.5)
    assert graphs.captured
    assert not graphs.reasons
    assert captured.digests() == plain.digests()


@pytest.mark.parametrize("budget", [{"accumulate": 2}, {"optimizer_state": "kept"}])
def test_captured_dropout_and_budgets_equal_the_others(budget):
    plain, _ = federated(METHODS["ditto"], NEVER, ADAM, dropping, **budget)
    captured, graphs = federated(METHODS["ditto"], 1, ADAM, dropping, **budget)
    assert graphs.replayed
    assert captured.digests() == plain.digests()


def test_states_are_offloaded_between_turns():
    plain, _ = federated(METHODS["ditto"], 1, ADAM, optimizer_state="kept")
    other, _ = federated(METHODS["ditto"], 1, ADAM, optimizer_state="kept", offload=True)
    assert other.digests() == plain.digests()
    for name, local in other.clients.items():
        groups = [named for group in local.state_dict().values() for named in group.values()]
        assert not any(t.is_cuda for named in groups for t in named.values())
        assert other.personal_model(name)["head.bias"].is_cuda


def test_what_cannot_be_captured_leaves_nothing_behind():
    def norm_by_count():
        network = ToyTask().network
        network.norm.momentum = None
        return network

    plain, _ = federated(METHODS["fedavg"], NEVER, MOMENTUM, norm_by_count)
    other, graphs = federated(METHODS["fedavg"], 1, MOMENTUM, norm_by_count)
    assert graphs.reasons
    assert not graphs.captured
    assert other.digests() == plain.digests()


def test_batches_are_those_of_main_memory():
    device = torch.device("cuda", 0)
    recipe = Augmentation(flip_chance=0.5, affine_chance=0.5, rotation=20.0, noise_chance=0.5)
    for gigabytes in (None, 0.0):
        data = client(augment=recipe.build((6, 6), flips=(0, 1)))
        batches = list(Samples(gigabytes).batches(data, 3, device))
        for ours, theirs in zip(batches, data.train_batches(3), strict=True):
            assert ours["image"].device == device
            torch.testing.assert_close(ours["image"].cpu(), theirs["image"].cpu())
            assert torch.equal(ours["label"].cpu(), theirs["label"].cpu())


def test_a_round_waits_for_nothing_but_its_losses():
    def waiting(steps: int) -> int:
        """Warnings of PyTorch about waits, which do not grow with the steps."""
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with pytest.warns(UserWarning, match="synchroniz") as seen:
                federated(METHODS["fedavg"], NEVER, partial(torch.optim.SGD, lr=0.1), steps=steps)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return len(seen)

    assert waiting(4) == waiting(8)
