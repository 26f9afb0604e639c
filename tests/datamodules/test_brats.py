import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch

from medfed.common.seeding import torch_rng
from medfed.datamodules import patches
from medfed.datamodules.partitions.base import RoundRobin
from medfed.datamodules.partitions.by_centre import ByCentre
from medfed.datamodules.partitions.by_group import ChannelMissing
from medfed.datamodules.readers.case_folders import FolderReader
from medfed.datamodules.readers.datalist import MSDReader
from medfed.standalone.errors import ConfigError, DataError
from medfed.standalone.files import sha256

SHARED = Path(os.environ.get("MEDFED_SHARED", Path(__file__).parents[3] / "shared"))
REAL = SHARED / "data" / "brats2018"


@pytest.fixture
def brats(make_brats):
    data = make_brats()
    data.setup()
    return data


def all_tensors(data):
    for client in data.clients.values():
        yield from client.train.values()
        for split in ("val", "test"):
            for batch in client.eval_batches(split):
                yield from batch.values()


def zscored_ras(path):
    """A 4-D file in RAS, channels first, z-scored over non-zero voxels: by hand."""
    volume = nib.as_closest_canonical(nib.load(path)).get_fdata().transpose(3, 0, 1, 2)
    for channel in volume:
        inside = channel != 0
        channel[inside] = (channel[inside] - channel[inside].mean()) / channel[inside].std()
    return volume


def test_clients_batches_and_shapes(brats):
    assert list(brats.clients) == ["hospital_0", "hospital_1"]
    assert (brats.in_channels, brats.num_classes) == (4, 3)
    client = brats.clients["hospital_0"]
    assert client.num_samples == 8
    assert {s: len(p) for s, p in client.patients.items()} == {"train": 1, "val": 1, "test": 1}
    batches = list(client.train_batches(seed=0))
    assert [len(b["image"]) for b in batches] == [3, 3, 2]
    assert batches[0]["image"].shape == (3, 4, 16, 16)
    assert batches[0]["label"].shape == (3, 3, 16, 16)
    assert batches[0]["channels"].tolist() == [[True] * 4] * 3
    (whole,) = client.eval_batches("val")
    assert whole["image"].shape == (8, 4, 40, 40)
    assert whole["case"].tolist() == [0] * 8
    for tensor in all_tensors(brats):
        assert type(tensor) is torch.Tensor  # a MetaTensor would slow every training step


def test_patch_equals_the_slice_cut_by_hand(brats, cohort):
    client = brats.clients["hospital_0"]
    (case,) = client.patients["train"]
    volume = zscored_ras(cohort / "imagesTr" / f"{case}.nii.gz")
    mask = nib.as_closest_canonical(nib.load(cohort / "labelsTr" / f"{case}.nii.gz")).get_fdata()
    centres = patches.sample_centres(
        torch.from_numpy(mask > 0),
        torch.from_numpy((volume != 0).any(axis=0)),
        count=8,
        background_share=0.25,
        size=(16, 16, 1),
        generator=torch_rng(brats.seed, "patches", case),
    ).tolist()
    for n, (x, y, z) in enumerate(centres):
        rows, columns = slice(x - 8, x + 8), slice(y - 8, y + 8)
        image, label = client.train["image"][n], client.train["label"][n]
        assert np.allclose(image.numpy(), volume[:, rows, columns, z], atol=1e-4)
        assert np.array_equal(label[2].numpy(), mask[rows, columns, z] == 3)


def test_evaluation_slices_equal_the_volume(brats, cohort):
    client = brats.clients["hospital_1"]
    (case,) = client.patients["test"]
    volume = zscored_ras(cohort / "imagesTr" / f"{case}.nii.gz")
    with_brain = np.flatnonzero((volume != 0).any(axis=(0, 1, 2)))
    images = torch.cat([b["image"] for b in client.eval_batches("test")])
    assert np.allclose(images.numpy(), volume[..., with_brain].transpose(3, 0, 1, 2), atol=1e-4)


