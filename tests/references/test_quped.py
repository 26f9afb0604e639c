"""QuPeD against Algorithm 1 in NumPy, with squared and with Kullback-Leibler distillation."""

from __future__ import annotations

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from medfed.federation.reference import onboarded_client, run_onboarding, run_reference
from medfed.personalize.quantized import Quantized
from medfed.personalize.quped import QuPeD, divergence
from medfed.personalize.qupel import QuPeL
from medfed.standalone.errors import ConfigError
from tests.references import linear_net
from tests.references.pairing import assert_same, to_numpy
from tests.references.quantized_net import (
    LAYERS,
    QUANTIZED,
    center_gradient,
    gradient,
    nearest,
    prox_centers,
    prox_weights,
)
from tests.references.test_fedrod import Classes, clients
from tests.references.test_heterofl import narrow
from tests.references.test_quantized import EXACT, LR, ROUNDS, STEPS, build, compare
from tests.sweeps import sweep
from tests.toys import ToyData, ToyTask, toy_data, toy_federation

A, GLOBAL, STRENGTH, CENTER_LR = 0.4, 0.3, 0.3, 0.01


def outputs(model, x):
    for layer in LAYERS:
        x = x @ model[f"{layer}.weight"].T + model[f"{layer}.bias"]
    return x[:, 0]


def mixed(client, model, w):
    """Of (1 - a) f + a KD; with squares the teacher's outputs take the place of the labels."""
    of_loss, of_w = (gradient(model, client.x, y) for y in (client.y, outputs(w, client.x)))
    return {n: (1 - A) * of_loss[n] + A * of_w[n] for n in of_loss}


def main_phase(client, w, strength, center_lr, momentum):
    """x, then c, then w, each at the newest values of the others."""
    w, velocity = dict(w), dict.fromkeys(client.model, 0.0)
    for _ in range(STEPS):
        client.draw()
        g = mixed(client, client.model, w)
        velocity = {n: momentum * velocity[n] + g[n] for n in g}
        client.model = {n: t - LR * velocity[n] for n, t in client.model.items()}
        students = [client.model]
        if client.centers is not None:
            c = client.centers
            x = prox_weights(client.model[QUANTIZED], c, strength * LR / 2)
            client.model = {**client.model, QUANTIZED: x}
            at = mixed(client, client.quantized(), w)[QUANTIZED]
            h = center_gradient(at, nearest(x, c), len(c))
            client.centers = np.sort(
                prox_centers(c - center_lr * h, x, c, strength * center_lr / 2)
            )
            students = [client.model, client.quantized()]
        taught = [gradient(w, client.x, outputs(x, client.x)) for x in students]
        w = {n: t - GLOBAL * A * sum(g[n] for g in taught) for n, t in w.items()}
    return w


SETTINGS = {
    "plain": {},
    "samples-momentum": {"weighting": "samples", "momentum": 0.9},
    "minibatches-half": {"batch": 4, "fraction": 0.67},
}


@sweep("setting", SETTINGS)
@sweep("bits", [32, 2.67])
def test_equals_algorithm_1(bits, setting):
    changes = {"weighting": "uniform", "momentum": 0.0} | SETTINGS[setting]
    weighting = changes.pop("weighting")
    method = QuPeD(
        bits=bits,
        weighting=weighting,
        strength=STRENGTH,
        center_lr=CENTER_LR,
        center_drops=(),
        proximity=A,
        global_lr=GLOBAL,
        finetune_share=0.0,
        rounds=ROUNDS,
    )
    federation, w, chosen = build(method, **changes)
    run_reference(federation, ROUNDS)
    for t in range(ROUNDS):
        cohort = [federation.ids.index(c) for c in federation.members(t)]
        how = (STRENGTH * (t + 1), CENTER_LR, changes["momentum"])
        ends = [main_phase(chosen[k], w, *how) for k in cohort]
        shares = np.array([6.0 + 2 * k if weighting == "samples" else 1.0 for k in cohort])
        shares /= shares.sum()
        w = {n: sum(p * e[n] for p, e in zip(shares, ends, strict=True)) for n in w}
    assert_same(federation.server["shared"], w, EXACT)
    compare(federation, chosen)


def softmax(z):
    share = np.exp(z - z.max(1, keepdims=True))
    return share / share.sum(1, keepdims=True)


def parts(model, x):
    hidden = x @ model["body.weight"].T + model["body.bias"]
    return hidden, hidden @ model["head.weight"].T + model["head.bias"]


