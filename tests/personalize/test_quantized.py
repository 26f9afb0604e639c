"""What quantised methods promise beyond the papers' equations."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

from medfed.config.compose import build, load
from medfed.federation.algorithm import ClientInfo
from medfed.federation.reference import run_reference
from medfed.federation.split import ParameterSplit
from medfed.functional.quantize import soft_quantize
from medfed.models.networks.densenet import densenet_bc
from medfed.models.networks.small import SmallCNN
from medfed.models.networks.unet import unet
from medfed.personalize.proxquant import ProxQuant
from medfed.personalize.quantized import Quantized
from medfed.personalize.quantized_base import assign_bits, layer_weights
from medfed.personalize.quped import QuPeD
from medfed.personalize.qupel import QuPeL
from medfed.standalone.errors import ConfigError
from tests.references.test_quantized import QUANTIZED, deep_task
from tests.references.test_quantized import build as deep_federation
from tests.sweeps import sweep
from tests.toys import ToyTask, toy_data, toy_federation

NETWORKS = {
    "small_cnn": lambda: SmallCNN(2, 1, 4),
    "densenet_bc": lambda: densenet_bc(2, 1, 2, block_config=(2, 2, 2), stem="small"),
    "unet": lambda: unet(2, 4, 3, num_res_units=0),
}
METHODS = ("qupel", "quantized", "proxquant", "binaryrelax")


@pytest.mark.parametrize("name", NETWORKS)
def test_first_and_last_layer_are_those_that_the_input_meets_first_and_last(name):
    network, met = NETWORKS[name](), []
    weights = layer_weights(network)
    for module_name, module in network.named_modules():
        if f"{module_name}.weight" in weights:
            module.register_forward_hook(lambda *_, n=module_name: met.append(f"{n}.weight"))
    with torch.no_grad():
        network.eval()(torch.zeros(1, 4 if name == "unet" else 1, 32, 32))
    assert len(met) == len(weights) > 2
    assert (met[0], met[-1]) == (weights[0], weights[-1])


@sweep("tuned", [0.0, 0.5])
@sweep("name", METHODS)
def test_every_quantised_weight_equals_one_of_its_centres(name, tuned):
    over = [f"algorithm={name}", "algorithm.bits=2", f"algorithm.finetune_share={tuned}"]
    algorithm = build(load([*over, "rounds=2"]).algorithm)
    _, federation, _ = toy_federation(algorithm, deep_task(torch.float32), rounds=2)
    for rounds in range(3):
        run_reference(federation, rounds, start=max(0, rounds - 1))
        for client in federation.ids:
            model, centers = federation.personal_model(client), federation.centers(client)
            assert list(centers) == [QUANTIZED]
            assert centers[QUANTIZED].dtype == model[QUANTIZED].dtype
            assert len(centers[QUANTIZED]) == 4
            assert bool((centers[QUANTIZED].diff() >= 0).all())
            assert bool(torch.isin(model[QUANTIZED], centers[QUANTIZED]).all())


def test_weights_converge_to_their_centres_by_themselves():
    """Without the final quantisation: the proximal maps alone bring them there, and keep them."""
    algorithm = QuPeL(bits=2, strength=0.5, center_lr=0.001, finetune_share=0.0, rounds=6)
    federation, _, _ = deep_federation(algorithm, rounds=6)
    run_reference(federation, 1)
    early = [on_centers(federation, c) for c in federation.ids]
    run_reference(federation, 6, start=1)
    assert max(early) < 1
    assert [on_centers(federation, c) for c in federation.ids] == [1.0] * 3


def on_centers(federation, client):
    """The share of trained weights that lie exactly on a centre."""
    weight = federation.clients[client].state["model"][QUANTIZED]
    return float(torch.isin(weight, federation.centers(client)[QUANTIZED]).double().mean())


def test_soft_steps_descend_the_printed_objective():
    """One step against autograd of f(x) + f(Q(x)), then of f(Q(x)) with respect to c."""
    lr, center_lr, sharpness = 0.05, 0.01, 20.0
    algorithm = Quantized(
        bits=2, quantizer="soft", sharpness=sharpness, strength=0.0, center_lr=center_lr,
        finetune_share=0.0, rounds=1,
    )  # fmt: skip
    federation, start, clients = deep_federation(algorithm, clients=1, steps=1, rounds=1, lr=lr)
    run_reference(federation, 1)
    data, network = toy_data(1, dtype=torch.float64)[0], deep_task().network

    def loss(weights, c=None):
        if c is not None:
            weights = {**weights, QUANTIZED: soft_quantize(weights[QUANTIZED], c, sharpness)}
        gap = functional_call(network, weights, data.x).squeeze(-1) - data.y
        return gap.square().mean() / 2

    x = {n: torch.tensor(t, requires_grad=True) for n, t in start.items()}
    c = torch.tensor(clients[0].centers, requires_grad=True)
    grads = torch.autograd.grad(loss(x) + loss(x, c), list(x.values()))
    new = {n: t.detach() - lr * g for (n, t), g in zip(x.items(), grads, strict=True)}
    (h,) = torch.autograd.grad(loss(new, c), c)
    state = federation.clients["c0"].state
    for name, expected in new.items():
        torch.testing.assert_close(state["model"][name], expected, rtol=0, atol=1e-12)
    expected = (c - center_lr * h).detach()
    torch.testing.assert_close(state["centers"][QUANTIZED], expected, rtol=0, atol=1e-12)


@sweep("bits", [1, 2, 2.25, 2.5, 2.75, 3, 7.6, 32])
def test_dealt_bits_have_the_mean(bits):
    dealt = list(assign_bits(bits, [f"c{i}" for i in range(20)]).values())
    assert np.mean(dealt) == pytest.approx(bits)
    assert set(dealt) <= {int(np.floor(bits)), int(np.ceil(bits))}
    for quarter in range(0, 20, 5):  # even turns: no stretch of clients gets more than its share
        assert abs(np.mean(dealt[quarter : quarter + 5]) - bits) < 0.2 + 1e-9


def test_schedules():
    algorithm = QuPeL(
        strength=0.5, center_lr=1.0, center_drops=(0.5, 0.8), finetune_share=0.3, rounds=10
    ).adapted(ParameterSplit((), ()), deep_task().network)
    assert [algorithm.scalars(t)["strength"] for t in range(3)] == [0.5, 1.0, 1.5]
    rates = [algorithm.scalars(t)["center_lr"] for t in range(10)]
    assert rates == [1.0] * 5 + [0.1] * 3 + [0.01] * 2
    assert [algorithm.phases(t) for t in range(10)] == [("fit",)] * 7 + [("tune",)] * 3


@sweep(
    ("share", "rounds", "tail"),
    [
        (0.0, 5, 0),
        (0.1, 4, 0),
        (0.2, 7, 1),
        (0.25, 10, 3),
        (0.24, 10, 2),
        (0.3, 5, 2),
        (0.99, 3, 2),
    ],
)
def test_the_share_of_fine_tuning_is_rounded_to_whole_rounds(share, rounds, tail):
    """To the nearest, a half up, and one round is left to train in."""
    options = {"finetune_share": share, "rounds": rounds}
    algorithm = QuPeL(**options).adapted(ParameterSplit((), ()), deep_task().network)
    phases = [algorithm.phases(t) for t in range(rounds)]
    assert phases == [("fit",)] * (rounds - tail) + [("tune",)] * tail


def test_averaged_statistics_are_the_mean_of_the_clients():
    """Which keep their own: their models never come from the server."""
    data = toy_data(3, dtype=torch.float64)
    task = ToyTask(dtype=torch.float64)
    _, federation, _ = toy_federation(QuPeL(), task, data, buffers="averaged")
    start = federation.server["shared"]["norm.running_mean"].clone()
    run_reference(federation, 1)
    own = [c.state["model"]["norm.running_mean"] for c in federation.clients.values()]
    assert min(float((t - start).abs().max()) for t in own) > 1e-2
    mean = federation.server["shared"]["norm.running_mean"]
    torch.testing.assert_close(mean, torch.stack(own).mean(0))


def test_fine_tuning_sends_no_tensor():
    algorithm = QuPeL(bits=2, finetune_share=0.5, rounds=4)
    _, federation, _ = toy_federation(algorithm, deep_task(torch.float32), rounds=4)
    run_reference(federation, 4)
    parts = {(e.phase, e.part) for e in federation.ledger.entries}
    assert ("fit", "shared") in parts
    assert ("tune", "shared") not in parts
    assert {e.phase for e in federation.ledger.entries if e.round >= 2} <= {"tune"}


@pytest.mark.parametrize(
    ("algorithm", "passes"),
    [
        (Quantized(bits=2), 2),
        (Quantized(bits=32), 1),
        (Quantized(bits=2, center_lr=0.0), 1),
        (Quantized(bits=2, quantizer="soft"), 3),
        (Quantized(bits=32, quantizer="soft"), 1),
        (Quantized(bits=32, client_bits={"c0": 2}), 2),
        (QuPeL(bits=2), 2),
        (QuPeL(bits=32), 1),
        (QuPeD(bits=2), 3),
        (QuPeD(bits=32), 2),
        (QuPeD(bits=2, quantizer="soft"), 4),
    ],
    ids=lambda v: "" if isinstance(v, int) else f"{v.title}-{v.bits:g}-{v.quantizer}",
)
def test_gradient_passes_follow_the_bits(algorithm, passes):
    """Those that a run takes in a round before its fine-tuning."""
    _, federation, _ = toy_federation(algorithm, deep_task(torch.float32), rounds=3, steps=4)
    run_reference(federation, 1)
    most = max(client.passes.gradient for client in federation.clients.values())
    assert most == 4 * passes == 4 * algorithm.passes
    assert federation.algorithm.gradients_per_batch == passes


def test_layers_and_clients_with_their_own_bits():
    algorithm = QuPeL(
        bits=3,
        client_bits={"c1": 32, "c2": 1},
        layer_bits={"head.*": 2},
        full_precision=("body.*",),
    )
    _, federation, _ = toy_federation(algorithm, deep_task(torch.float32))
    sizes = {c: {n: len(t) for n, t in federation.centers(c).items()} for c in federation.ids}
    assert sizes["c0"] == {QUANTIZED: 8, "head.weight": 4}
    assert sizes["c1"] == {}
    assert sizes["c2"] == {QUANTIZED: 2, "head.weight": 4}


@sweep(
    ("options", "words"),
    [
        ({"bits": 0}, "algorithm.bits must be a number from 1 to 8 or 32, not 0"),
        ({"bits": 9}, "not 9"),
        ({"bits": float("nan")}, "not nan"),
        ({"layer_bits": {"a": 2.5}}, "algorithm.layer_bits.a must be a whole number"),
        ({"client_bits": {"c0": 12}}, "algorithm.client_bits.c0 must be"),
        ({"finetune_share": 1.0}, "finetune_share"),
        ({"quantizer": "medium"}, "choose hard or soft"),
        ({"sharpness": 0.0}, "sharpness"),
        ({"strength": -1.0}, "strength must not be negative"),
        ({"center_lr": float("nan")}, "center_lr"),
        ({"center_drops": (0.8, 0.5)}, "ascending"),
        ({"proximity": -0.1}, "proximity"),
        ({"global_lr": -0.1}, "global_lr"),
    ],
)
def test_values_out_of_range_are_refused(options, words):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        QuPeL(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layer_bits": {"midle.*": 2}}, "'midle.*' of algorithm.layer_bits matches no quantised"),
        ({"full_precision": ("nothing.*",)}, "algorithm.full_precision matches no parameter"),
        ({"client_bits": {"c7": 2}}, "algorithm.client_bits names no client 'c7'"),
    ],
)
def test_names_that_match_nothing_are_refused(options, words):
    with pytest.raises(ConfigError, match=words.replace("*", r"\*")):
        toy_federation(QuPeL(**options), deep_task(torch.float32))


def test_a_network_without_a_middle_is_trained_whole_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        _, federation, _ = toy_federation(QuPeL(bits=2, rounds=2))
    assert "Nothing is quantised" in caplog.text
    run_reference(federation, 2)
    assert all(federation.centers(c) == {} for c in federation.ids)
    assert {e.phase for e in federation.ledger.entries} == {"fit"}


def test_an_unstable_step_is_warned_of(caplog):
    infos, weights = [ClientInfo("c0", 1)], {"w": torch.zeros(2)}
    with caplog.at_level(logging.WARNING):
        QuPeL(proximity=0.5, global_lr=2.0).init(weights, ParameterSplit(("w",), ()), infos)
        assert not caplog.text
        QuPeL(proximity=0.5, global_lr=3.0).init(weights, ParameterSplit(("w",), ()), infos)
    assert "overshoots" in caplog.text


def test_divergence_is_named():
    _, federation, _ = toy_federation(Quantized(center_lr=1e30), deep_task(torch.float32), steps=9)
    with pytest.raises(ArithmeticError, match="Client c0, round 1, phase fit"):
        run_reference(federation, 3)


def test_proxquant_keeps_its_centres():
    federation, _, _ = deep_federation(ProxQuant(bits=2, strength=0.1, rounds=3), rounds=3)
    before = federation.centers("c0")[QUANTIZED]
    run_reference(federation, 3)
    assert torch.equal(federation.centers("c0")[QUANTIZED], before)


def test_biases_and_normalisation_are_never_quantised():
    network = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.PReLU(), nn.Conv2d(2, 2, 1))
    assert layer_weights(network) == ("0.weight", "3.weight")
