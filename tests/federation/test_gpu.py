"""Training on a GPU gives what a CPU gives, to rounding: `pytest -m gpu` where there is one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from medfed.common.tensors import distinct, to_device
from medfed.federation.algorithm import Algorithm
from medfed.federation.budget import LocalBudget
from medfed.federation.federation import Federation
from medfed.federation.other_state import OTHER
from medfed.federation.reference import run_reference
from medfed.personalize.ditto import Ditto
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.pfednet import PFedNet
from medfed.personalize.scaffold import Scaffold
from tests.federation import test_graphs
from tests.federation.test_graphs import OPTIMIZERS as RULES
from tests.sweeps import sweep
from tests.toys import ToyTask, toy_data, toy_federation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
METHODS = {
    "fedavg": FedAvg(),
    "ditto": Ditto(strength=0.3),
    "scaffold": Scaffold(option="I"),
    "pfednet": PFedNet(),
}
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.01),
}


def trained(
    algorithm: Algorithm,
    optimizer: str,
    device: str,
    after: Callable[[Federation], None] = lambda _: None,
    **budget: Any,
) -> Federation:
    """Runs three rounds on a device, and something after each."""
    # Before a normalisation a bias has no gradient but rounding, whose size Adam does not see.
    task = ToyTask(norm=optimizer == "sgd")
    federation, local = toy_federation(algorithm, task, toy_data(batch=4), rounds=3)[1:]
    task.network.to(device)
    federation.to(torch.device(device))
    local.model.make_optimizer = OPTIMIZERS[optimizer]
    local.rates = [0.05, 0.02, 0.01]
    local.budget = LocalBudget(**{"steps": 5, **budget})
    return run_reference(federation, 3, lambda _: after(federation))


@sweep("optimizer", OPTIMIZERS)
@sweep("name", METHODS)
def test_a_gpu_trains_as_a_cpu(name, optimizer):
    for budget in ({}, {"optimizer_state": "kept", "accumulate": 2}, {"clip": 0.5}):
        cpu = trained(METHODS[name], optimizer, "cpu", **budget)
        gpu = trained(METHODS[name], optimizer, "cuda", **budget)
        assert gpu.ledger.entries == cpu.ledger.entries
        for client in cpu.ids:
            for entry, value in gpu.personal_model(client).items():
                assert value.is_cuda is (entry != OTHER)  # which is read in main memory
                expected = cpu.personal_model(client)[entry]
                torch.testing.assert_close(value.cpu(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", RULES)
def test_samples_on_the_gpu_and_graphs_change_no_bit(name, caplog):
    how = {"optimizer": RULES[name], "device": "cuda", "optimizer_state": "kept", "clip": 0.5}
    kinds = {"resident_gib": 0}, {"resident_gib": 1}, {"resident_states": True}, {"graphs": True}
    copied, *others = (test_graphs.trained(**how, **more) for more in kinds)
    for other in others:
        test_graphs.assert_equal_runs(copied, other)
    assert "local.graphs" not in caplog.text  # no capture was refused


def test_a_batch_with_channel_masks_reaches_the_gpu():
    mask = torch.tensor([True, False]).expand(3, -1)
    batch = to_device({"channels": mask, "case": "a"}, torch.device("cuda"))
    assert batch["channels"].is_cuda
    assert batch["case"] == "a"
    assert torch.equal(batch["channels"].cpu(), mask)


@pytest.mark.parametrize("stay", [False, True], ids=["main memory", "the GPU"])
def test_states_between_turns_are_in(stay):
    def look(federation: Federation) -> None:
        for client in federation.clients.values():
            assert client.state["model"]["head.bias"].is_cuda is stay
            saved = distinct(client.state_dict().values())
            assert not any(t.is_cuda for t in saved.values())

    kept = {"optimizer_state": "kept", "resident_states": stay}
    federation = trained(METHODS["ditto"], "adam", "cuda", look, **kept)
    for name, client in federation.clients.items():
        assert not client.state["model"]["head.bias"].is_cuda  # the end gives the memory back
        assert federation.personal_model(name)["head.bias"].is_cuda