def back(model, x, residual):
    """The gradient of sum_j residual_j logits_j."""
    hidden, _ = parts(model, x)
    inner = residual @ model["head.weight"]
    return {
        "body.weight": inner.T @ x,
        "body.bias": inner.sum(0),
        "head.weight": residual.T @ hidden,
        "head.bias": residual.sum(0),
    }


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_equals_the_loop_with_classes(temperature):
    """d/d student = T^2 (s(x) - s(w/T)) / n; d/d teacher = T s (log s - log s(x) - KL) / n."""
    data, size, t = clients(), 4, temperature
    method = QuPeD(bits=32, proximity=A, global_lr=GLOBAL, temperature=t, rounds=ROUNDS)
    _, federation, local = toy_federation(method, Classes(), data, rounds=ROUNDS, steps=5, lr=0.1)
    w = to_numpy(local.model.initial())
    models = [w] * len(data)
    run_reference(federation, ROUNDS)
    batches = [iter(d.drawn) for d in data]
    for _ in range(ROUNDS):
        ends = []
        for n, stream in enumerate(batches):
            v = dict(w)
            for _ in range(5):
                x, y = next(stream)
                assert len(y) == size
                s, taught = softmax(parts(models[n], x)[1]), softmax(parts(v, x)[1] / t)
                residual = (1 - A) * (s - np.eye(3)[y]) + A * t**2 * (s - taught)
                g = back(models[n], x, residual / size)
                models[n] = {k: models[n][k] - 0.1 * g[k] for k in g}
                gap = np.log(taught) - np.log(softmax(parts(models[n], x)[1]))
                residual = t * taught * (gap - (taught * gap).sum(1, keepdims=True))
                g = back(v, x, residual / size)
                v = {k: v[k] - GLOBAL * A * g[k] for k in g}
            ends.append(v)
        w = {k: sum(e[k] for e in ends) / len(ends) for k in w}
    assert_same(federation.server["shared"], w, EXACT)
    for client, model in zip(federation.ids, models, strict=True):
        assert_same(federation.personal_model(client), model, EXACT)


@pytest.mark.parametrize("quantizer", ["hard", "soft"])
@pytest.mark.parametrize("bits", [2, 32])
def test_without_weight_on_outputs_clients_are_alone(bits, quantizer):
    """``quantized``, bit for bit; w never moves."""
    common = {
        "bits": bits, "quantizer": quantizer, "sharpness": 40.0, "strength": 0.3,
        "center_lr": 0.01, "rounds": ROUNDS,
    }  # fmt: skip
    pair = [build(m)[:2] for m in (QuPeD(proximity=0.0, **common), Quantized(**common))]
    digests = [run_reference(f, ROUNDS).digests() for f, _ in pair]
    assert digests[0].items() >= {c: d for c, d in digests[1].items() if c != "server"}.items()
    assert_same(pair[0][0].server["shared"], pair[0][1], 0.0)


def test_without_weight_on_labels_nothing_moves_but_to_the_quantised_model():
    """From x = w: full precision stays; with centres w is drawn to Q(x). Labels are unused."""
    still, start, _ = build(QuPeD(bits=32, proximity=1.0, rounds=ROUNDS))
    run_reference(still, ROUNDS)
    assert_same(still.server["shared"], start, EXACT)
    assert_same(still.personal_model("c1"), start, EXACT)
    ends = []
    for sign in (1.0, -1.0):
        method = QuPeD(bits=2, proximity=1.0, rounds=ROUNDS, center_lr=0.0, finetune_share=0.0)
        federation, start, _ = build(method)
        for client in federation.clients.values():
            client.data.y = sign * client.data.y
        before = outputs(start, federation.clients["c0"].data.x.numpy())
        run_reference(federation, ROUNDS)
        x = federation.clients["c0"].data.x.numpy()
        first = {n: t.numpy() for n, t in federation.personal_model("c0").items()}
        after = outputs({n: t.numpy() for n, t in federation.server["shared"].items()}, x)
        aim = outputs({**start, QUANTIZED: first[QUANTIZED]}, x)
        assert np.abs(after - aim).mean() < np.abs(before - aim).mean()
        ends.append(federation.digests())
    assert ends[0] == ends[1]


class OneLayer(pl.LightningModule):
    """Three inputs, one output."""

    personal = ("*",)
    evaluate, loss = ToyTask.evaluate, ToyTask.loss

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Linear(3, 1).double()