def test_background_share_is_exact():
    tumour = torch.zeros(20, 20, 5, dtype=torch.bool)
    tumour[8:12, 8:12, 2] = True
    brain = torch.ones_like(tumour)
    centres = patches.sample_centres(tumour, brain, 20, 0.25, (4, 4, 1), torch_rng(0))
    assert [bool(tumour[tuple(c)]) for c in centres.tolist()] == [True] * 15 + [False] * 5
    none = patches.sample_centres(brain & False, brain, 6, 0.25, (4, 4, 1), torch_rng(0))
    assert len(none) == 6


def test_patches_at_the_border_and_larger_than_the_volume():
    tumour = torch.zeros(6, 6, 2, dtype=torch.bool)
    tumour[0, 5, 0] = True
    centres = patches.sample_centres(tumour, tumour, 3, 0.0, (4, 4, 1), torch_rng(0))
    for centre in centres.tolist():
        x, y, z = centre
        assert tumour[x - 2 : x + 2, y - 2 : y + 2, z].any()


def test_missing_channels_are_zero_and_masked(make_brats):
    partition = ChannelMissing(ByCentre(), "lack_k", channel="T1gd", clients=["hospital_1"])
    data = make_brats(partition=partition)
    data.setup()
    whole, lacking = data.clients.values()
    assert whole.channels.tolist() == [True] * 4
    assert lacking.channels.tolist() == [True, True, False, True]
    for split in ("train", "val", "test"):
        for batch in lacking.eval_batches(split):
            assert not batch["image"][:, 2].any()
            assert batch["image"][:, 3].any()
            assert not batch["channels"][:, 2].any()


