"""State that is no entry of a model: kept for each client, restored, delivered, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import medfed
from medfed.federation.other_state import OTHER, OtherState, copied, filled
from medfed.federation.reference import ArrayClient, run_reference
from medfed.federation.split import ParameterSplit, float_entries
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.local import Local
from medfed.standalone.errors import ConfigError
from tests.contract import harness
from tests.contract.harness import NAMES, algorithm
from tests.odd_networks import CHECKS, ODDITIES, Case, Keeps, built, hospitals, loss

REFUSED = {
    "random generator": "Training changes kept of the network .Generator., which cannot be kept",
    "new layers": "Training adds, removes or replaces layers of the network",
    "lazy": "Layer 1 .LazyLinear. has no weights yet: pass one batch through the network",
}
KEPT = [name for name in ODDITIES if name not in REFUSED]
# The others in benchmarks/trust/networks_of_others.py.
ALL_CHECKS = ["integer buffer", "dictionary", "hidden moving average", "spectral norm, older"]


@pytest.mark.parametrize("name", KEPT)
def test_training_is_that_of_plain_pytorch_whoever_trains_beside(name):
    case = Case(ODDITIES[name])
    assert CHECKS["local = plain PyTorch"](case)
    assert CHECKS["alone = beside others"](case)


@pytest.mark.parametrize("check", ["one rank = two", "saved = evaluated", "resumed = straight"])
@pytest.mark.parametrize("name", ALL_CHECKS)
def test_state_is_saved_and_delivered(name, check):
    assert CHECKS[check](Case(ODDITIES[name]))


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_refused_before_a_round_closes(name):
    case = Case(ODDITIES[name])
    closed: list[int] = []
    with pytest.raises(ConfigError, match=REFUSED[name]):
        run_reference(built(FedAvg(), case, hospitals(case)).federation, 1, closed.append)
    assert not closed


class Study:
    """Keeps its criterion and a record of all calls."""

    def __init__(self, criterion: nn.Module) -> None:
        self.criterion, self.calls = criterion, 0

    def loss(self, network: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        self.calls += 1
        return by_criterion(network, batch, self.criterion)


class Judges(nn.Module):
    """A loss that is a module."""

    def __init__(self, criterion: nn.Module) -> None:
        super().__init__()
        self.criterion = criterion

    def forward(self, network: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return by_criterion(network, batch, self.criterion)


class Judge:
    """A loss that is an object."""

    def __init__(self, criterion: nn.Module) -> None:
        self.criterion = criterion

    __call__ = Judges.forward


def by_criterion(network: nn.Module, batch: dict[str, Tensor], criterion: nn.Module) -> Tensor:
    return loss(criterion, {**batch, "image": network(batch["image"])})


def around(criterion: nn.Module) -> Any:
    return lambda net, batch: sum(by_criterion(net, batch, criterion) for _ in range(1))


LOSSES = {
    "closure": around,
    "partial": lambda c: partial(by_criterion, criterion=c),
    "method": lambda c: Study(c).loss,
    "module": Judges,
    "object": Judge,
    "wrapped": lambda c: wraps(loss)(around(c)),
}


def trained_by(given: Any, names: str) -> medfed.Federated:
    torch.manual_seed(0)
    x, count = torch.randn(3, 12, 4), {"a": 8, "b": 12, "c": 4}
    every = {
        n: ArrayClient(n, x[i, :k], x[i, :k, 0].sign(), 4) for i, (n, k) in enumerate(count.items())
    }
    clients = [every[n] for n in names]
    return medfed.federate("local", nn.Linear(4, 4), given, clients, rounds=2, steps=2, lr=0.02)


@pytest.mark.parametrize(
    ("name", "form"),
    [*((name, "closure") for name in KEPT), *(("BatchNorm", form) for form in LOSSES)],
)
def test_what_a_loss_keeps_is_each_hospitals_and_begins_anew(name, form):
    given = LOSSES[form](ODDITIES[name]().requires_grad_(False))
    done = trained_by(given, "abc")
    assert set(done.weights("a")) == {"weight", "bias"}
    done.model("a")
    assert done.losses("train") == done.losses("train")
    for hospital in "abc":
        alone = trained_by(given, hospital).weights(hospital)
        assert torch.equal(alone["weight"], done.weights(hospital)["weight"])


def test_what_a_loss_keeps_is_named_or_its_authors():
    study = Study(nn.Identity())
    trained_by(study.loss, "ab")
    assert study.calls == 8
    drawing = ODDITIES["random generator"]().requires_grad_(False)
    with pytest.raises(ConfigError, match=r"changes the loss: criterion.kept .Generator., which"):
        trained_by(around(drawing), "ab")


class Counts(nn.Module):
    """Counts passes in every kind of place; its outputs show each."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))
        self.register_buffer("hidden", torch.zeros(4), persistent=False)
        self.number = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.passes += 1
                self.hidden = self.hidden + 1
            self.number += 1
        return x * (1 + 1e-3 * self.passes) + 1e-3 * self.hidden + 1e-3 * self.number


