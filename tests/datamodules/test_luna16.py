"""Nodule patches from a real cohort on disk, through the cache, to batches of clients."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
import logging
import os
import pickle
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from torch import nn

from medfed.config.compose import load
from medfed.datamodules.client_data import gather
from medfed.datamodules.generated.luna16 import LunaCohort
from medfed.datamodules.luna16 import Luna16DataModule
from medfed.datamodules.partitions.by_centre import ByCentre
from medfed.datamodules.partitions.by_group import ChannelMissing
from medfed.datamodules.partitions.by_label import LabelImbalance
from medfed.datamodules.readers.luna16 import Luna16Reader
from medfed.standalone.ct import PatchSpec, extract
from medfed.standalone.errors import ConfigError, DataError

COHORT = LunaCohort(hospitals=2, patients=5, shape=(48, 48, 24), lookalikes=8, seed=1)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("luna")


@pytest.fixture
def make(root):
    """A data module on a tiny cohort, whose cache is made once; keyword arguments override."""

    def module(**settings):
        defaults = {
            "partition": ByCentre(),
            "reader": Luna16Reader,
            "patches": PatchSpec(size=(16, 16)),
            "root": str(root),
            "generated": COHORT,
            "batch_size": 4,
            "seed": 5,
        }
        return Luna16DataModule(**{**defaults, **settings})

    return module


@pytest.fixture
def luna(make):
    data = make()
    data.setup()
    return data


def by_hand(data, series, spec):
    """One scan's patches as floats, without the cache."""
    header = next(COHORT.ensure(Path(data.root))[0].glob(f"subset*/{series}.mhd"))
    hu = extract(header, data.scans.candidates_of(series), spec).astype(np.float64)
    return np.clip((hu + 1000) / 1400, 0, 1) * 2 - 1


def in_memory(client):
    """The same client with its patches as tensors."""
    everything = torch.arange(client.num_samples)
    train = {**client.train, "image": gather(client.train["image"], everything)}
    return dataclasses.replace(client, train=train)


@pytest.mark.parametrize(
    "spec",
    [
        PatchSpec(size=(16, 16)),
        PatchSpec(size=(16, 16), slices=3),
        PatchSpec(size=(8, 8, 8)),
        PatchSpec(size=(16, 16), spacing=1.0),
    ],
)
def test_batches_hold_the_extracted_patches(make, spec):
    data = make(patches=spec)
    data.setup()
    assert data.in_channels == spec.slices
    assert data.spatial_dims == len(spec.size)
    for client in data.clients.values():
        for split in ("train", "val", "test"):
            batches = list(client.eval_batches(split))
            for case, series in enumerate(client.patients[split]):
                expected = by_hand(data, series, spec)
                at = [b["case"] == case for b in batches]
                found = torch.cat([b["image"][i] for b, i in zip(batches, at, strict=True)])
                labels = torch.cat([b["label"][i] for b, i in zip(batches, at, strict=True)])
                assert found.shape == (len(expected), *spec.shape)
                assert np.allclose(found.numpy(), expected, atol=1e-6)
                assert labels.tolist() == data.scans.candidates_of(series).label.tolist()


def test_every_candidate_is_with_exactly_one_client(luna):
    path = COHORT.ensure(Path(luna.root))[0]
    with (path / "candidates.csv").open() as file:
        rows = list(csv.DictReader(file))
    counted = sum(
        torch.bincount(b["label"], minlength=2)
        for client in luna.clients.values()
        for split in ("train", "val", "test")
        for b in client.eval_batches(split)
    )
    assert counted.tolist() == [sum(r["class"] == str(k) for r in rows) for k in (0, 1)]
    for client in luna.clients.values():
        counts = torch.bincount(client.train["label"], minlength=2).float()
        assert torch.equal(client.label_counts, counts)


def test_training_from_the_cache_equals_training_from_memory(luna):
    client = luna.clients["hospital_0"]
    weights = []
    for data in (client, in_memory(client), pickle.loads(pickle.dumps(client))):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten(),
                                nn.LazyLinear(2))  # fmt: skip
        network(torch.zeros(1, 1, 16, 16))
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        for epoch in range(2):
            for batch in data.train_batches(epoch):
                optimizer.zero_grad()
                nn.functional.cross_entropy(network(batch["image"]), batch["label"]).backward()
                optimizer.step()
        weights.append(torch.cat([p.detach().ravel() for p in network.parameters()]))
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])


def test_a_label_ratio_thins_every_split(make):
    data = make(partition=LabelImbalance(2, delta=2.0), val_fraction=0.4, test_fraction=0.2)
    data.setup()
    for name, share in (("hospital_0", 1 / 3), ("hospital_1", 2 / 3)):
        client = data.clients[name]
        for split in ("train", "test"):
            labels = torch.cat([b["label"] for b in client.eval_batches(split)])
            positives = int(labels.sum())
            assert 0 < positives < len(labels)
            assert abs(positives - share * len(labels)) < 1
    kept = data.settings()["candidates"]["hospital_0"]["train"]
    assert kept["counts"] == data.clients["hospital_0"].label_counts.tolist()


def test_shares_that_nothing_suffices_for(make):
    data = make()
    data.plan()
    data.plans["hospital_1"] = replace(data.plans["hospital_1"], shares=(0.0, 0.0, 1.0))
    with pytest.raises(DataError, match="Client hospital_1 has no training patch; give it more"):
        data.build()


