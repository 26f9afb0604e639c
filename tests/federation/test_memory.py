"""How many copies of a large model a federation has in memory, counted within PyTorch."""

from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import medfed
from medfed.common.tensors import digest
from medfed.federation.split import ParameterSplit
from medfed.federation.wire.channel import CER, Channel, Link
from medfed.federation.wire.codecs.qsgd import QSGD
from medfed.federation.wire.codecs.runlength import RunLength
from medfed.federation.wire.codecs.stc import STC
from medfed.method import select
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.scaffold import Scaffold
from tests.toys import assert_alike

WIDTH = 128


class Peak(TorchDispatchMode):
    """Counts the bytes of all tensors that operations return, until they are freed."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least = least  # bytes of the smallest tensor that counts
        self.living: dict[int, int] = {}
        self.bytes = self.most = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        results = operation(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, torch.Tensor) and result.layout == torch.strided:
                self.count(result.untyped_storage())
        return results

    def count(self, storage: torch.UntypedStorage) -> None:
        if storage.nbytes() >= self.least and storage._cdata not in self.living:
            self.living[storage._cdata] = storage.nbytes()
            self.bytes += storage.nbytes()
            self.most = max(self.most, self.bytes)
            weakref.finalize(storage, self.freed, storage._cdata)

    def freed(self, number: int) -> None:
        self.bytes -= self.living.pop(number)


def network() -> nn.Module:
    layers = [m for _ in range(3) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 2))


def federated(method, model, **settings):
    generator = torch.Generator().manual_seed(0)
    clients = [
        medfed.ArrayClient(n, torch.randn(16, WIDTH, generator=generator), torch.arange(16) % 2, 8)
        for n in ("a", "b")
    ]

    def loss(model, batch):
        return cross_entropy(model(batch["image"]), batch["label"])

    fixed = {"rounds": 2, "steps": 2, "personal": "6.*", **sgd()}
    return medfed.federate(method, model, loss, clients, **{**fixed, **settings})


def sgd(**options):
    return {"lr": None, "optimizer": partial(torch.optim.SGD, lr=0.01, **options)}


def both(link):
    return {"channel": Channel(link(), link())}


# Your network, its copy that trains and its initial weights are three of each; then there are the
# server's states and sums, and what one turn needs. Two clients' states of a method are two.
MOST = {
    "fedavg": ("fedavg", {}, 6),
    "fedavg with momentum": ("fedavg", sgd(momentum=0.9), 7),
    "fedper": ("fedper", {}, 6),
    "pfednet": ("pfednet", {}, 6),
    "scaffold": ("scaffold", {}, 12),
    "scaffold with momentum": ("scaffold", sgd(momentum=0.9), 12),
    "apfl": ("apfl", {}, 11),
    "qupel": ("qupel", {}, 10.6),
    "fedavg by stc": ("fedavg", both(lambda: Link(STC())), 12),
    "fedavg by qsgd": ("fedavg", both(lambda: Link(QSGD())), 9),
    "fedavg by cer": ("fedavg", {"channel": Channel(Link(RunLength(), cer=CER(0.5)))}, 9),
}


@pytest.mark.parametrize("row", list(MOST))
def test_no_copy_of_a_large_model_is_idle(row, monkeypatch):
    monkeypatch.setattr("medfed.federation.wire.channel._BLOCK", 1024)  # of a larger model's share
    method, settings, sizes = MOST[row]
    size = sum(t.nbytes for t in network().parameters())
    with Peak(size // 20) as peak:
        model = network()
        done = federated(method, model, **settings)
    assert done.ledger.total(direction="up") > 0
    assert sizes - 1 < peak.most / size < sizes + 0.1


def test_what_a_turn_has_needed_is_gone_after_it():
    fed = federated("scaffold", network(), **sgd(momentum=0.9)).federation
    plan = fed.trainer.model.plan("all")
    assert not plan.optimizer.state
    assert all(t.grad is None for t in plan.parameters)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (1, 1), (4,), (4, 1), (0, 4), (2, 3)], ids=str)
def test_zeros_of_every_shape_are_ordinary_tensors(shape):
    start = {"w": torch.ones(shape)}
    zero = Scaffold().init(start, ParameterSplit(("w",), ()), [])[1]["control"]
    assert digest(zero) == digest({"w": torch.zeros(shape)})
    assert zero["w"].untyped_storage().nbytes() <= 4


class InSteps(FedAvg):
    def local_steps(self, client, start):
        client.state["mine"] = super().local_steps(client, start)
        return client.state["mine"]


class InFit(FedAvg):
    def fit(self, client, message):
        end = client.train({**message.parts["shared"], **client.state["personal"]})
        reply = self.displaced(client, message, end)
        client.state["mine"] = end
        return reply


class InDisplaced(FedAvg):
    def displaced(self, client, message, end):
        client.state["mine"] = end
        return super().displaced(client, message, end)


@pytest.mark.parametrize("kind", [InSteps, InFit, InDisplaced])
def test_a_method_may_keep_what_it_has_trained(kind):
    torch.manual_seed(0)
    model = network()
    plain = federated(FedAvg(), model, rounds=1)
    keeping = federated(kind(), model, rounds=1)
    assert keeping.federation.digests()["server"] == plain.federation.digests()["server"]
    kept = [c.state["mine"] for c in keeping.federation.clients.values()]
    for name, tensor in keeping.federation.server["shared"].items():
        assert_alike((kept[0][name] + kept[1][name]) / 2, tensor)
    start = select(keeping.network.state_dict(), kept[0])
    assert all(not torch.equal(kept[0][name], start[name]) for name in start)