@pytest.mark.parametrize("name", sorted({*NAMES} - {"fedbn", "adabn", "silobn"}))
def test_every_method_keeps_it_for_each_client(name, monkeypatch):
    """Each personal model has counted the batches of its own training, in all places alike.

    And every method leaves frozen layers as they are, and at home.
    """
    plain = harness.network

    def network(seed: int = 0, outputs: int = 1) -> nn.Module:
        net = plain(seed, outputs)
        net.norm = Counts()
        net.middle.requires_grad_(False)
        return net

    monkeypatch.setattr(harness, "network", network)
    task, fed, local = harness.federation(name)
    run_reference(fed, 2)
    method = algorithm(name)
    common = "common." if method.mixes else "canonical.0.network." if method.sums else ""
    place, frozen = f"{common}norm", f"{common}middle.weight"
    assert frozen not in local.split.names("all")
    for client in fed.ids:
        model = fed.personal_model(client)
        assert torch.equal(local.model.whole(model)[frozen], plain().middle.weight)
        assert not task.network.get_parameter(frozen).requires_grad
        if method.trains_centrally:
            assert OTHER not in model
            continue
        counts = local.model.whole(model)[f"{place}.passes"].item()
        assert counts == (4 if name == "ditto" else 8)  # which trains two models by turns
        local.model.load(model)
        norm = task.network.get_submodule(place)
        assert (norm.passes.item(), norm.number) == (counts, counts)
        assert torch.equal(norm.hidden, torch.full((4,), float(counts)))
    sent = {n for e in fed.ledger.entries for n in (e.part,)}
    assert OTHER not in sent


def test_integers_are_never_averaged_and_a_newcomer_starts_anew():
    case = Case(ODDITIES["integer buffer"])
    clients = [ArrayClient(c, torch.randn(n, 4), torch.ones(n), 2) for c, n in (("a", 4), ("b", 8))]
    done = medfed.federate(FedAvg(), case.network(), loss, clients, rounds=3)
    assert [done.model(c).kept.item() for c in "ab"] == [6, 12]
    assert OTHER not in done.federation.client_start["personal"]
    plain = medfed.federate(FedAvg(), Keeps(lambda net: None), loss, clients, rounds=3)
    assert done.ledger.to_csv() == plain.ledger.to_csv()


def test_a_counter_of_batches_is_delivered_by_name():
    case = Case(ODDITIES["BatchNorm"])
    done = medfed.federate(Local(), case.network(), loss, hospitals(case), rounds=2, steps=3)
    weights = done.weights("c")
    assert set(weights) == set(case.network().state_dict())
    assert weights["kept.num_batches_tracked"].item() == 6
    assert OTHER in done.federation.clients["c"].state["model"]


def test_frozen_parameters_neither_train_nor_travel_and_stay_frozen():
    network = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    network[0].requires_grad_(False)
    network[1].bias.requires_grad_(False)
    case = Case(lambda: network)
    for method in ("fedavg", "ditto", "scaffold", "pfednet", "qupel"):
        personal = "2.*" if method == "pfednet" else ()
        done = medfed.federate(
            method, network, loss, hospitals(case), rounds=2, steps=2, personal=personal
        )
        split = done.federation.clients["a"].split
        assert set(split.parameters("all")) == {"1.weight", "2.weight", "2.bias"}
        for client in done.federation.ids:
            model = done.model(client)
            assert [p.requires_grad for p in model.parameters()] == [
                False,
                False,
                True,
                False,
                True,
                True,
            ]
            for name in ("0.weight", "0.bias", "1.bias"):
                assert torch.equal(model.state_dict()[name], network.state_dict()[name])
            assert not torch.equal(model[1].weight, network[1].weight)
    done = medfed.federate("fedavg", network, loss, hospitals(case), rounds=1)
    assert done.ledger.total(direction="up") == 3 * (4 * (64 + 16 + 2) + 12)


