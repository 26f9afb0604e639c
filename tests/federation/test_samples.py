"""Batches on a device are those of main memory, and a step waits for none of its values."""

from __future__ import annotations

import torch

from medfed.datamodules.augmentation import Augmentation, ChannelDropout
from medfed.datamodules.client_data import ClientData
from medfed.federation.engine.gpu.steps import SHARE, Samples
from medfed.federation.local_client import Pool
from tests.toys import toy_data

CPU = torch.device("cpu")


def client(samples: int = 10, **more) -> ClientData:
    rng = torch.Generator().manual_seed(3)
    image = torch.randn(samples, 2, 6, 6, generator=rng)
    image[:, 1] = 0
    return ClientData(
        id=f"clinic_{samples}",
        train={"image": image, "label": torch.arange(samples) % 3},
        evaluation={"val": [], "test": []},
        channels=torch.tensor([True, False]),
        label_counts=torch.tensor([4.0, 3.0, 3.0]),
        patients={"train": ["p"], "val": [], "test": []},
        batch_size=4,
        balanced=True,
        **more,
    )


def equal(ours, theirs) -> bool:
    pairs = list(zip(ours, theirs, strict=True))
    return all(a.keys() == b.keys() for a, b in pairs) and all(
        torch.equal(a[n], b[n]) for a, b in pairs for n in a
    )


def test_what_is_kept_on_a_device_makes_the_batches_of_main_memory():
    recipe = Augmentation(flip_chance=0.5, affine_chance=0.5, rotation=20.0, noise_chance=0.5)
    for more in ({}, {"augment": recipe.build((6, 6), flips=(0, 1))}):
        plain, kept = client(**more), client(**more)
        kept.keep_on(CPU)
        kept.train = {n: torch.zeros_like(t) for n, t in kept.train.items()}  # read no more
        assert equal(kept.train_batches(5), plain.train_batches(5))
        assert not equal(kept.train_batches(6), plain.train_batches(5))


def test_clients_are_kept_while_there_is_room():
    first, second, third = (client(n) for n in (10, 20, 5))
    size = first.device_bytes
    assert size == 10 * (2 * 6 * 6 * 4 + 8)
    room = Samples(2 * size / 1e9)
    assert room.keep(first, CPU, free=None)
    assert not room.keep(second, CPU, free=None)
    assert room.keep(third, CPU, free=None)
    assert room.keep(first, CPU, free=None)  # again, at no cost
    assert room.left == size / 2
    assert Samples().keep(first, CPU, free=lambda: size / SHARE)
    assert not Samples().keep(first, CPU, free=lambda: size / SHARE - 1)
    assert not Samples(0.0).keep(first, CPU, free=None)


def test_what_is_made_in_main_memory_alone_is_not_kept():
    mapped, own = client(), client(augment=lambda sample: sample)
    mapped.train = {**mapped.train, "image": object()}
    pooled = Pool(client(), [client(), client(20)])
    for data in (mapped, own, pooled, toy_data()[0]):
        assert not Samples(1.0).keep(data, CPU, free=None)


def test_on_the_cpu_batches_are_the_clients_own():
    data = client(channel_dropout=ChannelDropout(0.5))
    assert equal(Samples(1.0).batches(data, 2, CPU), data.train_batches(2))
