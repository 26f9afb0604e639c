"""Small images: MedMNIST files, digits, and what the data module makes of them."""

from functools import partial

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from medfed.common.seeding import numpy_rng
from medfed.config.compose import described, load
from medfed.config.description import describe
from medfed.datamodules.client_data import ArrayRows
from medfed.datamodules.generated.medmnist import CLASSES, BloodCells
from medfed.datamodules.images import ImageDataModule
from medfed.datamodules.partitions.base import RoundRobin
from medfed.datamodules.partitions.by_centre import ByCentre
from medfed.datamodules.partitions.by_group import ChannelMissing, LabelGroups, SiteGroups
from medfed.datamodules.readers.medmnist import read_medmnist
from medfed.datamodules.readers.scikit_learn import read_digits
from medfed.datamodules.splits import SPLITS
from medfed.run.assembly import read_data, task_for
from medfed.run.train import train
from medfed.standalone.errors import ConfigError, DataError
from tests.sweeps import sweep

SIZES = {"train": 24, "val": 9, "test": 12}
SHAPES = {"grey": (28, 28), "colour": (28, 28, 3), "volume": (12, 12, 12), "sizes": (20, 31)}
CELLS = BloodCells(images=(40, 20, 20), size=16)


def arrays(shape=(28, 28), classes=3):
    """The arrays of a file as MedMNIST writes it."""
    rng = numpy_rng("medmnist", *shape)
    out = {}
    for split, n in SIZES.items():
        out[f"{split}_images"] = rng.integers(0, 256, (n, *shape), dtype=np.uint8)
        out[f"{split}_labels"] = (np.arange(n) % classes)[:, None].astype(np.uint8)
    return out


def save(folder, content):
    np.savez_compressed(folder / "some.npz", **content)
    return folder / "some.npz"


def module(path, partition=None, reader=read_medmnist, **settings):
    data = ImageDataModule(partition or RoundRobin(3), reader, path=path and str(path), **settings)
    data.setup()
    return data


def by_hand(images):
    """Channels first, from -1 to 1, in float64."""
    images = images[..., None] if images.ndim == 3 or images.shape[-1] != 3 else images
    return np.moveaxis(images, -1, 1).astype(np.float64) / 127.5 - 1


@sweep("shape", SHAPES.values())
def test_every_image_reaches_one_client_in_its_official_split(tmp_path, shape):
    content = arrays(shape)
    data = module(save(tmp_path, content))
    assert data.spatial_dims == (3 if shape == SHAPES["volume"] else 2)
    assert (data.in_channels, data.num_classes) == (3 if shape[-1] == 3 else 1, 3)
    for split in SPLITS:
        wanted = by_hand(content[f"{split}_images"])
        seen = []
        for client in data.clients.values():
            batches = list(client.eval_batches(split))
            images = torch.cat([b["image"] for b in batches]).numpy()
            names = [client.patients[split][c] for b in batches for c in b["case"].tolist()]
            numbers = [int(name.removeprefix(f"{split}_")) for name in names]
            assert np.allclose(images, wanted[numbers], atol=1e-6)
            labels = torch.cat([b["label"] for b in batches])
            assert labels.tolist() == content[f"{split}_labels"][numbers, 0].tolist()
            seen += numbers
        assert sorted(seen) == list(range(SIZES[split]))


def test_splits_may_be_drawn_anew(tmp_path):
    path = save(tmp_path, arrays())
    data = module(path, official_splits=False)
    for client in data.clients.values():
        sizes = [len(client.patients[s]) for s in SPLITS]
        assert sizes == [9, 3, 3]
        assert len({name.split("_")[0] for name in client.patients["train"]}) > 1
    assert data.splits()["settings"] == {"splits": "by patient, from the seed"}
    assert module(path).splits()["settings"] == {"splits": "official"}
    assert list(data.splits()["files"]) == [str(path)]