def test_a_one_class_client_is_warned_of(make, caplog):
    partition = LabelImbalance(2, positive_fractions=[0.0, 0.5])
    with caplog.at_level(logging.WARNING):
        make(partition=partition).setup()
    assert "Client hospital_0 trains on a single class" in caplog.text


@dataclass(frozen=True)
class Shift:
    """A scanner that adds what can be told from the key."""

    def apply(self, image, *key):
        series, row = key
        return image + float(series[-1]) + row

    def record(self):
        return {"shift": "by series and row"}


def test_a_scanner_applies_once_to_each_patch_by_series_and_row(make):
    @dataclass(frozen=True)
    class Shifted(ByCentre):
        def scanners_of(self, clients, seed):
            return {"hospital_1": Shift()}

    plain, shifted = make(), make(partition=Shifted())
    plain.setup()
    shifted.setup()
    assert shifted.splits()["partition"]["hospital_1"]["site"] == Shift().record()
    for split in ("train", "val", "test"):
        one, two = (d.clients["hospital_1"].eval_batches(split) for d in (plain, shifted))
        for a, b in zip(one, two, strict=True):
            for image, seen, case in zip(a["image"], b["image"], a["case"], strict=True):
                series = plain.clients["hospital_1"].patients[split][case]
                rows = plain.scans.candidates_of(series).row.tolist()
                added = (seen - image).unique()
                assert len(added.round(decimals=3).unique()) == 1
                assert any(abs(float(added[0]) - float(series[-1]) - r) < 1e-3 for r in rows)
    assert isinstance(shifted.clients["hospital_1"].train["image"], torch.Tensor)
    assert not isinstance(shifted.clients["hospital_0"].train["image"], torch.Tensor)


def test_a_channel_that_a_client_lacks_is_zero(make):
    partition = ChannelMissing(ByCentre(), "lack_k", channel="CT+1", clients=["hospital_1"])
    data = make(partition=partition, patches=PatchSpec(size=(16, 16), slices=3))
    data.setup()
    assert data.channel_names == ("CT-1", "CT+0", "CT+1")
    batch = next(data.clients["hospital_1"].train_batches(0))
    assert not batch["image"][:, 2].any()
    assert batch["image"][:, :2].flatten(2).any(dim=2).all()
    assert batch["channels"].tolist() == [[True, True, False]] * 4


def test_the_record_has_the_hashes_and_what_was_kept(luna):
    record = json.loads(json.dumps(luna.splits()))
    path = COHORT.ensure(Path(luna.root))[0]
    for file in [path / "candidates.csv", *path.glob("subset*/*.mhd")]:
        assert record["files"][str(file)] == hashlib.sha256(file.read_bytes()).hexdigest()
    for file in path.glob("subset*/*.raw"):
        entry = luna.store.entry(file.name.removesuffix(".raw"))
        assert record["files"][str(file)] == entry.checksum
    client = luna.clients["hospital_0"]
    kept = record["settings"]["candidates"]["hospital_0"]
    rows = [r for s in client.patients["test"] for r in luna.scans.candidates_of(s).row.tolist()]
    assert kept["test"]["rows_sha256"] == hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    assert record["settings"]["reader"]["negatives_per_positive"] == 10.0


def test_another_seed_splits_otherwise_from_the_same_cache(make):
    modules = [make(), make(), make(seed=6)]
    for data in modules:
        data.setup()
    first, again, other = (d.splits() for d in modules)
    assert first == again
    assert first["clients"] != other["clients"]
    assert len({d.store.folder for d in modules}) == 1


def test_other_candidates_are_another_cache(make):
    few, many = make(reader=partial(Luna16Reader, negatives_per_positive=1.0)), make()
    for data in (few, many):
        data.setup()
    assert few.store.folder != many.store.folder
    labels = few.store.array("label")
    assert int((labels == 0).sum()) == int((labels == 1).sum())


def test_training_makes_the_cache_and_refuses_a_changed_scan(make, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        data = make(cache=str(tmp_path))
        data.setup()
        assert f"Prepared the patches once for all runs, in {tmp_path}" in caplog.text
        caplog.clear()
        make(cache=str(tmp_path)).setup()
        assert "Prepared" not in caplog.text
    raw = next(COHORT.ensure(Path(data.root))[0].glob("subset*/*.raw"))
    before = raw.stat()
    os.utime(raw, (1, 1))
    try:
        with pytest.raises(DataError, match=r"raw of .* has changed .* run medfed prepare"):
            make(cache=str(tmp_path)).setup()
    finally:
        os.utime(raw, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_truncated_scan_leaves_no_cache(make, tmp_path):
    small = LunaCohort(hospitals=1, patients=2, shape=(32, 32, 16), lookalikes=4, seed=2)
    data = make(generated=small, root=str(tmp_path))
    raw = sorted(small.ensure(tmp_path)[0].glob("subset*/*.raw"))[-1]
    raw.write_bytes(raw.read_bytes()[:-100])
    with pytest.raises(DataError, match=rf"{raw.name} has \d+ bytes"):
        data.build_cache(workers=1)
    assert not list((tmp_path / "cache").rglob("manifest.json"))


def test_neither_path_nor_cohort(make):
    with pytest.raises(ConfigError, match=r"set data\.path"):
        make(generated=None).setup()


def test_the_shipped_configuration_builds_every_setting():
    data = instantiate(load(["data=luna16", "partition=centre"]).data)
    assert isinstance(data, Luna16DataModule)
    assert data.patches == PatchSpec()
    assert data.generated.hospitals == 5
