"""Limits in which one algorithm becomes another, and values that none accepts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from medfed.errors import ConfigError
from medfed.federation.federation import Federation
from medfed.federation.reference import run_reference
from medfed.personalize.ditto import Ditto
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.fedbn import FedBN
from medfed.personalize.fedper import FedPer
from medfed.personalize.fedprox import FedProx
from medfed.personalize.fedrep import FedRep
from medfed.personalize.local import Local
from medfed.personalize.pfednet import PFedNet
from medfed.personalize.similarity import SimilarityGraph
from tests.toys import ToyData, ToyTask, toy_data, toy_federation

ROUNDS = 3
RING = SimilarityGraph(kind="ring")
ALONE = SimilarityGraph(kind="edges", edges=[["c0"], ["c1"], ["c2"], ["c3"]])


def run(algorithm, data=None, **changes) -> Federation:
    """Full batches in double precision, four unequal clients unless others are given."""
    task = ToyTask(norm=False, dtype=torch.float64)
    data = data or toy_data(4, dtype=torch.float64)
    _, federation, _ = toy_federation(algorithm, task, data, **{"steps": 4, **changes})
    return run_reference(federation, ROUNDS)


def models(federation: Federation) -> np.ndarray:
    """A row per client: its personal model."""
    return np.stack(
        [
            torch.cat([t.flatten() for t in federation.personal_model(c).values()]).numpy()
            for c in federation.ids
        ]
    )


def gap(a: Federation, b: Federation) -> float:
    return float(np.abs(models(a) - models(b)).max())


def test_pfednet_without_strength_is_pfednet_without_edges():
    free = run(PFedNet(strength=0.0, graph=RING))
    alone = run(PFedNet(strength=0.5, graph=ALONE))
    assert np.array_equal(models(free), models(alone))
    assert gap(free, run(PFedNet(strength=0.5, graph=RING))) > 1e-3


def test_pfednet_without_strength_trains_z_locally():
    """With all of the model personal, the scaled step is local training; the literal is not."""
    options = {"personal": "all", "shared_rounds": 0, "strength": 0.0, "graph": RING}
    local = run(Local())
    assert gap(run(PFedNet(**options)), local) < 1e-14
    assert gap(run(PFedNet(z_step="literal", **options)), local) > 1e-2


@pytest.mark.parametrize(
    ("p", "strength", "kind"),
    [
        *[(p, s, "ring") for p in (1.0, 2.0, math.inf) for s in (1e3, math.inf)],
        (2.0, 1e3, "star"),
        (2.0, math.inf, "complete"),
    ],
)
def test_pfednet_with_any_large_strength_is_uniform_fedavg(p, strength, kind):
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


def test_pfednet_consensus_stays_inside_components():
    pairs = SimilarityGraph(kind="edges", edges=[["c0", "c2"], ["c1", "c3"]])
    rows = models(run(PFedNet(strength=math.inf, graph=pairs)))
    assert np.array_equal(rows[0], rows[2])
    assert np.array_equal(rows[1], rows[3])
    assert np.abs(rows[0] - rows[1]).max() > 1e-3


def test_fedprox_tends_to_fedavg():
    fedavg = run(FedAvg())
    gaps = [gap(run(FedProx(mu=mu)), fedavg) for mu in (1e-1, 1e-6, 1e-12)]
    assert gaps[0] > 1e-3
    assert gaps[1] == pytest.approx(gaps[0] * 1e-5, rel=0.2)
    assert gaps[2] < 1e-11


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("kind", [FedAvg, FedPer, FedBN])
def test_one_client_trains_alone(kind, weighting):
    """Averaging over one client does nothing, whatever of the model is personal."""
    data = toy_data(4, dtype=torch.float64)[2:3]
    personal = {} if kind is not FedBN else {"personal": "none"}
    federation = run(kind(weighting=weighting, **personal), data, momentum=0.9)
    assert gap(federation, run(Local(), data, momentum=0.9)) < 1e-14


def test_equal_clients_train_as_if_alone():
    source = toy_data(4, dtype=torch.float64)[2]
    data = [ToyData(f"c{i}", source.x, source.y) for i in range(3)]
    local = run(Local(), data)
    assert gap(run(FedAvg(), data), local) < 1e-14
    coupled = run(PFedNet(personal="all", shared_rounds=0, strength=0.7, graph=RING), data)
    assert gap(coupled, local) < 1e-14
    assert gap(run(FedAvg()), run(Local())) > 1e-2


def test_fedper_without_personal_part_is_fedavg():
    assert np.array_equal(models(run(FedPer(personal="none"))), models(run(FedAvg())))
    assert gap(run(FedPer()), run(FedAvg())) > 1e-2


def test_ditto_without_strength_is_local_on_its_share():
    """Of 5 steps the personal model has 3."""
    rows = models(run(Ditto(strength=0.0), steps=5))
    assert np.array_equal(rows, models(run(Local(), steps=3)))
    assert np.abs(rows - models(run(Ditto(strength=1.0), steps=5))).max() > 1e-3


@pytest.mark.parametrize(
    ("algorithm", "share"), [(FedProx(personal="all"), 4), (Ditto(personal="all"), 2)]
)
def test_nothing_shared_is_nothing_to_be_tied_to(algorithm, share):
    assert gap(run(algorithm), run(Local(), steps=share)) < 1e-14


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


def test_ditto_draws_to_its_global_model():
    """The distance of the personal models from w falls as lambda grows."""
    spread = [np.ptp(models(run(Ditto(strength=s))), axis=0).max() for s in (0.0, 1.0, 5.0)]
    assert spread[0] > 1.05 * spread[1] > 1.1 * spread[2]


@pytest.mark.parametrize(
    ("make", "culprit"),
    [
        (lambda: FedProx(mu=0.0), "algorithm.mu"),
        (lambda: FedProx(mu=math.nan), "algorithm.mu"),
        (lambda: Ditto(strength=-1.0), "algorithm.strength"),
        (lambda: FedRep(head_share=1.0), "algorithm.head_share"),
        (lambda: PFedNet(strength=-0.1), "algorithm.strength"),
        (lambda: PFedNet(p=3.0), "p is 3.0"),
        (lambda: PFedNet(shared_rounds=0, personal_rounds=0), "algorithm.shared_rounds"),
        (lambda: PFedNet(shared_rounds=-1), "algorithm.shared_rounds"),
        (lambda: PFedNet(z_step="other"), "algorithm.z_step='other'"),
        (lambda: PFedNet(local_steps=0), "algorithm.local_steps"),
        (lambda: PFedNet(local_steps=-2), "algorithm.local_steps"),
        (lambda: FedAvg(weighting="equal"), "algorithm.weighting='equal'"),
        (lambda: toy_federation(PFedNet(personal="all", personal_rounds=0)), "shared_rounds"),
        (lambda: toy_federation(FedPer(personal="haed.*")), "haed"),
    ],
)
def test_bad_values_are_named(make, culprit):
    with pytest.raises(ConfigError, match=culprit.replace("*", r"\*")) as caught:
        make()
    assert "\n" not in str(caught.value)
    assert str(caught.value).rstrip().endswith(".")
