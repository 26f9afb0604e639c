"""Averaged variances are those of all patients, whatever the method, the wire and the rank."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from medfed.common.tensors import weighted_mean
from medfed.federation.aggregation import pooled_variances, second_moments
from medfed.federation.reference import ArrayClient, federate
from medfed.federation.wire.packet import Message
from medfed.personalize.diana import DIANA
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.feddyn import FedDyn
from medfed.personalize.fedopt import FedAdam
from medfed.personalize.fedpd import FedPD
from medfed.personalize.heterofl import HeteroFL
from medfed.personalize.pfedme import PFedMe
from medfed.personalize.scaffold import Scaffold


def replies(rng, counts, kind, start):
    """What hospitals with other patients reply, and the patients of all of them."""
    patients = [rng.normal(rng.normal(0, 5), rng.uniform(0.5, 2), (n, 3)) for n in counts]
    made = []
    for values in patients:
        own = {
            "norm.running_mean": torch.tensor(values.mean(0)),
            "norm.running_var": torch.tensor(values.var(0)),
        }
        if kind == "update":
            own = {name: tensor - start[name] for name, tensor in own.items()}
        made.append(Message("fit", {"shared": own}, kinds={"shared": kind}))
    return made, patients


@pytest.mark.parametrize("centre", [0.0, 1e4], ids=["near 0", "far from 0"])
@pytest.mark.parametrize("kind", ["update", "state"])
@pytest.mark.parametrize("counts", [(40, 40), (10, 90, 300)], ids=["equal", "unequal"])
def test_the_mean_is_the_variance_of_all_patients(counts, kind, centre):
    start = {
        "norm.running_mean": torch.full((3,), centre, dtype=torch.float64),
        "norm.running_var": torch.full((3,), 2.0, dtype=torch.float64),
    }
    made, patients = replies(np.random.default_rng(1), counts, kind, start)
    everyone, received = np.concatenate(patients), Message("fit", {"shared": start})
    sent = [second_moments(reply, received, ["shared"]).parts["shared"] for reply in made]
    mean = pooled_variances(weighted_mean(sent, counts), start if kind == "state" else None)
    if kind == "update":
        mean = {name: start[name] + mean[name] for name in mean}
    # What is far from its centre loses what its square rounds away.
    away = max(np.abs(values.mean(0) - centre).max() for values in patients) ** 2
    tolerance = 1e-13 * max(1.0, away / everyone.var(0).min())
    np.testing.assert_allclose(mean["norm.running_var"], everyone.var(0), rtol=tolerance)
    np.testing.assert_allclose(
        mean["norm.running_mean"], everyone.mean(0), rtol=1e-12, atol=1e-15 * (1 + centre)
    )


def test_other_tensors_stay_as_they_are():
    tensors = {"running_var": torch.ones(1), "x.weight": torch.ones(1)}
    reply = Message("fit", {"shared": tensors}, kinds={"shared": "update"})
    assert second_moments(reply, Message(), ()) is reply
    assert pooled_variances(tensors, None) is tensors


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(2, momentum=None, affine=False), nn.Linear(2, 2)).double()


def hospitals():
    rng = np.random.default_rng(0)
    labels = torch.arange(64) % 2
    return [
        ArrayClient(name, torch.tensor(rng.normal(centre, 1.0, (64, 2))), labels, 64)
        for name, centre in {"low": -3.0, "high": 3.0}.items()
    ]


def whole_heterofl():
    return HeteroFL(widths=(1.0,))


KINDS = (FedAvg, Scaffold, FedAdam, FedDyn, PFedMe, FedPD, whole_heterofl, DIANA)


@pytest.mark.parametrize("kind", KINDS)
def test_two_hospitals_apart_have_the_variance_of_both(kind):
    """Means of -3 and 3 and variances of 1 give 10, where the mean of the variances is 1."""
    model = network()
    done = federate(
        kind(),
        model,
        lambda net, batch: nn.functional.cross_entropy(net(batch["image"]), batch["label"]),
        hospitals(),
        rounds=1,
        steps=2,
        optimizer=partial(torch.optim.SGD, lr=1e-9),
    )
    everyone = torch.cat([one.inputs for one in hospitals()])
    shared = done.federation.server["shared"]
    name = next(n for n in shared if n.endswith("running_var"))
    found = shared[name].double()
    torch.testing.assert_close(found, everyone.var(0, correction=0), rtol=0.03, atol=0)
