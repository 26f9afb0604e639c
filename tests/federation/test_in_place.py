"""Steps over tensors that keep their places in memory, as a captured step needs them."""

from functools import partial

import torch

from medfed.common.tensors import digest
from medfed.federation.engine.gpu.steps import GpuSteps, PlanInPlace
from medfed.federation.engine.loop import LocalTrainer
from medfed.personalize.fedavg import FedAvg
from tests.sweeps import sweep
from tests.toys import toy_data, toy_federation

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
}


def places(local: LocalTrainer) -> tuple[int, ...]:
    """Where everything lies that a step reads and keeps."""
    plan = local.model.plan("all")
    assert isinstance(plan, PlanInPlace)
    return plan.places()


@sweep("kept", [False, True])
@sweep("name", OPTIMIZERS)
def test_steps_in_place_are_the_same_fused_steps(name: str, kept: bool) -> None:
    ends, seen = {}, []
    for in_place in (False, True):
        _, federation, local = toy_federation(FedAvg(), data=toy_data(), steps=3, kept=kept)
        local.model.make_optimizer = partial(OPTIMIZERS[name], fused=True)
        local.gpu = GpuSteps(torch.device("cpu")) if in_place else None
        local.rates = [0.05, 0.02]
        for number in range(2):
            for client in federation.clients.values():
                client.begin(number, "fit", 0)
                weights = client.train(client.weights, penalty=lambda w: w["body.weight"].sum())
                ends[in_place, number, client.id] = digest(weights), client.loss
                if in_place:
                    seen.append(places(local))
    for (in_place, *key), end in ends.items():
        assert end == ends[not in_place, *key]
    assert all(found == seen[0] for found in seen)
