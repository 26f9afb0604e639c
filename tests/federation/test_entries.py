"""Personal entries of tensors: M and N entry by entry in NumPy, the contract, bytes and errors."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import medfed
from medfed.common.tensors import select
from medfed.config.compose import load
from medfed.config.description import checked
from medfed.delivery.bundle.bundle import read_bundle
from medfed.delivery.export.export import export_run
from medfed.federation.reference import ArrayClient, run_reference
from medfed.federation.split import divide, float_entries, joined, numbered, parted
from medfed.personalize.fedper import FedPer
from medfed.personalize.moon import MOON
from medfed.records.folder import Run
from medfed.run.evaluation import evaluate_run
from medfed.standalone.errors import ConfigError
from tests.contract import harness
from tests.contract.harness import ROUNDS, Serialising, federation, half, lightning, lossy
from tests.integration.runs import CLINICAL, outcome, resume, run
from tests.references.linear_net import ALL
from tests.references.minibatch_steps import descend
from tests.references.pairing import assert_same, run_on_minibatches
from tests.toys import ToyTask, assert_alike, toy_data, toy_federation

PERSONAL = ("body.weight[:, 1]", "head.weight[0, 2]", "body.bias")
PLAIN = harness.task


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fedper_equals_selection_matrices(momentum):
    """y = Mx + Nz: all entries take the steps, x is averaged, z stays."""
    method = FedPer(personal=PERSONAL)
    federation, p = run_on_minibatches(method, fraction=0.5, momentum=momentum, lr=0.01)
    network = next(iter(federation.clients.values())).trainer.network
    p.initial = {n: t.numpy() for n, t in joined(network, _torch(p.initial)).items()}
    keep = {k: np.zeros_like(p.initial[k], dtype=bool) for k in ALL}  # N
    keep["body.weight"][:, 1] = keep["head.weight"][0, 2] = keep["body.bias"][:] = True
    x, z = p.initial, dict.fromkeys(range(len(p.batches)), p.initial)
    for cohort in p.cohorts:
        start = {n: {k: np.where(keep[k], z[n][k], x[k]) for k in ALL} for n in cohort}
        ends = {n: descend(p, n, start[n]) for n in cohort}
        present = sum(p.shares[n] for n in cohort)
        x = {k: sum(p.shares[n] * e[k] for n, e in ends.items()) / present for k in ALL}
        z |= ends
    for n, client in enumerate(federation.ids):
        found = joined(network, federation.personal_model(client))
        assert_same(found, {k: np.where(keep[k], z[n][k], x[k]) for k in ALL}, 1e-10)
    assert all(np.ptp([z[n][k][keep[k]] for n in z], axis=0).max() > 1e-3 for k in ALL[:2])


def _torch(model):
    return {n: torch.tensor(t) for n, t in model.items()}


@pytest.mark.parametrize("name", ["fedper", "pfednet"])
def test_the_contract_holds(name, tmp_path: Path, monkeypatch):
    """Lightning = reference = messages as bytes; straight = resumed, also behind lossy codecs."""

    def task(name: str = ""):
        toy = PLAIN(name)
        toy.personal = ("head.*", "body.weight[:, 0]", "middle.weight[1:3]")
        return toy

    monkeypatch.setattr(harness, "task", task)
    _, plain, local = federation(name, cohort=half())
    run_reference(plain, ROUNDS)
    personal = select(local.model.initial(), local.split.parameters("personal"))
    assert sum(t.numel() for t in personal.values()) == 5 + 4 + 8
    straight, record = lightning(name, tmp_path / "a", cohort=half())
    assert straight.federation.digests() == plain.digests()
    _, serial, _ = federation(name, cohort=half(), channel=Serialising())
    assert run_reference(serial, ROUNDS).digests() == plain.digests()
    lightning(name, tmp_path / "b", rounds=1, cohort=half())
    first = tmp_path / "b" / "round_00000.ckpt"
    again, resumed = lightning(name, tmp_path / "b", resume=first, cohort=half())
    assert again.federation.digests() == straight.federation.digests()
    assert resumed.history == record.history
    _, coded, _ = federation(name, channel=lossy("stc"))
    module, _ = lightning(name, channel=lossy("stc"))
    assert module.federation.digests() == run_reference(coded, ROUNDS).digests()


@pytest.mark.parametrize("entry", ["[:, 9]", "[4]", "[1:1]", "[0, 0, 0]"])
def test_an_index_of_nothing_is_refused(entry):
    with pytest.raises(ConfigError, match=r"names no entry: the tensor has 1 x 3 entries"):
        divide(nn.Linear(3, 1), [f"weight{entry}"])


@pytest.mark.parametrize(
    ("pattern", "sentence"),
    [
        ("weight[:]", "name all of its 3 entries; write 'weight' alone"),
        ("wieght[0]", r"wieght, which is no tensor of the model .did you mean weight"),
        ("weight[:, age]", "has the index 'age'; write numbers and ranges"),
    ],
)
def test_what_cannot_be_meant_is_refused(pattern, sentence):
    with pytest.raises(ConfigError, match=sentence):
        divide(nn.Linear(3, 1), [pattern])


def test_a_tied_tensor_is_refused_and_an_unknown_input_named():
    with pytest.raises(ConfigError, match="name all of its 3 entries"):  # two halves are, too
        divide(nn.Linear(3, 1), ["weight[:, :1]", "weight[:, 1:]"])
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    network[1].weight = network[0].weight
    with pytest.raises(ConfigError, match="this tensor is also called 1"):
        divide(network, ["0.weight[0]"])
    with pytest.raises(ConfigError, match="names wage, which is no input of these data"):
        numbered("linear.weight[:, wage]", ["age", "sex"])


def test_division_computes_the_same_again_and_in_other_cuts():
    torch.manual_seed(0)
    network, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.randn(5, 3)
    before = network(x)
    first = divide(network, ["0.weight[..., -1]", "1.*"])
    vector = network.get_parameter(first[1])
    assert divide(network, ["0.weight[:, 2]", "1.*"]) == first
    assert network.get_parameter(first[1]) is vector
    divide(network, ["0.weight[::2]", "1.*"])
    assert torch.equal(network(x), before)
    whole = joined(network, {n: t.detach() for n, t in network.named_parameters()})
    assert set(parted(network, whole)) == {n for n, _ in network.named_parameters()}
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    plain.load_state_dict(whole)
    assert torch.equal(plain(x), before)


LAYERS = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 2)))
SIZES = {n: t.shape for n, t in LAYERS.named_parameters()}


@st.composite
def divisions(draw):
    """Indices of some tensors of any layers, with the mask of each."""
    masks = {}
    for name in draw(st.lists(st.sampled_from(sorted(SIZES)), min_size=1, unique=True)):
        index = [draw(st.integers(0, size - 1)) for size in SIZES[name]]
        length = draw(st.integers(1, len(index)))  # a whole row, or one entry of it
        mask = torch.zeros(SIZES[name], dtype=torch.bool)
        mask[tuple(index[:length])] = True
        masks[name] = (f"{name}[{', '.join(map(str, index[:length]))}]", mask)
    return masks


@settings(max_examples=12, deadline=None)
@given(divided=divisions())
def test_any_division_is_put_together_again(divided):
    """Of several tensors of a layer, and of several layers: x is one, z is each client's."""
    torch.manual_seed(0)
    network, x = copy.deepcopy(LAYERS), torch.randn(6, 3)
    before = network.eval()(x)
    patterns = [pattern for pattern, _ in divided.values()]
    found = divide(network, patterns)
    named = {n: t.detach() for n, t in float_entries(network).items()}
    assert len(set(found)) == len(patterns)
    assert set(found) <= set(named)
    assert torch.equal(network(x), before)
    whole = joined(network, named)
    assert set(whole) == set(float_entries(LAYERS))
    again = parted(network, whole)
    assert set(again) == set(named)
    assert all(torch.equal(again[n], named[n]) for n in named)
    clients = [ArrayClient(c, torch.randn(8, 3) + n, torch.randn(8, 2)) for n, c in enumerate("ab")]
    done = medfed.federate(
        FedPer(personal=tuple(patterns)),
        LAYERS,
        lambda net, b: (net(b["image"]) - b["label"]).square().mean(),
        clients,
        rounds=2,
    )
    first, second = (done.model(c).state_dict() for c in "ab")
    for name, size in SIZES.items():
        mask = divided[name][1] if name in divided else torch.zeros(size, dtype=torch.bool)
        assert torch.equal(first[name][~mask], second[name][~mask])
        start = LAYERS.state_dict()[name]
        assert not torch.equal(first[name], start) or name == "0.bias"  # which norms cancel
        assert (
            not mask.any()
            or not torch.equal(first[name][mask], second[name][mask])
            or (name == "0.bias")
        )


