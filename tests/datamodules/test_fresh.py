"""Fresh patches against cuts of the whole volumes, and their shares against counts."""

from functools import partial

import numpy as np
import pytest
import torch

from medfed.datamodules.cache.volumes import encode
from medfed.datamodules.fresh_patches import LARGEST, FreshPatches, volume_of, volume_of_cache
from medfed.datamodules.partitions.by_centre import ByCentre
from medfed.datamodules.partitions.by_group import ChannelMissing, SiteGroups
from medfed.datamodules.patches import PatchRows
from medfed.datamodules.plans import first_patients
from medfed.standalone.errors import ConfigError

SHAPE = (20, 16, 6)
SCANNED = SiteGroups(2, scanners=[{"gamma": 1.4, "noise": 0.1}] * 2)


def head(seed=0, regions=((3, 9), (4, 6))):
    """A head in air, two nested regions: the second of 8 voxels, the first of many."""
    rng = np.random.default_rng(seed)
    image = np.zeros((2, *SHAPE), np.float32)
    image[:, 2:18, 1:15, 1:5] = 1 + rng.random((2, 16, 14, 4), dtype=np.float32)
    label = np.zeros((len(regions), *SHAPE), np.uint8)
    for region, (low, high) in zip(label, regions, strict=True):
        region[low:high, low:high, 2:4] = 1
    return torch.from_numpy(image), torch.from_numpy(label)


def kept(image, label):
    return volume_of(image, label, (image != 0).any(dim=0), np.random.default_rng(0))


def padded(volume, start, size):
    """A patch by NumPy, of a volume that goes on with zeros."""
    wide = np.pad(volume.numpy(), [(0, 0)] + [(40, 40)] * 3)
    return wide[:, *(slice(40 + a, 40 + a + n) for a, n in zip(start, size, strict=True))]


def test_a_patch_is_a_cut_of_the_volume():
    image, label = head()
    arrays = encode(image.numpy(), label.numpy())
    inside, all_present = (image != 0).any(dim=0), torch.ones(2, dtype=torch.bool)
    mapped = volume_of_cache(arrays, label, inside, all_present, np.random.default_rng(0))
    assert mapped.values is not None
    for volume in (kept(image, label), mapped):
        rng = np.random.default_rng(1)
        starts = np.stack([rng.integers(-9, n + 3, 40) for n in SHAPE], axis=1)
        at = np.column_stack([np.zeros(40, int), starts])
        for size in ((8, 8, 1), (5, 7, 4), (24, 20, 8)):
            images = PatchRows([volume], at, size)
            labels = PatchRows([volume], at, size, labels=True)
            some = torch.tensor([3, 0, 3, 39])
            expected = np.stack([padded(image, starts[n], size) for n in some])
            assert np.array_equal(images.take(some), expected)
            assert np.array_equal(images.some(some).take(torch.arange(4)), expected)
            expected = np.stack([padded(label, starts[n], size) for n in some])
            assert np.array_equal(labels.take(some), expected)
            assert images.shape == (40, 2, *size)
    absent = volume_of_cache(arrays, label, inside, ~all_present, np.random.default_rng(0))
    assert not PatchRows([absent], at, (8, 8, 1)).take(torch.arange(40)).any()


def test_neighbouring_slices_are_channels():
    image, label = head()
    at = np.array([[0, 4, 4, 0], [0, 4, 4, 3]])
    flat = PatchRows([kept(image, label)], at, (8, 8, 1), slices=3)
    assert flat.shape == (2, 6, 8, 8)
    found = flat.take(torch.arange(2))
    for n, z in enumerate((0, 3)):
        three = padded(image, (4, 4, z - 1), (8, 8, 3))
        assert np.array_equal(found[n], three.transpose(0, 3, 1, 2).reshape(6, 8, 8))
    labels = PatchRows([kept(image, label)], at, (8, 8, 1), labels=True, slices=3)
    assert np.array_equal(
        labels.take(torch.arange(2))[1], padded(label, (4, 4, 3), (8, 8, 1))[..., 0]
    )


def centres(fresh, seed):
    """(N, 3) voxels in the middle of every patch, and the number of the volume."""
    at = fresh.block(seed)["image"].at
    return at[:, 1:] + np.array(fresh.size) // 2, at[:, 0]


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_shares_of_background_and_of_every_region(share):
    image, label = head()
    fresh = FreshPatches([[kept(image, label)]] * 2, 40, share, (1, 1, 1), slices=1)
    where, volume = centres(fresh, seed=3)
    values = label.numpy()[:, *where.T]
    off = ~values.any(axis=0)
    assert (image.numpy()[:, *where.T] != 0).all()  # never in the air
    for patient in (0, 1):
        assert off[volume == patient].sum() == round(40 * share)
    # The small region (8 of 72 voxels) has half of the others, and its share of the other half.
    on = 80 - off.sum()
    if on:
        assert 0.5 * on <= values[1].sum() <= 0.5 * on + 12
    block = fresh.block(3)
    assert block["case"].tolist() == [0] * 40 + [1] * 40


def test_draws_depend_on_the_seed_alone_and_differ_by_epoch():
    fresh = FreshPatches([[kept(*head())]], 64, 0.25, (4, 4, 1), slices=1)
    first, _ = centres(fresh, 1)
    second, _ = centres(fresh, 2)
    assert (first == centres(fresh, 1)[0]).all()
    assert len({*map(tuple, first.tolist())} & {*map(tuple, second.tolist())}) < 20


