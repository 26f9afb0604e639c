"""Low-rank adapters: the base is frozen and in no message, and the contract of methods holds."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from monai.networks.nets import SwinUNETR
from torch import nn
from torch.nn.utils.parametrize import remove_parametrizations

import medfed
from medfed.common.tensors import digest, select
from medfed.federation.reference import ArrayClient, run_reference
from medfed.federation.split import ParameterSplit, float_entries
from medfed.models.networks.adapters import PATTERN, Adapters, attach, merged
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.fedper import FedPer
from medfed.standalone.errors import ConfigError
from tests.contract import harness
from tests.contract.harness import ROUNDS, Serialising, federation, half, lightning

METHODS = ["fedavg", "pfednet", "ppfl", "qupel", "ditto"]
PLAIN = harness.task


@pytest.fixture(autouse=True)
def adapted(monkeypatch):
    """Every toy of the contract gets adapters of rank 1; its head trains whole."""

    def task(name: str = ""):
        toy = PLAIN(name)
        attach(toy.network, Adapters(rank=1))
        return toy

    monkeypatch.setattr(harness, "task", task)


def base_of(network: nn.Module) -> str:
    return digest(select(float_entries(network), sorted(network.frozen_entries)))


@pytest.mark.parametrize("name", METHODS)
def test_the_contract_holds_with_half_the_clients(name, tmp_path: Path):
    """Lightning = reference = messages as bytes, straight = resumed; the base stays as it was."""
    task, plain, local = federation(name, cohort=half())
    before = base_of(task.network)
    run_reference(plain, ROUNDS)
    straight, record = lightning(name, tmp_path / "a", cohort=half())
    assert straight.federation.digests() == plain.digests()
    assert straight.federation.ledger.to_csv() == plain.ledger.to_csv()

    _, serial, _ = federation(name, cohort=half(), channel=Serialising())
    assert run_reference(serial, ROUNDS).digests() == plain.digests()

    lightning(name, tmp_path / "b", rounds=1, cohort=half())
    first = tmp_path / "b" / "round_00000.ckpt"
    resumed, again = lightning(name, tmp_path / "b", resume=first, cohort=half())
    assert resumed.federation.digests() == plain.digests()
    assert again.history == record.history

    networks = [task.network, straight.task.network, resumed.task.network]
    assert {base_of(network) for network in networks} == {before}
    frozen = local.split.base
    assert frozen
    kept = [plain.server, *(c.state for c in plain.clients.values())]
    names = {n for state in kept for group in state.values() for n in group}
    names |= {n for c in plain.clients.values() for n in c.weights}
    assert not names & frozen
    assert {n for n in names if "lora_A" in n} > set()


@pytest.mark.parametrize("name", METHODS)
def test_adapters_learn(name):
    _, fed, _ = federation(name)
    before = fed.personal_model("c0")
    run_reference(fed, 1)
    after = fed.personal_model("c0")
    moved = [n for n in after if "lora" in n and not torch.equal(after[n], before[n])]
    assert {n.rpartition(".")[2] for n in moved} == {"lora_A", "lora_B"}


def volumes() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv3d(2, 8, 3, padding=1),
        nn.BatchNorm3d(8),
        nn.Conv3d(8, 8, 3, groups=2, bias=False),
        nn.ConvTranspose3d(8, 6, 2, stride=2),
        nn.Flatten(2),
        nn.Linear(64, 40),
        nn.Linear(40, 2),
    )


def test_the_start_is_the_network_to_the_bit_and_merging_is_pytorchs():
    network, image = volumes().eval(), torch.randn(2, 2, 4, 4, 4)
    before, names = network(image), set(float_entries(network))
    told = attach(network, Adapters(rank=2, alpha=3.0), seed=1)
    assert told.layers == ("0", "2", "3", "5")
    assert torch.equal(network(image), before)

    trained = {n: t for n, t in float_entries(network).items() if n not in network.frozen_entries}
    drawn = trained[_matrix("0", "A")].detach().clone()
    torch.manual_seed(1)
    there = {n: torch.randn_like(t) for n, t in trained.items()}
    whole = merged(network, there)
    network.load_state_dict(there, strict=False)
    after = network(image)
    assert not torch.equal(after, before)
    plain = volumes().eval()
    plain.load_state_dict(whole, strict=False)
    assert torch.equal(plain(image), after)
    for layer in told.layers:
        remove_parametrizations(network.get_submodule(layer), "weight")
    assert digest(float_entries(network)) == digest(whole)
    assert set(whole) == names
    again = volumes()
    attach(again, Adapters(rank=2), seed=1)
    assert torch.equal(again[0].parametrizations.weight[0].lora_A, drawn)


def _matrix(layer: str, which: str) -> str:
    return f"{layer}.parametrizations.weight.0.lora_{which}"


def test_a_step_is_that_of_the_paper():
    """h = W x + (alpha / r) B A x, its gradients by hand in NumPy, two steps of SGD."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(10, 6)), rng.normal(size=(10, 5))
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 5, bias=False)).double()
    w = network[0].weight.detach().numpy().copy()
    attach(network, Adapters(rank=2, alpha=3.0, train=[]))
    a = network[0].parametrizations.weight[0].lora_A.detach().numpy().copy()
    b, scale, lr = np.zeros((5, 2)), 1.5, 0.1
    for _ in range(2):
        error = 2 * (x @ (w + scale * b @ a).T - y) / y.size
        gradient = error.T @ x
        a, b = a - lr * scale * b.T @ gradient, b - lr * scale * gradient @ a.T
    data = ArrayClient("a", torch.tensor(x), torch.tensor(y))
    done = medfed.federate(
        FedAvg(),
        network,
        lambda net, batch: (net(batch["image"]) - batch["label"]).square().mean(),
        [data],
        rounds=2,
        lr=lr,
    )
    found = done.weights("a")
    np.testing.assert_allclose(found[_matrix("0", "A")].numpy(), a, atol=1e-6)  # fp32 travels
    np.testing.assert_allclose(found[_matrix("0", "B")].numpy(), b, atol=1e-6)
    model = done.model("a")
    assert torch.equal(model[0].parametrizations.weight.original, torch.tensor(w))
    outside = merged(network, found)["0.weight"].numpy()
    np.testing.assert_allclose(model(torch.tensor(x)).detach().numpy(), x @ outside.T, atol=1e-12)