def test_normal_outputs_of_whitened_inputs_are_qupel():
    """With lambda_p' = a / (1 - a) and the rates (1 - a) eta: KD is half the squared distance."""
    ends = []
    for method, lr in (
        (QuPeD(bits=32, proximity=A, global_lr=GLOBAL), LR),
        (QuPeL(bits=32, proximity=A / (1 - A), global_lr=(1 - A) * GLOBAL), (1 - A) * LR),
    ):
        data = []
        for client in toy_data(3, dtype=torch.float64):
            q, _ = torch.linalg.qr(torch.cat([torch.ones(len(client.y), 1).double(), client.x], 1))
            data.append(ToyData(client.id, q[:, 1:] * len(client.y) ** 0.5, client.y))
        _, federation, _ = toy_federation(method, OneLayer(), data, steps=STEPS, lr=lr)
        run_reference(federation, 3)
        ends.append([federation.server["shared"], *map(federation.personal_model, federation.ids)])
    for one, other in zip(*ends, strict=True):
        assert_same(one, to_numpy(other), EXACT)


def test_narrow_networks_equal_really_narrow_ones():
    """Hidden widths 4, 2, 4; w is whole."""
    method = QuPeD(bits=32, widths=[1.0, 0.5], proximity=A, global_lr=GLOBAL, rounds=ROUNDS)
    data = toy_data(3, dtype=torch.float64)
    task = ToyTask(norm=False, dtype=torch.float64)
    _, federation, local = toy_federation(method, task, data, steps=STEPS, lr=LR)
    w = to_numpy(local.model.initial())
    models = [narrow(w, hidden) for hidden in (4, 2, 4)]
    run_reference(federation, ROUNDS)

    def answers(model, x):
        return parts(model, x)[1][:, 0]

    for _ in range(ROUNDS):
        ends = []
        for n, client in enumerate(data):
            x, y, v = client.x.numpy(), client.y.numpy(), dict(w)
            for _ in range(STEPS):
                pair = [linear_net.gradient(models[n], x, aim) for aim in (y, answers(v, x))]
                models[n] = {
                    k: t - LR * ((1 - A) * pair[0][k] + A * pair[1][k])
                    for k, t in models[n].items()
                }
                g = linear_net.gradient(v, x, answers(models[n], x))
                v = {k: t - GLOBAL * A * g[k] for k, t in v.items()}
            ends.append(v)
        w = {k: sum(e[k] for e in ends) / 3 for k in w}
    assert_same(federation.server["shared"], w, EXACT)
    for n, client in enumerate(federation.ids):
        found = to_numpy(federation.personal_model(client))
        assert_same(narrow(found, (4, 2, 4)[n]), models[n], EXACT)
        assert not found["body.weight"][(4, 2, 4)[n] :].any()


def test_a_newcomer_learns_from_a_shared_model_that_stays():
    method = QuPeD(bits=32, proximity=A, global_lr=GLOBAL, rounds=ROUNDS)
    federation, _, _ = build(method)
    run_reference(federation, 2)
    before = federation.digests()["server"]
    client = onboarded_client(federation, toy_data(3, dtype=torch.float64)[1])
    found = method.onboard(client, run_onboarding(federation, client)[0])
    w = to_numpy(federation.server["shared"])
    x, y, model = client.data.x.numpy(), client.data.y.numpy(), dict(w)
    for _ in range(STEPS):
        pair = [gradient(model, x, aim) for aim in (y, outputs(w, x))]
        model = {n: t - LR * ((1 - A) * pair[0][n] + A * pair[1][n]) for n, t in model.items()}
    assert_same(found, model, EXACT)
    assert federation.digests()["server"] == before


def kl(p, q):
    return float((p * (np.log(p) - np.log(q))).sum())


def test_divergence_of_each_task():
    rng = np.random.default_rng(0)
    s, t = rng.normal(size=(2, 2, 3, 4))
    label = torch.zeros(2, 3, 4)
    found = float(divergence({"label": label}, *map(torch.from_numpy, (s, t)), 1.0))
    share = [1 / (1 + np.exp(-z)) for z in (t, s)]
    both = [np.stack([p, 1 - p]) for p in share]
    assert found == pytest.approx(kl(*both) / s.size, abs=1e-12)
    found = float(divergence({"label": label[:, :2]}, *map(torch.from_numpy, (s, t)), 2.0))
    soft = [np.exp(z) / np.exp(z).sum(1, keepdims=True) for z in (t / 2, s)]
    assert found == pytest.approx(4 * kl(*soft) / 8, abs=1e-12)
    with pytest.raises(ConfigError, match=r"choose algorithm=qupel"):
        divergence({"label": torch.zeros(2, 2)}, torch.zeros(2, 4), torch.zeros(2, 4), 1.0)


def test_bad_values():
    with pytest.raises(ConfigError, match=r"algorithm\.proximity"):
        QuPeD(proximity=1.5)
    with pytest.raises(ConfigError, match=r"set algorithm\.bits=32"):
        QuPeD(widths=[1.0, 0.5])
    with pytest.raises(ConfigError, match=r"shares of the channels"):
        QuPeD(bits=32, widths=[0.0])