def test_batches_gather_the_right_images_and_keep_bytes(tmp_path):
    content = arrays(SHAPES["colour"])
    client = module(save(tmp_path, content)).clients["hospital_1"]
    rows = client.train["image"]
    assert isinstance(rows, ArrayRows)
    assert rows.array.dtype == np.uint8
    assert rows.shape == (client.num_samples, 3, 28, 28)
    some = client.samples(torch.tensor([5, 0, 5]))
    numbers = [int(client.patients["train"][i].removeprefix("train_")) for i in (5, 0, 5)]
    assert np.allclose(some["image"].numpy(), by_hand(content["train_images"])[numbers], atol=1e-6)
    epoch = torch.cat([b["image"] for b in client.train_batches(1)])
    assert epoch.dtype == torch.float32
    everything = rows.take(torch.arange(client.num_samples))
    assert torch.equal(epoch.sum((1, 2, 3)).sort()[0], everything.sum((1, 2, 3)).sort()[0])


def test_a_missing_colour_is_zero_everywhere(tmp_path):
    partition = ChannelMissing(RoundRobin(3), preset="rotate")
    data = module(save(tmp_path, arrays(SHAPES["colour"])), partition)
    for n, client in enumerate(data.clients.values()):
        for split in SPLITS:
            for batch in client.eval_batches(split):
                used = (batch["image"] != 0).flatten(2).any(2).any(0).tolist()
                assert used == batch["channels"][0].tolist() == [c != n for c in range(3)]


def test_a_scanner_changes_its_client_only_and_every_image_differently(tmp_path):
    content = arrays()
    content["train_images"][:] = content["train_images"][:1]
    path = save(tmp_path, content)
    partition = SiteGroups(2, scanners=[{"noise": 0.1}, {}])
    plain, seen = module(path, SiteGroups(2)), module(path, partition)
    before, after = (
        {
            name: torch.cat([b["image"] for b in client.eval_batches("train")])
            for name, client in data.clients.items()
        }
        for data in (plain, seen)
    )
    assert torch.equal(before["group_1_hospital_0"], after["group_1_hospital_0"])
    noise = after["group_0_hospital_0"] - before["group_0_hospital_0"]
    assert 0.05 < float(noise.std()) < 0.15
    assert not torch.equal(noise[0], noise[1])
    again = module(path, partition).clients["group_0_hospital_0"].train["image"]
    assert torch.equal(again, after["group_0_hospital_0"])


@sweep(
    ("change", "message"),
    [
        ({"val_images": None}, r"lacks val_images; it must hold"),
        ({"train_labels": np.zeros((24, 14), np.uint8)}, r"labels per image \(train 14, val 1"),
        (
            {f"{s}_labels": np.full((n, 14), 2) for s, n in SIZES.items()},
            "train_labels: the finding 2 is unknown; known: 0 and 1",
        ),
        ({"train_labels": np.zeros((24, 1))}, r"train_labels: float64 \(24, 1\) must be integers"),
        ({"test_labels": np.full((12, 1), -1)}, "test_labels: the label -1 is negative"),
        ({"train_labels": np.zeros((7, 1), np.uint8)}, "24 train_images, but 7 train_labels"),
        ({"train_images": np.zeros((24, 28, 28))}, "train_images: float64 .* must be uint8"),
        ({"val_images": np.zeros((9, 8, 8), np.uint8)}, r"val_images are \(1, 8, 8\), the others"),
        ({"train_images": np.array([{}] * 24)}, "Object arrays cannot be loaded"),
        (
            {f"{s}_labels": np.zeros((n, 1), int) for s, n in SIZES.items()},
            "has only the class 0; a classification needs images of two classes",
        ),
    ],
)
def test_bad_files_are_named(tmp_path, change, message):
    content = {k: v for k, v in (arrays() | change).items() if v is not None}
    with pytest.raises(DataError, match=message) as error:
        module(save(tmp_path, content))
    assert "some.npz" in str(error.value)


