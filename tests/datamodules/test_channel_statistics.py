"""Images normalised by channel statistics, a client's own or (FedRDN) those of a random client."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import torch

from medfed.common.seeding import numpy_rng
from medfed.config.compose import described
from medfed.datamodules.augmentation import Augmentation
from medfed.datamodules.images import (
    ImageDataModule,
    channel_statistics,
    normalized,
    random_statistics,
)
from medfed.datamodules.one_site import Claims
from medfed.datamodules.partitions.base import RoundRobin
from medfed.datamodules.partitions.by_group import ChannelMissing, SiteGroups
from medfed.datamodules.readers.medmnist import read_medmnist
from medfed.datamodules.splits import SPLITS
from medfed.datamodules.tables.agreement import packed
from medfed.run.assembly import read_data
from medfed.sites.policy import Policy
from medfed.sites.words import VetoError
from medfed.standalone.errors import ConfigError, DataError

CLIENTS = ("hospital_0", "hospital_1", "hospital_2")
SIZES = {"train": 66, "val": 9, "test": 9}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Colour images; those of the n-th patient are the brighter, the larger n modulo 3."""
    rng, content = numpy_rng("channels"), {}
    for split, n in SIZES.items():
        level = 40 + 50 * (np.arange(n) % 3)[:, None, None, None] + np.array([0, 10, 30])
        spread = 5 + 10 * (np.arange(n) % 3)[:, None, None, None]
        noise = rng.normal(0, 1, (n, 6, 5, 3)) * spread
        content[f"{split}_images"] = (level + noise).clip(0, 255).astype(np.uint8)
        content[f"{split}_labels"] = (np.arange(n) % 2)[:, None].astype(np.uint8)
    path = tmp_path_factory.mktemp("channels") / "some.npz"
    np.savez_compressed(path, **content)
    return path


def module(file, partition=None, keep_out=(), **settings):
    settings = {"scaling": "fedrdn", **settings}
    data = ImageDataModule(
        partition or RoundRobin(3), read_medmnist, path=str(file), val_fraction=0, **settings
    )
    data.keep_out = keep_out
    return data


def ready(*arguments, **settings):
    data = module(*arguments, **settings)
    data.setup()
    return data


def raw(file, client, split):
    """A client's images in the order of its patients, channels first, from -1 to 1, in float64."""
    numbers = [int(name.rpartition("_")[2]) for name in client.patients[split]]
    with np.load(file) as arrays:
        images = arrays[f"{split}_images"][numbers]
    return np.moveaxis(images, -1, 1).astype(np.float64) / 127.5 - 1


def by_hand(images):
    """Means and deviations over images and pixels, (C, 1, 1) each."""
    axes = (0, 2, 3)
    return images.mean(axes)[:, None, None], images.std(axes)[:, None, None]


def evaluated(client, split):
    return torch.cat([batch["image"] for batch in client.eval_batches(split)]).numpy()


def test_a_training_image_has_the_statistics_of_a_random_hospital_and_others_their_own(file):
    data = ready(file)
    every = {c: by_hand(raw(file, client, "train")) for c, client in data.clients.items()}
    for name, client in data.clients.items():
        mean, sd = every[name]
        for split in SPLITS:
            wanted = (raw(file, client, split) - mean) / sd
            np.testing.assert_allclose(evaluated(client, split), wanted, atol=2e-6)
        images = raw(file, client, "train")
        wanted = np.stack([(images - m) / s for m, s in every.values()])
        order, drawn = torch.arange(len(images)), []
        for epoch in range(20):
            seen = client.train_batch(epoch, 0, order)["image"].numpy()
            apart = np.abs(wanted - seen).max(axis=(2, 3, 4))
            assert apart.min(axis=0).max() < 1e-4  # of numbers up to 30
            drawn += apart.argmin(axis=0).tolist()
        counts = np.bincount(drawn, minlength=3)
        # 440 draws: the deviation of a count is 10.
        assert np.abs(counts - len(drawn) / 3).max() < 5 * np.sqrt(len(drawn) * 2 / 9)


