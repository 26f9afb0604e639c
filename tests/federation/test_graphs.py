"""Captured steps are the same steps, bit for bit: shown by a tape, which no Python runs beside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from medfed.common.tensors import digest
from medfed.federation.budget import LocalBudget
from medfed.federation.engine.gpu.graphs import Graphs, Replay, UncapturableError, Watch, anatomy
from medfed.federation.engine.gpu.steps import GpuSteps
from medfed.federation.local_client import LocalClient
from medfed.federation.reference import run_reference
from medfed.functional.prox import Linear, Proximity
from medfed.personalize.ditto import Ditto
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.fedrep import FedRep
from medfed.personalize.perfedavg import PerFedAvg
from medfed.personalize.pfedme import PFedMe
from medfed.personalize.qupel import QuPeL
from medfed.personalize.scaffold import Scaffold
from tests.sweeps import sweep
from tests.toys import ToyTask, toy_data, toy_federation

NEVER = 10**9
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)
ADAM = partial(torch.optim.Adam, lr=0.01, amsgrad=True)
METHODS = {
    "fedavg": FedAvg(),
    "ditto": Ditto(strength=0.3),
    "scaffold": Scaffold(option="I"),
    "fedrep": FedRep(),
    "qupel": QuPeL(bits=1, proximity=0.5, global_lr=0.4),
    "pfedme": PFedMe(strength=0.5, inner_steps=2),
}


class Tape:
    """Keeps the operations of a step with the very tensors that they read and wrote.

    As a graph does, a replay reads the same addresses and the same numbers, and no Python runs: it
    shows on a CPU whether everything is filled in place. It saves no time.
    """

    def side(self) -> AbstractContextManager[None]:
        """The CPU has no streams."""
        return nullcontext()

    def record(self, step: Callable[[], None]) -> Replay:
        """See :meth:`Backend.record`; the step runs."""
        operations = _Operations()
        with operations:
            step()
        return operations.replay


class _Operations(Watch):
    """Runs operations and remembers them."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, list[Tensor | None]]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs one operation; of its results those in new memory have to be filled again."""
        kwargs = kwargs or {}
        outcome = super().__torch_dispatch__(func, types, args, kwargs)
        if func.namespace != "profiler":
            known = {_memory(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
            new = [
                t if isinstance(t, Tensor) and _memory(t) not in known else None
                for t in tree_leaves(outcome)
            ]
            self._calls.append((func, args, kwargs, new))
        return outcome

    def replay(self) -> None:
        """Runs all operations on the tensors of the recording."""
        with torch.no_grad():
            for func, args, kwargs, new in self._calls:
                again = tree_leaves(func(*args, **kwargs))
                for tensor, value in zip(new, again, strict=True):
                    if tensor is not None:
                        tensor.copy_(value)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def federated(
    algorithm: Any,
    often: int,
    optimizer: Any = MOMENTUM,
    network: nn.Module | None = None,
    rounds: int = 3,
    **budget: Any,
):
    """Runs three rounds, in which clients have batches of 4 and shorter last ones."""
    task = ToyTask()
    if network is not None:
        task.network = network
    federation, local = toy_federation(algorithm, task, toy_data(batch=4), rounds=3)[1:]
    local.model.make_optimizer = optimizer
    local.rates = [0.05, 0.02, 0.01]
    local.budget = LocalBudget(steps=5, **budget)
    local.gpu = GpuSteps(torch.device("cpu"), Graphs(Tape(), often, often))
    run_reference(federation, rounds)
    return federation, local


def same(algorithm: Any, **how: Any) -> Graphs:
    """Compares a run whose steps are captured with one whose steps are not."""
    plain, _ = federated(algorithm, NEVER, **how)
    captured, local = federated(algorithm, 1, **how)
    assert captured.digests() == plain.digests()
    ours, theirs = (
        {c: (k.loss, k.steps_done, k.passes) for c, k in f.clients.items()}
        for f in (captured, plain)
    )
    assert ours == theirs
    return local.gpu.graphs


@sweep("optimizer", [MOMENTUM, ADAM])
@sweep("name", METHODS)
def test_methods(name, optimizer):
    graphs = same(METHODS[name], optimizer=optimizer)
    assert graphs.captured
    assert graphs.replayed > 2 * graphs.captured
    assert not graphs.reasons


BUDGETS = {
    "clip": {"clip": 0.5},
    "accumulate": {"accumulate": 2},
    "kept": {"optimizer_state": "kept"},
}


@pytest.mark.parametrize("budget", BUDGETS)
def test_budgets(budget):
    graphs = same(Ditto(strength=0.3), optimizer=ADAM, **BUDGETS[budget])
    assert graphs.replayed
    assert not graphs.reasons


def dropping() -> nn.Module:
    """A network with dropout."""
    torch.manual_seed(4)
    layers = {"body": nn.Linear(3, 4), "off": nn.Dropout(0.5), "head": nn.Linear(4, 1)}
    network = nn.Sequential()
    for name, layer in layers.items():
        network.add_module(name, layer)
    return network


def test_dropout_draws_what_it_drew():
    plain, _ = federated(FedAvg(), NEVER, network=dropping())
    captured, local = federated(FedAvg(), 1, network=dropping())
    assert captured.digests() == plain.digests()
    assert local.gpu.graphs.replayed


def test_a_resumed_run_is_a_straight_one():
    kept = {"optimizer": ADAM, "optimizer_state": "kept"}
    straight, _ = federated(Ditto(strength=0.3), 1, **kept)
    first, _ = federated(Ditto(strength=0.3), 1, rounds=2, **kept)
    second, local = federated(Ditto(strength=0.3), 1, rounds=0, **kept)
    second.server = first.server
    for name, client in second.clients.items():
        client.load_state_dict(first.clients[name].state_dict())
    run_reference(second, 3, start=2)
    assert second.digests() == straight.digests()
    assert local.gpu.graphs.replayed


def test_parts_may_have_their_own_step_sizes():
    ends = []
    for often in (NEVER, 1):
        federation, local = federated(FedRep(), often, rounds=0)
        client = federation.clients["c1"]
        for number in range(3):
            client.begin(number, "fit", 0)
            rates = {"shared": 0.1 / (1 + number), "personal": 0.01}
            ends.append(digest(client.train(client.weights, rates=rates)))
    assert ends[:3] == ends[3:]
    assert len(set(ends)) == 3
    assert local.gpu.graphs.captured == 1
    assert not local.gpu.graphs.reasons


def test_autocast_is_captured_with_its_casts():
    def trained(often: int, precision: Any):
        federation, local = federated(FedAvg(), often, rounds=0)
        local.gradients.precision = precision
        run_reference(federation, 2)
        return federation.digests(), local.gpu.graphs

    half = partial(torch.autocast, "cpu", dtype=torch.bfloat16, cache_enabled=False)
    (plain, _), (captured, graphs) = trained(NEVER, half), trained(1, half)
    assert captured == plain != trained(1, nullcontext)[0]
    assert graphs.replayed
    assert not graphs.reasons


def test_a_network_that_is_moved_is_captured_anew():
    federation, local = federated(FedAvg(), 1, rounds=2)
    before = local.gpu.graphs.captured
    local.network.norm.running_mean = local.network.norm.running_mean.clone()
    run_reference(federation, 3, start=2)
    assert local.gpu.graphs.captured == 2 * before
    assert federation.digests() == federated(FedAvg(), NEVER)[0].digests()


class Seeing(FedAvg):
    """With a term that sees the network's outputs."""

    def local_steps(self, client, start):
        return client.train(start, batch_penalty=lambda batch, w, passed: passed(w).square().mean())


class Own(torch.optim.SGD):
    """Somebody's own."""


DECLINED = {
    "sees batches or outputs": {"algorithm": Seeing()},
    "Rprop has no fused step": {"optimizer": partial(torch.optim.Rprop, lr=0.01)},
    "Own has no fused step": {"optimizer": partial(Own, lr=0.01)},
    "unlike the others": {"optimizer": partial(torch.optim.SGD, momentum=0.9, dampening=0.5)},
    "optimizer.fused": {"optimizer": partial(torch.optim.Adam, foreach=True)},
    "a step waits for a value (_local_scalar_dense)": {"norm": {"momentum": None}},
    "float16": {"half": True},
}


@pytest.mark.parametrize("reason", DECLINED)
def test_what_cannot_be_captured_runs_and_is_said_once(reason, caplog):
    how = {"algorithm": FedAvg(), "norm": {}, "half": False, **DECLINED[reason]}
    norm, half, ends = how.pop("norm"), how.pop("half"), []
    caplog.set_level("INFO")
    for often in (NEVER, 1):
        federation, local = federated(**how, often=often, rounds=0)
        local.gradients.half = half
        for name, value in norm.items():
            setattr(local.network.norm, name, value)
        run_reference(federation, 3)
        ends.append(federation.digests())
    assert ends[0] == ends[1]
    assert local.gpu.graphs.captured == local.gpu.graphs.replayed == 0
    assert len(local.gpu.graphs.reasons) == 1
    assert reason in local.gpu.graphs.reasons[0]
    assert sum(reason in message for message in caplog.messages) in (1, 2)  # once per run


def test_a_penalty_of_unknown_make_runs_uncaptured():
    federation, local = federated(FedAvg(), 1, rounds=0)
    client = federation.clients["c1"]
    client.begin(0, "fit", 0)
    client.train(client.weights, penalty=lambda weights: weights["head.bias"].sum())
    (reason,) = local.gpu.graphs.reasons
    assert "does not declare what it depends on" in reason
    assert not local.gpu.graphs.captured


def test_steps_beside_the_loss_are_no_graphs_and_say_nothing():
    plain, _ = federated(PerFedAvg(), NEVER)
    other, local = federated(PerFedAvg(), 1)
    assert other.digests() == plain.digests()
    assert not local.gpu.graphs.captured
    assert not local.gpu.graphs.reasons


def test_an_anatomy_tells_values_from_structure():
    tie, other = (Proximity(0.5, {"x": torch.full((2,), n)}) for n in (1.0, 2.0))
    assert anatomy(tie).structure == anatomy(other).structure
    assert anatomy(tie).structure != anatomy(Proximity(0.25, tie.anchor)).structure
    assert anatomy(tie).structure != anatomy(Linear(tie.anchor)).structure
    assert anatomy(tie).structure != anatomy(Proximity(0.5, {"y": torch.ones(2)})).structure
    assert anatomy(None).tensors == []


def test_kinds_are_captured_when_seen_often_and_the_least_recent_is_dropped():
    graphs = Graphs(Tape(), often=2, often_if_short=3, kept=2)
    weight = torch.zeros(())

    def step(batches, penalty):
        weight.add_(batches[0]["image"].sum())
        return weight.clone()

    def taken(size):
        group = [{"image": torch.ones(size)}]
        return graphs.take("kind", group, None, step, lambda: [weight]) is not None

    assert [taken(8) for _ in range(4)] == [False, False, True, True]
    assert float(weight) == 16  # a capture itself changes nothing
    assert [taken(3) for _ in range(4)] == [False, False, False, True]
    assert taken(8)
    assert [taken(9) for _ in range(3)] == [False, False, True]  # in place of those of 3
    assert [taken(8), taken(9), graphs.captured] == [True, True, 3]
    assert taken(3)
    assert graphs.captured == 4


class Counting(Watch):
    """Counts what a GPU would wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def check(self, *operation: Any) -> None:
        try:
            super().check(*operation)
        except UncapturableError:
            self.waits += operation[0] != "randperm"  # of the CPU, wherever the network is


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM], ids=["sgd", "adam"])
def test_only_the_loss_at_the_end_is_waited_for(optimizer):
    federation, local = federated(FedAvg(), NEVER, optimizer, rounds=0, clip=0.5)
    tie = Proximity(0.1, {"head.bias": torch.ones(1)})
    for steps in (3, 12):
        federation.clients["c1"].begin(0, "fit", 0)
        with Counting() as counting:
            federation.clients["c1"].train(local.model.initial(), steps=steps, penalty=tie)
        assert counting.waits == 1


WAITS = {
    "waits for a value": lambda x: x * float(x.sum()),
    "waits for a value ": lambda x: x * (1 if x.sum() > 0 else 2),
    "by a mask": lambda x: x[x > 0],
    "not the default one": lambda x: x + torch.rand(3, generator=torch.Generator()),
}


@sweep("reason", WAITS)
def test_what_a_gpu_would_wait_for_is_found_on_a_cpu(reason):
    with pytest.raises(UncapturableError, match=reason.strip()), Watch():
        WAITS[reason](torch.arange(3.0))


def test_what_a_client_keeps_is_with_it_for_its_turn(monkeypatch):
    federation, _ = federated(Ditto(), NEVER, rounds=0, optimizer_state="kept", offload=True)
    keep, moves = LocalClient._keep, []

    def kept(client, saved, device):
        moves.append((client.id, client.steps_done, device))
        keep(client, saved, device)

    monkeypatch.setattr(LocalClient, "_keep", kept)
    monkeypatch.setattr(
        LocalClient, "home", torch.device("cpu", 0)
    )  # told apart from the network's
    run_reference(federation, 1)
    federation.personal_model("c1")
    here, home = torch.device("cpu"), torch.device("cpu", 0)
    turns = [((c, 0, here), (c, 5, home)) for c in federation.ids]
    assert moves == [m for turn in turns for m in turn] + [("c1", 5, here), ("c1", 5, home)]
    plain, _ = federated(Ditto(), NEVER, rounds=1, optimizer_state="kept")
    assert federation.digests() == plain.digests()