def test_many_regions_each_have_their_turn():
    regions = tuple((n, n + 2) for n in range(3, 9))
    fresh = FreshPatches([[kept(*head(regions=regions))]], 2, 0.0, (1, 1, 1), slices=1)
    label = head(regions=regions)[1].numpy()
    seen = sum(label[:, *centres(fresh, seed)[0].T].sum(axis=1) > 0 for seed in range(12))
    assert (seen > 0).all()


def test_patients_without_regions_without_background_and_with_several_volumes():
    healthy = kept(head()[0], torch.zeros(2, *SHAPE, dtype=torch.uint8))
    image, label = head()
    full = kept(image, (image[:1] != 0).to(torch.uint8).expand(2, -1, -1, -1))
    fresh = FreshPatches([[healthy], [full], [kept(image, label), healthy]], 30, 0.3, (4, 4, 1), 1)
    block = fresh.block(0)
    assert block["image"].shape == (90, 2, 4, 4)
    labels = block["label"].take(torch.arange(90)).flatten(1).any(dim=1)
    assert not labels[:30].any()
    assert labels[30:60].all()
    numbers = block["image"].at[:, 0]
    assert (numbers[:30] == 0).all()
    assert (numbers[30:60] == 1).all()
    assert {*numbers[60:81].tolist()} == {2}  # regions are in one of the two volumes
    assert {*numbers[81:].tolist()} == {2, 3}
    fewer = fresh.some([2]).block(0)
    assert fewer["image"].shape[0] == 30
    assert set(fewer["image"].at[:, 0].tolist()) == {0, 1}


def test_of_a_large_region_some_voxels_are_enough():
    image = torch.ones(1, 40, 40, 20)
    label = torch.zeros(1, 40, 40, 20, dtype=torch.uint8)
    label[:, :20] = 1
    volume = kept(image, label)
    assert [len(p) for p in volume.places] == [LARGEST, LARGEST]
    assert len({*map(tuple, volume.places[1].tolist())}) == LARGEST
    assert abs(volume.places[1].mean(axis=0) - [9.5, 19.5, 9.5]).max() < 0.5  # evenly


@pytest.fixture
def make(make_brats):
    return partial(make_brats, patches="fresh")


def prepared(data):
    data.setup()
    return data


def epochs(data, seeds=(1, 2)):
    return [b for c in data.clients.values() for seed in seeds for b in c.train_batches(seed)]


def same(one, other):
    assert len(one) == len(other)
    return all(torch.equal(a[key], b[key]) for a, b in zip(one, other, strict=True) for key in a)


@pytest.mark.parametrize("settings", [{}, {"spatial_dims": 3, "patch_size": (16, 16, 4)}])
@pytest.mark.parametrize("partition", [ChannelMissing(ByCentre()), SCANNED])
def test_memory_cache_and_workers_give_the_same_bits(partition, settings, make, tmp_path):
    data = prepared(make(partition=partition, **settings))
    expected = epochs(data)
    first = next(iter(data.clients.values()))
    one, two = (torch.cat([b["image"] for b in first.train_batches(s)]) for s in (1, 2))
    assert one.shape == two.shape == (first.num_samples, 4, *data.size[: data.spatial_dims])
    assert not torch.equal(one.sort(dim=0).values, two.sort(dim=0).values)
    mapped = make(partition=partition, memory_gb=0, workers=2, cache=str(tmp_path), **settings)
    assert same(expected, epochs(prepared(mapped)))
    assert mapped.store is not None
    codes = [v.values for v in next(iter(mapped.clients.values())).fresh.patients[0]]
    assert (codes[0] is None) == (partition is SCANNED)  # a scanner's images are in memory
    assert torch.equal(first.label_counts, next(iter(mapped.clients.values())).label_counts)


def test_fixed_patches_are_those_of_one_draw_and_fresh_ones_are_not(make_brats, make):
    for data, other in ((prepared(make_brats()), False), (prepared(make()), True)):
        client = data.clients["hospital_0"]
        sums = [sorted(b["image"].sum().item() for b in client.train_batches(s)) for s in (1, 2)]
        rows = [torch.cat([b["image"] for b in client.train_batches(s)]) for s in (1, 2)]
        flat = [{tuple(r.flatten()[:50].tolist()) for r in patches} for patches in rows]
        assert (flat[0] != flat[1]) == other, sums
        assert data.settings()["patches"] == ("fresh" if other else "fixed")


def test_whoever_looks_at_samples_finds_them(make):
    client = prepared(make()).clients["hospital_0"]
    index = torch.tensor([0, 5])
    picked = client.samples(index)
    assert picked["image"].shape == (2, 4, 16, 16)
    assert torch.equal(client.train_inputs(client.num_samples)[index], picked["image"])
    batch = next(client.eval_batches("train"))
    assert torch.equal(batch["image"][5], picked["image"][1])
    assert batch["label"].dtype == torch.float32
    labels = client.train["label"].take(torch.arange(client.num_samples))
    assert client.label_counts[1:].tolist() == labels.sum(dim=(0, 2, 3)).tolist()


def test_few_patients_are_drawn_from_alone(make):
    client = prepared(make(val_fraction=0.0, test_fraction=0.0)).clients["hospital_0"]
    few = first_patients(client, 1, seed=0)
    assert few.num_samples == 8
    assert len(few.fresh.patients) == 1
    assert (
        few.fresh.patients[0]
        is client.fresh.patients[client.patients["train"].index(*few.patients["train"])]
    )
    assert sum(len(b["image"]) for b in few.train_batches(0)) == 8


def test_another_word_is_refused(make_brats):
    with pytest.raises(ConfigError, match=r"data\.patches=.new. is unknown; choose fresh or fixed"):
        make_brats(patches="new")