def test_same_seed_same_tensors_other_seed_other_patches(make_brats):
    first, again, other = make_brats(), make_brats(), make_brats(seed=6)
    for data in (first, again, other):
        data.setup()
    pairs = zip(all_tensors(first), all_tensors(again), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert first.splits() == again.splits()
    images = [d.clients["hospital_0"].train["image"] for d in (first, other)]
    assert not torch.equal(*images)


def test_splits_are_json_with_the_hashes_of_the_files(brats, cohort):
    record = json.loads(json.dumps(brats.splits()))
    ids = [i for c in record["clients"].values() for part in c.values() for i in part]
    assert sorted(ids) == [f"BRATS_{n:03d}" for n in range(1, 7)]
    assert len(record["files"]) == 12
    path = cohort / "imagesTr" / "BRATS_001.nii.gz"
    assert record["files"][str(path)] == sha256(path)
    assert record["settings"]["patch_size"] == [16, 16]
    four = ["FLAIR", "T1w", "T1gd", "T2w"]
    assert record["partition"]["hospital_0"]["channels"] == four


def test_setup_twice_changes_nothing_and_threads_are_restored(brats):
    threads, clients = torch.get_num_threads(), brats.clients
    brats.setup("test")
    assert brats.clients is clients
    assert torch.get_num_threads() == threads


def test_three_dimensions_by_the_same_path(make_brats):
    data = make_brats(spatial_dims=3, patch_size=(16, 16, 4))
    data.setup()
    client = data.clients["hospital_0"]
    assert next(client.train_batches(0))["label"].shape == (3, 3, 16, 16, 4)
    (volume,) = client.eval_batches("test")
    assert volume["image"].shape == (1, 4, 40, 40, 8)


def test_description_names_the_path_and_the_command(brats, cohort):
    assert str(cohort) in brats.description
    assert "data=brats data.path=" in brats.description


def test_impossible_settings_are_refused(make_brats):
    with pytest.raises(ConfigError, match=r"does not fit data\.spatial_dims=3"):
        make_brats(spatial_dims=3)
    with pytest.raises(ConfigError, match="background_share"):
        make_brats(background_share=1.5)
    with pytest.raises(ConfigError, match=r"memory_gb must not be negative, not -1"):
        make_brats(memory_gb=-1)
    with pytest.raises(ConfigError, match=r"set data\.path"):
        make_brats(generated=None).setup()
    with pytest.raises(ConfigError, match=r"num_clients=9 does not fit 6 patients"):
        make_brats(partition=RoundRobin(9)).setup()


def test_a_client_without_patients_is_named(make_brats):
    class Empty(ByCentre):
        def assign(self, patients, seed):
            return {**super().assign(patients, seed), "nobody": []}

    with pytest.raises(DataError, match="Client nobody has no patients"):
        make_brats(partition=Empty()).setup()


def test_a_patient_at_two_clients_stops_the_run(make_brats):
    class Twice(ByCentre):
        def assign(self, patients, seed):
            return {"a": [p.id for p in patients], "b": [patients[0].id]}

    with pytest.raises(DataError, match=r"Patient BRATS_001 is in .* of a and again in .* of b"):
        make_brats(partition=Twice()).setup()


def test_two_patients_of_one_name_stop_the_run(make_brats):
    data = make_brats()
    first, *others = data.list_patients()
    data.list_patients = lambda: [first, *others, replace(first, centre="elsewhere")]
    with pytest.raises(DataError, match="Patient BRATS_001 is listed twice"):
        data.setup()


@pytest.mark.skipif(not REAL.is_dir(), reason=f"the real sample is not at {REAL}")
def test_six_real_patients_two_hospitals(make_brats):
    reader = partial(
        FolderReader,
        modalities={"FLAIR": "FLAIR.nii.gz", "T1": "T1.nii.gz"},
        label="GT_W.nii.gz",
        regions={"whole": [1]},
        hospitals=2,
    )
    partition = ChannelMissing(ByCentre(), "rotate")
    data = make_brats(
        reader, partition=partition, path=str(REAL), patch_size=(64, 64), eval_every=20
    )
    data.setup()
    ids = [sorted(i for p in c.patients.values() for i in p) for c in data.clients.values()]
    assert ids == [["case_0", "case_1", "case_2"], ["case_3", "case_4", "case_5"]]
    assert [c.channels.tolist() for c in data.clients.values()] == [[False, True], [True, False]]
    for client in data.clients.values():
        assert client.train["image"].shape == (8, 2, 64, 64)
        assert float(client.label_counts[1] / client.label_counts.sum()) > 0.05
        whole = next(client.eval_batches("test"))
        assert whole["image"].shape[1:] == (2, 240, 240)


def test_msd_without_named_hospitals_is_cut_into_blocks(make_brats, cohort, tmp_path):
    (tmp_path / "imagesTr").symlink_to(cohort / "imagesTr")
    (tmp_path / "labelsTr").symlink_to(cohort / "labelsTr")
    (tmp_path / "dataset.json").write_text((cohort / "dataset.json").read_text())
    data = make_brats(partial(MSDReader, hospitals=3), path=str(tmp_path))
    data.setup()
    assert list(data.clients) == ["hospital_0", "hospital_1", "hospital_2"]


def test_validation_leaves_out_slices_and_tests_do_not(make_brats):
    whole, thinned = make_brats(), make_brats(eval_every=3)
    whole.setup()
    thinned.setup()
    assert whole.remarks == []
    assert thinned.remarks == [
        "Tests measure all axial slices with brain; in validation one of 3 (data.eval_every=3)."
    ]
    for name, client in whole.clients.items():
        other = thinned.clients[name]
        (every,), (third,) = client.evaluation["val"], other.evaluation["val"]
        assert len(third["image"]) == -(-(len(every["image"]) - 1) // 3) < len(every["image"])
        assert (third["spacing"][0] / every["spacing"][0]).tolist() == [1, 1, 3]
        (every,), (same,) = client.evaluation["test"], other.evaluation["test"]
        for key, values in every.items():
            assert torch.equal(same[key], values)
