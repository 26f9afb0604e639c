"""FedNova against Equation 8 in NumPy: clients whose epochs have unequal numbers of steps."""

from __future__ import annotations

from functools import partial
from itertools import islice

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from medfed.federation.algorithm import Cohort
from medfed.federation.reference import run_reference
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.fednova import FedNova
from medfed.standalone.errors import ConfigError
from tests.references.linear_net import ALL, gradient
from tests.references.pairing import assert_same, drawn_in, run_both_ways, to_numpy
from tests.sweeps import sweep
from tests.toys import ToyData, ToyTask, toy_data, toy_federation

ROUNDS, LR = 4, 0.05
SETTINGS = {
    "plain": {},
    "uniform": {"weighting": "uniform"},
    "momentum-half": {"momentum": 0.9, "fraction": 0.5},
}


def fednova(initial, clients, cohorts, momentum, weighting):
    """Coefficients of the steps' gradients, summed: a_i = sum_k (1 - beta^k) / (1 - beta)."""
    w, batches = initial, [iter(d.drawn) for d in clients]
    for cohort in cohorts:
        total, direction = 0.0, dict.fromkeys(ALL, 0.0)
        sizes = [clients[n].num_samples if weighting == "samples" else 1.0 for n in cohort]
        for size, n in zip(sizes, cohort, strict=True):
            steps = -(-clients[n].num_samples // 4)
            y, velocity = dict(w), dict.fromkeys(ALL, 0.0)
            for x, label in islice(batches[n], steps):
                g = gradient(y, x, label)
                velocity = {k: momentum * velocity[k] + g[k] for k in ALL}
                y = {k: y[k] - LR * velocity[k] for k in ALL}
            a = sum((1 - momentum**k) / (1 - momentum) for k in range(1, steps + 1))
            p = size / sum(sizes)
            total += p * a
            direction = {k: direction[k] + p * (y[k] - w[k]) / a for k in ALL}
        w = {k: w[k] + total * direction[k] for k in ALL}
    return w


@sweep("setting", SETTINGS)
def test_equals_the_papers_loop(setting):
    changes = dict(SETTINGS[setting])
    weighting, fraction = changes.pop("weighting", "samples"), changes.pop("fraction", 1.0)
    data = drawn_in(toy_data(4, dtype=torch.float64), 4)
    _, federation, local = toy_federation(
        FedNova(weighting=weighting),
        ToyTask(norm=False, dtype=torch.float64),
        data,
        steps=None,
        lr=LR,
        cohort=Cohort(fraction=fraction),
        **changes,
    )
    initial = to_numpy(local.model.initial())
    cohorts = [[federation.ids.index(c) for c in federation.members(t)] for t in range(ROUNDS)]
    run_reference(federation, ROUNDS)
    assert len({c.steps_done for c in federation.clients.values()}) > 1
    expected = fednova(initial, data, cohorts, changes.get("momentum", 0.0), weighting)
    assert_same(federation.server["shared"], expected, 1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_with_equally_many_steps_it_is_fedavg(momentum):
    ends = [run_both_ways(kind(), momentum=momentum)[0].server["shared"] for kind in KINDS]
    assert_same(ends[0], to_numpy(ends[1]), 1e-12)


KINDS = FedAvg, FedNova


class Parabola(pl.LightningModule):
    """(h / 2) (w - c)^2 of one number w, as least squares of one sample."""

    personal = ()
    evaluate = ToyTask.evaluate

    def __init__(self, start: float):
        super().__init__()
        self.network = nn.Linear(1, 1, bias=False).double()
        nn.init.constant_(self.network.weight, start)

    def loss(self, batch):
        return (self.network(batch["image"])[:, 0] - batch["label"]).square().mean() / 2


class Steps(ToyData):
    """One sample; an epoch has it so many times."""

    def __init__(self, id, curvature, optimum, epoch):
        root = torch.tensor([[curvature]], dtype=torch.float64).sqrt()
        super().__init__(id, root, root[0] * optimum)
        self.num_batches = epoch

    def train_batches(self, seed):
        for _ in range(self.num_batches):
            yield {"image": self.x, "label": self.y}


HOSPITALS = {"curvature": (1.0, 0.5, 2.0, 1.5), "optimum": (4.0, -1.0, 2.0, -3.0)}
EPOCHS = (1, 3, 10, 30)


def fixed_point(kind, lr):
    """Of a round, which maps w by an affine function: two rounds say which."""
    ends = []
    for start in (0.0, 1.0):
        rows = zip(*HOSPITALS.values(), EPOCHS, strict=True)
        data = [Steps(f"c{n}", *row) for n, row in enumerate(rows)]
        _, federation, _ = toy_federation(kind(), Parabola(start), data, steps=None, lr=lr)
        ends.append(float(run_reference(federation, 1).server["shared"]["weight"]))
    return ends[0] / (1 - (ends[1] - ends[0]))


def test_it_converges_to_the_optimum_of_the_mean_loss_and_fedavg_does_not():
    h, c = (np.array(v) for v in HOSPITALS.values())
    true, of_steps = ((p * h * c).sum() / (p * h).sum() for p in (np.ones(4), np.array(EPOCHS)))
    assert abs(true - of_steps) > 1
    gaps = [abs(fixed_point(FedNova, lr) - true) for lr in (0.01, 0.001)]
    assert gaps[0] < 1
    assert gaps[0] / gaps[1] == pytest.approx(10, rel=0.2)  # O(eta)
    fedavg = [fixed_point(FedAvg, lr) for lr in (0.01, 0.001)]
    assert abs(fedavg[1] - of_steps) < 0.1
    assert all(abs(w - true) > 1 for w in fedavg)


def test_statistics_are_averaged_and_not_divided():
    """As FedAvg's, where learning rates are so small that weights are equal."""
    found = []
    for kind in KINDS:
        data = toy_data(dtype=torch.float64, batch=4)
        task = ToyTask(dtype=torch.float64)
        _, federation, _ = toy_federation(kind(), task, data, steps=None, lr=1e-9)
        found.append(run_reference(federation, 3).server["shared"])
    for name in ("norm.running_mean", "norm.running_var"):
        torch.testing.assert_close(found[0][name], found[1][name], rtol=0, atol=1e-6)
        assert float(found[0][name].abs().max()) > 0.1


def test_adam_is_refused(monkeypatch):
    monkeypatch.setattr("tests.toys.sgd", lambda lr, _: partial(torch.optim.Adam, lr=lr))
    _, federation, _ = toy_federation(FedNova())
    with pytest.raises(ConfigError, match=r"choose optimizer=sgd"):
        run_reference(federation, 1)