def test_a_part_that_its_owner_put_in_evaluation_mode_stays_in_it():
    network = ODDITIES["BatchNorm"]().train()
    network.kept.eval()
    case = Case(lambda: network)
    done = medfed.federate("fedavg", network, loss, hospitals(case), rounds=1)
    assert torch.equal(done.model("a").kept.running_mean, network.kept.running_mean)
    done = medfed.federate("fedavg", network.eval(), loss, hospitals(case), rounds=1)
    assert not torch.equal(done.model("a").kept.running_mean, network.kept.running_mean)


def test_other_state_of_another_network_is_refused():
    network, stranger = ODDITIES["queue of features"](), nn.Linear(4, 2)
    other = OtherState(network, float_entries(network))
    network(torch.ones(2, 4))
    packed = other.packed()
    for damaged in (packed[:-1], packed.float(), torch.ones(3, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="damaged"):
            other.restore(damaged)
    with pytest.raises(ValueError, match=r"the network has no kept\."):
        OtherState(stranger, float_entries(stranger)).restore(packed)


def _moves(kind: str, module: Any, x: Tensor) -> None:
    """Changes one kind of state by a batch."""
    step = x.detach().mean()
    if kind in ("tensor", "buffer", "hidden"):
        module.kept = 0.5 * module.kept + step
    elif kind == "in place":
        module.kept.add_(step)
    elif kind == "integer":
        module.kept += 1
    elif kind == "bool":
        module.kept = ~module.kept
    elif kind == "number":
        module.kept = module.kept + float(step)
    elif kind == "text":
        module.kept = f"{float(step):.3f}"
    elif kind == "list":
        module.kept.append([float(step), x.detach()[0, :2].clone()])
    elif kind == "dict":
        module.kept.setdefault("seen", []).append((1, float(step)))
    elif kind == "gone":
        module.kept = None if isinstance(module.kept, list) else 1
    elif kind == "none":
        module.kept = None if module.kept is not None else x.detach()[:1].clone()


STARTS: dict[str, Callable[[nn.Module], None]] = {
    "tensor": lambda m: setattr(m, "kept", torch.zeros(3)),
    "buffer": lambda m: m.register_buffer("kept", torch.zeros(3, dtype=torch.float64), False),
    "hidden": lambda m: setattr(m, "kept", torch.zeros(())),
    "in place": lambda m: setattr(m, "kept", torch.zeros(2)),
    "integer": lambda m: m.register_buffer("kept", torch.zeros(2, dtype=torch.int32)),
    "bool": lambda m: m.register_buffer("kept", torch.zeros(2, dtype=torch.bool)),
    "number": lambda m: setattr(m, "kept", 0.0),
    "text": lambda m: setattr(m, "kept", ""),
    "list": lambda m: setattr(m, "kept", []),
    "dict": lambda m: setattr(m, "kept", {}),
    "gone": lambda m: setattr(m, "kept", [1]),
    "none": lambda m: setattr(m, "kept", None),
}


class Node(nn.Module):
    """A layer of a random tree: one kind of state, and others below."""

    def __init__(self, tree: tuple[str, list[Any]]) -> None:
        super().__init__()
        self.kind, below = tree
        self.layer = nn.Linear(3, 3)
        STARTS[self.kind](self)
        self.below = nn.ModuleList(Node(one) for one in below)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x).tanh()
        _moves(self.kind, self, x)
        for one in self.below:
            x = one(x)
        return x


