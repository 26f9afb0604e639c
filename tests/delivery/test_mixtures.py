"""Canonical models that mix outputs, as bundles hold them: against the models of the training."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from medfed.config.compose import build, load
from medfed.delivery.bundle.bundle import read_bundle, write_bundle
from medfed.delivery.bundle.networks import build_network, describe
from medfed.delivery.bundle.onnx_file import OnnxNetwork, save_onnx
from medfed.delivery.export.client_model import (
    NEGLIGIBLE,
    checked,
    choose_bits,
    from_canonical,
    quantise,
)
from medfed.federation.split import float_entries
from medfed.models.networks.personal_part import part_roots
from medfed.records.tasks import build_task
from medfed.standalone.errors import CheckpointError
from tests import processes
from tests.toys import assert_alike

CNN = ("model=small_cnn", "model.network.channels=[4,4,4]", "in_channels=3", "out_channels=4")
BASIC = ("model=basic_unet", "model.network.features=[4,4,8,8,8,4]")
UNET = ("model=unet", "model.network.channels=[4,8,8]", "model.network.strides=[2,2]")
SEGMENTS = ("in_channels=3", "out_channels=2", "regions=[whole,core]")
LINEAR = ("model.network.spread=1.0", "in_channels=3")
CASES = {
    "heads": (*CNN, "canonical.parts=['head.*']"),
    "whole networks": (*CNN, "canonical.parts=['*']"),
    "last convolution and head": (*CNN, "canonical.parts=['features.2.*','head.*']"),
    "batch norm": (*CNN, "model.network.norm=batch", "canonical.parts=['head.*']"),
    "up-sampling path": (*BASIC, *SEGMENTS, "canonical.parts=['upcat_*','final_conv.*']"),
    "inside a U-Net": (*UNET, *SEGMENTS, "canonical.parts=['model.1.submodule.2.*','model.2.*']"),
    "whole U-Nets": (*UNET, *SEGMENTS, "canonical.parts=['*']"),
    "logistic": ("model=logistic", *LINEAR, "out_channels=4", "canonical.parts=['*']"),
    "linear": ("model=linear", *LINEAR, "out_channels=1", "canonical.parts=['*']"),
}


def made(case: str, membership: list[float]):
    """A run's network with a membership, its ordinary network as plain data, and its places."""
    dims = [] if case in ("logistic", "linear") else ["spatial_dims=2"]
    count = f"canonical.count={len(membership)}"
    config = load(["canonical=outputs", "algorithm=ppfl", count, *CASES[case], *dims])
    network = build_task(config.model, config.canonical, config.seed).network.eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in network.state_dict().values():
            if tensor.is_floating_point() and tensor.ndim == 1:
                tensor.add_(0.3 * torch.rand(tensor.shape, generator=generator))
        network.membership.copy_(torch.tensor(membership))
    places = part_roots(build(config.model).network, list(config.canonical.parts))
    return network, json.loads(json.dumps(describe(dict(config.model.network)))), places


def exported(case: str, membership: list[float]):
    """The same and what the exporter makes of it."""
    network, plain, places = made(case, membership)
    state = {n: t.detach().clone() for n, t in float_entries(network).items()}
    return network, from_canonical(copy.deepcopy(network), plain, places, state, "a client")


def loaded(model):
    network = build_network(json.loads(json.dumps(model.plain)))
    counters = {n: t for n, t in network.state_dict().items() if not t.is_floating_point()}
    network.load_state_dict({**counters, **model.weights})
    return network.eval()


