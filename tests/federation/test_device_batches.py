"""Batches made on a device, or ahead of the steps, are those of main memory: order and bits.

No GPU is needed: the same code makes them on the CPU where `DEVICES` names it.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from medfed.common.tensors import digest
from medfed.datamodules.augmentation import Augmentation, ChannelDropout
from medfed.datamodules.client_data import ArrayRows, ClientData
from medfed.federation.assemble import assemble
from medfed.federation.budget import LocalBudget
from medfed.federation.engine import batches
from medfed.federation.engine.batches import Residents
from medfed.federation.hospital import ArrayClient, Hospital
from medfed.federation.inputs import Pool
from medfed.federation.reference import run_reference
from medfed.personalize.ditto import Ditto
from medfed.personalize.fedavg import FedAvg

CPU = torch.device("cpu")


def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "DEVICES", {"cpu"})


def images(name: str = "c0", n: int = 7, **more: Any) -> ClientData:
    """A client of small images with two regions."""
    random = torch.Generator().manual_seed(len(name) + n)
    image = torch.randn(n, 2, 4, 4, generator=random)
    label = (torch.rand(n, 2, 4, 4, generator=random) > 0.5).to(torch.uint8)
    block = {"image": image, "label": label, "case": torch.arange(n)}
    both = torch.tensor([True, True])
    return ClientData(name, block, {}, both, torch.tensor([9.0, 3.0, 2.0]), {}, 3, **more)


def classes(name: str = "c0", n: int = 7) -> ClientData:
    block = {"image": torch.randn(n, 3), "label": torch.arange(n) % 2}
    return ClientData(name, block, {}, torch.ones(3, dtype=torch.bool), torch.ones(2), {}, 3)


def mapped(data: ClientData) -> ClientData:
    """The client with images that are read from an array as int16."""
    raw = np.arange(40 * 2 * 16, dtype=np.int16).reshape(40, 2, 4, 4)
    rows = ArrayRows(raw, np.arange(data.num_samples)[::-1] * 2, lambda a: a.astype(np.float32) / 7)
    return replace(data, train={**data.train, "image": rows})


def lacking(data: ClientData) -> ClientData:
    present = torch.rand(data.num_samples, 2, generator=torch.Generator().manual_seed(5)) > 0.3
    return replace(data, train={**data.train, "present": present})


STAYING = {
    "images": images(),
    "classes": classes(),
    "balanced": replace(classes(), balanced=True),
    "outlined": images(annotated=torch.tensor([True, False])),
    "mapped": mapped(images()),
    "many": mapped(images(n=19)),
    "lacking": lacking(images()),
    "arrays": ArrayClient("c0", torch.randn(7, 3), torch.arange(7) % 2, 3),
}


@pytest.mark.parametrize("name", STAYING)
def test_a_client_on_a_device_makes_the_batches_of_main_memory(name):
    data = STAYING[name]
    there = data.resident_on(CPU)
    moved = there.inputs if name == "arrays" else there.train["image"]
    assert isinstance(moved, Tensor)
    for seed in (0, 1):
        pairs = zip(data.train_batches(seed), there.train_batches(seed), strict=True)
        for number, (expected, batch) in enumerate(pairs):
            assert digest(batch) == digest(expected), number
            assert {n: t.dtype for n, t in batch.items()} == {
                n: t.dtype for n, t in expected.items()
            }
    held = there.inputs.nbytes + there.labels.nbytes if name == "arrays" else None
    held = held or sum(t.nbytes for t in there.train.values())
    assert data.resident_bytes == held


class Noisy(ArrayClient):
    """A user's client, which computes in main memory."""

    def train_batches(self, seed):
        for batch in super().train_batches(seed):
            yield {**batch, "image": torch.from_numpy(batch["image"].numpy() + 1)}


class Passing:
    """A user's wrapper, which passes all but the batches on."""

    def __init__(self, data):
        self.data = data

    def __getattr__(self, name):
        return getattr(self.data, name)

    def train_batches(self, seed):
        return reversed([*self.data.train_batches(seed)])


