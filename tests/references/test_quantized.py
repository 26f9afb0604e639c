"""QuPeL and its relatives against the papers' update rules in NumPy."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from medfed.federation.algorithm import Cohort
from medfed.federation.reference import run_reference
from medfed.federation.wire.channel import Channel
from medfed.federation.wire.codecs.dense import Dense
from medfed.functional.kmeans import initial_centers
from medfed.personalize.binaryrelax import BinaryRelax
from medfed.personalize.proxquant import ProxQuant
from medfed.personalize.quantized import Quantized
from medfed.personalize.qupel import QuPeL
from tests.references import quantized_net as reference
from tests.references.pairing import assert_same, drawn_in, to_numpy
from tests.references.quantized_net import LAYERS, QUANTIZED, Client, Settings
from tests.toys import ToyTask, toy_data, toy_federation

STEPS, LR, ROUNDS = 4, 0.05, 5
EXACT = 1e-12


def deep_task(dtype=torch.float64, width=6):
    """A chain of linear layers, whose middle one is quantised."""
    task = ToyTask(norm=False, dtype=dtype)
    torch.manual_seed(1)
    task.network = nn.Sequential()
    for name, (i, o) in zip(LAYERS, ((3, width), (width, width), (width, 1)), strict=True):
        task.network.add_module(name, nn.Linear(i, o).to(dtype))
    return task


def build(
    algorithm,
    clients=3,
    momentum=0.0,
    fraction=1.0,
    steps=STEPS,
    rounds=ROUNDS,
    lr=LR,
    batch=None,
):
    """The federation in double precision, and its clients for the NumPy loop."""
    data = drawn_in(toy_data(clients, dtype=torch.float64), batch or 100)
    _, federation, local = toy_federation(
        algorithm,
        deep_task(),
        data,
        rounds=rounds,
        steps=steps,
        lr=lr,
        momentum=momentum,
        cohort=Cohort(fraction=fraction),
        channel=Channel(Dense("float64"), Dense("float64")),
    )
    start = to_numpy(local.model.initial())
    bits = [int(federation.server["bits"][c]) for c in federation.ids]
    numpy_clients = [
        Client(d.x.numpy(), d.y.numpy(), start, first_centers(start, b))
        for d, b in zip(data, bits, strict=True)
    ]
    if batch:
        for client, d in zip(numpy_clients, data, strict=True):
            client.batches = remembered(d)
    return federation, start, numpy_clients


def remembered(data):
    """The batches that training has drawn by the time that they are asked for."""
    yield from data.drawn


def first_centers(start, bits):
    """Where the centres start is tested on its own."""
    if bits == 32:
        return None
    return initial_centers(torch.from_numpy(start[QUANTIZED]), bits).numpy()


def compare(federation, clients, tolerance=EXACT):
    for id, client in zip(federation.ids, clients, strict=True):
        assert_same(federation.personal_model(id), client.quantized(), tolerance)
        assert_same(federation.clients[id].state["model"], client.model, tolerance)
        found = federation.centers(id)
        if client.centers is None:
            assert not found
        else:
            assert_same(found, {QUANTIZED: np.sort(client.centers)}, tolerance)


SETTINGS = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "samples": {"weighting": "samples"},
    "half": {"fraction": 0.67},
    "tuned": {"finetune_share": 0.4},
    "minibatches": {"batch": 4, "momentum": 0.9, "fraction": 0.67, "weighting": "samples"},
    "minibatches-tuned": {"batch": 4, "finetune_share": 0.4},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("bits", [32, 3, 2, 1, 2.67, 16.5], ids=str)
def test_qupel_equals_algorithm_2(bits, setting):
    changes = {"weighting": "uniform", "momentum": 0.0, "fraction": 1.0, "finetune_share": 0.0}
    changes |= SETTINGS[setting]
    mixed = {"bits": 2, "client_bits": {"c1": 32}} if bits == 16.5 else {"bits": bits}
    algorithm = QuPeL(
        **mixed,
        weighting=changes["weighting"],
        strength=0.3,
        center_lr=0.01,
        center_drops=(0.5,),
        proximity=0.2,
        global_lr=2.0,
        finetune_share=changes["finetune_share"],
        rounds=ROUNDS,
    )
    momentum = 0.0 if setting == "tuned" else changes["momentum"]
    federation, w, clients = build(
        algorithm, momentum=momentum, fraction=changes["fraction"], batch=changes.get("batch")
    )
    run_reference(federation, ROUNDS)
    tail = round(changes["finetune_share"] * ROUNDS) if bits != 32 else 0
    for t in range(ROUNDS):
        cohort = [federation.ids.index(c) for c in federation.members(t)]
        chosen = [clients[k] for k in cohort]
        s = Settings(
            STEPS, LR, momentum, 0.3 * (t + 1), 0.01 / (10 if t >= 0.5 * ROUNDS else 1), 0.2, 2.0
        )
        if t >= ROUNDS - tail:
            for client in chosen:
                client.fine_tune(s)
            continue
        sizes = [6.0 + 2 * k if changes["weighting"] == "samples" else 1.0 for k in cohort]
        w = reference.qupel_round(w, chosen, sizes, s)
    assert_same(federation.server["shared"], w, EXACT)
    compare(federation, clients)


def test_the_reference_moves_everything():
    """Else a rule that is left out on both sides would pass above."""
    _, w, clients = build(QuPeL(bits=2))
    client = clients[0]
    before = client.centers.copy()
    after = client.main_phase(w, Settings(3, LR, 0.0, 0.3, 0.01, 0.2, 2.0))
    assert np.abs(client.centers - before).min() > 1e-3
    assert np.abs(after[QUANTIZED] - w[QUANTIZED]).min() > 1e-3
    on_centers = np.abs(client.model[QUANTIZED][..., None] - client.centers).min(-1) < 1e-12
    assert on_centers.any()
    assert not on_centers.all()


@pytest.mark.parametrize("quantizer", ["hard", "soft"])
def test_one_client_without_a_tie_is_the_centralised_method(quantizer):
    common = {
        "bits": 2, "quantizer": quantizer, "sharpness": 40.0, "strength": 0.3, "center_lr": 0.01,
        "rounds": ROUNDS,
    }  # fmt: skip
    tied, _, _ = build(QuPeL(proximity=0.0, **common), clients=1, momentum=0.9)
    alone, _, _ = build(Quantized(**common), clients=1, momentum=0.9)
    states = [run_reference(f, ROUNDS).digests()["client/c0"] for f in (tied, alone)]
    assert states[0] == states[1]


def test_the_printed_sign_of_the_shared_step_diverges():
    """Line 8 of Algorithm 2 adds what has to be subtracted; w then runs away from x."""
    ends = {}
    for sign in (1.0, -1.0):
        _, w, clients = build(QuPeL(bits=32))
        s = Settings(1, LR, proximity=0.2, global_lr=2.0, sign=sign)
        gaps = []
        for _ in range(12):
            w = reference.qupel_round(w, clients, [1.0] * 3, s)
            gaps.append(max(np.abs(w[n] - c.model[n]).max() for c in clients for n in w))
        ends[sign] = gaps
    assert ends[1.0][-1] < 0.5
    assert ends[-1.0][-1] > 5
    ratios = [b / a for a, b in pairwise(ends[-1.0])]
    assert min(ratios) > 1.3


def test_proxquant_equals_algorithm_1():
    algorithm = ProxQuant(bits=1, strength=0.3, finetune_share=0.4, rounds=ROUNDS)
    federation, start, clients = build(algorithm)
    run_reference(federation, ROUNDS)
    scale = np.abs(start[QUANTIZED]).mean()
    for client in clients:
        client.centers = np.array([-scale, scale])
        for t in range(ROUNDS):
            s = Settings(STEPS, LR, strength=0.3 * (t + 1))
            if t < 3:
                client.main_phase(start, s)
            else:
                client.fine_tune(s)
    compare(federation, clients)


def test_binaryrelax_equals_algorithm_1():
    algorithm = BinaryRelax(bits=1, strength=0.5, growth=2.0, finetune_share=0.4, rounds=ROUNDS)
    federation, start, clients = build(algorithm)
    run_reference(federation, ROUNDS)
    for client in clients:
        free = start[QUANTIZED]
        for t in range(ROUNDS):
            lam = 0.5 * 2.0**t if t < 3 else np.inf
            free = reference.relaxed_steps(client, free, lam, Settings(STEPS, LR))
    compare(federation, clients)


def test_gradient_by_finite_differences():
    _, model, clients = build(QuPeL(bits=2))
    client = clients[1]

    def loss(m):
        h = client.x
        for layer in LAYERS:
            h = h @ m[f"{layer}.weight"].T + m[f"{layer}.bias"]
        return ((h[:, 0] - client.y) ** 2).mean() / 2

    for name, grad in client.gradient(model).items():
        for place in np.ndindex(grad.shape):
            step = np.zeros_like(grad)
            step[place] = 1e-6
            slope = (
                loss({**model, name: model[name] + step})
                - loss({**model, name: model[name] - step})
            ) / 2e-6
            assert slope == pytest.approx(grad[place], abs=1e-8)