def image_of(case: str) -> torch.Tensor:
    size = () if case in ("logistic", "linear") else (32, 32)
    return torch.randn(3, 3, *size, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_two_bodies_are_the_sum_of_two_networks():
    config = load(["algorithm=fenda", *CNN, "spatial_dims=2"])
    network = build_task(config.model, config.canonical, config.seed).network.eval()
    state = {n: t.detach().clone() for n, t in float_entries(network).items()}
    plain, places = describe(dict(config.model.network)), part_roots(network, ["*"])
    model = loaded(from_canonical(network, plain, places, state, "a client"))
    image, singles = image_of("heads"), []
    for k in range(2):
        one = build_network(plain).eval()
        prefix = f"canonical.{k}.network."
        one.load_state_dict({n: state[f"{prefix}{n}"] for n in one.state_dict()})
        singles.append(one(image))
    assert_alike(model(image), singles[0] + singles[1])
    assert float(singles[1].abs().max()) > 0.01


@torch.no_grad()
@pytest.mark.parametrize("case", sorted(CASES))
def test_the_mixture_is_that_of_the_run(case):
    network, model = exported(case, [0.2, 0.5, 0.3])
    assert {n: t.shape for n, t in float_entries(network).items()} == {
        n: t.shape for n, t in model.weights.items() if t.is_floating_point()
    }
    image, own = image_of(case), loaded(model)
    expected = network(image)
    assert_alike(own(image), expected)
    # A copy computes with its own weights, and nothing is left of the last batch.
    twin = copy.deepcopy(own)
    for tensor in own.state_dict().values():
        tensor.zero_()
    assert_alike(twin(image), expected)
    assert_alike(twin(image + 1), network(image + 1))


@torch.no_grad()
@pytest.mark.parametrize("case", sorted(CASES))
def test_one_instance_alone_is_an_ordinary_network(case):
    """As IFCA leaves it, where the membership is all on one instance."""
    network, model = exported(case, [0.0, 1.0, 0.0])
    assert "CanonicalMixture" not in model.plain["_target_"]
    image = image_of(case)
    assert_alike(loaded(model)(image), network(image))


@torch.no_grad()
def test_what_a_client_does_not_use_is_left_out():
    network, model = exported("whole networks", [0.6, NEGLIGIBLE / 2, 0.4])
    assert model.plain["count"] == 2
    image = image_of("whole networks")
    found = loaded(model)(image).softmax(1)
    torch.testing.assert_close(found, network(image).softmax(1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", ["batch norm", "up-sampling path"])
def test_training_at_export_sees_the_same_loss_and_statistics(case):
    """Fine-tuning trains all but the membership; what is common takes part once per batch."""
    network, model = exported(case, [0.2, 0.5, 0.3])
    network.membership.requires_grad_(False)
    own, image = loaded(model).train(), image_of(case)
    network.train()
    torch.manual_seed(0)
    network(image).square().mean().backward()
    torch.manual_seed(0)
    own(image).square().mean().backward()
    gradients = {n: p.grad for n, p in network.named_parameters() if n != "membership"}
    assert [n for n, _ in own.named_parameters()] == list(gradients)
    for name, parameter in own.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-5)
    for name, tensor in own.named_buffers():
        torch.testing.assert_close(tensor, network.state_dict()[name], rtol=0, atol=1e-6)


RUN = """
import json, torch
from monai.bundle import ConfigParser
from scripts.networks import load
config = json.load(open("configs/inference.json"))
parser = ConfigParser({"network_def": config["network_def"]})
network = load(parser.get_parsed_content("network_def"), ".")
with torch.no_grad():
    torch.save(network(torch.load("image.pt", weights_only=True)), "output.pt")
"""


def mixture_bundle(like, folder, width):
    """A bundle of a mixture; returns the case, the run's network and the bits of its tensors."""
    case = "up-sampling path"
    network, model = exported(case, [0.2, 0.5, 0.3])
    chosen = choose_bits(build_network(model.plain["network"]), width)
    bits = {entry: b for name, b in chosen.items() for entry in model.entries(name)}
    books = quantise(model.weights, bits)
    dense = {n: t for n, t in model.weights.items() if n not in books}
    sizes = model.plain["network"]
    inputs = [f"c{i}" for i in range(sizes["in_channels"])]
    facts = {
        **read_bundle(like.bundle).facts,
        "network": model.plain,
        "channels": inputs,
        "present": inputs,
        "labels": [f"l{i}" for i in range(sizes["out_channels"])],
    }
    facts["input"] = {**facts["input"], "file_channels": inputs, "adjacent_slices": None}
    write_bundle(folder, facts, dense, books)
    return case, network, bits


def test_a_quantised_bundle_runs_without_medfed(hospital, tmp_path):
    folder = tmp_path / "bundle"
    case, network, bits = mixture_bundle(hospital("slices"), folder, 3)
    bundle = read_bundle(folder)
    assert set(bundle.facts["bits"]) == set(bits)
    image = image_of(case)
    torch.save(image, folder / "image.pt")
    (tmp_path / "run.py").write_text(RUN)
    words = "medfed", str(tmp_path / "run.py")
    done = processes.run(processes.ROOT / "tests/delivery/alone.py", *words, cwd=folder)
    assert done.returncode == 0, done.stderr[-2000:]
    network.load_state_dict(bundle.state, strict=False)
    with torch.no_grad():
        expected = network(image)
        assert_alike(bundle.network()(image), expected)
    alone = torch.load(folder / "output.pt", weights_only=True)
    assert_alike(alone, expected)


def test_the_ends_of_every_path_keep_single_precision():
    """First and last are those of the ordinary network, and so of every instance."""
    _, whole = exported("whole networks", [0.5, 0.5])
    names = choose_bits(build_network(whole.plain["network"]), 2)
    assert [entry for n in names for entry in whole.entries(n)] == [
        f"canonical.{k}.network.features.{i}.conv.weight" for i in (1, 2) for k in (0, 1)
    ]
    _, heads = exported("heads", [0.5, 0.5])
    assert [entry for n in names for entry in heads.entries(n)] == [
        f"common.features.{i}.conv.weight" for i in (1, 2)
    ]


def test_counters_of_a_client_are_kept():
    _, plain, _ = made("batch norm", [0.5, 0.5])
    state = build_network(plain).state_dict()
    counters = [n for n, t in state.items() if t.dtype == torch.int64]
    assert counters
    weights = {**state, counters[0]: torch.tensor(7)}
    found = checked(plain, weights, "A").weights
    assert [*found] == [*state]
    assert found[counters[0]] == 7
    with pytest.raises(CheckpointError, match="The model of A has other entries"):
        checked(plain, {**state, counters[0]: torch.tensor(7.0)}, "A")


@torch.no_grad()
@pytest.mark.parametrize("membership", [[0.2, 0.5, 0.3], [0.0, 1.0, 0.0]], ids=["three", "one"])
def test_counters_of_the_instances_that_a_client_uses_are_kept(membership):
    network, plain, places = made("batch norm", membership)
    state = {n: t.clone() for n, t in network.state_dict().items()}
    counters = [n for n, t in state.items() if t.dtype == torch.int64]
    for number, name in enumerate(counters):
        state[name] += 10 + number
    used = from_canonical(network, plain, places, state, "A").weights
    found = {int(t) for t in used.values() if t.dtype == torch.int64}
    assert found == {int(state[name]) for name in counters}


def test_weights_of_another_model():
    _, model = exported("heads", [0.5, 0.5])
    weights = dict(model.weights)
    del weights["canonical.1.head.bias"]
    with pytest.raises(CheckpointError, match="The model of A has other entries"):
        checked(model.plain, weights, "A")


@torch.no_grad()
@pytest.mark.parametrize("case", ["heads", "linear", "up-sampling path"])
def test_onnx_runtime_computes_the_same_mixture(tmp_path, case):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    _, model = exported(case, [0.2, 0.5, 0.3])
    names = choose_bits(build_network(model.plain["network"]), 2, {"*": 2})
    books = quantise(model.weights, {e: b for n, b in names.items() for e in model.entries(n)})
    network = loaded(model)
    network.load_state_dict({n: b.dense() for n, b in books.items()}, strict=False)
    image = image_of(case)
    save_onnx(tmp_path / "model.onnx", network, tuple(image.shape[1:]))
    expected = network(image)
    found = OnnxNetwork(tmp_path / "model.onnx")(image)
    assert_alike(found, expected)
