"""pFedNet: limits in which it becomes another method, and values that it refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from medfed.federation.reference import run_reference
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.local import Local
from medfed.personalize.pfednet import PFedNet
from medfed.personalize.similarity import SimilarityGraph
from medfed.standalone.errors import ConfigError
from tests.personalize.whole_runs import assert_one_sentence, gap, models, run
from tests.sweeps import sweep
from tests.toys import ToyData, ToyTask, toy_data, toy_federation

RING = SimilarityGraph(kind="ring")
ALONE = SimilarityGraph(kind="edges", edges=[["c0"], ["c1"], ["c2"], ["c3"]])


def test_without_strength_is_without_edges():
    free = run(PFedNet(strength=0.0, graph=RING))
    alone = run(PFedNet(strength=0.5, graph=ALONE))
    assert np.array_equal(models(free), models(alone))
    assert gap(free, run(PFedNet(strength=0.5, graph=RING))) > 1e-3


def test_without_strength_z_is_trained_locally():
    """With all of the model personal, the scaled step is local training; the literal is not."""
    options = {"personal": "all", "shared_rounds": 0, "strength": 0.0, "graph": RING}
    local = run(Local())
    assert gap(run(PFedNet(**options)), local) < 1e-14
    assert gap(run(PFedNet(z_step="literal", **options)), local) > 1e-2


@sweep(
    ("p", "strength", "kind"),
    [
        *[(p, s, "ring") for p in (1.0, 2.0, math.inf) for s in (1e3, math.inf)],
        (2.0, 1e3, "star"),
        (2.0, math.inf, "complete"),
    ],
)
def test_any_large_strength_is_uniform_fedavg(p, strength, kind):
    """lambda = inf leaves one common z, the mean: FedAvg when all of the model is personal."""
    federation = run(
        PFedNet(
            personal="all",
            shared_rounds=0,
            strength=strength,
            p=p,
            graph=SimilarityGraph(kind=kind),
        )
    )
    assert np.ptp(models(federation), axis=0).max() == 0
    assert gap(federation, run(FedAvg(weighting="uniform"))) < 1e-13


def test_consensus_stays_inside_components():
    pairs = SimilarityGraph(kind="edges", edges=[["c0", "c2"], ["c1", "c3"]])
    rows = models(run(PFedNet(strength=math.inf, graph=pairs)))
    assert np.array_equal(rows[0], rows[2])
    assert np.array_equal(rows[1], rows[3])
    assert np.abs(rows[0] - rows[1]).max() > 1e-3


def test_equal_clients_train_as_if_alone():
    source = toy_data(4, dtype=torch.float64)[2]
    data = [ToyData(f"c{i}", source.x, source.y) for i in range(3)]
    coupled = run(PFedNet(personal="all", shared_rounds=0, strength=0.7, graph=RING), data)
    assert gap(coupled, run(Local(), data)) < 1e-14


def test_a_personal_parameter_may_be_a_scalar():
    class Scale(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            return self.scale * x

    task = ToyTask()
    task.network = torch.nn.Sequential()
    task.network.add_module("body", torch.nn.Linear(3, 1))
    task.network.add_module("head", Scale())
    _, federation, _ = toy_federation(PFedNet(graph=RING, strength=0.0), task, toy_data(3))
    run_reference(federation, 2)
    scales = [float(federation.personal_model(c)["head.scale"]) for c in federation.ids]
    assert len({*scales, 2.0}) == 4


@sweep(
    ("make", "culprit"),
    [
        (lambda: PFedNet(strength=-0.1), "algorithm.strength"),
        (lambda: PFedNet(p=3.0), "p is 3.0"),
        (lambda: PFedNet(shared_rounds=0, personal_rounds=0), "algorithm.shared_rounds"),
        (lambda: PFedNet(shared_rounds=-1), "algorithm.shared_rounds"),
        (lambda: PFedNet(z_step="other"), "algorithm.z_step='other'"),
        (lambda: PFedNet(local_steps=0), "algorithm.local_steps"),
        (lambda: PFedNet(local_steps=-2), "algorithm.local_steps"),
        (lambda: toy_federation(PFedNet(personal="all", personal_rounds=0)), "shared_rounds"),
    ],
)
def test_bad_values_are_named(make, culprit):
    with pytest.raises(ConfigError, match=culprit) as caught:
        make()
    assert_one_sentence(caught.value)


@pytest.mark.parametrize("personal_rounds", [0, 1])
def test_local_statistics_follow_the_batches_with_and_without_z_phases(personal_rounds):
    """At rest, k batches leave the running mean at (1 - 0.9^k) of the data's."""
    data = toy_data(3)
    method = PFedNet(graph=RING, personal_rounds=personal_rounds)
    _, federation, _ = toy_federation(method, ToyTask(), data, lr=0.0, buffers="local", steps=4)
    run_reference(federation, 2)
    counted = 2 * 4 // (1 + personal_rounds)  # the phase that they follow has its share of steps
    for client in data:
        model = federation.personal_model(client.id)
        hidden = client.x @ model["body.weight"].T + model["body.bias"]
        expected = (1 - 0.9**counted) * hidden.mean(0)
        torch.testing.assert_close(model["norm.running_mean"], expected)