def test_bytes_are_those_of_what_trains():
    _, fed, local = federation("fedavg")
    run_reference(fed, 1)
    trained = sum(t.numel() for t in local.model.initial().values())
    assert trained == (4 + 3) + (4 + 4) + (4 + 1)  # A and B of two layers, the head
    assert fed.ledger.total(direction="up") == 3 * (4 * trained + 12)


def test_statistics_of_the_base_are_frozen_unless_their_layer_trains():
    for train, moves in ((None, False), (["norm.*", "head.*"], True)):
        network = harness.network()
        attach(network, Adapters(rank=1, train=train))
        before = network.norm.running_mean.clone()
        clients = [ArrayClient("a", torch.randn(12, 3), torch.randn(12, 1))]
        done = medfed.federate(
            FedAvg(), network, lambda net, b: net(b["image"]).square().mean(), clients, rounds=1
        )
        assert torch.equal(done.model("a").norm.running_mean, before) != moves
        assert ("norm.running_mean" in done.federation.personal_model("a")) == moves


def test_personal_adapters_and_a_head_that_is_shared():
    network = harness.network()
    attach(network, Adapters(rank=1))
    split = FedPer(personal=PATTERN).split(network, (), "averaged")
    assert {n.rpartition(".")[2] for n in split.personal} == {"lora_A", "lora_B"}
    assert split.shared == ("head.weight", "head.bias")
    with pytest.raises(ConfigError, match=r"personal part norm\.\* is all frozen"):
        ParameterSplit.of(network, ["norm.*"])


def test_tied_weights_stay_frozen():
    network = harness.network()
    network.add_module("again", nn.Linear(4, 4))
    network.again.weight = network.middle.weight
    told = attach(network, Adapters(rank=1, train=["head.*"]))
    assert told.layers == ("body",)
    assert "middle.weight" in network.frozen_entries


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rank": 0}, "adapters.rank must be"),
        ({"alpha": 0.0}, "adapters.alpha must be"),
        ({"part": "both"}, "adapters.part"),
        ({"layers": "*"}, "adapters.layers must be a list"),
        ({"layers": ["bodi"]}, r"adapters\.layers: 'bodi' matches no layer \(did you mean body"),
        ({"train": ["haed.*"]}, r"adapters\.train: 'haed\.\*' matches no parameter"),
        ({"rank": 4}, "adapters.rank=4 saves nothing"),
    ],
)
def test_what_cannot_be_adapted_is_one_sentence(options, sentence):
    network = harness.network()
    before = list(network.state_dict())
    with pytest.raises(ConfigError, match=sentence):
        attach(network, Adapters(**{"rank": 1, **options}))
    assert list(network.state_dict()) == before
    with pytest.raises(ConfigError, match="finds no linear or convolutional layer"):
        attach(nn.Sequential(nn.BatchNorm1d(3)), Adapters())


def test_of_swin_unetr_a_fiftieth_travels_at_most(monkeypatch):
    """62 million weights: by shapes alone, on no device."""
    linspace = torch.linspace  # of which the network reads numbers while it is built
    monkeypatch.setattr(torch, "linspace", lambda *a, **k: linspace(*a, **{**k, "device": "cpu"}))
    with torch.device("meta"):
        network = SwinUNETR(in_channels=4, out_channels=3, feature_size=48)
    whole = sum(t.numel() for t in float_entries(network).values())
    assert 61e6 < whole < 63e6
    told = attach(network, Adapters(rank=4, train=["out.*"]))
    split = ParameterSplit.of(network)
    entries = float_entries(network)
    assert sum(entries[n].numel() for n in split.shared) == told.trained <= 0.02 * whole
    assert told.frozen == whole - (48 * 3 + 3)  # the output layer
    assert dataclasses.asdict(told)["train"] == ("out.conv.conv.weight", "out.conv.conv.bias")
