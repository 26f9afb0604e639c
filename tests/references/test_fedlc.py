"""FedLC against cross-entropy with margins in NumPy: three classes, one of which a client lacks."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from medfed.federation.reference import onboarded_client, run_onboarding, run_reference
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.fedlc import FedLC
from medfed.standalone.errors import ConfigError
from tests.references.linear_net import ALL
from tests.references.pairing import assert_same, to_numpy
from tests.references.test_fedrod import LR, SETTINGS, STEPS, clients, finished, gradient
from tests.sweeps import sweep
from tests.toys import ToyTask, toy_data, toy_federation


def margins(counts: np.ndarray, margin: str, tau: float) -> np.ndarray:
    with np.errstate(divide="ignore"):
        if margin == "power":
            return -tau * np.where(counts > 0, counts, np.nan) ** -0.25
        return tau * np.log(np.where(counts > 0, counts, np.nan) / counts.sum())


def fedlc(w, data, cohorts, momentum, margin, tau):
    """Absent classes leave the log-sum-exp."""
    batches = [iter(d.drawn) for d in data]
    for cohort in cohorts:
        ends = {}
        for n in cohort:
            prior = np.nan_to_num(margins(data[n].label_counts.numpy(), margin, tau), nan=-np.inf)
            y, velocity = dict(w), {k: np.zeros_like(w[k]) for k in ALL}
            for x, label in islice(batches[n], STEPS):
                g = gradient(y, x, label, prior)
                velocity = {k: momentum * velocity[k] + g[k] for k in ALL}
                y = {k: y[k] - LR * velocity[k] for k in ALL}
            ends[n] = y
        sizes = {n: data[n].num_samples for n in cohort}
        w = {k: sum(s * ends[n][k] for n, s in sizes.items()) / sum(sizes.values()) for k in ALL}
    return w


@sweep("setting", SETTINGS)
@sweep("tau", [1.0, 0.4])
@sweep("margin", ["power", "prior"])
def test_equals_the_papers_loop(margin, tau, setting):
    data, changes = clients(), SETTINGS[setting]
    federation, initial = finished(FedLC(margin=margin, strength=tau), data, **changes)
    cohorts = [[federation.ids.index(c) for c in federation.members(t)] for t in range(4)]
    expected = fedlc(initial, data, cohorts, changes.get("momentum", 0.0), margin, tau)
    assert_same(federation.server["shared"], expected, 1e-12)


@pytest.mark.parametrize("margin", ["power", "prior"])
def test_equal_counts_and_strength_zero_are_fedavg(margin):
    plain, _ = finished(FedAvg(), clients(even=True))
    even, _ = finished(FedLC(margin=margin), clients(even=True))
    assert_same(even.server["shared"], to_numpy(plain.server["shared"]), 1e-12)
    data = clients()[1:]  # all of whom have every class
    found = [finished(kind, data)[0] for kind in (FedAvg(), FedLC(margin=margin, strength=0.0))]
    assert_same(found[1].server["shared"], to_numpy(found[0].server["shared"]), 1e-12)


def test_an_absent_class_leaves_the_softmax():
    """The loss is that of the classes that are there, and finite with label smoothing."""
    logits, label = torch.randn(6, 3, dtype=torch.float64), torch.tensor([0, 2] * 3)
    moved = logits + FedLC(margin="prior").margins(torch.tensor([3, 0, 3]))
    two = logits[:, [0, 2]] + np.log(0.5)
    torch.testing.assert_close(cross_entropy(moved, label), cross_entropy(two, label // 2))
    assert torch.isfinite(cross_entropy(moved, label, label_smoothing=0.1))


def test_margins_of_the_page():
    """100 against 5 samples: a rare class is favoured by .35 (power) or 3.0 (prior)."""
    counts = torch.tensor([100.0, 5.0])
    gaps = [float(FedLC(margin=m).margins(counts).diff()) for m in ("power", "prior")]
    assert gaps == pytest.approx([-0.3525, -2.9957], abs=1e-4)


@pytest.mark.parametrize("margin", ["power", "prior"])
def test_own_shares_move_the_biases_alone(margin):
    even, own = (finished(FedLC(margin=margin, prior=p), clients())[0] for p in ("even", "own"))
    assert_same(own.server["shared"], to_numpy(even.server["shared"]), 0.0)
    for client, data in zip(even.ids, clients(), strict=True):
        counts = np.maximum(data.label_counts.numpy(), 0.5)
        moved = counts**-0.25 * -1 if margin == "power" else np.log(counts / 8)
        expected = to_numpy(even.personal_model(client))
        expected["head.bias"] = expected["head.bias"] + moved
        assert_same(own.personal_model(client), expected, 1e-12)
    newcomer = onboarded_client(own, clients()[2])
    model = own.algorithm.onboard(newcomer, run_onboarding(own, newcomer)[0])
    assert_same(model, to_numpy(own.personal_model("c2")), 1e-12)


def test_one_logit_gets_the_difference_of_the_margins():
    """Two classes by one logit learn as by two, of which class 0 stays at 0."""
    method, counts = FedLC(), torch.tensor([9.0, 2.0])
    z, label = torch.randn(5, 1, dtype=torch.float64), torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0])
    both = torch.cat([torch.zeros_like(z), z], 1) + method.margins(counts)
    one = z[:, 0] + method.margins(counts).diff()
    torch.testing.assert_close(
        torch.nn.functional.binary_cross_entropy_with_logits(one, label.double()),
        cross_entropy(both, label.long()),
    )
    data = toy_data(batch=4)
    for client in data:
        client.label_counts = counts
    _, federation, _ = toy_federation(FedLC(prior="own"), ToyTask(norm=False), data)
    run_reference(federation, 1)
    own, even = federation.personal_model("c0"), federation.server["shared"]
    gap = own["head.bias"] - even["head.bias"]
    torch.testing.assert_close(gap.double(), method.margins(counts).diff(), rtol=0, atol=1e-6)


def test_other_tasks_are_refused():
    data = toy_data(batch=4)
    for client in data:  # an outcome without classes
        client.label_counts = torch.tensor([client.num_samples])
    _, federation, _ = toy_federation(FedLC(), data=data)
    with pytest.raises(ConfigError, match="algorithm=fedlc is for classification"):
        run_reference(federation, 1)
    for client in data:
        client.label_counts = torch.tensor([3, 3, 3])
    _, federation, _ = toy_federation(FedLC(prior="own"), data=data)
    with pytest.raises(ConfigError, match=r"set algorithm\.prior=even"):
        federation.personal_model("c0")