def test_a_run_keeps_a_feature_by_name(tmp_path):
    """Resumed, evaluated and exported as the plain network that it is."""
    folder, again = tmp_path / "run", tmp_path / "again"
    keys = (*CLINICAL, "algorithm=fedper", "rounds=2", "local.steps=5")
    with pytest.raises(ConfigError, match="which is no input of these data") as refused:
        run(tmp_path / "wrong", *keys, 'model.personal=["linear.weight[:, agee]"]')
    feature = str(refused.value).split("the inputs are ")[1].split(", ")[1]
    keys = (*keys, f'model.personal=["linear.weight[:, {feature}]"]')
    run(folder, *keys)
    done = Run(folder)
    weights = torch.stack([done.model(c).linear.weight.detach() for c in done.clients])
    apart = (weights - weights[0]).abs().amax((0, 1)) > 0
    assert apart.nonzero().flatten().tolist() == [1]
    fits = {e.bytes for e in done.ledger.entries if e.phase == "fit"}
    assert fits == {4 * weights[0].numel() + 12}  # the bias goes, the feature stays
    assert evaluate_run(folder)["clients"] == done.summary["clients"]
    shutil.copytree(folder, again)
    for path in (again / "checkpoints").glob("round_00001*"):
        path.unlink()
    resume(again, *keys)
    assert outcome(again) == outcome(folder)
    with pytest.raises(ConfigError, match=r"read tensor by tensor; set init\.part=all"):
        run(tmp_path / "third", *keys, f"init.weights={folder}", "init.part=shared")
    client = done.clients[0]
    export_run(checked(load([f"run={folder}", f"client={client}"], "export")))
    rows = torch.rand(3, weights.shape[2])
    with torch.no_grad():
        exported = read_bundle(folder / "bundles" / client).network()(rows)
        assert_alike(exported, done.model(client)(rows), 1e-6)


def test_features_enter_a_head_that_is_divided():
    """What puts its weights together has no input, and hides none."""
    whole, divided = ToyTask(), ToyTask()
    ends = []
    for task, personal in ((whole, "none"), (divided, ("head.weight[0, 1]",))):
        method = MOON(personal=personal)
        _, fed, _ = toy_federation(method, task, toy_data(1, batch=4), momentum=0.0)
        run_reference(fed, 3)  # of a single client, so that nothing is averaged
        ends.append(joined(task.network, fed.personal_model("c0")))
    for name, tensor in ends[0].items():
        assert_alike(ends[1][name], tensor)
