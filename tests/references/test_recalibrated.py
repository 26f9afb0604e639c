"""The recalibrated model against SciPy on the logits themselves, and its limits."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import log_softmax
from torch.nn.functional import cross_entropy

from medfed.common.tensors import digest
from medfed.federation.reference import onboarded_client, run_onboarding, run_reference
from medfed.models.networks.small import LogisticRegression
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.recalibrated import Recalibrated
from medfed.standalone.errors import ConfigError
from tests.references.pairing import to_numpy
from tests.references.test_fedrod import Classes, clients, finished
from tests.toys import ToyTask, toy_federation


def logits(model, x):
    hidden = x @ model["body.weight"].T + model["body.bias"]
    return hidden @ model["head.weight"].T + model["head.bias"]


@pytest.mark.parametrize("variance", [0.2, 1.0, 50.0])
def test_it_minimises_the_loss_of_scaled_and_shifted_logits(variance):
    """As an optimizer without gradients finds them; the intercepts sum to 0."""
    data = clients()
    found, _ = finished(Recalibrated(variance=variance), data)
    plain, _ = finished(FedAvg(), clients())
    for client, held in zip(found.ids, data, strict=True):
        z, y = logits(to_numpy(plain.personal_model(client)), held.x.numpy()), held.y.numpy()

        def cost(at, z=z, y=y):
            log = log_softmax(at[0] * z + at[1:], 1)[np.arange(len(y)), y]
            return -log.sum() + ((at[0] - 1) ** 2 + at[1:] @ at[1:]) / (2 * variance)

        bounds = [(1e-3, None), *[(None, None)] * 3]
        options = {"ftol": 1e-14, "maxiter": 500}
        best = minimize(cost, [1.0, 0, 0, 0], method="SLSQP", bounds=bounds, options=options).x
        model = to_numpy(found.personal_model(client))
        moved = logits(model, held.x.numpy())
        np.testing.assert_allclose(moved, best[0] * z + best[1:], atol=1e-5)
        bias = model["head.bias"] - best[0] * to_numpy(plain.personal_model(client))["head.bias"]
        assert abs(bias.sum()) < 1e-5
        assert np.abs(moved - z).max() > 0.01


def test_validation_measures_the_shared_model_and_nothing_travels():
    found, _ = finished(Recalibrated(), clients())
    plain, _ = finished(FedAvg(), clients())
    assert digest(found.server["shared"]) == digest(plain.server["shared"])
    assert found.ledger.to_csv() == plain.ledger.to_csv()
    for client in found.ids:
        shared, own = found.personal_model(client, "val"), found.personal_model(client)
        assert digest(shared) == digest(plain.personal_model(client))
        assert digest(own) != digest(shared)


def test_a_shift_of_the_classes_shares_is_mended_by_its_log_odds():
    """Probabilities that are right for even classes, at a client where class 1 is rarer."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=4000)
    y = (rng.random(4000) < 1 / (1 + np.exp(-x))).astype(int)
    keep = (y == 0) | (rng.random(4000) < 0.2)
    (held,) = clients()[1:2]
    held.x = torch.tensor(np.stack([x, 0 * x, 0 * x], 1)[keep])
    held.y = torch.tensor(y[keep])
    method = Recalibrated(variance=1e9)
    _, federation, _ = toy_federation(method, Classes(), [held], lr=0.0, steps=1)
    model = {n: torch.zeros_like(t) for n, t in federation.server["shared"].items()}
    model["body.weight"][0, 0] = model["head.weight"][1, 0] = 1.0
    model["head.bias"][2] = -30.0  # a class that nobody has
    done = method.completed(federation.clients["c1"], model)
    gap = float(done["head.bias"][1] - done["head.bias"][0])
    assert gap == pytest.approx(np.log(0.2), abs=0.15)
    scale = float(done["head.weight"][1, 0])
    assert scale == pytest.approx(1.0, abs=0.15)
    before, after = (
        cross_entropy(torch.tensor(logits(to_numpy(m), held.x.numpy())), held.y)
        for m in (model, done)
    )
    assert after < before - 0.1


def test_two_classes_keep_their_order():
    """So a client's AUROC is that of FedAvg, even where the model is worse than chance."""
    held = clients()[1]
    held.y = (held.x[:, 0] < 0).long()
    _, federation, _ = toy_federation(Recalibrated(variance=1e3), Classes(), [held], lr=0.0)
    model = {n: torch.zeros_like(t) for n, t in federation.server["shared"].items()}
    model["body.weight"][0, 0] = model["head.weight"][1, 0] = 1.0
    model["head.bias"][2] = -30.0
    done = federation.algorithm.completed(federation.clients["c1"], model)
    ranks = [
        np.argsort(logits(to_numpy(m), held.x.numpy())[:, :2] @ [-1, 1]) for m in (model, done)
    ]
    np.testing.assert_array_equal(*ranks)


def test_a_newcomer_is_recalibrated_and_one_without_validation_cases_is_not():
    found, _ = finished(Recalibrated(), clients())
    newcomer = onboarded_client(found, clients()[2])
    model = found.algorithm.completed(newcomer, run_onboarding(found, newcomer)[0].parts["shared"])
    assert digest(model) == digest(found.personal_model("c2"))
    newcomer.data.eval_batches = lambda split: iter(())
    shared = found.server["shared"]
    assert found.algorithm.completed(newcomer, shared) is shared


def test_statistics_are_estimated_again_before():
    """Else scale and intercepts would be those of another model."""
    found = []
    for wanted in ("kept", "reestimated"):
        task = Classes()
        norm = torch.nn.BatchNorm1d(4, dtype=torch.float64)
        layers = {"body": task.network.body, "norm": norm, "head": task.network.head}
        task.network = torch.nn.Sequential(OrderedDict(layers))
        _, federation, _ = toy_federation(Recalibrated(), task, clients())
        federation.clients["c1"].trainer.normalization = wanted
        run_reference(federation, 2)
        local, model = federation.clients["c1"], federation.personal_model("c1", "val")
        found.append(digest(federation.personal_model("c1")))
        assert found[-1] == digest(federation.algorithm.completed(local, model))
    assert found[0] != found[1]


def test_a_class_whose_logit_is_fixed_stays_so():
    """Two logits, one of which is 0: the other gets the difference of the intercepts."""
    data = clients()[1:]
    for held in data:
        held.y = held.y.clamp(max=1)
    task = Reference()
    _, federation, _ = toy_federation(Recalibrated(variance=1e6), task, data, lr=0.0, steps=1)
    run_reference(federation, 1)
    for client, held in zip(federation.ids, data, strict=True):
        model = federation.personal_model(client)
        share = held.y.double().mean()
        z = model["linear.weight"] * 0 + model["linear.bias"]
        assert float(z[0, 0]) == pytest.approx(float(torch.logit(share)), abs=1e-3)


class Reference(Classes):
    """A logit for class 1 alone, which starts at 0."""

    def __init__(self):
        super().__init__()
        self.network, self.personal = LogisticRegression(3).double(), ()


def test_a_last_layer_without_bias_is_refused():
    task = ToyTask(norm=False)
    task.network.head = torch.nn.Linear(4, 1, bias=False)
    with pytest.raises(ConfigError, match=r"choose evaluation\.calibration=shift"):
        toy_federation(Recalibrated(), task)