def test_of_one_hospital_or_of_equal_ones_it_is_the_hospitals_own_scaling(file):
    settings = {"partition": RoundRobin(1), "batch_size": 16}
    one, own = ready(file, **settings), ready(file, scaling="client", **settings)
    (client,), (plain,) = one.clients.values(), own.clients.values()
    for a, b in zip(client.train_batches(3), plain.train_batches(3), strict=True):
        assert torch.equal(a["image"], b["image"])
    every = evaluated(client, "train")
    np.testing.assert_allclose(every.mean((0, 2, 3)), 0, atol=1e-5)
    np.testing.assert_allclose(every.std((0, 2, 3)), 1, atol=1e-5)
    assert own.exchanged == []
    statistics = np.array([[0.1, -0.2], [0.3, 0.4]])
    images = torch.randn(5, 2, 4, 4)
    assert torch.equal(
        random_statistics(statistics, statistics.ravel().tolist() * 3)(images, 1), images
    )


def test_only_means_and_deviations_travel_and_all_see_them(file):
    data = ready(file)
    ups, downs = ([e for e in data.exchanged if e[1] == way] for way in ("up", "down"))
    assert [c for c, *_ in ups] == [c for c, *_ in downs] == [*CLIENTS]
    for (name, _, size), (other, _, answer) in zip(ups, downs, strict=True):
        mean, sd = by_hand(raw(file, data.clients[name], "train"))
        numbers = data.statistics[name].ravel().tolist()
        np.testing.assert_allclose(numbers, [*mean.ravel(), *sd.ravel()], atol=2e-7)  # float32
        assert (other, size) == (name, len(packed({"channels": numbers})))
        assert answer == len(packed({"channels": data.agreed["channels"]}))
    assert len(data.agreed["channels"]) == 3 * 2 * 3


def test_a_site_has_the_bits_of_the_simulation(file):
    whole, sites = ready(file, batch_size=7), {c: module(file, batch_size=7) for c in CLIENTS}
    halves = {c: data.setup_alone(c) for c, data in sites.items()}
    server = module(file).merging(whole.facts(), Claims(CLIENTS))
    next(server)
    answer = server.send([next(half) for half in halves.values()])
    for name, half in halves.items():
        with pytest.raises(StopIteration):
            half.send(answer)
        one, other = sites[name].clients[name], whole.clients[name]
        for a, b in zip(one.train_batches(5), other.train_batches(5), strict=True):
            assert torch.equal(a["image"], b["image"])
        assert np.array_equal(evaluated(one, "test"), evaluated(other, "test"))
        assert sites[name].preprocessing(name) == whole.preprocessing(name)


def test_a_hospital_that_joins_later_sends_nothing_and_uses_its_own_for_evaluation(file):
    data = ready(file, keep_out=("hospital_1",))
    assert {client for client, *_ in data.exchanged} == {"hospital_0", "hospital_2"}
    late = data.kept_out["hospital_1"]
    mean, sd = by_hand(raw(file, late, "train"))
    wanted = (raw(file, late, "test") - mean) / sd
    np.testing.assert_allclose(evaluated(late, "test"), wanted, atol=2e-6)
    images = raw(file, late, "train")
    others = [by_hand(raw(file, data.clients[c], "train")) for c in ("hospital_0", "hospital_2")]
    seen = late.train_batch(0, 0, torch.arange(len(images)))["image"].numpy()
    apart = [np.abs((images - m) / s - seen).max(axis=(1, 2, 3)) for m, s in others]
    assert np.min(apart, axis=0).max() < 1e-4


def test_lacking_and_constant_channels_are_left_alone(file):
    data = ready(file, partition=ChannelMissing(RoundRobin(3), preset="rotate"))
    for n, client in enumerate(data.clients.values()):
        batches = [*client.train_batches(1), *client.eval_batches("test")]
        for batch in batches:
            used = (batch["image"] != 0).flatten(2).any(2).any(0).tolist()
            assert used == [c != n for c in range(3)]
            assert batch["image"].isfinite().all()
    # A mean of nothing; a deviation of 0, or so small that it would ruin all models.
    own, image = np.array([[0.5], [0.25]]), torch.full((9, 1, 2), 2.0)
    for other in ([0.0, 0.0], [0.9, 0.0024], [0.9, -1.0]):
        assert torch.equal(random_statistics(own, other)(image, 0), image)
    assert not torch.equal(random_statistics(own, [0.9, 0.0026])(image, 0), image)
    flat = channel_statistics(torch.full((50, 1, 7), 0.1))
    assert flat[1].tolist() == [0.0]
    assert normalized(torch.full((2, 1, 7), 0.1), flat).abs().max() == 0


