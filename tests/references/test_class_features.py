"""What methods of classes and their features refuse by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from medfed.federation.reference import federate
from medfed.personalize.fedpac import FedPAC
from medfed.personalize.fedproto import FedProto
from medfed.personalize.knnper import KNNPer
from medfed.personalize.pfedfda import PFedFDA
from medfed.personalize.recalibrated import Recalibrated
from medfed.standalone.errors import ConfigError
from tests.references.class_net import K, clients
from tests.references.test_fedrod import Classes
from tests.toys import toy_federation

METHODS = {kind.__name__: kind for kind in (FedProto, FedPAC, PFedFDA, KNNPer, Recalibrated)}
LABELS = {
    "regression": (torch.rand(8, dtype=torch.double), torch.ones(2)),
    "survival": (torch.rand(8, 2, dtype=torch.double), torch.ones(1)),
    "findings": (torch.ones(8, 3), torch.ones(6)),
    "regions": (torch.ones(8, 2, 4, 4, dtype=torch.long), torch.ones(3)),
}


def summed(network, batch):
    return network(batch["image"]).sum()


@pytest.mark.parametrize("kind", LABELS)
@pytest.mark.parametrize("method", METHODS)
def test_other_tasks(method, kind):
    data = clients()
    data[2].y, data[2].label_counts = LABELS[kind]
    data[2].x = data[2].x[:8]
    with pytest.raises(
        ConfigError,
        match=f"{METHODS[method]().title} is for patients of one class each, .* of c2 are",
    ):
        federate(METHODS[method](), Classes().network, summed, data, personal="head.*")


@pytest.mark.parametrize("method", [name for name in METHODS if name != "Recalibrated"])
def test_a_head_that_is_the_whole_model(method):
    task = Classes()
    task.network = nn.Sequential()
    task.network.add_module("head", nn.Linear(3, K).double())
    said = "(the head is the whole model|The model has no shared part)"
    with pytest.raises(ConfigError, match=said):
        toy_federation(METHODS[method](), task, clients())