def test_torn_files_and_unset_paths(tmp_path):
    path = save(tmp_path, arrays())
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"some\.npz is no whole \.npz file"):
        module(path)
    path.write_bytes(whole[:9000] + bytes(400) + whole[9400:])
    with pytest.raises(DataError, match=r"some\.npz cannot be read as \.npz"):
        module(path)
    with pytest.raises(DataError, match="does not exist"):
        module(tmp_path / "none.npz")
    with pytest.raises(ConfigError, match=r"data\.path is not set"):
        module(None)
    path.write_bytes(whole)
    with pytest.raises(DataError, match=r"labels up to 2, but .* names 2 classes"):
        module(path, reader=partial(read_medmnist, classes=["a", "b"]))
    assert module(path, reader=partial(read_medmnist, classes="abcd")).class_names == tuple("abcd")


def test_data_without_hospitals_name_none(tmp_path):
    with pytest.raises(ConfigError, match="has no centre"):
        module(save(tmp_path, arrays()), ByCentre())


def test_generated_cells_are_the_same_bytes_and_in_the_format(tmp_path):
    path, new = CELLS.ensure(tmp_path / "a")
    again, _ = CELLS.ensure(tmp_path / "b")
    assert new
    assert path.read_bytes() == again.read_bytes()
    assert CELLS.ensure(tmp_path / "a") == (path, False)
    other, _ = BloodCells(images=(40, 20, 20), size=16, seed=1).ensure(tmp_path / "a")
    assert other.read_bytes() != path.read_bytes()
    assert len(list((tmp_path / "a" / "generated").iterdir())) == 2  # nothing half-written
    cells = read_medmnist(path, CLASSES)
    assert cells.images.shape == (80, 3, 16, 16)
    counts = [np.bincount(cells.samples.labels[i : i + 20]) for i in (40, 60)]
    assert [c.tolist() for c in counts] == [[5] * 4] * 2
    with pytest.raises(ConfigError, match=r"data\.generated\.images=\[2, 4, 4\]"):
        BloodCells(images=(2, 4, 4))


def test_digits_are_scikit_learns_and_fall_into_groups():
    data = module(None, LabelGroups(8, [[0, 1, 2], [3, 4], [5, 6, 7], [8, 9]]), read_digits)
    wanted = load_digits()
    assert (data.in_channels, data.num_classes, len(data.clients)) == (1, 10, 8)
    for name, client in data.clients.items():
        numbers = [int(i.removeprefix("digit_")) for i in client.patients["test"]]
        (batch,) = client.eval_batches("test")
        assert np.allclose(batch["image"][:, 0].numpy(), wanted.images[numbers] / 8 - 1)
        assert batch["label"].tolist() == wanted.target[numbers].tolist()
        group = [{0, 1, 2}, {3, 4}, {5, 6, 7}, {8, 9}][int(name[len("group_")])]
        assert set(client.label_counts.nonzero().flatten().tolist()) == group
    with pytest.raises(ConfigError, match=r"data\.path=x cannot be used: the digits come with"):
        module("x", reader=read_digits)


@pytest.mark.parametrize(
    "overrides",
    [
        (
            *("experiment=medmnist_pfednet", "partition.num_clients=3"),
            *("data.generated.images=[60,20,20]", "data.generated.size=16"),
        ),
        ("experiment=digits_pfednet", "partition.num_clients=4"),
    ],
    ids=("cells", "digits"),
)
def test_shipped_experiments_learn(tmp_path, overrides):
    more = ["rounds=2", "local.steps=3", "logger=none", "progress=false"]
    folders = [f"data.root={tmp_path}", f"folder={tmp_path / 'run'}"]
    summary, experiment = train(described([*overrides, *more, *folders]))
    losses = [m["loss"] for m in summary["clients"].values()]
    assert np.mean(losses) < 1.05 * np.log(experiment.data.num_classes)


def test_volumes_pass_a_network_of_three_dimensions(tmp_path):
    path = save(tmp_path, arrays(SHAPES["volume"]))
    wanted = ["data=medmnist", f"data.path={path}", "partition=round_robin", "model=small_cnn"]
    config = load([*wanted, "partition.num_clients=3"])
    described = describe(config)
    data = read_data(described)
    settled, task = task_for(described, data)
    facts = settled.facts
    assert (facts.spatial_dims, facts.in_channels, facts.out_channels) == (3, 1, 3)
    assert task(next(data.clients["hospital_0"].train_batches(0))["image"]).shape == (8, 3)
