"""A partition or a reader from outside the repository: one class, and a node that names it."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from medfed.config.compose import build, load
from medfed.datamodules.partitions.base import Dealt, Partition, Traits
from medfed.datamodules.readers.base import Patient, VolumeReader
from medfed.datamodules.readers.samples import ImageSet, Samples
from medfed.datamodules.readers.table import Table
from tests.registered import register

HERE = "tests.datamodules.test_plugins"
register(HERE)


@dataclass(frozen=True)
class Alphabet(Partition):
    """Early and late ids, of which the late ones have no first channel and other labels."""

    traits = Traits(seeded=False)

    first: str = "n"

    def assign(self, patients, seed):
        ids = sorted(p.id for p in patients)
        return {
            "early": [i for i in ids if i < self.first],
            "late": [i for i in ids if i >= self.first],
        }

    def availability(self, clients, channels, seed):
        present = super().availability(clients, channels, seed)
        present["late"][0] = False
        return present

    def label_orders(self, clients, num_classes, seed):
        return {"late": tuple(reversed(range(num_classes)))}


@dataclass(frozen=True)
class Alternate(Dealt):
    """Every patient to the next client."""

    def deal(self, patients, seed):
        return np.arange(len(patients)) % self.num_clients


class ArrayReader(VolumeReader):
    """``<patient>.npz`` with image and label: no format that the repository knows."""

    channels = ("one", "two")
    regions = ("lesion",)

    def __init__(self, path, gain=1.0):
        self.path = path
        self.gain = gain

    def patients(self):
        return [Patient(f.stem, {"arrays": f}) for f in sorted(self.path.glob("*.npz"))]

    def read(self, patient):
        with np.load(patient.files["arrays"]) as arrays:
            image = torch.from_numpy(self.gain * arrays["image"])
            return {"image": image, "label": torch.from_numpy(arrays["label"])}

    def shape(self, patient):
        with np.load(patient.files["arrays"]) as arrays:
            return arrays["label"].shape[1:]

    def spacing(self, patient):
        return 1.0, 1.0, 2.0

    def record(self):
        return {**super().record(), "gain": self.gain}


def read_numbers(path, power=1):
    """A table of two features, whose sum decides the class."""
    values = np.loadtxt(path) ** power
    names = tuple(f"{chr(97 + n % 26)}{n}" for n in range(len(values)))
    labels = (values.sum(1) > 0).astype(np.int64)
    return Table(("x", "y"), values, labels, ("low", "high"), names)


def read_stripes(path, classes=2):
    """Images in rows of a text file."""
    values = np.loadtxt(path, dtype=np.uint8)
    labels = np.arange(len(values)) % classes
    samples = Samples(labels, classes, [f"{chr(97 + n % 26)}{n}" for n in range(len(values))])
    images = np.repeat(values[:, None, None], 8, axis=2)
    return ImageSet(images, ("grey",), tuple(map(str, range(classes))), samples, str(path))


def module(data, partition, reader=None, **settings):
    """What a configuration gives whose nodes name the classes above."""
    config = load([f"data={data}", "partition=round_robin", "partition.num_clients=2"]).copy()
    OmegaConf.set_struct(config, False)
    if partition is not None:
        config.data.partition = {"_target_": f"{HERE}.{partition[0]}", **partition[1]}
    if reader is not None:
        node = {"_target_": f"{HERE}.{reader[0]}", "_partial_": True, **reader[1]}
        config.data.reader = node
    config.data.update(settings)
    data = build(config.data)
    data.setup()
    return data


@pytest.fixture
def table(tmp_path):
    np.savetxt(tmp_path / "a.txt", np.random.default_rng(0).normal(size=(60, 2)))
    return str(tmp_path / "a.txt")


def test_a_partition(table):
    reader = ("read_numbers", {"power": 3})
    plain = module("csv", None, reader, path=table)
    data = module("csv", ("Alphabet", {"first": "n"}), reader, path=table)
    assert list(data.clients) == ["early", "late"]
    assert sum(len(p) for c in data.clients.values() for p in c.patients.values()) == 60
    late = data.clients["late"]
    assert not late.train["image"][:, 0].any()
    assert late.train["image"][:, 1].any()
    assert data.splits()["partition"]["late"]["label_order"] == [1, 0]
    assert data.splits()["partition"]["late"]["channels"] == ["y"]
    assert len(plain.clients) == 2
    json.dumps(data.splits())
    rows, cells = data.accounts
    assert (rows.where, rows.taken, rows.total, cells.taken, cells.total) == (
        table,
        60,
        60,
        120,
        120,
    )


def test_a_partition_that_deals(table):
    data = module("csv", ("Alternate", {"num_clients": 3}), ("read_numbers", {}), path=table)
    sizes = [sum(map(len, c.patients.values())) for c in data.clients.values()]
    assert list(data.clients) == ["hospital_0", "hospital_1", "hospital_2"]
    assert sizes == [20, 20, 20]


def test_a_wrapper_takes_it(table):
    inner = {"_target_": f"{HERE}.Alternate", "num_clients": 2}
    config = load(["partition=channel_missing"]).partition.copy()
    OmegaConf.set_struct(config, False)
    config.assignment = inner
    assert build(config).assignment == Alternate(2)


def test_a_reader_of_images(tmp_path):
    values = np.random.default_rng(0).integers(0, 256, (30, 8))
    np.savetxt(tmp_path / "a.txt", values, fmt="%d")
    reader, path = ("read_stripes", {"classes": 3}), str(tmp_path / "a.txt")
    data = module("image_folder", None, reader, path=path)
    assert (data.num_classes, data.spatial_dims, data.in_channels) == (3, 2, 1)
    whole = torch.cat([b["image"] for c in data.clients.values() for b in c.eval_batches("train")])
    assert whole.shape[1:] == (1, 8, 8)
    (account,) = data.accounts
    assert (account.where, account.taken, account.total) == (path, 1, 1)


@pytest.fixture
def volumes(tmp_path):
    folder = tmp_path / "volumes"
    folder.mkdir()
    rng = np.random.default_rng(1)
    for n in range(6):
        image = np.zeros((2, 12, 12, 6), np.float32)
        image[:, 2:10, 2:10, 1:5] = rng.normal(size=(2, 8, 8, 4))
        label = np.zeros((1, 12, 12, 6), np.uint8)
        label[0, 4:7, 4:7, 2:4] = 1
        np.savez(folder / f"p{n}.npz", image=image, label=label)
    return str(folder)


def test_a_reader_of_volumes(volumes, tmp_path):
    settings = {"path": volumes, "patch_size": [8, 8], "patches_per_patient": 4, "patches": "fixed"}
    reader = ("ArrayReader", {"gain": 2.0})
    data = module("brats", None, reader, **settings)
    assert data.channel_names == ("one", "two")
    assert data.splits()["files"].keys() == {f"{volumes}/p{n}.npz" for n in range(6)}
    Path(volumes, "notes.txt").touch()
    Path(volumes, ".hidden.txt").touch()
    (account,) = data.accounts
    assert (account.taken, account.total) == (6, 7)
    assert account.left_out == {".txt: another kind of file": (1, "notes.txt")}
    facts = data.preprocessing("hospital_0")
    assert facts["spacing"] == [1.0, 1.0, 2.0]
    assert facts["input"]["regions"] == {"lesion": [1]}
    caching = {"memory_gb": 0, "cache": str(tmp_path / "cache")}
    made = module("brats", None, reader, **settings, cache=caching["cache"])
    pickle.dumps(made.recipe().read)  # for worker processes, which import the class by its name
    made.build_cache(workers=1)
    cached = module("brats", None, reader, **settings, **caching)
    assert not cached.store.new
    for name, client in data.clients.items():
        other = cached.clients[name]
        assert torch.equal(client.train["image"], other.train["image"])
        for one, two in zip(client.eval_batches("val"), other.eval_batches("val"), strict=True):
            assert torch.equal(one["image"], two["image"])
    other = module("brats", None, ("ArrayReader", {}), **settings).recipe()
    assert other.name != cached.recipe().name  # the record of the reader tells them apart


MODULES = [
    *(f"partitions.{name}" for name in ("base", "by_centre", "by_label", "by_group", "saved")),
    *(f"readers.{name}" for name in ("base", "case_folders", "luna16", "heart", "table")),
    *(f"readers.{name}" for name in ("image_folder", "medmnist", "scikit_learn", "samples")),
]
HEAVY = ("pytorch_lightning", "monai", "matplotlib", "scipy", "sklearn", "nibabel", "SimpleITK")


def loaded(modules, looked_for):
    """Which of some packages are imported with modules, those of the data layer by their place."""
    names = ", ".join(n if "medfed" in n else f"medfed.datamodules.{n}" for n in modules)
    code = f"import sys, {names}; print(*[m for m in {looked_for!r} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    return found.stdout.split()


def test_partitions_and_readers_import_little():
    assert loaded(MODULES, HEAVY) == []


def test_data_modules_import_no_library_of_a_format():
    modules = ["tables.datamodule", "images", "segmentation", "luna16"]
    formats = ("monai", "sklearn", "nibabel", "SimpleITK", "pytorch_lightning")
    assert loaded(modules, formats) == []


def test_worker_processes_that_cut_patches_need_no_pytorch():
    assert loaded(["cache.store", "medfed.standalone.ct"], ("torch", *HEAVY)) == []