def test_it_is_the_last_step_after_a_scanner_and_other_augmentation(file):
    groups = SiteGroups(2, scanners=[{"gamma": 2.0}, {}])
    data = ready(file, partition=groups, augment=None)
    scanned = data.clients["group_0_hospital_0"]
    np.testing.assert_allclose(evaluated(scanned, "train").mean((0, 2, 3)), 0, atol=1e-5)
    plain = ready(file, partition=SiteGroups(2)).statistics["group_0_hospital_0"]
    assert data.statistics["group_0_hospital_0"].tolist() != plain.tolist()
    flips = Augmentation(flip_chance=1.0)
    turned, straight = ready(file, augment=flips, flips=[0]), ready(file)
    for name, client in turned.clients.items():
        index = torch.arange(client.num_samples)
        seen = client.train_batch(2, 0, index)["image"]
        assert torch.equal(seen.flip(2), straight.clients[name].train_batch(2, 0, index)["image"])


def test_worker_processes_make_the_same_batches(file):
    here, there = ready(file, batch_size=9), ready(file, batch_size=9, workers=1)
    for name, client in there.clients.items():
        batches = zip(client.train_batches(1), here.clients[name].train_batches(1), strict=True)
        assert all(torch.equal(a["image"], b["image"]) for a, b in batches)
        copy = pickle.loads(pickle.dumps(client.train["image"]))
        assert torch.equal(copy.take(torch.arange(3)), client.train["image"].take(torch.arange(3)))
    there.clients[CLIENTS[0]].source.pool.shutdown()


@pytest.mark.parametrize(
    "numbers",
    [[0.9, 0, 0, 0.5, 0.1, 0.1], [0, 0, 0, -0.1, 0.1, 0.1], [1.1, 0, 0, 0, 0, 0]],
    ids=["wide", "negative", "beyond"],
)
def test_statistics_that_no_images_have_are_refused_by_name(file, numbers):
    data = module(file)
    server = data.merging({"channels": [*"rgb"], "classes": [*"ab"]}, Claims(["x", "y"]))
    next(server)
    good = packed({"channels": [0.0] * 3 + [0.5] * 3})
    with pytest.raises(DataError, match="y sends means and deviations of channels that no images"):
        server.send([good, packed({"channels": numbers})])


def test_broken_messages_are_one_sentence(file):
    for text in ('{"channels":[0,1]}', '{"channels":[1e400,0,0,0,0,0]}', '{"mean":[]}', "[["):
        server = module(file).merging({"channels": [*"rgb"], "classes": [*"ab"]})
        next(server)
        with pytest.raises(DataError, match="is malformed"):
            server.send([text.encode()])
    for numbers in ([], [0.0] * 7):
        half = module(file).setup_alone(CLIENTS[0])
        next(half)
        with pytest.raises(DataError, match="answer about channels is not as medfed makes it"):
            half.send(json.dumps({"channels": numbers}).encode())


def test_few_patients_are_refused_at_a_hospital_and_said_in_a_simulation(file):
    statistics = ready(file).summaries("hospital_0")
    (line,) = (one.too_few() for one in statistics)
    assert line == (
        "At hospital_0, too few patients stand behind the means and deviations of channels "
        "(data.scaling): 22 of at least 30."
    )
    assert statistics[0].remedy == "set data.scaling=client"
    with pytest.raises(VetoError, match=r"means and deviations of channels \(data\.scaling\)"):
        Policy().check_statistics(statistics)
    assert ready(file, scaling="client").summaries("hospital_0") == []


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (["data=digits", "channel.secure=masks"], "which channel.secure=masks would hide; set"),
        (["data=breast_cancer"], "data.scaling.*client"),
        (["data=brats"], "scaling"),
        (["data=digits", "data.scaling=fedrnd"], "range.*client.*fedrdn"),
    ],
    ids=["masks", "tables", "scans", "misspelt"],
)
def test_where_it_is_not_defined_one_sentence_says_so(keys, sentence, tmp_path):
    with pytest.raises(ConfigError, match=sentence) as caught:
        read_data(described(["data.scaling=fedrdn", *keys, f"folder={tmp_path}"]))
    assert "\n" not in str(caught.value)
    print(caught.value)
