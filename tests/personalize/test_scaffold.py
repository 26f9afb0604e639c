"""SCAFFOLD: its limits, the drift that it removes, and what it refuses."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from medfed.federation import local_client
from medfed.federation.reference import run_reference
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.local import Local
from medfed.personalize.scaffold import Scaffold
from medfed.standalone.errors import ConfigError, NonFiniteError
from tests.personalize.whole_runs import assert_one_sentence, gap, run
from tests.references.linear_net import ALL, gradient
from tests.toys import ToyData, ToyTask, toy_data, toy_federation


def test_one_client_trains_alone():
    data = toy_data(4, dtype=torch.float64)[2:3]
    assert gap(run(Scaffold(), data), run(Local(), data)) < 1e-14


def test_equal_clients_have_no_drift():
    source = toy_data(4, dtype=torch.float64)[2]
    data = [ToyData(f"c{i}", source.x, source.y) for i in range(3)]
    assert gap(run(Scaffold(), data), run(FedAvg(), data)) < 1e-13
    assert gap(run(Scaffold()), run(FedAvg())) > 1e-3


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_one_step_is_gradient_descent(weighting):
    """Of the whole federation: the control variates cancel in the mean."""
    corrected, plain = (run(kind(weighting=weighting), steps=1) for kind in (Scaffold, FedAvg))
    assert gap(corrected, plain) < 1e-13


def test_personal_entries_are_trained_as_in_fedper():
    """With all of the model personal nothing is left to be corrected."""
    assert gap(run(Scaffold(personal="all")), run(Local())) < 1e-14


def slope(algorithm, momentum: float, rounds: int = 100) -> float:
    """The norm of the federation's gradient at the end."""
    data = toy_data(4, dtype=torch.float64)
    task = ToyTask(norm=False, dtype=torch.float64)
    _, federation, _ = toy_federation(algorithm, task, data, steps=4, lr=0.05, momentum=momentum)
    run_reference(federation, rounds)
    w = {n: t.numpy() for n, t in federation.server["shared"].items()}
    total = sum(d.num_samples for d in data)
    found = [(d.num_samples / total, gradient(w, d.x.numpy(), d.y.numpy())) for d in data]
    return max(float(np.abs(sum(p * g[k] for p, g in found)).max()) for k in ALL)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_it_ends_where_the_federations_gradient_is_zero(momentum):
    """Four local steps leave FedAvg elsewhere."""
    assert slope(Scaffold(), momentum) < 1e-6
    assert slope(FedAvg(), momentum) > 1e-3


def test_to_count_steps_alone_would_diverge_with_momentum(monkeypatch):
    """c_i+ = c_i - c + (w - y) / (K eta) as printed."""
    printed = "effective_step_length", lambda make, rate, steps, *_: rate * steps
    monkeypatch.setattr(local_client, *printed)
    with pytest.raises(NonFiniteError):
        slope(Scaffold(), momentum=0.9)


def test_statistics_are_averaged_whatever_the_server_does():
    ends = []
    for share in (1.0, 0.5):
        _, federation, _ = toy_federation(Scaffold(server_lr=share))
        before = federation.server["shared"]
        run_reference(federation, 1)
        ends.append({n: t - before[n] for n, t in federation.server["shared"].items()})
    for name, whole in ends[0].items():
        scale = 1.0 if "running" in name else 0.5
        torch.testing.assert_close(ends[1][name], scale * whole)


def test_an_optimizer_without_proportion_is_refused_in_the_first_round():
    _, federation, local = toy_federation(Scaffold())
    local.model.make_optimizer = partial(torch.optim.Adam, lr=0.01)
    with pytest.raises(ConfigError, match=r"choose optimizer=sgd\."):
        run_reference(federation, 1)


def test_momentum_over_rounds_is_refused():
    _, federation, _ = toy_federation(Scaffold(), momentum=0.9, kept=True)
    with pytest.raises(ConfigError, match=r"choose local\.optimizer_state=fresh\."):
        run_reference(federation, 1)


def test_a_negative_share_is_refused():
    with pytest.raises(ConfigError, match=r"algorithm\.server_lr") as caught:
        Scaffold(server_lr=-0.1)
    assert_one_sentence(caught.value)
