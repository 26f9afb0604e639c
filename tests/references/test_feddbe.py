"""FedDBE against its objective in NumPy, and what its shifts and its tie come to."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch
from torch import nn

from medfed.federation.algorithm import Cohort
from medfed.federation.budget import LocalBudget
from medfed.federation.onboarding import rules_of
from medfed.federation.reference import federate, onboarded_client, run_onboarding
from medfed.federation.split import joined
from medfed.federation.wire.channel import Channel
from medfed.federation.wire.codecs.dense import Dense
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.feddbe import FedDBE
from medfed.standalone.errors import ConfigError
from tests.references.class_net import (
    LR,
    STEPS,
    clients,
    cohorts,
    features,
    finished,
    logits,
    pulled,
)
from tests.references.pairing import assert_same, to_numpy
from tests.references.test_fedrod import Classes, gradient
from tests.toys import ToyTask, toy_data, toy_federation

BIAS, SHIFT = "head.parametrizations.bias.original", "head.parametrizations.bias.0.u"
# Hospitals have 16, 10, 10 and 14 patients.
SETTINGS = {
    "plain": {},
    "a-small-hospital": {"least_patients": 12},
    "running-mean": {"newest_share": 0.4},
    "momentum-half": {"momentum": 0.9, "lr": 0.02, "cohort": Cohort(0.5)},
}


def plain(w):
    """Names of a network without a shift, the bias apart from it."""
    names = {BIAS: "head.bias", SHIFT: "u"}
    return {names.get(k, k): t for k, t in w.items()}


def steps(w, batches, aim, mu=1.0, kappa=3.0, lr=LR, momentum=0.0, fixed=("u",), count=STEPS):
    """With the shift taken through the head by hand; kappa's term through the newest batch."""
    velocity, r = {k: np.zeros_like(v) for k, v in w.items()}, np.zeros(4)
    for t, (x, y) in enumerate(islice(batches, count), 1):
        shift = w["head.weight"] @ w["u"]
        g = gradient({k: w[k] for k in w if k != "u"}, x, y, shift)
        # dL/dW gains sum(residuals) u^T, dL/du is W^T sum(residuals), which is dL/db.
        g["head.weight"] = g["head.weight"] + np.outer(g["head.bias"], w["u"])
        g["u"] = w["head.weight"].T @ g["head.bias"]
        if aim is not None:
            z = features(w, x)
            r = (1 - mu) * r + mu * z.mean(0)
            whole = 1 - (1 - mu) ** t
            slope = np.tile(kappa * (r / whole - aim) / whole * mu / 4 / len(x), (len(x), 1))
            g = {k: g[k] + (0 if k == "u" else pulled(w, x, slope)[k]) for k in g}
        velocity = {k: momentum * velocity[k] + g[k] for k in w}
        w = {k: w[k] if k in fixed else w[k] - lr * velocity[k] for k in w}
    return w


@pytest.mark.parametrize("setting", SETTINGS)
def test_equals_the_objective(setting):
    data, changes = clients(), dict(SETTINGS[setting])
    keys = {k: changes.pop(k) for k in ("newest_share", "least_patients") if k in changes}
    least, mu = keys.setdefault("least_patients", 3), keys.get("newest_share", 1.0)
    fed, initial = finished(FedDBE(strength=3.0, **keys), data, **changes)
    w, aim = plain(initial), None
    shifts, batches = [w.pop("u")] * len(data), [iter(d.drawn) for d in data]
    more = {k: changes[k] for k in ("lr", "momentum") if k in changes}
    for number, cohort in enumerate(cohorts(fed)):
        ends, means = {}, {}
        for n in cohort:
            fixed = () if number else ("u",)
            at = {**w, "u": shifts[n]}
            ends[n] = steps(at, batches[n], aim, mu, fixed=fixed, **more)
            shifts[n] = ends[n].pop("u")
            if len(data[n].x) >= 2 * least:
                means[n] = features(ends[n], data[n].x.numpy()).mean(0)
        sizes = {n: data[n].num_samples for n in cohort}
        w = {k: sum(s * ends[n][k] for n, s in sizes.items()) / sum(sizes.values()) for k in w}
        if number == 0:
            aim = sum(sizes[n] * z for n, z in means.items()) / sum(sizes[n] for n in means)
    assert_same(plain(fed.server["shared"]), w, 1e-10)
    for n, client in enumerate(fed.ids):
        assert_same(plain(fed.personal_model(client)), {**w, "u": shifts[n]}, 1e-10)


def test_the_first_round_is_fedavg():
    """To the bit."""
    first, average = finished(FedDBE(), clients(), 1)[0], finished(FedAvg(), clients(), 1)[0]
    assert_same(plain(first.server["shared"]), average.server["shared"], 0.0)