ELSEWHERE = {
    "augmented": images(augment=Augmentation(flip_chance=0.5).build((4, 4), flips=(0,))),
    "normalised": images(normalize=lambda image, seed: image / 2),
    "channels dropped": images(channel_dropout=ChannelDropout(0.5)),
    "private or pooled": Pool(images(), [images(), images("c1")]),
    "a subclass": Noisy("c0", torch.randn(7, 3), torch.arange(7) % 2, 3),
    "a wrapper": Passing(images()),
    "a loader": Hospital("c0", [(torch.zeros(3), 1)] * 4),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_batches_that_are_made_in_main_memory_stay_there(name, monkeypatch):
    on_the_cpu(monkeypatch)
    data = ELSEWHERE[name]
    residents = Residents(1e9)
    residents.admit(data, CPU)
    assert residents.of(data) is data
    assert residents.size == 0


def test_batches_of_other_processes_stay_theirs(monkeypatch):
    on_the_cpu(monkeypatch)
    data = images()
    data.source = object()
    residents = Residents(1e9)
    residents.admit(data, CPU)
    assert residents.of(data) is data
    assert residents.size == 0


def turns(residents: Residents, clients: dict[str, ClientData], order: str) -> str:
    """Trains clients in turn; returns those whose samples were on the device."""
    there = ""
    for name in order:
        residents.admit(clients[name], CPU)
        there += name * (residents.of(clients[name]) is not clients[name])
    return there


def test_clients_that_take_turns_do_not_push_each_other_out(monkeypatch):
    on_the_cpu(monkeypatch)
    clients = {name: images(name) for name in "abc"}
    size = clients["a"].resident_bytes
    residents = Residents(2.5 * size)
    assert turns(residents, clients, "aababcabcabc") == "aabababab"
    assert residents.size == 2 * size
    # c takes the place of b, which has left: it has trained twice since.
    assert turns(residents, clients, "acac") == "acac"
    assert residents.size == 2 * size
    assert turns(Residents(0.5 * size), clients, "abab") == ""
    residents.release()
    assert residents.size == 0


def federation(data, network=None, algorithm=None, loss=None, **budget):
    torch.manual_seed(0)
    network = network or nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))

    def entropy(batch):
        return nn.functional.cross_entropy(network(batch["image"]), batch["label"])

    return assemble(
        algorithm or FedAvg(),
        network,
        partial(loss, entropy) if loss else entropy,
        data,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        rounds=2,
        budget=LocalBudget(**{"steps": 4, **budget}),
    )


def members() -> list[Any]:
    torch.manual_seed(3)
    arrays = ArrayClient("c1", torch.randn(8, 3), torch.arange(8) % 2, 3)
    return [classes(), arrays, Hospital("c2", [(torch.randn(3), k % 2) for k in range(5)])]


def test_a_federation_is_equal_and_its_end_gives_the_memory_back(monkeypatch):
    plain, _ = federation(members())
    run_reference(plain, 2)
    on_the_cpu(monkeypatch)
    resident, local = federation(members())
    monkeypatch.setattr(resident.clients["c0"].data, "train", dict(members()[0].train))
    sizes = []
    run_reference(resident, 2, lambda _: sizes.append(local.residents.size))
    expected = sum(c.resident_bytes for c in members()[:2])
    assert sizes == [expected, expected]
    assert local.residents.size == 0
    assert resident.digests() == plain.digests()


def failing(at: int):
    """A loss that finds the memory full once; the count is no hospital's."""
    calls = iter(range(at - 1, -1_000_000, -1))

    def loss(plain, batch):
        if next(calls) == 0:
            raise torch.OutOfMemoryError("out of memory")
        return plain(batch)

    return loss


def test_full_memory_gives_samples_back_once_and_changes_no_bit(monkeypatch, caplog):
    plain, _ = federation(members())
    run_reference(plain, 2)
    on_the_cpu(monkeypatch)
    full, local = federation(members(), loss=failing(at=7))
    with caplog.at_level(logging.WARNING):
        run_reference(full, 2)
    assert full.digests() == plain.digests()
    assert caplog.text.count("local.resident_gib=0") == 1
    assert local.residents.limit == local.residents.size == 0
    passes = {name: client.passes for name, client in plain.clients.items()}
    assert passes == {name: client.passes for name, client in full.clients.items()}
    with pytest.raises(torch.OutOfMemoryError):  # nothing is left to give back
        run_reference(federation(members(), loss=failing(at=1), resident_gib=0)[0], 1)
    # A method's own functions may not be called twice for one step.
    with pytest.raises(torch.OutOfMemoryError):
        run_reference(federation(members(), algorithm=Ditto(), loss=failing(at=7))[0], 1)


class Large(Passing):
    """A client whose samples do not fit, other than expected."""

    resident_bytes = 8

    def resident_on(self, device):
        raise torch.OutOfMemoryError("out of memory")


def test_samples_that_do_not_fit_stay_in_main_memory(monkeypatch, caplog):
    on_the_cpu(monkeypatch)
    residents, large, small = Residents(1e9), Large(images("a")), images("b")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            residents.admit(small, CPU)
            residents.admit(large, CPU)
            assert residents.of(large) is large
            assert residents.of(small) is small
    assert residents.size == 0
    assert len(caplog.records) == 1
