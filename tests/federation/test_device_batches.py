"""Batches made on a device, or ahead of the steps, are those of main memory: order and bits.

No GPU is needed: the same code makes them on the CPU where `DEVICES` names it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from dataclasses import replace
from functools import partial
from itertools import islice
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
from medfed.federation.engine.batches import Residents, ahead
from medfed.federation.hospital import ArrayClient, Hospital
from medfed.federation.inputs import Pool
from medfed.federation.reference import run_reference
from medfed.personalize.ditto import Ditto
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.scaffold import Scaffold

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


def counted(made: list[int], end: int, error: int | None = None):
    for number in range(end):
        if number == error:
            raise KeyError(f"batch {number}")
        made.append(number)
        yield number


def workers() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("batches")]


def test_a_thread_gives_the_same_values_and_errors_in_their_order():
    made: list[int] = []
    with ahead(counted(made, 9), CPU) as values:
        assert next(values) == 0
        assert workers()
        assert [*values] == [*range(1, 9)]
    with ahead(counted([], 9, error=4), CPU) as values:
        assert [*islice(values, 4)] == [0, 1, 2, 3]
        with pytest.raises(KeyError, match="batch 4"):
            next(values)
    made.clear()
    with contextlib.suppress(ValueError), ahead(counted(made, 9), CPU) as values:
        next(values)
        raise ValueError("a step failed")
    assert len(made) <= 3  # at most two are made in vain
    assert not workers()


def noted(threads: set[str], image: Tensor, seed: int) -> Tensor:
    threads.add(threading.current_thread().name.rstrip("0123456789_"))
    return image + torch.rand(image.shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "algorithm", [FedAvg(), Ditto(), Scaffold()], ids=["fedavg", "ditto", "scaffold"]
)
def test_prefetched_steps_are_equal_also_with_dropout(algorithm, monkeypatch):
    on_the_cpu(monkeypatch)
    assert_prefetching_changes_no_bit(algorithm, "cpu")


def assert_prefetching_changes_no_bit(algorithm, device):
    flips = Augmentation(
        flip_chance=0.5, affine_chance=0.5, rotation=20.0, noise_chance=0.5, noise=0.1
    )
    digests, used = {}, {}
    for prefetch in (False, True):
        threads: set[str] = set()
        more = {"augment": flips.build((4, 4), flips=(0, 1)), "normalize": partial(noted, threads)}
        data = [images("c0", 8, **more), images("c1", 7, **more)]
        network = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Dropout(0.5), nn.Conv2d(3, 2, 1))

        def loss(_, batch, network=network):
            logits = network(batch["image"])
            return nn.functional.binary_cross_entropy_with_logits(logits, batch["label"])

        torch.manual_seed(0)
        for layer in (network[0], network[2]):
            layer.reset_parameters()
        network.to(device)
        done, _ = federation(data, network, algorithm, loss, prefetch=prefetch)
        done.to(torch.device(device))
        digests[prefetch] = run_reference(done, 2).digests()
        used[prefetch] = threads
    assert digests[False] == digests[True]
    assert used[False] == {"MainThread"}
    assert "batches" in used[True]
    assert not workers()


@pytest.mark.parametrize(
    ("name", "may"),
    [("augmented", True), ("a loader", False), ("a subclass", False), ("a wrapper", False)],
)
def test_only_batches_from_a_seed_alone_are_made_by_a_thread(name, may, monkeypatch):
    on_the_cpu(monkeypatch)
    _, local = federation([classes()], prefetch=True)
    assert local._prefetches(ELSEWHERE[name]) is may
    assert not local._prefetches(images(augment=lambda sample: sample))
    local.residents.admit(images(), CPU)
    assert local._prefetches(images("c1"))
    on_the_device = images()
    local.residents.admit(on_the_device, CPU)
    assert not local._prefetches(on_the_device)