def test_without_a_tie_and_with_shifts_that_stay_it_is_fedavg():
    """An optimizer of the user's own holds the shifts: their group has a rate of 0."""

    def held(parameters, network):
        shift = network.head.parametrizations.bias[0].u
        others = [p for p in parameters if p is not shift]
        still = [{"params": [shift], "lr": 0.0}] if len(others) < len(parameters) else []
        return torch.optim.SGD([{"params": others}, *still], lr=LR)

    def loss(network, batch):
        return nn.functional.cross_entropy(network(batch["image"]), batch["label"])

    def run(method, **rates):
        channel = Channel(Dense("float64"), Dense("float64"))
        settings = {"rounds": 3, "steps": STEPS, "personal": "head.*", "channel": channel, **rates}
        return federate(method, Classes().network, loss, clients(), **settings)

    shifted = run(FedDBE(strength=0.0, least_patients=3), optimizer=held)
    average = run(FedAvg(), lr=LR)
    for client in average.federation.ids:
        assert_same(shifted.weights(client), to_numpy(average.weights(client)), 1e-12)


def test_what_is_delivered_is_a_plain_network_with_another_bias():
    fed, _ = finished(FedDBE(strength=3.0, least_patients=3), clients())
    x, network = clients()[1].x, fed.trainer.network
    model = fed.personal_model("c1")
    whole = joined(network, model)
    assert set(whole) == {"body.weight", "body.bias", "head.weight", "head.bias"}
    numbers = {k: t.numpy() for k, t in whole.items()}
    w = {k: t.numpy() for k, t in plain(model).items()}
    shifted = (features(w, x.numpy()) + w["u"]) @ w["head.weight"].T + w["head.bias"]
    np.testing.assert_allclose(logits(numbers, x.numpy()), shifted, atol=1e-12)
    fed.trainer.model.load(model)
    np.testing.assert_allclose(network.eval()(x).detach().numpy(), shifted, atol=1e-12)


def test_a_newcomer_trains_its_shift_alone_towards_its_prevalence():
    """For a linear head the shift is a free intercept: mean predictions are the shares."""
    fed, _ = finished(FedDBE(strength=0.0, least_patients=3), clients())
    data = clients(((10, 4, 6),), seed=9)[0]
    data.batch_size = len(data.x)
    client = onboarded_client(fed, data)
    client.trainer.budget, client.trainer.rates = LocalBudget(600), (0.5,)
    model = rules_of(fed.algorithm).onboard(client, run_onboarding(fed, client)[0])
    for name, tensor in fed.server["shared"].items():
        assert torch.equal(model[name], tensor)
    fed.trainer.model.load(model)
    shares = fed.trainer.network.eval()(data.x).softmax(1).mean(0)
    np.testing.assert_allclose(shares.detach().numpy(), np.array([10, 4, 6]) / 20, atol=1e-3)


def test_a_strong_tie_brings_mean_features_together():
    """With whole batches."""
    far = []
    for kappa in (0.0, 1000.0):
        data = clients()
        for one in data:
            one.batch_size = len(one.x)
        method, lr = FedDBE(strength=kappa, least_patients=3), 0.1 / (1 + kappa / 4)
        fed, _ = finished(method, data, 25, lr=lr)
        aim = fed.server["features"]["class_sums"][0]
        w = {k: t.numpy() for k, t in fed.server["shared"].items()}
        far.append(max(np.abs(features(w, d.x.numpy()).mean(0) - aim.numpy()).max() for d in data))
    assert far[0] > 4 * far[1]


def test_small_hospitals_tie_nothing_and_the_run_says_so(caplog):
    small, _ = finished(FedDBE(), clients())
    assert caplog.text.count("No hospital of the first round has 20 patients, so") == 1
    free, _ = finished(FedDBE(strength=0.0), clients())
    assert_same(small.server["shared"], free.server["shared"], 0.0)


def test_a_convolution_of_single_positions_is_shifted_and_others_are_refused():
    def task(kernel: int) -> ToyTask:
        toy = ToyTask()
        toy.network = nn.Sequential()
        toy.network.add_module("body", nn.Conv2d(1, 3, 3))
        toy.network.add_module("head", nn.Conv2d(3, 2, kernel))
        return toy

    toy = task(1)
    _, fed, _ = toy_federation(FedDBE(), toy, toy_data(1))
    x, before = torch.randn(2, 1, 5, 5), fed.personal_model("c0")
    with torch.no_grad():
        z = toy.network.body(x)
        toy.network.head.parametrizations.bias[0].u.copy_(torch.tensor([1.0, -2.0, 3.0]))
        moved = toy.network(x)
        plain_head = nn.functional.conv2d(
            z + torch.tensor([1.0, -2.0, 3.0])[:, None, None],
            before["head.weight"],
            before["head.parametrizations.bias.original"],
        )
    torch.testing.assert_close(moved, plain_head)
    with pytest.raises(ConfigError, match="FedDBE shifts what enters the head"):
        toy_federation(FedDBE(), task(3), toy_data(1))