def _alike(a: Any, b: Any) -> bool:
    """Whether two values are equal, tensors bit for bit."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(_alike(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(_alike, a, b))
    return type(a) is type(b) and bool(a == b)


def _all_kept(network: nn.Module) -> list[Any]:
    return [copy.deepcopy(m.kept) for m in network.modules() if isinstance(m, Node)]


trees = st.recursive(
    st.tuples(st.sampled_from(sorted(STARTS)), st.just([])),
    lambda below: st.tuples(st.sampled_from(sorted(STARTS)), st.lists(below, max_size=3)),
    max_leaves=6,
)


@settings(max_examples=25, deadline=None)
@given(tree=trees, turns=st.lists(st.integers(0, 2), min_size=1, max_size=6))
def test_clients_that_take_turns_on_a_random_tree_keep_their_own(tree, turns):
    """As if each had a network of its own."""
    torch.manual_seed(0)
    network = Node(tree)
    own = [copy.deepcopy(network) for _ in range(3)]
    other = OtherState(network, float_entries(network))
    packed: list[Tensor | None] = [None] * 3
    for number, client in enumerate(turns):
        x = torch.full((2, 3), 0.1 * number)
        other.restore(packed[client])
        network(x)
        own[client](x)
        packed[client] = other.packed()
    for client, expected in enumerate(own):
        other.restore(packed[client])
        assert _alike(_all_kept(network), _all_kept(expected))
        fresh = Node(tree)
        fresh.load_state_dict(network.state_dict())
        named, rest = other.by_name(packed[client])
        whole = {**float_entries(network), **named, **({} if rest is None else {OTHER: rest})}
        delivered = filled(copied(Node(tree)), {n: t.detach() for n, t in whole.items()})
        assert _alike(_all_kept(delivered), _all_kept(expected))


def test_a_network_of_frozen_parameters_is_refused():
    network = nn.Sequential(nn.Linear(4, 2)).requires_grad_(False)
    with pytest.raises(ConfigError, match="No parameter of the model trains: all are frozen"):
        medfed.federate("fedavg", network, loss, hospitals(Case(lambda: network)), rounds=1)
    assert not ParameterSplit.of(network).parameters("all")


def test_batch_normalisation_of_one_sample_is_one_sentence():
    case = Case(ODDITIES["BatchNorm"])
    clients = [ArrayClient("north", torch.randn(1, 4), torch.ones(1)), *hospitals(case)]
    for method in ("fedavg", "fedsgd"):
        with pytest.raises(ConfigError, match="Client north trains on batches of one sample"):
            medfed.federate(method, case.network(), loss, clients, rounds=1)
    medfed.federate("fedavg", case.network(), loss, clients, rounds=1, buffers="frozen")


@dataclass(frozen=True)
class Forgets(FedAvg):
    """A user's method, which keeps less than what training returns."""

    what: str = ""

    def personal_model(self, client, message):
        model = {**client.state["personal"], **message.parts["shared"]}
        return {name: t for name, t in model.items() if not name.startswith(self.what)}


@pytest.mark.parametrize(("what", "named"), [("other", "other state"), ("middle", "middle.weight")])
def test_a_method_that_forgets_what_was_trained_is_refused(what, named, monkeypatch):
    plain = harness.network

    def network(seed: int = 0, outputs: int = 1) -> nn.Module:
        net = plain(seed, outputs)
        net.norm = Counts()
        return net

    monkeypatch.setattr(harness, "network", network)
    _, federation, _ = harness.toy_federation(Forgets(what=what), harness.task(), rounds=1)
    run_reference(federation, 1)
    with pytest.raises(ConfigError, match=rf"Forgets\.personal_model lacks {named}"):
        federation.personal_model(federation.ids[0])


def test_a_network_that_replaces_what_it_has_is_compared_anew():
    """Neither a remembered object nor another name of one hides a change."""

    class Holds(nn.Linear):
        first: object = None

    network = nn.Sequential(Holds(2, 2), nn.ReLU(), nn.Linear(2, 1))
    held = network[0]
    held.first, held.second = "a", "b"
    other = OtherState(network, network.state_dict())
    packed = []
    for values in (("a", "b"), ("b", "a"), ("a", "b"), ("a", "c"), ("a", "b")):
        held.first, held.second = values
        packed.append(other.packed())
        assert (len(packed[-1]) > 0) is (values != ("a", "b"))
    for state, values in zip(packed, ("ab", "ba", "ab", "ac", "ab"), strict=True):
        other.restore(state)
        assert held.first + held.second == values
    held.third = held.second  # the objects are the same, the names are not
    del held.second
    assert len(other.packed()) > 0
    other.restore(None)
    assert held.second == "b"
    assert not hasattr(held, "third")
    network.append(nn.ReLU())
    with pytest.raises(ConfigError, match="adds, removes or replaces layers"):
        other.packed()
