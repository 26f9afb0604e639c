"""Volumes from the cache, and evaluation patient by patient: the same numbers, and less memory."""

import os
import weakref
from functools import partial

import numpy as np
import pytest
import torch

from medfed.datamodules.cache.volumes import decode, encode
from medfed.datamodules.client_data import BlocksOnDemand
from medfed.datamodules.partitions.by_centre import ByCentre
from medfed.datamodules.partitions.by_group import ChannelMissing
from medfed.datamodules.readers.case_folders import BratsChallengeReader
from medfed.standalone.errors import DataError
from medfed.standalone.preparation import bounding_box
from tests.datamodules.brats_layouts import make_head, write_challenge
from tests.sweeps import sweep

LACKING = ChannelMissing(ByCentre(), "rotate")


def everything(data):
    for client in data.clients.values():
        yield from client.train.values()
        yield client.label_counts
        for split in ("val", "test"):
            for batch in client.eval_batches(split):
                yield from batch.values()


def assert_same(first, second):
    for a, b in zip(everything(first), everything(second), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    assert first.splits() == second.splits()


def forbid_reading(data):
    """Whatever is read after this comes from the cache."""
    data.prepare_data()

    def read(patient):
        raise AssertionError(f"{patient.id} was read from its own files")

    data.scans.read = read
    return data


@pytest.mark.parametrize(
    "settings", [{}, {"eval_every": 3}, {"spatial_dims": 3, "patch_size": (16, 16, 4)}]
)
def test_cache_and_memory_change_no_number(make_brats, tmp_path, settings):
    settings = {"partition": LACKING, "cache": str(tmp_path), **settings}
    plain = make_brats(**settings)
    plain.setup()
    assert plain.store is None
    assert not list(tmp_path.iterdir())  # a small cohort needs none
    on_demand = make_brats(memory_gb=0, **settings)
    on_demand.setup()
    assert_same(plain, on_demand)
    cached = forbid_reading(make_brats(**settings))
    cached.setup()
    assert_same(plain, cached)
    client, other = plain.clients["hospital_0"], on_demand.clients["hospital_0"]
    assert isinstance(client.evaluation["test"], list)
    assert isinstance(other.evaluation["test"], BlocksOnDemand)


def test_prepared_ahead_is_what_setup_makes(make_brats, tmp_path):
    ahead = make_brats(cache=str(tmp_path / "a"))
    store = ahead.build_cache(workers=1)
    forbid_reading(ahead).setup()
    late = make_brats(cache=str(tmp_path / "b"), memory_gb=0)
    late.setup()
    assert late.store.checksum == store.checksum
    assert_same(ahead, late)


def test_the_reader_and_the_data_tell_caches_apart(make_brats, cohort, tmp_path):
    def name(reader=None, **settings):
        data = make_brats(reader, cache=str(tmp_path), **settings)
        return data.recipe().name

    (tmp_path / "elsewhere").symlink_to(cohort)
    names = {name(), name(seed=9), name(path=str(tmp_path / "elsewhere"))}
    assert len(names) == 1
    write_challenge(tmp_path / "other", {f"BRATS_{n:03d}": make_head(n) for n in range(1, 7)})
    reader = partial(BratsChallengeReader, regions=("whole", "core", "enhancing"))
    names.add(name(reader, path=str(tmp_path / "other")))
    names.add(name(partial(reader, enhancing=3), path=str(tmp_path / "other")))
    names.add(name(partial(reader, channels=["T2w"]), path=str(tmp_path / "other")))
    assert len(names) == 4


def test_blocks_are_read_one_at_a_time_and_not_kept(make_brats, tmp_path):
    data = make_brats(cache=str(tmp_path), memory_gb=0, val_fraction=0.0, test_fraction=0.6)
    data.setup()
    blocks = data.clients["hospital_1"].evaluation["test"]
    read = iter(blocks)
    seen = [weakref.ref(next(read)["image"]) for _ in range(2)]
    assert [reference() for reference in seen] == [None] * 2
    assert [b["case"].unique().tolist() for b in blocks] == [[0], [1]]


def test_a_changed_file_is_noticed_before_training(tmp_path, make_brats):
    write_challenge(tmp_path / "data", {name: make_head(n) for n, name in enumerate("abc")})
    settings = {"path": str(tmp_path / "data"), "cache": str(tmp_path), "patch_size": (4, 4)}
    reader = partial(BratsChallengeReader, hospitals=1)
    make_brats(reader, **settings).build_cache(workers=1)
    changed = tmp_path / "data" / "b" / "b_t1.nii.gz"
    os.utime(changed, ns=(1, 1))
    with pytest.raises(DataError, match=r"b_t1\.nii\.gz of b has changed since .* medfed prepare"):
        make_brats(reader, **settings).setup()
    changed.unlink()
    with pytest.raises(DataError, match=r"0 files match \*_t1\.nii\.gz"):
        make_brats(reader, **settings).setup()


def test_a_bad_volume_is_named_while_preparing(tmp_path, make_brats):
    write_challenge(tmp_path / "data", {name: make_head(n) for n, name in enumerate("abc")})
    torn = tmp_path / "data" / "c" / "c_t2.nii.gz"
    torn.write_bytes(torn.read_bytes()[:-9])
    data = make_brats(
        partial(BratsChallengeReader, hospitals=1),
        path=str(tmp_path / "data"),
        cache=str(tmp_path),
        memory_gb=0,
    )
    with pytest.raises(DataError, match=r"c_t2\.nii\.gz is truncated or corrupt"):
        data.setup()


def volume(values):
    image = np.zeros((2, 9, 8, 7), np.float32)
    image[:, 2:6, 1:4, 3:7] = values
    return image


RNG = np.random.default_rng(0)
LABEL = np.zeros((1, 9, 8, 7), np.uint8)
CASES = {
    "integers, normalised": (RNG.integers(0, 5, (2, 4, 3, 4)) - np.float32(1 / 3)) / 7,
    "with zeros inside": RNG.integers(-1, 2, (2, 4, 3, 4)).astype(np.float32),
    "empty": np.zeros((2, 4, 3, 4), np.float32),
    "smallest and largest": np.array(1e-45, np.float32) * RNG.choice([1, 1e20, -1e20], (4, 3, 4)),
}


@sweep("values", CASES.values())
def test_what_is_stored_comes_back_bit_by_bit(values):
    image, label = volume(values), LABEL.copy()
    label[0, 8, 0, 0] = 1  # a label outside the head is not cropped away
    stored = encode(image, label)
    assert stored["codes"].dtype == np.uint16
    back = decode(stored)
    assert back[0].tobytes() == image.tobytes()
    assert back[1].tobytes() == label.tobytes()


def test_more_values_than_two_bytes_count_are_stored_as_they_are():
    image = np.random.default_rng(1).normal(size=(1, 41, 41, 41)).astype(np.float32)
    image[:, :, -1] = 0
    stored = encode(image, np.zeros((3, 41, 41, 41), np.uint8))
    assert stored["image"].shape == (1, 41, 40, 41)
    assert decode(stored)[0].tobytes() == image.tobytes()


def test_the_box_is_the_smallest():
    mask = np.zeros((5, 6, 7), bool)
    mask[1, 2, 6] = mask[4, 3, 0] = True
    assert bounding_box(mask) == (slice(1, 5), slice(2, 4), slice(0, 7))
    assert bounding_box(mask & False) == (slice(0, 1),) * 3
